"""A conversation begun with the first events of another: time travel that leaves the original as it is.

Holds: what ran in the origin does not run again in a fork; an action that had no result by then runs in the fork.
Does not: bring the files of a workspace along. They are no part of a log: a fork works where it is told to, or tool
workers restore what was last saved of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.contract.events import ConversationCreated, Event, LLMSpec, ModelSwitched, WorkspaceSpec
from broker.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Point:
    """A conversation, as far as one of its events; `at` is None for its end."""

    conversation_id: str
    at: int | None = None

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read `ID` or `ID@EVENT`.

        Raises:
            UsageError: what stands behind the @ is no event id.
        """
        conversation_id, mark, at = text.partition("@")
        if mark and not (at.isascii() and at.isdigit() and int(at) > 0):
            raise UsageError(
                f"{at!r} is no event.", remedy="Write ID@EVENT with a number from 1; `logs ID` shows them."
            )
        return cls(conversation_id, int(at) if mark else None)

    def cut(self, events: Sequence[Event]) -> list[Event]:
        """Return the events up to the point.

        Raises:
            UsageError: the conversation has fewer.
        """
        if self.at is not None and self.at > len(events):
            raise UsageError(
                f"The conversation {self.conversation_id} has {len(events)} events; there is no event {self.at}.",
                remedy=f"Choose one from 1 to {len(events)}.",
            )
        return list(events[: self.at])


def fork_of(
    events: Sequence[Event],
    conversation_id: str,
    *,
    model: str | None = None,
    workspace: WorkspaceSpec | None = None,
    title: str = "",
) -> ConversationCreated:
    """Return the first event of a fork.

    Args:
        events: those of the origin that the fork takes over, the first included.
        conversation_id: of the fork.
        model: another model, for whoever carries a plan out too; the origin's if None.
        workspace: another place to work; as the origin's if None: a directory that it shares, or one of its own.
        title: the origin's, with the event's number, if empty.
    """
    created = events[0]
    assert isinstance(created, ConversationCreated)
    agent = created.agent
    if model is not None:
        plan = agent.plan.model_copy(update={"llm": None}) if agent.plan is not None else None
        agent = agent.model_copy(update={"llm": LLMSpec(model=model), "plan": plan})
    changes = {
        "id": 0,
        "timestamp": None,
        "conversation_id": conversation_id,
        "agent": agent,
        "workspace": workspace or created.workspace,
        "title": title or f"{created.title} @{len(events)}".strip(),
        "forked_from": f"{created.conversation_id}@{len(events)}",
        "parent": None,  # a fork of a delegate answers to nobody
    }
    return created.model_copy(update=changes)


def taken_over(events: Sequence[Event], *, model: str | None = None) -> list[Event]:
    """Return the events behind the first as the fork has them: a switch of model does not take back the fork's own."""
    return [
        event.model_copy(update={"model": model}) if model is not None and isinstance(event, ModelSwitched) else event
        for event in events[1:]
    ]
