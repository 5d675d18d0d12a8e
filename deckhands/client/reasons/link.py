"""An explanation: a chain of links, each with its times and with its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Self


class Cause(StrEnum):
    """The cause in a link, for programs; the values are stable."""

    STATE = "state"
    SCHEDULED = "scheduled"
    ACTION_RUNS = "action_runs"
    ACTION_QUEUED = "action_queued"
    ACTION_UNSENT = "action_unsent"
    WORKER_LOST = "worker_lost"
    NO_WORKER = "no_worker"
    NODE_AWAY = "node_away"
    DELEGATE = "delegate"
    QUOTA = "quota"
    BUDGET = "budget"
    BATCH = "batch"
    RETRY = "retry"
    NEWER_WORKER = "newer_worker"
    LOCKED = "locked"
    PINNED_VERSION = "pinned_version"
    CONFIRMATION = "confirmation"
    ANSWER = "answer"
    PAUSED = "paused"
    LOOP = "loop"
    DEAD_LETTER = "dead_letter"
    MESSAGE = "message"
    QUEUED = "queued"
    OWNER = "owner"
    UNCLAIMED = "unclaimed"
    ENDED = "ended"
    CLOSED = "closed"
    ARCHIVED = "archived"


@dataclass(frozen=True, slots=True)
class Link:
    """One step from a conversation's state to the cause.

    Attributes:
        text: one sentence for the user. It may contain text from a model or a command.
        since: the time of its start, aware UTC; None if unknown.
        until: its expected end; None if unknown.
        remedy: a sentence with the action that would resolve it; empty if only time helps.
        details: the same as values: numbers, names and ids.
        lines: lines of a log, the latest last.
        links: the explanation of another conversation that is the cause; `details` names it.
    """

    cause: Cause
    text: str
    since: datetime | None = None
    until: datetime | None = None
    remedy: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "cause": self.cause.value,
            "text": self.text,
            "since": self.since.isoformat() if self.since else None,
            "until": self.until.isoformat() if self.until else None,
            "remedy": self.remedy,
            "details": dict(self.details),
            "lines": list(self.lines),
            "links": [link.as_json() for link in self.links],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return a link from the fields that `as_json` returned.

        Raises:
            KeyError, TypeError, ValueError: these are not the fields of a link.
        """
        since, until = fields["since"], fields["until"]
        return cls(
            Cause(fields["cause"]),
            fields["text"],
            datetime.fromisoformat(since) if since else None,
            datetime.fromisoformat(until) if until else None,
            fields["remedy"],
            dict(fields["details"]),
            tuple(fields["lines"]),
            tuple(cls.from_json(link) for link in fields["links"]),
        )


@dataclass(frozen=True, slots=True)
class Why:
    """The chain of reasons for a conversation's current state.

    Attributes:
        state: the agent's state.
        wait_reason: the wait reason in the index; empty if it does not wait, or waits for a user.
        at: when the store was read, aware UTC.
        links: from the state to the cause; at least one.
    """

    conversation_id: str
    state: str
    wait_reason: str
    at: datetime
    links: tuple[Link, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "conversation_id": self.conversation_id,
            "state": self.state,
            "wait_reason": self.wait_reason,
            "at": self.at.isoformat(),
            "links": [link.as_json() for link in self.links],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return an explanation from the fields that `as_json` returned; raises the errors of `Link.from_json`."""
        return cls(
            fields["conversation_id"],
            fields["state"],
            fields["wait_reason"],
            datetime.fromisoformat(fields["at"]),
            tuple(Link.from_json(link) for link in fields["links"]),
        )
