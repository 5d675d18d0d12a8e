"""The sampled tokens of an answer, in the forms of the servers that return them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from broker.contract import UNKNOWN_VERSION
from controller_worker.providers.errors import MalformedReplyError, TokensMissingError
from controller_worker.providers.token_calls import read_sampled

ROWS = [[-0.25, 11, "roll"], [-0.5, 12, "outs"], [-1.0, 13, None]]
SGLANG = {"output_token_logprobs": ROWS, "weight_version": "7"}


def make_answer(answer: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": "stop", **choice}], **(answer or {})}


@pytest.mark.parametrize("answer", [make_answer(meta_info=SGLANG), make_answer({"meta_info": SGLANG})])
def test_tokens_of_sglang(answer: dict[str, Any]) -> None:
    ids, logprobs, versions = read_sampled(answer)
    assert ids.tolist() == [11, 12, 13]
    assert logprobs.tolist() == [-0.25, -0.5, -1.0]
    assert versions == ((3, 7),)


@pytest.mark.parametrize(
    "logprobs",
    [
        {"token_logprobs": [-0.25, None]},
        {"content": [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": None}]},
    ],
)
def test_tokens_of_vllm(logprobs: dict[str, Any]) -> None:
    ids, numbers, versions = read_sampled(make_answer(token_ids=[11, 12], logprobs=logprobs))
    assert ids.tolist() == [11, 12]
    assert numbers[0] == -0.25
    assert math.isnan(numbers[1])
    assert versions == ((2, UNKNOWN_VERSION),)


@pytest.mark.parametrize(
    ("answer", "versions"),
    [
        (make_answer(token_ids=[1, 2, 3], output_versions=[4, 4, 5]), ((2, 4), (1, 5))),
        (make_answer({"output_versions": [4, 5, 5]}, token_ids=[1, 2, 3]), ((1, 4), (2, 5))),
        (make_answer({"policy_version": 6}, token_ids=[1, 2]), ((2, 6),)),
        (make_answer({"weight_version": "default"}, token_ids=[1, 2]), ((2, UNKNOWN_VERSION),)),
        (make_answer(token_ids=[1, 2], output_versions=[4]), ((2, UNKNOWN_VERSION),)),
    ],
)
def test_versions_of_a_reply(answer: dict[str, Any], versions: tuple[tuple[int, int], ...]) -> None:
    assert read_sampled(answer)[2] == versions


@pytest.mark.parametrize("answer", [make_answer(), make_answer(token_ids=[])])
def test_an_answer_without_tokens_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(TokensMissingError):
        read_sampled(answer)


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5]}},
        {"token_ids": [1, -2]},
        {"token_ids": [1, True]},
        {"token_ids": [1, 1 << 31]},
        {"meta_info": {"output_token_logprobs": [[-0.5]]}},
    ],
)
def test_damaged_tokens_are_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(MalformedReplyError):
        read_sampled(make_answer(**choice))
