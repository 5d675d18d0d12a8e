"""The output of `run` and `logs` on an interactive terminal: events as they arrive above a status line.

Holds: without a terminal, with --plain, NO_COLOR or TERM=dumb, and for JSON, lines are printed as `EventPrinter` does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from broker.contract import Event, ModelReply, RiskyAction
from broker.log import LivePiece
from broker.runtime import SYSTEM_CLOCK
from deckhands.client import (
    EventPrinter,
    LiveArea,
    Renderer,
    ScreenRenderer,
    StatusLine,
    Summary,
    clean,
    clean_line,
    ignore_closed_output,
    is_coloured,
    note,
)

TICK_SECONDS = 0.5


class Area(Protocol):
    """Lines at the bottom of a terminal; see `LiveArea`."""

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines."""

    def above(self, lines: Iterable[str]) -> None:
        """Print lines above."""

    def hide(self) -> None:
        """Remove the lines until `unhide`."""

    def unhide(self) -> None:
        """Show the lines again."""

    def close(self) -> None:
        """Remove the lines."""


class ScreenPrinter(EventPrinter):
    """Prints events on a terminal, above a status line of the conversation.

    Args:
        area: the area of the status line; None for the last line of the terminal.
    """

    def __init__(self, *, is_whole: bool = False, has_status: bool = True, area: Area | None = None) -> None:
        super().__init__(as_json=False)
        self._renderer: Renderer = ScreenRenderer(is_whole=is_whole)
        self._area: Area = area if area is not None else LiveArea(sys.stdout)
        self._standing = StatusLine()
        self._has_status = has_status
        self._turn = 0
        self._written = ""
        """The model's unfinished line."""

    @property
    def status(self) -> StatusLine:
        """The status of the conversation after the printed events."""
        return self._standing

    def event(self, event: Event) -> None:
        """Print an event above the line."""
        self._standing.add(event)
        if isinstance(event, ModelReply):  # which is complete now
            self._end_line()
        shown = "\n".join(self._streamed.values())
        lines = self._renderer.lines(event, shown=shown)
        if lines:
            self._end_line()
            self._area.above(lines)

    def forget(self) -> None:
        """Start with another conversation."""
        self._end_line()
        self._standing = StatusLine()
        self._streamed.clear()
        self._call = self._kind = ""

    def question(self, action: RiskyAction) -> None:
        """Print the action that awaits confirmation, and how to answer."""
        self._area.hide()
        super().question(action)
        self._area.unhide()

    def piece(self, piece: LivePiece) -> None:
        """Print the lines that the model has completed, and show its current line above the status."""
        if piece.kind == "superseded":
            self._streamed.pop(piece.call, None)
            self._end_line()
            self._area.above([self._renderer.style(f"[{piece.call}: the call failed; another model is asked]", "dim")])
            return
        if piece.kind == "progress":  # of a call, which has no unfinished lines
            self._end_line()
            self._area.above([self._renderer.style(f"  {clean_line(piece.text, limit=1_000)}", "dim")])
            return
        if piece.call != self._call or piece.kind != self._kind:
            self._end_line()
            mark = ""
            if piece.kind == "thinking":
                mark = "~"
            elif piece.kind == "call":
                mark = f"[{piece.call}]"
            self._area.above([self._renderer.style(mark, "dim")])
            self._call = piece.call
            self._kind = piece.kind
        self._remember(piece)
        *whole, self._written = (self._written + clean(piece.text)).split("\n")
        self._area.above([self._words(line) for line in whole])
        self._draw()

    def note(self, text: str) -> None:
        """Print a notice on standard error."""
        if not sys.stderr.isatty():
            note(text)
            return
        with ignore_closed_output():
            self._area.above([clean_line(text, limit=1_000)])

    def summary(self, summary: Summary) -> None:
        """Print a summary in place of the status line."""
        self.close()
        super().summary(summary)

    def close(self) -> None:
        """Remove the status line."""
        with suppress(OSError):
            self._area.close()

    @asynccontextmanager
    async def leave_to_user(self) -> AsyncIterator[None]:
        """Hide the status line while the user answers."""
        self._end_line()
        self._area.hide()
        try:
            yield
        finally:
            self._area.unhide()

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        """Keep the status line up to date."""
        scheduling = asyncio.ensure_future(self._tick())
        try:
            yield
        finally:
            scheduling.cancel()
            await asyncio.gather(scheduling, return_exceptions=True)
            self.close()

    async def _tick(self) -> None:
        with suppress(OSError):  # the terminal is closed; the next print reports it
            while self._has_status:
                self._turn += 1
                self._draw()
                await asyncio.sleep(TICK_SECONDS)

    def _draw(self) -> None:
        status = self._standing.line(SYSTEM_CLOCK.now(), turn=self._turn)
        writing = [self._written[-1_000:]] if self._written else []
        self._area.show([*writing, status] if self._has_status else writing)

    def _words(self, line: str) -> str:
        return self._renderer.style(line, "dim") if self._kind == "thinking" else line

    def _end_line(self) -> None:
        if not self._written:
            return
        written = self._written
        self._written = ""
        self._draw()
        self._area.above([self._words(written)])


def printer_for(*, as_json: bool, is_plain: bool, is_whole: bool = False, has_status: bool = True) -> EventPrinter:
    """Return the printer for this output: for an interactive terminal, or plain lines."""
    if as_json or is_plain or not is_coloured(sys.stdout):
        return EventPrinter(as_json=as_json, is_plain=is_plain)
    return ScreenPrinter(is_whole=is_whole, has_status=has_status)
