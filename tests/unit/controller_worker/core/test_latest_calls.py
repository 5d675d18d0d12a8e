"""The record of the latest call of each kind, and its largest effect on an estimate."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.events import CallEstimate, ModelReply, TokenUsage
from controller_worker.core.concerns.limits import (
    LARGEST_RATIO,
    MAX_KINDS,
    SMALLEST_RATIO,
    LatestCall,
    add_call,
    compute_ratio,
    correct_estimate,
    find_latest_call,
)


def reply(model: str | None, *, estimated: int = 100, counted: int = 100, **fields: Any) -> ModelReply:
    estimate = None if model is None else CallEstimate(model=model, prompt_tokens=estimated)
    return ModelReply(estimate=estimate, usage=TokenUsage(prompt_tokens=counted, completion_tokens=7), **fields)


def after(*replies: ModelReply) -> tuple[LatestCall, ...]:
    calls: tuple[LatestCall, ...] = ()
    for each in replies:
        calls = add_call(calls, each)
    return calls


def test_calls_of_another_model_or_service_say_nothing() -> None:
    calls = after(reply("a", cost_usd=1.0), reply("a", cost_usd=0.1, service="condenser"), reply("b", cost_usd=0.2))
    found = {
        (service, model): find_latest_call(calls, service, model)
        for service in ("agent", "condenser")
        for model in "abc"
    }
    costs = {kind: call.cost_usd if call is not None else None for kind, call in found.items()}
    assert costs == {
        ("agent", "a"): 1.0,
        ("agent", "b"): 0.2,
        ("agent", "c"): None,
        ("condenser", "a"): 0.1,
        ("condenser", "b"): None,
        ("condenser", "c"): None,
    }
    assert find_latest_call(calls, "agent", None) == calls[-1]


def test_reply_without_a_noted_model_counts_for_every_model() -> None:
    call = find_latest_call(after(reply(None, cost_usd=0.5)), "agent", "a")
    assert call is not None
    assert (call.cost_usd, call.ratio) == (0.5, None)


def test_the_latest_reply_corrects_the_next_estimate_at_once() -> None:
    for counted, ratio in ((400, 4.0), (90, 0.9), (100, 1.0)):
        call = find_latest_call(after(reply("a", counted=777), reply("a", counted=counted)), "agent", "a")
        assert call is not None
        assert call.ratio == ratio
        assert correct_estimate(101, ratio) == pytest.approx(101 * ratio, abs=1)


def test_the_longest_reply_of_a_kind_is_kept() -> None:
    long = ModelReply(usage=TokenUsage(completion_tokens=900), estimate=CallEstimate(model="a", prompt_tokens=1))
    call = find_latest_call(after(long, reply("a")), "agent", "a")
    assert call is not None
    assert call.longest_reply_tokens == 900


def test_no_more_than_so_many_kinds_are_kept() -> None:
    calls = after(*(reply(f"model-{number}") for number in range(100)))
    assert len(calls) == MAX_KINDS
    assert find_latest_call(calls, "agent", "model-99") is not None
    assert find_latest_call(calls, "agent", "model-1") is None


@given(st.integers(-(10**400), 10**400), st.integers(-(10**400), 10**400))
def test_no_count_moves_an_estimate_beyond_its_bounds(counted: int, estimated: int) -> None:
    assert SMALLEST_RATIO <= compute_ratio(counted, estimated) <= LARGEST_RATIO
    call = LatestCall("agent", "a", prompt_tokens=counted, estimated_tokens=estimated)
    assert call.ratio is None or 500 <= correct_estimate(1_000, call.ratio) <= 10_000
