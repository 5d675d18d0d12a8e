"""The status line of a conversation: step, tokens, cost, time and current activity.

Holds: a fold of its log; the same events and the same time give the same line.
"""

from __future__ import annotations

from datetime import datetime

from broker.contract import Action, AgentState, CmdRunAction, Event, ModelCallFailed, Observation
from deckhands.client.reading.summary import Summary, Tally
from deckhands.client.reading.terminal import clean_line

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
            waits_for: the wait reason of the index; empty: it does not wait.
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
