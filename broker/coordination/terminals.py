"""Live terminals: an operator's keys on their way to the tool worker that has the workspace, and its output back.

The server writes a request and an order in the node's action stream that names it. A tool worker of the node answers,
and both exchange numbered messages, each in a stream that it alone writes.

Holds: a request starts at most one shell, because the worker's first message has a fixed id. It is not started after
`REQUEST_SECONDS`. Messages are encrypted for the other side, bound to their conversation, terminal, direction and
number, so that none can be read, repeated, exchanged or left out in the store. A side that has `MOST_UNREAD` unread
messages waits. A side that hears nothing for `SILENCE_SECONDS` gives up, and the streams expire.
Does not: prove which worker answers. Who may forge it: tool workers may neither write requests nor input (see
`deploy/store.acl`), so a worker that was taken over opens no terminal elsewhere and types in none. It can answer in
place of the right worker, and then gets what the operator types.
Keys: `deck:{k}:c:<id>:terminal:<token>`, `…:terminal_input:<token>`, `…:terminal_output:<token>`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.coordination.transfers import NoWorkspace, Receiver, seal
from broker.runtime import CorruptEntry, DeckhandsError, StoreRefused, new_key
from broker.store import Argument, ConversationKeys, Store

REQUEST_SECONDS = 20.0
"""How long a tool worker may take to start the shell."""
TTL_SECONDS = 120.0
ALIVE_SECONDS = 4.0
"""A side that has sent nothing for this long sends a sign of life."""
SILENCE_SECONDS = 16.0
MOST_UNREAD = 64
MOST_BYTES = 16 * 2**10
"""The longest content of a message."""
MOST_CELLS = 1_000
_ACKNOWLEDGED_EVERY = 16
_BLOCK_MS = 1_000
_POLL_SECONDS = 0.02
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,64}")

Kind = Literal["alive", "keys", "size", "close", "opened", "output", "ended", "failed"]
KINDS: dict[bytes, Kind] = {
    b"a": "alive",
    b"k": "keys",
    b"s": "size",
    b"c": "close",
    b"p": "opened",
    b"o": "output",
    b"e": "ended",
    b"f": "failed",
}
_LETTERS = {kind: letter for letter, kind in KINDS.items()}

Size = Annotated[int, Field(ge=1, le=MOST_CELLS)]


class TerminalRequest(BaseModel):
    """A request for a terminal.

    Attributes:
        public: the public key of the server that asks, in hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True)

    columns: Size
    rows: Size
    public: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TerminalFailed(DeckhandsError):
    """A terminal could not be opened, or broke off."""

    code = "terminal_failed"


class TerminalLost(TerminalFailed):
    """The other side of a terminal is gone. Another one can be opened."""

    code = "terminal_lost"
    retryable = True


@dataclass(frozen=True, slots=True)
class TerminalMessage:
    """A message of a terminal: `keys` and `output` are bytes, `size` is `COLUMNS ROWS`, `ended` an exit code."""

    kind: Kind
    content: bytes = b""


class TerminalLink:
    """One side of a terminal.

    Args:
        sends, receives: the streams that this side writes and reads.
        names: the directions of these streams, which are authenticated with each message.
        peer: the public key of the other side; None until its first message.
    """

    def __init__(
        self, store: Store, sends: str, receives: str, *, about: str, names: tuple[str, str], receiver: Receiver
    ) -> None:
        self._store = store
        self._sends, self._receives = sends, receives
        self._about = about
        self._names = names
        self._receiver = receiver
        self._peer: bytes | None = None
        self._sent = self._received = 0
        self._read_by_peer = self._acknowledged = 0
        self._turn = asyncio.Lock()
        loop = asyncio.get_running_loop()
        self._last_sent = self._last_heard = loop.time()
        self._reader = store.connection.another(reply_timeout_seconds=10 * _BLOCK_MS / 1000)

    def meet(self, public: bytes) -> None:
        """Encrypt what is sent for the side with this public key."""
        self._peer = public

    async def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a message, once the other side has read enough of the earlier ones.

        Raises:
            TerminalLost: the other side does not read.
            StoreRefused: it was the first message, and another worker has sent it.
        """
        async with self._turn:
            while self._sent - self._read_by_peer >= MOST_UNREAD:
                self.check_alive()
                await asyncio.sleep(_POLL_SECONDS)
            assert self._peer is not None
            number = self._sent + 1
            sealed = seal(self._peer, _LETTERS[kind] + content, self._describe(self._names[0], number))
            fields: tuple[Argument, ...] = ("m", sealed, "r", self._received)
            if number == 1:
                fields += ("k", self._receiver.public)
            trimmed = ("MINID", f"{self._read_by_peer + 1}-0")
            add = ("XADD", self._sends, *trimmed, f"{number}-0", *fields)
            await self._store.call_many([add, ("PEXPIRE", self._sends, int(TTL_SECONDS * 1000))])
            self._sent = number
            self._acknowledged = self._received
            self._last_sent = asyncio.get_running_loop().time()

    async def receive(self) -> list[TerminalMessage]:
        """Return the next messages; none after about a second without any. Sends signs of life meanwhile.

        Raises:
            TerminalLost: nothing was heard for too long.
            CorruptEntry: a message was changed, repeated or left out.
        """
        command = ("XREAD", "COUNT", MOST_UNREAD, "BLOCK", _BLOCK_MS, "STREAMS", self._receives, f"{self._received}-0")
        found = await self._reader.call(*command)
        messages = [self._open(entry, flat) for entry, flat in (found[0][1] if found else ())]
        loop = asyncio.get_running_loop()
        if messages:
            self._last_heard = loop.time()
        self.check_alive()
        is_due = loop.time() - self._last_sent >= ALIVE_SECONDS
        is_due = is_due or self._received - self._acknowledged >= _ACKNOWLEDGED_EVERY
        # A message that waits for room carries the acknowledgement later, and only reading here makes room for it.
        has_room = not self._turn.locked() and self._sent - self._read_by_peer < MOST_UNREAD
        if is_due and has_room and self._peer is not None:
            await self.send("alive")
        return [message for message in messages if message.kind != "alive"]

    def check_alive(self) -> None:
        """Check that the other side has sent something lately; raises TerminalLost."""
        if asyncio.get_running_loop().time() - self._last_heard > SILENCE_SECONDS:
            raise TerminalLost("The other side of the terminal is gone.", remedy="Open another terminal.")

    async def aclose(self) -> None:
        """Close the connection to the store. The streams expire."""
        await self._reader.aclose()

    def _open(self, entry: bytes, flat: Sequence[bytes]) -> TerminalMessage:
        number = self._received + 1
        fields = dict(zip(flat[::2], flat[1::2], strict=False))
        read = fields.get(b"r", b"")
        if entry != b"%d-0" % number or b"m" not in fields or not read.isdigit() or len(read) > 12:
            raise CorruptEntry("A message of the terminal is missing or damaged.", remedy="Open another terminal.")
        if self._peer is None:
            self.meet(fields.get(b"k", b""))
        content = self._receiver.open(fields[b"m"], self._describe(self._names[1], number))
        kind = KINDS.get(content[:1])
        if kind is None or len(content) > MOST_BYTES + 1 or int(read) > self._sent:
            raise CorruptEntry("A message of the terminal is not one.", remedy="Open another terminal.")
        self._received = number
        self._read_by_peer = max(self._read_by_peer, int(read))
        return TerminalMessage(kind, content[1:])

    def _describe(self, name: str, number: int) -> str:
        return f"{self._about} {name} {number}"


class Terminals:
    """The terminals of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def request(self, conversation_id: str, *, columns: int, rows: int) -> TerminalLink:
        """Ask for a terminal, as the server, and return its link once a worker has opened it.

        Raises:
            NoWorkspace: the conversation has no workspace yet.
            TerminalFailed: no tool worker of the node answered, or it could not open a terminal.
        """
        names = await self._store.locate(conversation_id)
        node = await self._store.call("HGET", names.meta, "node")
        if node is None:
            raise NoWorkspace(conversation_id)
        token, receiver = new_key(), Receiver()
        key = names.terminal(token)
        asked = TerminalRequest(columns=columns, rows=rows, public=receiver.public.hex())
        expiry = ("PEXPIRE", key, int(REQUEST_SECONDS * 1000))
        await self._store.call_many([("HSET", key, "request", asked.model_dump_json()), expiry])
        stream = names.shard.actions(f"node:{node.decode()}")
        await self._store.call("XADD", stream, "*", "c", conversation_id, "a", 0, "x", "terminal", "t", token)
        link = self._link(names, token, receiver, is_server=True)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                while not (first := await link.receive()):
                    pass
        except (TimeoutError, TerminalLost) as error:
            await link.aclose()
            await self._store.call("DEL", key)
            raise TerminalFailed(
                f"The node {node.decode()}, which has the workspace, opened no terminal in time.",
                remedy="Start a tool worker of this version there.",
            ) from error
        except BaseException:
            await link.aclose()
            raise
        if first[0].kind != "opened":
            await link.aclose()
            raise TerminalFailed(first[0].content.decode("utf-8", "replace"))
        return link

    async def accept(self, conversation_id: str, token: str) -> tuple[TerminalRequest, TerminalLink] | None:
        """Return a request and the link to its server, as a tool worker; None if the server no longer waits."""
        if not _TOKEN.fullmatch(token):
            return None
        names = await self._store.locate(conversation_id)
        written = await self._store.call("HGET", names.terminal(token), "request")
        if written is None:
            return None
        try:
            asked = TerminalRequest.model_validate_json(written)
        except ValueError:
            return None  # not written by our code
        link = self._link(names, token, Receiver(), is_server=False)
        link.meet(bytes.fromhex(asked.public))
        return asked, link

    def _link(self, names: ConversationKeys, token: str, receiver: Receiver, *, is_server: bool) -> TerminalLink:
        streams, directions = (names.terminal_input(token), names.terminal_output(token)), ("input", "output")
        ours, theirs = streams if is_server else streams[::-1]
        about = f"{names.conversation_id} {token}"
        return TerminalLink(
            self._store,
            ours,
            theirs,
            about=about,
            names=directions if is_server else directions[::-1],
            receiver=receiver,
        )


def parse_size(content: bytes) -> tuple[int, int] | None:
    """Return the columns and rows of a `size` message; None if it is invalid."""
    parts = content.split()
    if len(parts) != 2 or not all(part.isdigit() and len(part) <= 4 for part in parts):
        return None
    columns, rows = map(int, parts)
    return (columns, rows) if 0 < columns <= MOST_CELLS and 0 < rows <= MOST_CELLS else None


def was_answered(error: StoreRefused) -> bool:
    """Return whether a first message was refused because another worker has answered."""
    return "equal or smaller" in error.message
