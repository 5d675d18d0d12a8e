"""The start time of a conversation, and the policies for messages that arrive while its agent works.

Holds: a time of day is converted to a duration once, on submission. From then on only the store counts, so a wrong
clock cannot start a conversation too early or too late.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field

MAX_SECONDS = 10 * 366 * 86_400.0
"""Ten years; anything later is assumed to be a mistake."""

DoubleTexting = Literal["enqueue", "reject", "interrupt", "rollback"]
"""The effect of a message that arrives while the agent works: it waits for the next step, it is rejected, it stops
running work, or it also rolls back the agent's current work."""
MessagePolicy = Literal["enqueue", "reject", "interrupt"]
"""The policies that a single message may request. A rollback must be enabled when the conversation is created, because
its owner must keep the earlier state."""

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]


def _check_range(moment: datetime) -> datetime:
    if not 1970 < moment.year < 2200:
        raise ValueError("it must be between 1971 and 2199")
    return moment


Moment = Annotated[AwareDatetime, AfterValidator(_check_range)]
"""A time with a time zone, between 1971 and 2199."""


@dataclass(frozen=True, slots=True)
class StartWindow:
    """The start window of a conversation, relative to now.

    Attributes:
        delay_seconds: the delay before it may start; None for no delay.
        limit_seconds: the time within which it must start; None for no limit.
    """

    delay_seconds: float | None = None
    limit_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """The start window of a conversation, as requested.

    Attributes:
        not_before: the earliest start time.
        delay_seconds: the shortest delay after the submission.
        expires: a time, or seconds after the submission. If the conversation has not started by then, it never does.
    """

    not_before: datetime | None = None
    delay_seconds: float | None = None
    expires: datetime | float | None = None

    def earliest_start(self, now: datetime) -> datetime | None:
        """Return the earliest start: the later of both fields; None to start at once."""
        due = [] if self.not_before is None else [self.not_before]
        if self.delay_seconds is not None:
            due.append(now + timedelta(seconds=self.delay_seconds))
        return max(due, default=None)

    def latest_start(self, now: datetime) -> datetime | None:
        """Return the latest start; None for no limit."""
        if self.expires is None or isinstance(self.expires, datetime):
            return self.expires
        return now + timedelta(seconds=self.expires)

    def to_start_window(self, now: datetime) -> StartWindow | None:
        """Return the start window as durations; None to start as soon as possible."""
        delay, limit = _seconds_until(self.earliest_start(now), now), _seconds_until(self.latest_start(now), now)
        return StartWindow(delay or None, limit) if delay or limit is not None else None

    def after(self, seconds: float) -> Timing:
        """Return the timing of a request that was made `seconds` ago: the remaining delay and time to expiry."""
        delay, expires = self.delay_seconds, self.expires
        return Timing(
            self.not_before,
            None if delay is None else max(0.0, delay - seconds),
            expires if expires is None or isinstance(expires, datetime) else max(0.0, expires - seconds),
        )


def _seconds_until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (moment - now).total_seconds())
