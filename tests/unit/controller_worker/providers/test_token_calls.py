"""Replies of llama.cpp's `/completion`: which log-probability belongs to which token."""

from __future__ import annotations

import math
from typing import Any

import pytest

from controller_worker.providers.errors import MalformedReplyError, TokensMissingError
from controller_worker.providers.token_calls import read_llama_cpp_reply, read_sampled


def make_answer(tokens: list[int], reported: list[tuple[int, float]], **more: Any) -> dict[str, Any]:
    rows = [{"id": token, "logprob": logprob} for token, logprob in reported]
    return {"tokens": tokens, "completion_probabilities": rows, "content": "text", "stop_type": "eos", **more}


@pytest.mark.parametrize(
    ("tokens", "reported", "expected"),
    [
        ([5, 6, 7], [(5, -1.0), (6, -2.0), (7, -3.0)], [-1.0, -2.0, -3.0]),
        ([5, 6, 7], [(5, -1.0), (7, -3.0)], [-1.0, None, -3.0]),  # 6 ends within a character
        ([5, 6, 7], [(5, -1.0)], [-1.0, None, None]),  # 6 and 7 are the stop word
        ([5, 6, 6, 7], [(5, -1.0), (6, -2.0), (7, -3.0)], [-1.0, None, None, -3.0]),  # which 6 it was is not certain
        ([5, 6, 6], [(5, -1.0), (6, -2.0), (6, -3.0)], [-1.0, -2.0, -3.0]),
        ([5], [], [None]),
    ],
)
def test_a_log_probability_is_that_of_its_token(
    tokens: list[int], reported: list[tuple[int, float]], expected: list[float | None]
) -> None:
    ids, logprobs, versions = read_sampled(read_llama_cpp_reply(make_answer(tokens, reported)))
    assert ids.tolist() == tokens
    assert [None if math.isnan(one) else one for one in logprobs] == expected
    assert versions == ((len(tokens), -1),)


@pytest.mark.parametrize(("stop_type", "expected"), [("eos", "stop"), ("word", "stop"), ("limit", "length")])
def test_the_end_of_a_reply_is_named_as_by_others(stop_type: str, expected: str) -> None:
    (choice,) = read_llama_cpp_reply(make_answer([5], [], stop_type=stop_type))["choices"]
    assert (choice["finish_reason"], choice["text"]) == (expected, "text")


def test_an_answer_of_another_server_is_named() -> None:
    with pytest.raises(TokensMissingError, match=r"llama\.cpp"):
        read_llama_cpp_reply({"choices": []})


@pytest.mark.parametrize(
    "answer",
    [
        [],
        make_answer([5], [(6, -1.0)]),
        make_answer([-5], []),
        {"tokens": [5], "completion_probabilities": [{"id": 5}]},
    ],
)
def test_an_answer_that_cannot_be_read_is_reported(answer: Any) -> None:
    with pytest.raises(MalformedReplyError):
        read_llama_cpp_reply(answer)
