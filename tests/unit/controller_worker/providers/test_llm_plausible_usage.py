"""Implausible usage in a provider's reply."""

import math
from dataclasses import replace
from typing import Any

import pytest

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import CallUsage, Completion, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart
from controller_worker.providers.model_table import look_up
from controller_worker.providers.request_size import estimate_prompt_tokens, estimate_text_tokens, make_completion
from controller_worker.providers.wires.chat_wire import read_chat_reply
from controller_worker.providers.wires.messages_wire import read_message
from controller_worker.providers.wires.reply import parse_reported_usd

MODEL = "gpt-4o"  # 128,000 tokens in, 16,384 out
PROMPT = "The tests of the parser fail since yesterday; find out why. " * 200
ANSWER = "I have looked at the parser and at its tests, and found the cause. " * 20
REQUEST = ModelRequest((Message("user", (TextPart(PROMPT),)),), (), "c", 1, "/workspace")
ESTIMATE, WRITTEN = estimate_prompt_tokens(REQUEST), estimate_text_tokens(ANSWER)


def completion(usage: Any, *, request: ModelRequest = REQUEST, told: float | None = None, **known: Any) -> Completion:
    reply = {"id": "r", "model": MODEL, "usage": usage}
    reply |= {"choices": [{"message": {"content": ANSWER}, "finish_reason": "stop"}]}
    config = LLMConfig(model=MODEL)
    row = look_up(MODEL)
    return make_completion(
        read_chat_reply(reply), request, config, row, latency_seconds=1.0, reported_usd=told, **known
    )


def usage(prompt: Any, answer: Any, cached: Any = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": answer, "prompt_tokens_details": details}


@pytest.mark.parametrize("sent_bytes", [None, len(PROMPT)])
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        "many",
        usage(0, 0),
        usage(-5, -7),
        usage(1, 1),
        usage("2000", [400]),
        usage(math.nan, math.inf),
        usage(900_000_000, 900_000_000),
        usage(10**30, 10**30),
        usage(300_000, 40_000),
    ],
)
def test_a_usage_that_cannot_be_is_replaced_by_our_estimate(wrong: Any, sent_bytes: int | None) -> None:
    found = completion(wrong, sent_bytes=sent_bytes)
    assert found.usage == CallUsage(ESTIMATE, WRITTEN)
    assert found.is_usage_estimated
    row = look_up(MODEL)
    assert row is not None
    assert found.cost_usd == row.cost_usd(CallUsage(ESTIMATE, WRITTEN))


@pytest.mark.parametrize("sent_bytes", [None, len(PROMPT)])
@pytest.mark.parametrize(
    "right", [(2_400, 280), (ESTIMATE // 5, WRITTEN // 5), (120_000, 16_384), (2_400, 280, 2_300), (2_400, 280, 2_400)]
)
def test_a_plausible_usage_stays_as_it_was_reported(right: tuple[int, ...], sent_bytes: int | None) -> None:
    found = completion(usage(*right), sent_bytes=sent_bytes)
    assert (found.usage, found.is_usage_estimated) == (CallUsage(*right), False)


def test_cache_counted_beside_the_prompt_is_counted() -> None:
    assert completion(usage(100, 280, 2_300)).usage == CallUsage(2_400, 280, 2_300)
    message = {"id": "r", "model": "claude", "content": [{"type": "text", "text": ANSWER}], "stop_reason": "end_turn"}
    counts = {"input_tokens": 3, "output_tokens": 280, "cache_read_input_tokens": 2_400}
    reply = read_message(message | {"usage": counts})
    config = LLMConfig(model="claude")
    found = make_completion(reply, REQUEST, config, None, latency_seconds=1.0, sent_bytes=len(PROMPT))
    assert found.usage == CallUsage(2_403, 280, 2_400)


def test_an_image_has_many_bytes_and_few_tokens() -> None:
    image = ImagePart("data:image/png;base64," + "A" * 4_000_000)
    request = replace(REQUEST, messages=(Message("user", (TextPart("What is this?"), image)),))
    assert completion(usage(1_120, 280), request=request, sent_bytes=4_000_100).usage == CallUsage(1_120, 280)


@pytest.mark.parametrize(("said", "is_believed"), [(0.0, False), (0.002, True), (0.03, True), (9_000.0, False)])
def test_implausible_cost_is_not_believed(said: float, is_believed: bool) -> None:
    own = completion(usage(2_400, 280)).cost_usd
    assert own == pytest.approx(0.0088)
    assert completion(usage(2_400, 280), told=said).cost_usd == (said if is_believed else own)


@pytest.mark.parametrize(
    ("said", "usd"),
    [
        *((odd, None) for odd in (True, False, None, "", "much", [], {}, -0.1, -1, math.nan, math.inf, 10**400, 1e5)),
        *((0, 0.0), (0.5, 0.5), ("0.25", 0.25)),
    ],
)
def test_price_of_a_gateway_is_a_number_or_its_text(said: object, usd: float | None) -> None:
    assert parse_reported_usd(said) == usd


@pytest.mark.parametrize(
    ("settings", "counted", "expected"),
    [
        ({"context_management": {"compact": True}}, 20, 20),
        ({"context_management": {"compact": True}}, 0, None),
        ({}, 20, None),
    ],
)
def test_a_prompt_that_the_provider_shortens_counts_as_it_says(
    settings: dict[str, Any], counted: int, expected: int | None
) -> None:
    message = {"id": "m", "model": "claude-x", "content": [{"type": "text", "text": ANSWER}], "stop_reason": "end_turn"}
    reply = read_message(message | {"usage": {"input_tokens": counted, "output_tokens": 400}})
    config = LLMConfig.create(model="claude-x", **settings)
    found = make_completion(reply, REQUEST, config, None, latency_seconds=1.0).usage.prompt_tokens
    assert found == (ESTIMATE if expected is None else expected)
