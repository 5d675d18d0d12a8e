"""One call of the function `append`, as values: who writes, what, and what happens along with it.

Holds: the names of the arguments stand here and at the head of `append` in `append.lua`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgpack

from broker.contract import MessagePolicy, Ownership, Start
from broker.secrets import KnownValues
from broker.store import Argument

Condition = Literal["", "message:", "message:enqueue", "message:reject", "message:interrupt", "expire"]
"""On which a producer's append is made: `message:<policy>`, that the policy, by default the conversation's, takes a
message now; `expire`, that the conversation waits to begin."""

WORK: Condition = "message:enqueue"
"""Of what begins work and is never refused."""

Named = dict[str, Any]
"""Arguments by name. What the function compares with texts of the store is a text."""


def message_with(policy: MessagePolicy | None) -> Condition:
    """Return the condition of a person's message.

    Args:
        policy: what it does if the agent works; None: what the conversation says.
    """
    conditions: dict[MessagePolicy | None, Condition] = {
        None: "message:",
        "enqueue": "message:enqueue",
        "reject": "message:reject",
        "interrupt": "message:interrupt",
    }
    return conditions[policy]


class Creator(NamedTuple):
    """The producer that begins a conversation.

    Attributes:
        key: idempotency key.
        pool: of tool workers, for its first action.
        awaited: who waits for its end, see `awaited`; empty: nobody.
        elsewhere: how many conversations of its tenant are open in other shards; None: it is part of a step of another
            conversation, and neither refused nor counted.
        start: when it may begin; None: at once.
    """

    key: str
    pool: str
    awaited: str = ""
    elsewhere: int | None = 0
    start: Start | None = None

    def named(self) -> Named:
        """Return the writer's arguments."""
        named: Named = {"by": "create", "key": self.key, "pool": self.pool}
        named |= {"awaited": self.awaited} if self.awaited else {}
        named |= {"inner": True} if self.elsewhere is None else {"elsewhere": self.elsewhere}
        return named | ({"start": _millis_of(self.start)} if self.start else {})


def _millis_of(start: Start) -> dict[str, int]:
    found = {"delay_ms": start.delay_seconds, "limit_ms": start.limit_seconds}
    return {name: math.ceil(seconds * 1000) for name, seconds in found.items() if seconds is not None}


class Producer(NamedTuple):
    """A producer: a person, a client, another conversation.

    Attributes:
        key: idempotency key.
        condition: on which it is appended.
        quiet: nobody is notified.
        seen_id: the event that has to be the last one; None: any.
    """

    key: str
    condition: Condition = ""
    quiet: bool = False
    seen_id: int | None = None

    def named(self) -> Named:
        """Return the writer's arguments."""
        named: Named = {"by": "producer", "key": self.key, "condition": self.condition, "quiet": self.quiet}
        return named if self.seen_id is None else named | {"seen": str(self.seen_id)}


class ToolWriter(NamedTuple):
    """A tool worker that has carried an action out.

    Attributes:
        place: the action's entry, `<stream>|<entry>`, to acknowledge; or empty.
        checksum: of the action; empty: whatever the log has under its number.
    """

    worker_id: str
    action_id: int
    place: str
    checksum: str

    def named(self) -> Named:
        """Return the writer's arguments."""
        named: Named = {
            "by": "tool",
            "worker": self.worker_id,
            "action": str(self.action_id),
            "checksum": self.checksum,
        }
        return named | ({"place": self.place} if self.place else {})


class Owner(NamedTuple):
    """The owner of a conversation.

    Attributes:
        seen_id: the last event that its decision rests on.
        checksum: of that event; empty: whatever the log has under its number.
        key: names this very call, the same when it is repeated.
    """

    ownership: Ownership
    seen_id: int
    checksum: str
    key: str

    def named(self) -> Named:
        """Return the writer's arguments."""
        worker, token = self.ownership.worker_id, self.ownership.token
        decided = {"seen": str(self.seen_id), "checksum": self.checksum, "key": self.key}
        return {"by": "owner", "worker": worker, "token": token} | decided


Writer = Creator | Producer | ToolWriter | Owner


class Entry(NamedTuple):
    """One event to be written.

    Attributes:
        data: its bytes.
        dispatch: `1` for a runnable action on its action stream, `pool:<name>` for one on that pool's; empty: neither.
        answers: the action that this observation settles; None: it is none.
    """

    data: bytes
    dispatch: str = ""
    answers: int | None = None

    def named(self) -> Named:
        """Return its arguments, without its bytes."""
        named: Named = {"dispatch": self.dispatch} if self.dispatch else {}
        return named | ({} if self.answers is None else {"answers": str(self.answers)})


def append_arguments(
    conversation_id: str,
    writer: Writer,
    entries: Sequence[Entry],
    cancels: Sequence[int] = (),
    fields: Mapping[str, str | int | float] | None = None,
    *,
    secrets: KnownValues | None = None,
) -> list[Argument]:
    """Return the arguments of the function: the id, what is named, and the bytes of each event.

    Args:
        cancels: running actions to be stopped; 0: all programs of the workspace.
        fields: what the index shows of the conversation.
        secrets: the values that the writer knows; it is refused if there are others. None: unchecked.
    """
    named = writer.named() | {"events": [entry.named() for entry in entries]}
    named |= {"cancels": [str(action) for action in cancels]} if cancels else {}
    named |= {"fields": [str(part) for field in fields.items() for part in field]} if fields else {}
    named |= {} if secrets is None else {"secrets": secrets.number, "sample": secrets.sample}
    return [conversation_id, msgpack.packb(named, use_bin_type=False), *(entry.data for entry in entries)]
