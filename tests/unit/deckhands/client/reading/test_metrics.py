"""OpenHands' rules for metrics: add, merge, diff; the metrics of a log, including its delegates."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import DelegateEnded, Event, ModelReply, ModelUsage
from broker.contract.events import TokenUsage as ReplyUsage
from controller_worker.model.usage import sum_usage_by_model
from deckhands.client.reading.metrics import Cost, Metrics, ResponseLatency, TokenUsage, compute_metrics
from deckhands.client.reading.output import render_summary
from deckhands.client.reading.summary import Summary, summarize
from tests.unit.deckhands.sample_log import created, finished_log, numbered

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
SMALL = TokenUsage("acme/small", 10, 2, 3, 4, context_window=8_000, per_turn_token=12, response_id="r1")
LARGE = TokenUsage("acme/large", 100, 20, 30, 40, context_window=5_000, per_turn_token=120, response_id="r2")


def replied(model: str, response_id: str, cost: float | None, latency: float = 2.0) -> ModelReply:
    usage = ReplyUsage(prompt_tokens=100, completion_tokens=10, cache_read_tokens=60, cache_write_tokens=5)
    return ModelReply(model=model, response_id=response_id, cost_usd=cost, latency_seconds=latency, usage=usage)


def test_usages_add_up_and_the_later_turn_counts() -> None:
    assert TokenUsage("acme/small", 110, 22, 33, 44, 8_000, 120, "r1") == SMALL + LARGE


def test_cost_and_latency_are_never_negative() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Metrics().with_cost(-0.01, model="m", at=NOON)
    latencies = Metrics().with_latency(-2.0, model="m", response_id="r").response_latencies
    assert latencies == (ResponseLatency("m", 0.0, "r"),)


def test_usage_without_a_model_belongs_to_the_configured_one() -> None:
    metrics = Metrics(accumulated_token_usage=TokenUsage(model="acme/large"))
    assert metrics.with_cost(0.5, model="", at=NOON).costs == (Cost("acme/large", 0.5, 1777636800.0),)


def test_merging_adds_everything_and_keeps_ones_own_budget() -> None:
    one = Metrics(max_budget_per_task=2.0).with_cost(0.5, model="a", at=NOON).with_usage(SMALL)
    other = Metrics(max_budget_per_task=9.0).with_cost(0.25, model="b", at=NOON).with_usage(LARGE)
    both = one.merge(other)
    assert (both.accumulated_cost, both.max_budget_per_task) == (0.75, 2.0)
    assert [cost.model for cost in both.costs] == ["a", "b"]
    assert both.accumulated_token_usage.prompt_tokens == 110
    assert both.token_usages == (SMALL, LARGE)
    assert Metrics().merge(other).max_budget_per_task == 9.0


def test_the_difference_of_two_moments() -> None:
    before = Metrics().with_cost(0.5, model="a", at=NOON).with_usage(SMALL)
    since = before.with_cost(0.25, model="b", at=NOON).with_usage(LARGE).diff(before)
    assert since.accumulated_cost == 0.25
    assert since.costs == (Cost("b", 0.25, 1777636800.0),)
    assert since.token_usages == (LARGE,)
    assert since.accumulated_token_usage == TokenUsage("", 100, 20, 30, 40, 8_000, 0, "")
    assert before.diff(before).get() == Metrics(accumulated_token_usage=TokenUsage(context_window=8_000)).get()


def test_log_metrics_at_its_end_and_at_an_event() -> None:
    events = numbered(
        created(limits={"max_budget_usd": 3.0}),
        replied("acme/large", "r1", 0.5, 2.0),
        replied("acme/small", "r2", 0.25, 1.0),
        replied("acme/large", "r3", None, 4.0),
    )
    metrics = compute_metrics(events)
    assert list(metrics.get()) == [
        *("accumulated_cost", "max_budget_per_task", "accumulated_token_usage", "costs", "response_latencies"),
        "token_usages",
    ]
    assert (metrics.accumulated_cost, metrics.max_budget_per_task) == (0.75, 3.0)
    assert [latency.latency for latency in metrics.response_latencies] == [2.0, 1.0, 4.0]
    assert [usage.per_turn_token for usage in metrics.token_usages] == [110, 110, 110]
    assert metrics.diff(compute_metrics(events[:3])).token_usages[0].response_id == "r3"
    assert metrics.by_model()["acme/large"].totals() == {
        "calls": 2,
        "accumulated_cost": 0.5,
        "prompt_tokens": 200,
        "completion_tokens": 20,
        "cache_read_tokens": 120,
        "cache_write_tokens": 10,
        "mean_latency": 3.0,
        "longest_latency": 4.0,
    }
    assert Metrics.from_json(json.loads(json.dumps(metrics.get()))) == metrics


def test_a_summary_shows_models_latencies_and_the_cache() -> None:
    events = numbered(created(), replied("acme/large", "r1", 0.5, 2.0), replied("acme/small", "r2", 0.25, 1.0))
    lines = render_summary(summarize(events))
    assert "Tokens:       200 in, 20 out (120 read from the cache, 10 written to it)" in lines
    assert "Models:       acme/large $0.5000 (calls: 1), acme/small $0.2500 (calls: 1)" in lines
    assert "Latency:      1.5 s a call, 2.0 s the longest" in lines
    assert list(summarize(events).as_json()["metrics"]["per_model"]) == ["acme/large", "acme/small"]
    assert not [line for line in render_summary(summarize(finished_log())) if line.startswith(("Models", "Latency"))]


def test_a_budget_that_cannot_be_kept_is_said_to_be() -> None:
    limited = created(limits={"max_budget_usd": 0.5})
    told = "Cost:         unknown; the budget of $0.50 covers only calls of known price"
    assert told in render_summary(summarize(numbered(limited, replied("acme/small", "r1", None, 1.0))))
    assert "Cost:         $0.2500" in render_summary(
        summarize(numbered(limited, replied("acme/small", "r1", 0.25, 1.0)))
    )
    assert "Cost:         unknown" in render_summary(summarize(numbered(created(), replied("a", "r1", None, 1.0))))


def ended(delegate_id: int, log: list[Event], **fields: Any) -> DelegateEnded:
    """Return the report of a delegate with this log."""
    models = sum_usage_by_model(log)
    sums: dict[str, Any] = {
        "models": models,
        "cost_usd": sum(used.cost_usd for used in models),
        "prompt_tokens": sum(used.usage.prompt_tokens for used in models),
        "completion_tokens": sum(used.usage.completion_tokens for used in models),
    }
    return DelegateEnded(
        delegate_id=delegate_id,
        conversation_id=f"d{delegate_id}",
        agent_state=AgentState.FINISHED,
        iterations=2,
        **sums | fields,
    )


GRANDCHILD = numbered(created(), replied("acme/small", "", 0.01))
CHILD = numbered(
    created(),
    replied("acme/small", "", 0.02),
    AgentDelegateAction(agent="inner"),
    ended(3, GRANDCHILD),
    ended(3, GRANDCHILD),
    replied("acme/large", "", 0.5),
)
PARENT = numbered(
    created(),
    replied("acme/large", "", 0.25),
    AgentDelegateAction(agent="helper"),
    AgentDelegateAction(agent="scout"),
    ended(3, CHILD),
    ended(4, numbered(created(), replied("acme/small", "", None)), has_unknown_cost=True),
    ended(4, CHILD),
    replied("acme/large", "", 0.25),
)


def test_a_report_adds_up_all_below_it_by_model() -> None:
    usage = ReplyUsage(prompt_tokens=200, completion_tokens=20, cache_read_tokens=120, cache_write_tokens=10)
    small, large = sum_usage_by_model(CHILD)
    assert small == ModelUsage(model="acme/small", calls=2, cost_usd=0.03, usage=usage)
    assert (large.model, large.calls, large.cost_usd) == ("acme/large", 1, 0.5)


def test_parents_summary_shows_each_delegates_costs() -> None:
    summary = summarize(PARENT)
    assert (summary.cost_usd, summary.prompt_tokens, summary.completion_tokens) == (1.03, 600, 60)
    assert summary.has_unknown_cost
    assert summary.iterations == 2
    usage = summary.metrics.accumulated_token_usage
    assert (usage.cache_read_tokens, usage.cache_write_tokens, usage.per_turn_token) == (360, 30, 110)
    metrics = summary.as_json()["metrics"]
    assert len(metrics["costs"]) == len(metrics["token_usages"]) == 2
    assert [(one["agent"], one["cost"], one["state"]) for one in metrics["per_delegate"]] == [
        ("helper", 0.53, "finished"),
        ("scout", 0.0, "finished"),
    ]
    assert {name: (sums["calls"], sums["accumulated_cost"]) for name, sums in metrics["per_model"].items()} == {
        "acme/large": (3, 1.0),
        "acme/small": (3, 0.03),
    }
    assert Summary.from_json(json.loads(json.dumps(summary.as_json()))) == summary
    lines = render_summary(summary)
    assert "Models:       acme/large $1.0000 (calls: 3), acme/small at least $0.0300 (calls: 3)" in lines
    told = "helper $0.5300 (finished, iterations: 2), scout at an unknown cost (finished, iterations: 2)"
    assert f"Delegates:    {told}" in lines


def test_log_metrics_equal_its_summary_at_every_event() -> None:
    for at in range(1, len(PARENT) + 1):
        assert compute_metrics(PARENT[:at]) == summarize(PARENT[:at]).metrics
    later = compute_metrics(PARENT).diff(compute_metrics(PARENT[:4]))
    assert [delegate.agent for delegate in later.delegates] == ["helper", "scout"]
    assert round(later.accumulated_cost, 8) == 0.78
    assert "delegates" not in later.get()


def test_a_report_of_an_earlier_version_counts_without_its_models() -> None:
    old = numbered(created(), AgentDelegateAction(agent="helper"), ended(2, CHILD, models=()))
    summary = summarize(old)
    assert (summary.cost_usd, summary.as_json()["metrics"]["per_model"]) == (0.53, {})


def test_unknown_price_is_not_shown_as_zero() -> None:
    child = numbered(created(), replied("acme/secret", "", None))
    log = numbered(
        created(),
        replied("acme/large", "", 0.5),
        AgentDelegateAction(agent="inner"),
        ended(3, child, has_unknown_cost=True),
        replied("acme/open", "", None),
    )
    text = "\n".join(render_summary(summarize(log)))
    assert "acme/large $0.5000 (calls: 1), acme/open at an unknown cost (calls: 1)" in text
    assert "acme/secret at an unknown cost (calls: 1)" in text
    assert "inner at an unknown cost (finished, iterations: 2)" in text
    assert "$0.0000" not in text
