"""When a conversation may begin, and what a message does that comes while its agent works.

Holds: a time of day is turned into a duration once, when the conversation is submitted; from then on the store counts,
so no clock makes a conversation begin too early or too late.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field

MAX_SECONDS = 10 * 366 * 86_400.0
"""Ten years; whatever is to happen later is a mistake."""

DoubleTexting = Literal["enqueue", "reject", "interrupt", "rollback"]
"""What a message does that comes while the agent works: it is read with the next step; it is refused; it stops what
runs; it takes back what the agent works on as well."""
MessagePolicy = Literal["enqueue", "reject", "interrupt"]
"""What one message may ask for itself. To take back is for conversations that were submitted for it: their owner has to
remember what was before."""

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]


def _in_range(moment: datetime) -> datetime:
    if not 1970 < moment.year < 2200:
        raise ValueError("it must be between 1971 and 2199")
    return moment


Moment = Annotated[AwareDatetime, AfterValidator(_in_range)]
"""A time with its zone."""


@dataclass(frozen=True, slots=True)
class Start:
    """When a conversation may begin, counted from now.

    Attributes:
        delay_seconds: how long it waits; None: not at all.
        limit_seconds: within how many seconds it has to begin; None: whenever it can.
    """

    delay_seconds: float | None = None
    limit_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """When a conversation may begin, as somebody asked for it.

    Attributes:
        not_before: not earlier than this.
        delay_seconds: not earlier than so long after it was submitted.
        expires: if it has not begun by then, or this many seconds after it was submitted, it never does.
    """

    not_before: datetime | None = None
    delay_seconds: float | None = None
    expires: datetime | float | None = None

    def begins(self, now: datetime) -> datetime | None:
        """Return when it may begin, the later of both; None: at once."""
        due = [] if self.not_before is None else [self.not_before]
        if self.delay_seconds is not None:
            due.append(now + timedelta(seconds=self.delay_seconds))
        return max(due, default=None)

    def ends(self, now: datetime) -> datetime | None:
        """Return by when it has to have begun; None: whenever it can."""
        if self.expires is None or isinstance(self.expires, datetime):
            return self.expires
        return now + timedelta(seconds=self.expires)

    def start(self, now: datetime) -> Start | None:
        """Return it as durations; None: it begins as soon as it can."""
        delay, limit = _left(self.begins(now), now), _left(self.ends(now), now)
        return Start(delay or None, limit) if delay or limit is not None else None

    def after(self, seconds: float) -> Timing:
        """Return the same for a request that has been under way for some time: what it counts began then."""
        delay, expires = self.delay_seconds, self.expires
        return Timing(
            self.not_before,
            None if delay is None else max(0.0, delay - seconds),
            expires if expires is None or isinstance(expires, datetime) else max(0.0, expires - seconds),
        )


WHENEVER = Timing()


def _left(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (moment - now).total_seconds())
