"""Fork a conversation: start a new one from the first events of another, which does not change.

Holds: an action that ran in the origin does not run again in a fork; an action without a result runs in the fork.
Does not: copy the files of a workspace, which are not part of a log. A fork works in the directory it is given, or tool
workers restore the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from broker.contract import (
    ConversationChanged,
    ConversationCreated,
    Event,
    LLMSpec,
    ModelSwitched,
    Tenancy,
    WorkspaceSpec,
)
from broker.runtime import UsageError, format_count


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A conversation up to one of its events; `at` is None for its end."""

    conversation_id: str
    at: int | None = None

    @classmethod
    def parse(cls, text: str) -> ForkPoint:
        """Parse `ID` or `ID@EVENT`.

        Raises:
            UsageError: the text after the @ is not an event id.
        """
        conversation_id, mark, at = text.partition("@")
        if mark and not (at.isascii() and at.isdigit() and int(at) > 0):
            raise UsageError(
                f"{at!r} is not an event.", remedy="Write ID@EVENT with a number from 1; `logs ID` shows them."
            )
        return cls(conversation_id, int(at) if mark else None)

    def events_until(self, events: Sequence[Event]) -> list[Event]:
        """Return the events up to the point.

        Raises:
            UsageError: the conversation has fewer.
        """
        if self.at is not None and self.at > len(events):
            number = format_count(len(events), "event")
            raise UsageError(
                f"The conversation {self.conversation_id} has {number}; there is no event {self.at}.",
                remedy=f"Choose one from 1 to {len(events)}.",
            )
        return list(events[: self.at])


def build_fork(
    events: Sequence[Event],
    conversation_id: str,
    *,
    model: str | None = None,
    workspace: WorkspaceSpec | None = None,
    title: str = "",
    labels: Mapping[str, str] | None = None,
    tenancy: Tenancy | None = None,
) -> ConversationCreated:
    """Return the first event of a fork.

    Args:
        events: the origin's events that the fork copies, including the first.
        conversation_id: the id of the fork.
        model: another model, also for the agent that carries out a plan; the origin's if None.
        workspace: the workspace of the fork. None: the directory that was named for the origin, or otherwise a new one.
        title: if empty, the origin's with the number of the event.
        labels: the origin's if None.
        tenancy: the origin's if None.
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
        "not_before": None,
        "expires": None,
        "pinned_version": None,  # the way out if no worker of that version is left
        **({} if labels is None else {"labels": dict(labels)}),
        **({} if tenancy is None else {"tenancy": tenancy}),
        "parent": None,  # a fork of a delegate reports to no parent
    }
    return created.model_copy(update=changes)


def copy_events(events: Sequence[Event], *, model: str | None = None) -> list[Event]:
    """Return the events after the first, adapted to the fork. A switch of model keeps the fork's model."""
    return list(events[1:]) if model is None else [_with_model(event, model) for event in events[1:]]


def _with_model(event: Event, model: str) -> Event:
    if isinstance(event, ModelSwitched):
        return event.model_copy(update={"model": model})
    if isinstance(event, ConversationChanged) and event.agent is not None:
        agent = event.agent.model_copy(update={"llm": LLMSpec(model=model)})
        return event.model_copy(update={"agent": agent})
    return event
