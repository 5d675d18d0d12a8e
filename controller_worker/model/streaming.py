"""Streams a reply to clients while the model writes it.

Holds: a call without watchers is not streamed and costs nothing. Pieces are buffered, so a fast model does not load
the store. The conversation's secrets are masked, even across pieces. Streamed text is for display only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from broker.log import EventLog, LivePiece, LiveText
from broker.secrets import MaskedPieces, Masker
from broker.store import Store
from controller_worker.providers import Delta, ModelRequest

GATHER_SECONDS = 0.1


@contextlib.asynccontextmanager
async def stream_reply(
    store: Store, log: EventLog, request: ModelRequest, *, attempt: int, is_watched: bool
) -> AsyncIterator[ModelRequest]:
    """Yield the request to send; it streams if a client follows the reply.

    Args:
        log: provides the masker of secrets.
        attempt: the number of this call within its step, from 1.
        is_watched: a client follows the reply.
    """
    if request.service != "agent" or request.carry is not None or not is_watched:
        yield request
        return
    masker = await log.load_masker(request.conversation_id)
    gathered = _PieceBuffer(LiveText(store, request.conversation_id), f"{request.iteration + 1}.{attempt}", masker)
    try:
        yield replace(request, on_delta=gathered.add)
        await gathered.flush()
    finally:
        gathered.stop()


class _PieceBuffer:
    """Buffers pieces that are not shown yet.

    Attributes:
        _run: the last piece, without its text. Pieces of one call and kind are masked as one text.
        _shown: the number of characters shown for each call.
    """

    def __init__(self, live: LiveText, call: str, masker: Masker) -> None:
        self._live = live
        self._call = call
        self._fallbacks = 0
        self._pieces: list[LivePiece] = []
        self._run: LivePiece | None = None
        self._shown: dict[str, int] = {}
        self._masked = MaskedPieces(masker)
        self._timer: asyncio.TimerHandle | None = None
        self._showing: asyncio.Task[None] | None = None

    def add(self, delta: Delta) -> None:
        pieces = self._pieces
        if delta.kind == "superseded":
            pieces.append(LivePiece(self._name, delta.kind, ""))
            self._fallbacks += 1
            return
        if pieces and pieces[-1].kind == delta.kind and pieces[-1].call == self._name:
            pieces[-1] = replace(pieces[-1], text=pieces[-1].text + delta.text)
        else:
            pieces.append(LivePiece(self._name, delta.kind, delta.text))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._on_timer)

    @property
    def _name(self) -> str:
        """The name of the current call; each fallback has its own."""
        return f"{self._call}.{self._fallbacks}" if self._fallbacks else self._call

    async def flush(self) -> None:
        """Wait for the current write, then show the rest."""
        if self._showing is not None:
            await self._showing
        pieces = self._add_offsets([*self._take_masked(), *self._end_run()])
        if pieces:
            await self._live.add(pieces)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._showing is not None:
            self._showing.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        if self._showing is not None and not self._showing.done():
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._on_timer)
            return
        if pieces := self._add_offsets(self._take_masked()):
            self._showing = asyncio.create_task(self._live.add(pieces))

    def _take_masked(self) -> list[LivePiece]:
        """Return the buffered pieces, masked as far as they can be shown now."""
        pieces, self._pieces = self._pieces, []
        found: list[LivePiece] = []
        for piece in pieces:
            run = replace(piece, text="")
            if run != self._run:
                found += self._end_run()
                self._run = run
            found.append(replace(piece, text=self._masked.feed(piece.text)))
        return [piece for piece in found if piece.text or piece.kind == "superseded"]

    def _add_offsets(self, pieces: list[LivePiece]) -> list[LivePiece]:
        """Add to each piece its offset in the text of its call."""
        found = []
        for piece in pieces:
            at = self._shown.get(piece.call, 0)
            self._shown[piece.call] = at + len(piece.text)
            found.append(replace(piece, at=at))
        return found

    def _end_run(self) -> list[LivePiece]:
        """Return the text that the masker held back at the end of a run."""
        rest = self._masked.finish()
        return [replace(self._run, text=rest)] if self._run is not None and rest else []
