"""The text that a model is writing now, for clients that watch: a small stream beside the log whose entries expire.

Keys: `…:live` (stream) holds the latest pieces; `…:watched` (string) marks that a client watches. Both expire.

Holds: correctness never depends on this stream; the log gets the whole reply, once. Each piece has its position, so a
reader detects lost pieces and waits for the log. Nothing is written for a conversation without watchers. Invalid
entries are skipped.
Does not: keep pieces for more than a minute, or promise the first pieces of a call that started before the watcher.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from broker.runtime import CorruptEntry, StoreError
from broker.store import Argument, Cipher, ConversationKeys, Store

WATCH_TTL_SECONDS = 30.0
PIECE_TTL_SECONDS = 60.0
MAX_PIECES = 512
MAX_PIECE_CHARS = 16_384
BLOCK_SECONDS = 5.0
LIVE = "live text"

_READ = ("XREAD", "COUNT", MAX_PIECES)
_BLOCK_MS = int(BLOCK_SECONDS * 1000)


@dataclass(frozen=True, slots=True)
class LivePiece:
    """A piece of a reply that is being written.

    Attributes:
        call: the call and its step: `<iteration>.<attempt>`, both from 1, then `.<n>` for the n-th fallback. A later
            call replaces all earlier ones.
        kind: `text`, `thinking` or `call`; `superseded` if the call has failed and another model is asked. `progress`:
            a report of a running action, which `call` names; it is no part of a reply.
        text: the added text.
        at: number of characters of all kinds that the call has shown before. A reader with fewer has lost pieces. A
            repeated call restarts at 0. None if written by an older worker.
    """

    call: str
    kind: str
    text: str
    at: int | None = None


class LiveText:
    """The pieces of one conversation."""

    def __init__(self, store: Store, conversation_id: str) -> None:
        self._store = store
        self._conversation_id = conversation_id
        self._seen = b"0-0"

    async def register_watcher(self) -> None:
        """Register a watcher for 30 seconds. `watch` repeats it."""
        names = await self._locate()
        await self._store.connection.call("SET", names.watcher_mark, "1", "PX", int(WATCH_TTL_SECONDS * 1000))

    async def add(self, pieces: list[LivePiece]) -> None:
        """Add pieces. If the store refuses them, they are lost."""
        commands: list[tuple[Argument, ...]] = []
        try:
            live = (await self._locate()).live
            cipher = await self._store.encryption.find_cipher(self._conversation_id)
        except StoreError:
            return
        for piece in pieces:
            text = piece.text[-MAX_PIECE_CHARS:]
            at = None if piece.at is None else piece.at + len(piece.text) - len(text)
            data = json.dumps({"call": piece.call, "kind": piece.kind, "text": text, "at": at}).encode()
            data = data if cipher is None else cipher.encrypt(data, LIVE)
            commands.append(("XADD", live, "MAXLEN", "~", MAX_PIECES, "*", "p", data))
        with contextlib.suppress(StoreError):
            await self._store.connection.call_many([*commands, ("PEXPIRE", live, int(PIECE_TTL_SECONDS * 1000))])

    async def watch(self) -> AsyncGenerator[LivePiece]:
        """Yield the stored pieces, then each new one, without end.

        Raises:
            StoreUnavailable, OutcomeUnknown: the store cannot be reached.
        """
        reader = self._store.connection.another(reply_timeout_seconds=2 * BLOCK_SECONDS)
        try:
            while True:
                await self.register_watcher()
                live = (await self._locate()).live
                found = await reader.call(*_READ, "BLOCK", _BLOCK_MS, "STREAMS", live, self._seen)
                for piece in self._parse_new(found, await self._find_cipher(found)):
                    yield piece
        finally:
            await reader.aclose()

    async def read_rest(self) -> list[LivePiece]:
        """Return the pieces that `watch` has not yielded yet.

        Once a reply is in the log, all its pieces are in the stream.

        Raises:
            StoreUnavailable, OutcomeUnknown: the store cannot be reached.
        """
        live = (await self._locate()).live
        found = await self._store.connection.call(*_READ, "STREAMS", live, self._seen)
        return list(self._parse_new(found, await self._find_cipher(found)))

    async def _find_cipher(self, found: Any) -> Cipher | None:
        """Return the cipher of the conversation, if there is anything to decrypt; raises DataLocked."""
        return await self._store.encryption.find_cipher(self._conversation_id) if found else None

    async def _locate(self) -> ConversationKeys:
        return await self._store.locate(self._conversation_id)

    def _parse_new(self, found: Any, cipher: Cipher | None) -> Iterator[LivePiece]:
        for entry_id, fields in found[0][1] if found else ():
            if _parse_id(entry_id) > _parse_id(self._seen):  # `watch` and `rest` may both have read them
                self._seen = entry_id
                if (piece := _parse_piece(fields[1], cipher)) is not None:
                    yield piece


def _parse_id(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))


def _parse_piece(written: bytes, cipher: Cipher | None) -> LivePiece | None:
    """Parse a piece; None if the bytes are not a piece."""
    try:
        found = json.loads(written if cipher is None else cipher.decrypt(written, LIVE))
        piece = LivePiece(found["call"], found["kind"], found["text"], found.get("at"))
    except (CorruptEntry, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    is_text = all(isinstance(part, str) for part in (piece.call, piece.kind, piece.text))
    is_place = piece.at is None or (type(piece.at) is int and piece.at >= 0)
    return piece if is_text and is_place else None
