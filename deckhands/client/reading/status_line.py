"""The status line of a conversation: step, tokens, cost, time and current activity.

`LiveArea` replaces the lines at the bottom of a terminal in place, while everything else is printed above them.

Holds: the line is a fold of the log; the same events and the same time give the same line. The lines are cleaned and
cut to the width of the terminal, so that no line wraps and all can be erased. Printed text and the lines below it are
sent in one write.
Does not: use the whole screen, or leave anything on it once it is closed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TextIO

from broker.contract import Action, AgentState, CmdRunAction, Event, ModelCallFailed, Observation
from deckhands.client.reading.summary import Summary, Tally
from deckhands.client.reading.terminal import clean, clean_line, draw, fit_width

GAP = " · "
ACTION_CHARS = 80
SPINNER = "|/-\\"


class StatusLine:
    """The status line of a growing log."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._running: dict[int, Action] = {}
        self._failed: ModelCallFailed | None = None
        self._summary: Summary | None = None

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.tally.add(event)
        self._summary = None
        self._failed = event if isinstance(event, ModelCallFailed) and event.retry_at is not None else None
        if isinstance(event, Observation) and event.cause is not None:
            self._running.pop(event.cause, None)
        elif isinstance(event, Action) and type(event).runnable:
            self._running[event.id] = event

    @property
    def summary(self) -> Summary | None:
        """The summary of the events so far; None before the first event."""
        if self._summary is None and self.tally.last_event_id:
            self._summary = self.tally.summary()
        return self._summary

    def line(self, now: datetime, *, turn: int = 0, waits_for: str = "") -> str:
        """Return the line.

        Args:
            turn: the frame of the spinner.
            waits_for: the wait reason of the index; empty if there is none.
        """
        summary = self.summary
        if summary is None:
            return f"{SPINNER[turn % len(SPINNER)]} starting"
        is_settled = self.tally.status.is_settled
        mark = "-" if is_settled else SPINNER[turn % len(SPINNER)]
        seconds = summary.duration_seconds
        if not is_settled and summary.started is not None:
            seconds = max(seconds, (now - summary.started).total_seconds())
        parts = [
            f"{mark} step {summary.iterations}",
            f"{format_short_number(summary.prompt_tokens + summary.completion_tokens)} tokens",
            format_short_cost(summary),
            format_duration(seconds),
            self._activity(now, waits_for),
        ]
        return GAP.join(part for part in parts if part)

    def _activity(self, now: datetime, waits_for: str) -> str:
        """Return a description of the current activity."""
        status = self.tally.status
        if status.is_settled or status.state is not AgentState.RUNNING:
            return status.state.value.replace("_", " ")
        if self._running:
            action = next(iter(self._running.values()))
            more = f" and {len(self._running) - 1} more" if len(self._running) > 1 else ""
            # A fork has waited for a copied action only since the fork was created.
            summary = self.summary
            times = [at for at in (action.timestamp, summary.started if summary else None) if at is not None]
            since = f" ({format_duration((now - max(times)).total_seconds())})" if action.timestamp else ""
            return f"{_describe_action(action)}{more}{since}"
        if self._failed is not None:
            return f"the model call failed ({clean_line(self._failed.code)}), it is repeated"
        return f"waits for {waits_for.replace('_', ' ')}" if waits_for else "asks the model"


def _describe_action(action: Action) -> str:
    text = f"$ {action.command}" if isinstance(action, CmdRunAction) else action.sentence
    return clean_line(text, limit=ACTION_CHARS)


def format_short_number(number: int) -> str:
    """Return a number in a few characters: 950, 12.4k, 3.1M."""
    if number < 1_000:
        return str(number)
    if number < 999_950:
        return f"{number / 1_000:.1f}k"
    return f"{number / 1_000_000:.1f}M"


def format_short_cost(summary: Summary) -> str:
    """Return the cost in a few characters; a lower bound is marked, and a wholly unknown cost is empty."""
    if summary.has_unknown_cost:
        return f">= ${summary.cost_usd:.4f}" if summary.cost_usd else "cost unknown"
    return f"${summary.cost_usd:.4f}"


def format_duration(seconds: float) -> str:
    """Format a duration as `m:ss`, or `h:mm:ss`."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


_ERASE_BELOW = "\r\x1b[J"


class LiveArea:
    """The last lines of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._drawn = 0
        self._is_hidden = False

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines; nothing is sent if nothing changes."""
        fitting = self._fit_lines(lines)
        if fitting == self._lines and (self._drawn or not fitting):
            return
        self._lines = fitting
        self._send("")

    def above(self, lines: Iterable[str]) -> None:
        """Print cleaned lines above, which may have colours."""
        self._send("".join(f"{line}\n" for line in lines))

    def hide(self) -> None:
        """Erase the lines until `unhide`, so that the user can type in their place."""
        self._is_hidden = True
        self._send("")

    def unhide(self) -> None:
        """Show the lines again."""
        self._is_hidden = False
        self._send("")

    def close(self) -> None:
        """Erase the lines."""
        self._lines = []
        self._send("")

    def _fit_lines(self, lines: Sequence[str]) -> list[str]:
        columns = max(1, shutil.get_terminal_size().columns - 1)  # the last column would wrap on some terminals
        return [fit_width(" ".join(clean(line).split("\n")), columns) for line in lines]

    def _send(self, text: str) -> None:
        """Send text, with the lines below it."""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        away = f"{up}{_ERASE_BELOW}" if self._drawn else ""
        shown = [] if self._is_hidden else self._fit_lines(self._lines)
        below = "".join(f"\x1b[2m{line}\x1b[0m\n" for line in shown).removesuffix("\n")
        self._drawn = len(shown)
        if whole := away + text + below:
            draw(whole, on=self._stream)
