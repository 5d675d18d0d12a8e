"""What a controller worker counts of the events that it appends, for metrics."""

from __future__ import annotations

from collections.abc import Iterable

from broker.contract.events import Event, ModelCallFailed, ModelReply
from broker.contract.observations import AgentStateChangedObservation
from broker.coordination.figures import Figures
from broker.specs.agent_state import is_settled

ANSWERED = "answered"


def count_events(figures: Figures, events: Iterable[Event]) -> None:
    """Count what an append has added to a log: steps, calls, tokens, money, conversations that settle."""
    for event in events:
        if isinstance(event, ModelReply):
            _count_reply(figures, event)
        elif isinstance(event, ModelCallFailed):
            figures.add("model_calls", label=event.code)
        elif isinstance(event, AgentStateChangedObservation) and is_settled(event.agent_state):
            figures.add("settled", label=event.agent_state.value)


def _count_reply(figures: Figures, reply: ModelReply) -> None:
    if reply.service == "agent":
        figures.add("steps")
    figures.add("model_calls", label=ANSWERED)
    figures.add("model_seconds", reply.latency_seconds, reply.model)
    figures.add("cost_usd", reply.cost_usd or 0.0, reply.model)
    figures.add("prompt_tokens", reply.usage.prompt_tokens, reply.model)
    figures.add("completion_tokens", reply.usage.completion_tokens, reply.model)
    figures.add("cache_read_tokens", reply.usage.cache_read_tokens, reply.model)
    if reply.cost_usd is None:
        figures.add("calls_without_price", label=reply.model)
