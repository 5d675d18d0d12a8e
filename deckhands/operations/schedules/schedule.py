"""A schedule: a recurring task, at the times of a cron expression in a time zone.

Holds: a tick is a minute; the same expression and zone give the same ticks on every machine. When clocks go forward, a
tick in the skipped hour comes right after it; when they go back, a tick at a fixed time comes once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from broker.contract import Seconds

Overlap = Literal["skip", "enqueue", "cancel"]
"""A tick while the conversation of an earlier one works: skip it, queue it, or cancel the earlier conversation."""

NAME_PATTERN = r"^[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?$"
LABEL = "schedule"
"""The label that all conversations of a schedule have; its value is the name."""
CATCH_UP_SECONDS = 3_600.0
MAX_QUEUED = 100
MAX_MISSED = 10_000
"""The maximum number of missed ticks to count."""
PREVIEWED = 5
MINUTE = timedelta(minutes=1)


def _check_cron(text: str) -> str:
    try:
        found = next(CronSim(text, datetime(2026, 1, 1, tzinfo=UTC)))
    except (CronSimError, StopIteration) as error:
        raise ValueError(f"{ascii(text)[:100]} is not a cron expression that is ever due: {error}") from None
    assert found is not None
    return " ".join(text.split())


def _check_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ValueError(f"there is no time zone {ascii(name)[:100]}") from None
    return name


class Schedule(BaseModel):
    """The definition of a schedule.

    Attributes:
        name: its unique name.
        cron: five fields: minute, hour, day of the month, month, day of the week.
        zone: the time zone of the expression, such as `Europe/Berlin`.
        overlap: see `Overlap`.
        catch_up_seconds: how late a missed tick may still start. Of several missed ticks, only the latest starts.
        is_paused: no tick starts, and ticks during the pause are not made up for.
        request: the task that each tick submits: a `TaskSpec` as JSON.
        is_sealed: `request` is encrypted, because it has secrets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME_PATTERN)
    cron: Annotated[str, Field(min_length=9, max_length=200), AfterValidator(_check_cron)]
    zone: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_check_zone)] = "UTC"
    overlap: Overlap = "skip"
    catch_up_seconds: Seconds = CATCH_UP_SECONDS
    is_paused: bool = False
    request: str = ""
    is_sealed: bool = False

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the first tick after a time, in UTC; None if there are no more."""
        found = next(CronSim(self.cron, moment.astimezone(ZoneInfo(self.zone))), None)
        return None if found is None else found.astimezone(UTC)

    def next_ticks(self, moment: datetime, *, number: int = PREVIEWED) -> list[datetime]:
        """Return the next ticks after a time, in UTC."""
        ticks = CronSim(self.cron, moment.astimezone(ZoneInfo(self.zone)))
        return [tick.astimezone(UTC) for tick in islice(ticks, number)]


class ScheduleStatus(BaseModel):
    """The progress of a schedule.

    Attributes:
        last_tick: the latest that started a conversation.
        conversation_id: the id of that conversation.
        queued: ticks that wait until the current conversation has settled, in order.
        begun: the number of ticks that started a conversation; `skipped` ones by the overlap policy, `missed` ones
            because they were too late.
        error: the error of the latest tick; empty if it started.
        failing_since: when the first of `queued` failed to start; None if it was not tried, or others could start.
    """

    model_config = ConfigDict(frozen=True)

    last_tick: datetime | None = None
    conversation_id: str = ""
    queued: tuple[datetime, ...] = ()
    begun: int = 0
    skipped: int = 0
    missed: int = 0
    error: str = ""
    failing_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class DueTicks:
    """The due ticks of a schedule.

    Attributes:
        tick: the latest tick that is not too late; None if there is none.
        missed: the number of other due ticks.
        next: the first future tick; None if there are no more.
    """

    tick: datetime | None
    missed: int
    next: datetime | None


def find_due(schedule: Schedule, first: datetime, now: datetime) -> DueTicks:
    """Return the ticks that are due now, counted from `first`, the first unprocessed tick."""
    latest: datetime | None = None
    number = 0
    after = first
    zone = ZoneInfo(schedule.zone)
    for found in islice(CronSim(schedule.cron, (first - MINUTE).astimezone(zone)), MAX_MISSED):
        after = found.astimezone(UTC)
        if after > now:
            break
        latest, number = after, number + 1
    if number == MAX_MISSED:  # the rest is not counted
        behind = now.replace(second=0, microsecond=0) + MINUTE
        latest = next(CronSim(schedule.cron, behind.astimezone(zone), reverse=True)).astimezone(UTC)
        after = schedule.next_after(now) or after
    is_late = latest is not None and (now - latest).total_seconds() > schedule.catch_up_seconds
    tick = None if is_late else latest
    return DueTicks(tick, number - (tick is not None), after if after > now else None)
