"""Logs for tests: events numbered and stamped one second apart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from broker.contract.actions import AgentFinishAction, CmdRunAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationCreated, Event, ModelReply, TokenUsage, with_id
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    NullObservation,
)
from broker.contract.recall import RecallAction, RecallType

CONVERSATION_ID = "c1-sample"
STARTED = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


def numbered(*events: Event) -> list[Event]:
    """Number events from 1 and stamp them one second apart."""
    return [
        with_id(event, number).model_copy(update={"timestamp": STARTED + timedelta(seconds=number - 1)})
        for number, event in enumerate(events, 1)
    ]


def state(name: str, reason: str = "") -> AgentStateChangedObservation:
    return AgentStateChangedObservation(agent_state=AgentState(name), reason=reason)


def created(**fields: object) -> ConversationCreated:
    return ConversationCreated.model_validate(
        {"conversation_id": CONVERSATION_ID, "title": "Fix it", "workspace": {"path": "/srv/project"}, **fields}
    )


def user(text: str) -> MessageAction:
    return MessageAction(content=text, source="user")


def reply(*, prompt: int = 1000, completion: int = 50, cost: float | None = 0.25) -> ModelReply:
    usage = TokenUsage(prompt_tokens=prompt, completion_tokens=completion)
    return ModelReply(model="acme/large", usage=usage, cost_usd=cost)


def command(text: str) -> CmdRunAction:
    return CmdRunAction(command=text)


def output(cause: int, text: str = "ok", exit_code: int = 0) -> CmdOutputObservation:
    return CmdOutputObservation(
        cause=cause, command="", content=text, metadata=CmdOutputMetadata(exit_code=exit_code), source="environment"
    )


def finished_log() -> list[Event]:
    """Return the log of a conversation that ran one command and finished: 11 events."""
    return numbered(
        created(),
        user("Fix it, please."),
        RecallAction(recall_type=RecallType.WORKSPACE_CONTEXT, query="Fix it, please."),
        state("running"),
        NullObservation(cause=3),
        reply(),
        command("make test"),
        output(7, "1 passed"),
        reply(prompt=1200, completion=30),
        AgentFinishAction(final_thought="All tests pass."),
        state("finished"),
    )
