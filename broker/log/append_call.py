"""One call of the function `append`, as values: who writes, what, and what happens along with it.

Holds: the order of the arguments stands here and at the head of `append` in `functions.lua`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from broker.log.fencing import Ownership
from broker.specs.timing import MessagePolicy, Start
from broker.store.connection import Argument

Condition = Literal["", "message:", "message:enqueue", "message:reject", "message:interrupt", "expire"]
"""On which a producer's append is made: `message:<policy>`, that the policy, by default the conversation's, takes a
message now; `expire`, that the conversation waits to begin."""

WORK: Condition = "message:enqueue"
"""Of what begins work and is never refused."""

Guard = tuple[str, Argument, Argument, Argument, str]


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
        admission: how many conversations of its tenant are open in other shards; `inner`: it is part of a step of
            another conversation, and neither refused nor counted.
        start: when it may begin; None: at once.
    """

    key: str
    pool: str
    awaited: str = ""
    admission: str = ""
    start: Start | None = None

    def guard(self) -> Guard:
        """Return the guard of the append, and its flags."""
        timing = f"|{_millis(self.start.delay_seconds)}:{_millis(self.start.limit_seconds)}" if self.start else ""
        return ("create", self.key, self.pool, self.awaited, self.admission + timing)


def _millis(seconds: float | None) -> str:
    return "" if seconds is None else str(math.ceil(seconds * 1000))


class Producer(NamedTuple):
    """A producer: a person, a client, another conversation.

    Attributes:
        key: idempotency key.
        flags: `quiet`: nobody is notified; else a condition, see `Condition`.
    """

    key: str
    flags: str = ""

    def guard(self) -> Guard:
        """Return the guard of the append, and its flags."""
        return ("producer", self.key, "", "", self.flags)


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

    def guard(self) -> Guard:
        """Return the guard of the append, and its flags."""
        return ("tool", self.worker_id, self.action_id, self.place, self.checksum)


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

    def guard(self) -> Guard:
        """Return the guard of the append, and its flags."""
        return ("owner", self.ownership.worker_id, self.ownership.token, self.seen_id, self.key + self.checksum)


Writer = Creator | Producer | ToolWriter | Owner


Entry = tuple[bytes, str, int | str]
"""One event to be written: its bytes; `1` for a runnable action on its action stream, `pool:<name>` for one on that
pool's, or empty; the action that this observation settles, or empty."""


def append_arguments(
    conversation_id: str,
    writer: Writer,
    entries: Sequence[Entry],
    cancels: Sequence[int],
    fields: Mapping[str, str | int | float],
) -> list[Argument]:
    """Return the arguments of the function.

    Args:
        cancels: running actions to be stopped; 0: all programs of the workspace.
        fields: what the index shows of the conversation.
    """
    arguments: list[Argument] = [conversation_id, *writer.guard(), len(fields)]
    for field in fields.items():
        arguments += field
    arguments += (len(cancels), *cancels, len(entries))
    for entry in entries:
        arguments += entry
    return arguments
