"""A conversation's usage of each model, read from its log: its own calls and those that its delegates report.

Holds: a fold of the log. Every call counts once in the conversation that made it and once in each of its ancestors.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker.contract import DelegateEnded, Event, ModelReply, ModelUsage, TokenUsage


def sum_usage_by_model(events: Iterable[Event]) -> tuple[ModelUsage, ...]:
    """Return the usage by model, in the order of each model's first call."""
    found: dict[str, ModelUsage] = {}
    reported: set[int] = set()
    for event in events:
        if isinstance(event, ModelReply):
            _add(found, ModelUsage(model=event.model, calls=1, cost_usd=event.cost_usd or 0.0, usage=event.usage))
        elif isinstance(event, DelegateEnded) and event.delegate_id not in reported:
            reported.add(event.delegate_id)
            for used in event.models:
                _add(found, used)
    return tuple(found.values())


def _add(found: dict[str, ModelUsage], used: ModelUsage) -> None:
    so_far = found.get(used.model, ModelUsage(model=used.model))
    counts = {name: getattr(so_far.usage, name) + getattr(used.usage, name) for name in TokenUsage.model_fields}
    found[used.model] = ModelUsage(
        model=used.model,
        calls=so_far.calls + used.calls,
        cost_usd=so_far.cost_usd + used.cost_usd,
        usage=TokenUsage(**counts),
    )
