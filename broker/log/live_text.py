"""What a model is writing right now, for people who watch: a small stream beside the log that forgets.

Keys: `…:live` (stream) has the latest pieces, `…:watched` (string) says that somebody watches; both expire.

Holds: nothing here is ever needed: the whole reply comes in the log, once; by their places, a reader notices that
pieces were lost, and waits for the log; nothing is written for a conversation that nobody watches; what is no piece is
skipped.
Does not: keep pieces longer than a minute, or promise that a watcher sees the first ones of a call that had begun.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from broker.runtime import StoreError
from broker.store import Store

WATCHED_SECONDS = 30.0
KEPT_SECONDS = 60.0
KEPT_PIECES = 512
PIECE_LIMIT_CHARS = 16_384
BLOCK_SECONDS = 5.0

_READ = ("XREAD", "COUNT", KEPT_PIECES)
_BLOCK_MS = int(BLOCK_SECONDS * 1000)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a reply that is on its way.

    Attributes:
        call: which call of which step: `<iteration>.<attempt>`, both from 1, then `.<n>` for the n-th fallback. A later
            one takes the place of all before.
        kind: `text`, `thinking` or `call`; `superseded` says that the call has failed and another model is asked.
        text: what was added.
        at: how many characters the call has shown before, of all kinds, so that a reader who has fewer knows that some
            were lost; a call that is made again begins at 0 again. None: not known, from a worker of an older version.
    """

    call: str
    kind: str
    text: str
    at: int | None = None


class LiveText:
    """The pieces of one conversation."""

    def __init__(self, store: Store, conversation_id: str) -> None:
        keys = store.keys(conversation_id)
        self._store = store
        self._live, self._watched = keys.live, keys.watched
        self._seen = b"0-0"

    async def announce(self) -> None:
        """Record that somebody watches, for half a minute; `watch` repeats it."""
        await self._store.connection.call("SET", self._watched, "1", "PX", int(WATCHED_SECONDS * 1000))

    async def show(self, pieces: list[Piece]) -> None:
        """Add pieces. What the store does not take is lost."""
        commands = [("XADD", self._live, "MAXLEN", "~", KEPT_PIECES, "*", "p", _written(piece)) for piece in pieces]
        with contextlib.suppress(StoreError):
            await self._store.connection.call_many([*commands, ("PEXPIRE", self._live, int(KEPT_SECONDS * 1000))])

    async def watch(self) -> AsyncGenerator[Piece]:
        """Yield the pieces that are still kept, then those that come, without end.

        Raises:
            StoreUnavailable, OutcomeUnknown: the store cannot be reached.
        """
        reader = self._store.connection.another(reply_timeout_seconds=2 * BLOCK_SECONDS)
        try:
            while True:
                await self.announce()
                for piece in self._taken(await reader.call(*_READ, "BLOCK", _BLOCK_MS, *self._unseen)):
                    yield piece
        finally:
            await reader.aclose()

    async def rest(self) -> list[Piece]:
        """Return what `watch` has not reached yet: once the log has a reply, all its pieces are there.

        Raises:
            StoreUnavailable, OutcomeUnknown: the store cannot be reached.
        """
        return list(self._taken(await self._store.connection.call(*_READ, *self._unseen)))

    @property
    def _unseen(self) -> tuple[str, str, bytes]:
        return "STREAMS", self._live, self._seen

    def _taken(self, found: Any) -> Iterator[Piece]:
        for entry_id, fields in found[0][1] if found else ():
            if _place(entry_id) > _place(self._seen):  # `watch` and `rest` may both have asked
                self._seen = entry_id
                if (piece := _read(fields[1])) is not None:
                    yield piece


def _place(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))


def _written(piece: Piece) -> bytes:
    text = piece.text[-PIECE_LIMIT_CHARS:]
    at = None if piece.at is None else piece.at + len(piece.text) - len(text)
    return json.dumps({"call": piece.call, "kind": piece.kind, "text": text, "at": at}).encode()


def _read(written: bytes) -> Piece | None:
    """Return a piece; None: these bytes are none."""
    try:
        found = json.loads(written)
        piece = Piece(found["call"], found["kind"], found["text"], found.get("at"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    is_text = all(isinstance(part, str) for part in (piece.call, piece.kind, piece.text))
    is_place = piece.at is None or (type(piece.at) is int and piece.at >= 0)
    return piece if is_text and is_place else None
