"""Where the time of a conversation went."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from broker.contract.actions import CmdRunAction
from broker.contract.agent_state import AgentState
from broker.contract.events import (
    ConversationCreated,
    Event,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
)
from broker.contract.observations import AgentStateChangedObservation, CmdOutputMetadata, CmdOutputObservation
from deckhands.evaluation.attempts.times import Times, compute_times

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float, event: Event) -> Event:
    return event.model_copy(update={"timestamp": BEGAN + timedelta(seconds=seconds)})


def state(name: AgentState) -> Event:
    return AgentStateChangedObservation(agent_state=name)


def test_every_second_counts_once() -> None:
    output = CmdOutputObservation(cause=3, command="", content="", metadata=CmdOutputMetadata(exit_code=0))
    events = [
        at(0, ConversationCreated(conversation_id="one", title="One")),
        at(2, state(AgentState.RUNNING)),  # 2 s until a worker had it
        at(5, ModelCallFailed(code="rate_limit")),  # 3 s
        at(9, ModelReply(latency_seconds=1.0)),  # 3 s until the retry, 1 s of work
        at(9, CmdRunAction(command="make")),
        at(14, output),  # 5 s of work
        at(14, ModelCallDeferred(code="waiting_for_budget")),
        at(20, ModelCallAdmitted()),  # 6 s
        at(22, ModelReply(latency_seconds=2.0)),
        at(22, state(AgentState.PAUSED)),
        at(32, state(AgentState.RUNNING)),  # 10 s
        at(33, ModelReply(latency_seconds=30.0)),  # a provider's claim fits into its gap
    ]
    times = compute_times(events)
    assert times == Times(
        working=1.0 + 5.0 + 2.0 + 1.0,
        waiting={"worker": 5.0, "rate_limit": 3.0, "waiting_for_budget": 6.0, "paused": 10.0},
    )
    assert times.working + sum(times.waiting.values()) == 33.0


def test_a_log_without_times_has_none() -> None:
    assert compute_times([ModelReply(latency_seconds=3.0)]) == Times(0.0, {})
