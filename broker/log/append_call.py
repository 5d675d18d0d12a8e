"""One call of the function `append`, as values: who writes, what, and what happens along with it.

Holds: the names of the arguments stand here and in `functions.lua`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from broker.log.fencing import Ownership
from broker.store.connection import Argument

NAMED = "="
"""What named arguments begin with; no conversation id does, so functions tell them from those of older workers."""


@dataclass(frozen=True, slots=True)
class Creator:
    """The one who begins a conversation.

    Attributes:
        key: idempotency key.
        pool: of tool workers, for its first action.
    """

    key: str
    pool: str


@dataclass(frozen=True, slots=True)
class Producer:
    """A person, a client, another conversation.

    Attributes:
        key: idempotency key.
        is_quiet: whether nobody is notified.
    """

    key: str
    is_quiet: bool = False


@dataclass(frozen=True, slots=True)
class ToolWriter:
    """A tool worker that has carried an action out.

    Attributes:
        place: the action's entry, `<stream>|<entry>`, to acknowledge; or empty.
        checksum: of the action; empty: whatever the log has under its number.
    """

    worker_id: str
    action_id: int
    place: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Owner:
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


Writer = Creator | Producer | ToolWriter | Owner


@dataclass(frozen=True, slots=True)
class Entry:
    """One event to be written.

    Attributes:
        data: its bytes.
        dispatch: `1`: a runnable action for its action stream; `pool:<name>`: for that pool's; empty: neither.
        answers: the action that this observation settles.
    """

    data: bytes
    dispatch: str = ""
    answers: int | None = None


@dataclass(frozen=True, slots=True)
class AppendCall:
    """Everything that one append says.

    Attributes:
        cancels: running actions to be stopped; 0: all programs of the workspace.
        fields: what the index shows of the conversation.
    """

    conversation_id: str
    writer: Writer
    entries: Sequence[Entry]
    cancels: Sequence[int] = ()
    fields: Mapping[str, str | int | float] = field(default_factory=dict)

    def arguments(self) -> list[Argument]:
        """Return the arguments of the function."""
        arguments: list[Argument] = [NAMED, "cid", self.conversation_id, *_named(self.writer)]
        arguments += ("fields", len(self.fields))
        for name, value in self.fields.items():
            arguments += (name, value)
        arguments += (len(self.cancels), *self.cancels, len(self.entries))
        for entry in self.entries:
            arguments += (entry.data, entry.dispatch, "" if entry.answers is None else entry.answers)
        return arguments


def _named(writer: Writer) -> tuple[Argument, ...]:
    match writer:
        case Creator(key, pool):
            return ("guard", "create", "key", key, "pool", pool)
        case Producer(key, is_quiet):
            return ("guard", "producer", "key", key, "quiet", "1" if is_quiet else "")
        case ToolWriter(worker_id, action_id, place, checksum):
            return ("guard", "tool", "worker", worker_id, "action", action_id, "place", place, "checksum", checksum)
        case Owner(ownership, seen_id, checksum, key):
            owner = ("guard", "owner", "worker", ownership.worker_id, "token", ownership.token)
            return (*owner, "seen", seen_id, "checksum", checksum, "key", key)
