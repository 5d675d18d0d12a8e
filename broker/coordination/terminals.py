"""Live terminals: an operator's keys on their way to the tool worker that has the workspace, and its output back.

The server writes a request and an order in the node's action stream that names it. A tool worker of the node answers,
and both exchange numbered messages, each in a stream that it alone writes.

Holds: a request starts at most one shell, because the worker's first message has a fixed id. It is not started after
`REQUEST_SECONDS`. Messages are encrypted for the other side, bound to their conversation, terminal, direction and
number, so that none can be read, repeated, exchanged or left out in the store. A side that has `MOST_UNREAD` unread
messages waits; signs of life, which carry acknowledgements, do not. A link reads them also while its owner is busy. A
side that hears nothing for `SILENCE_SECONDS` gives up, and the streams expire.
Does not: prove which worker answers. Who may forge it: only the server and the operator may write requests and input
(see `deploy/store.acl`), so a worker that was taken over opens no terminal elsewhere and types in none. It can answer
in place of the right worker, and then gets what the operator types.
Keys: `deck:{k}:terminal:<id>:<token>`, `deck:{k}:terminal_input:…`, `deck:{k}:terminal_output:…`.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
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
_MOST_SENT = 1_000
"""A side that has not read so many messages, signs of life among them, is gone."""
_READ_AT_ONCE = 4
_ACKNOWLEDGED_EVERY = 16
_BLOCK_MS = 1_000
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
    """One side of a terminal. It reads in a separate task, until it is closed.

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
        self._unread: deque[tuple[int, TerminalMessage]] = deque()
        self._is_closing = False
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()
        self._last_sent = 0.0
        self._last_heard: float | None = None
        self._reader = store.connection.another(reply_timeout_seconds=10 * _BLOCK_MS / 1000)
        self._reading = asyncio.create_task(self._read(), name=f"terminal {about}")
        self._reading.add_done_callback(lambda _: self._moved.set())

    @property
    def is_over(self) -> bool:
        """Whether the other side has closed the terminal, or is gone."""
        return self._is_closing or self._reading.done()

    def meet(self, public: bytes) -> None:
        """Encrypt what is sent for the side with this public key."""
        self._peer = public

    async def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a message, once the other side has read enough of the earlier ones.

        Raises:
            TerminalLost: the other side is gone.
            StoreRefused: it was the first message, and another worker has sent it.
        """
        while self._sent - self._read_by_peer >= MOST_UNREAD:
            await self._wait()
        await self._write(kind, content)

    async def receive(self) -> TerminalMessage:
        """Wait for the next message, and return it.

        Raises:
            TerminalLost: nothing was heard for too long.
            CorruptEntry: a message was changed, repeated or left out.
        """
        while not self._unread:
            await self._wait()
        _, message = self._unread.popleft()
        if self._count_read() - self._acknowledged >= _ACKNOWLEDGED_EVERY:
            await self._write("alive")
        return message

    async def aclose(self) -> None:
        """Stop reading, and close the connection to the store. The streams expire. Idempotent."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._reader.aclose()

    async def _wait(self) -> None:
        """Wait until something was read; raises what has ended the reading."""
        if self._reading.done():
            self._reading.result()
        self._moved.clear()
        await self._moved.wait()

    async def _write(self, kind: Kind, content: bytes = b"") -> None:
        async with self._turn:
            assert self._peer is not None
            # The other side may read the message and answer before the store's reply is here.
            self._sent = number = self._sent + 1
            self._acknowledged = read = self._count_read()
            sealed = seal(self._peer, _LETTERS[kind] + content, self._describe(self._names[0], number))
            fields: tuple[Argument, ...] = ("m", sealed, "r", read)
            if number == 1:
                fields += ("k", self._receiver.public)
            trimmed = ("MINID", f"{self._read_by_peer + 1}-0")
            add = ("XADD", self._sends, *trimmed, f"{number}-0", *fields)
            await self._store.call_many([add, ("PEXPIRE", self._sends, int(TTL_SECONDS * 1000))])
            self._last_sent = asyncio.get_running_loop().time()
            if self._last_heard is None:
                self._last_heard = self._last_sent

    def _count_read(self) -> int:
        """Return the number of the last message that the owner has taken."""
        return self._unread[0][0] - 1 if self._unread else self._received

    async def _read(self) -> None:
        """Read messages, and send signs of life once both sides have met, until the other side is gone."""
        loop = asyncio.get_running_loop()
        command = ("XREAD", "COUNT", _READ_AT_ONCE, "BLOCK", _BLOCK_MS, "STREAMS", self._receives)
        while True:
            found = await self._reader.call(*command, f"{self._received}-0")
            for entry, flat in found[0][1] if found else ():
                message = self._open(entry, flat)
                self._last_heard = loop.time()
                self._is_closing = self._is_closing or message.kind == "close"
                if message.kind != "alive":
                    self._unread.append((self._received, message))
            self._moved.set()
            if len(self._unread) > 2 * MOST_UNREAD:
                raise CorruptEntry("The terminal got more messages than allowed.", remedy="Open another terminal.")
            if self._last_heard is None:
                continue
            is_full = self._sent - self._read_by_peer > _MOST_SENT
            if is_full or loop.time() - self._last_heard > SILENCE_SECONDS:
                raise TerminalLost("The other side of the terminal is gone.", remedy="Open another terminal.")
            if loop.time() - self._last_sent >= ALIVE_SECONDS:
                await self._write("alive")

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
                first = await link.receive()
        except TimeoutError as error:
            await link.aclose()
            await self._store.call("DEL", key)
            raise TerminalFailed(
                f"The workspace did not start in time on the node {node.decode()}, or no tool worker runs there.",
                remedy="Try again, and check with `deckhands doctor` that a tool worker of this version runs there.",
            ) from error
        except BaseException:
            await link.aclose()
            raise
        if first.kind != "opened":
            await link.aclose()
            raise TerminalFailed(first.content.decode("utf-8", "replace"))
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
