"""One call of the function `append`, as values: who writes, what, and what happens along with it.

Holds: the order of the arguments stands here and at the head of `append` in `functions.lua`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from broker.log.fencing import Ownership
from broker.store.connection import Argument

Guard = tuple[str, Argument, Argument, Argument, str]


class Creator(NamedTuple):
    """The producer that begins a conversation.

    Attributes:
        key: idempotency key.
        pool: of tool workers, for its first action.
        awaited: who waits for its end, see `awaited`; empty: nobody.
        admission: how many conversations of its tenant are open in other shards; `inner`: it is part of a step of
            another conversation, and neither refused nor counted.
    """

    key: str
    pool: str
    awaited: str = ""
    admission: str = ""

    def guard(self) -> Guard:
        """Return the guard of the append, and its flags."""
        return ("create", self.key, self.pool, self.awaited, self.admission)


class Producer(NamedTuple):
    """A producer: a person, a client, another conversation.

    Attributes:
        key: idempotency key.
        is_quiet: whether nobody is notified.
    """

    key: str
    is_quiet: bool = False

    def guard(self) -> Guard:
        """Return the guard of the append, and its flags."""
        return ("producer", self.key, "", "", "quiet" if self.is_quiet else "")


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
