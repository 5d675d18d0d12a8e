"""What delegates have cost, in the summary of their parent: told for each, and counted once."""

from __future__ import annotations

import json
from typing import Any

from broker.contract.actions import AgentDelegateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import DelegateEnded, Event, ModelReply, ModelUsage, TokenUsage
from controller_worker.model.usage import sum_usage_by_model
from deckhands.client.reading.metrics import compute_metrics
from deckhands.client.reading.output import render_summary
from deckhands.client.reading.summary import Summary, summarize
from tests.unit.deckhands.sample_log import created, numbered


def replied(model: str, cost: float | None) -> ModelReply:
    usage = TokenUsage(prompt_tokens=100, completion_tokens=10, cache_read_tokens=60, cache_write_tokens=5)
    return ModelReply(model=model, cost_usd=cost, usage=usage, latency_seconds=2.0)


def ended(delegate_id: int, log: list[Event], **fields: Any) -> DelegateEnded:
    """What a delegate with this log reports."""
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


GRANDCHILD = numbered(created(), replied("acme/small", 0.01))
CHILD = numbered(
    created(),
    replied("acme/small", 0.02),
    AgentDelegateAction(agent="inner"),
    ended(3, GRANDCHILD),
    ended(3, GRANDCHILD),
    replied("acme/large", 0.5),
)
PARENT = numbered(
    created(),
    replied("acme/large", 0.25),
    AgentDelegateAction(agent="helper"),
    AgentDelegateAction(agent="scout"),
    ended(3, CHILD),
    ended(4, numbered(created(), replied("acme/small", None)), has_unknown_cost=True),
    ended(4, CHILD),
    replied("acme/large", 0.25),
)


def test_a_report_adds_up_all_below_it_by_model() -> None:
    usage = TokenUsage(prompt_tokens=200, completion_tokens=20, cache_read_tokens=120, cache_write_tokens=10)
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
    child = numbered(created(), replied("acme/secret", None))
    log = numbered(
        created(),
        replied("acme/large", 0.5),
        AgentDelegateAction(agent="inner"),
        ended(3, child, has_unknown_cost=True),
        replied("acme/open", None),
    )
    text = "\n".join(render_summary(summarize(log)))
    assert "acme/large $0.5000 (calls: 1), acme/open at an unknown cost (calls: 1)" in text
    assert "acme/secret at an unknown cost (calls: 1)" in text
    assert "inner at an unknown cost (finished, iterations: 2)" in text
    assert "$0.0000" not in text
