"""Shows a reply on its way to those who look on.

Holds: a call that nobody watches is not streamed and costs nothing; pieces are gathered, so that a
model's speed never becomes the store's load; what is shown is never used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from broker.live_text import LiveText, Piece
from broker.store import Store
from controller_worker.llm.llm import Delta, ModelRequest

GATHER_SECONDS = 0.1


@contextlib.asynccontextmanager
async def shown(store: Store, request: ModelRequest, *, attempt: int, is_watched: bool) -> AsyncIterator[ModelRequest]:
    """Give the request as it is to be made: streamed, if somebody looks on.

    Args:
        attempt: which call of its step it is, from 1.
        is_watched: somebody looks on.
    """
    if request.service != "agent" or request.carry is not None or not is_watched:
        yield request
        return
    live = LiveText(store, request.conversation_id)
    gathered = _Gathered(live, f"{request.iteration + 1}.{attempt}")
    try:
        yield replace(request, on_delta=gathered.add)
        await gathered.flush()
    finally:
        gathered.stop()


class _Gathered:
    """Pieces that are not shown yet."""

    def __init__(self, live: LiveText, call: str) -> None:
        self._live = live
        self._call = call
        self._fallbacks = 0
        self._pieces: list[Piece] = []
        self._timer: asyncio.TimerHandle | None = None
        self._showing: asyncio.Task[None] | None = None

    def add(self, delta: Delta) -> None:
        pieces = self._pieces
        if delta.kind == "superseded":
            pieces.append(Piece(self._name, delta.kind, ""))
            self._fallbacks += 1
            return
        if pieces and pieces[-1].kind == delta.kind and pieces[-1].call == self._name:
            pieces[-1] = replace(pieces[-1], text=pieces[-1].text + delta.text)
        else:
            pieces.append(Piece(self._name, delta.kind, delta.text))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._due)

    @property
    def _name(self) -> str:
        """What the call under way is called; each fallback has a name of its own."""
        return f"{self._call}.{self._fallbacks}" if self._fallbacks else self._call

    async def flush(self) -> None:
        """Show what is left, after what is being shown."""
        if self._showing is not None:
            await self._showing
        pieces, self._pieces = self._pieces, []
        if pieces:
            await self._live.show(pieces)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._showing is not None:
            self._showing.cancel()

    def _due(self) -> None:
        self._timer = None
        if self._showing is not None and not self._showing.done():
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._due)
            return
        pieces, self._pieces = self._pieces, []
        self._showing = asyncio.create_task(self._live.show(pieces))
