"""Schedules: tasks that are submitted repeatedly. Operators manage them, for all tenants."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Annotated, Self

from fastapi import APIRouter, Path
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.responses import Response

from broker.runtime import UsageError
from deckhands.client import TaskSpec
from deckhands.operations import (
    CATCH_UP_SECONDS,
    NAME_PATTERN,
    Overlap,
    Schedule,
    ScheduleCheck,
    ScheduleConflict,
    ScheduleRepository,
    StoredSchedule,
)
from deckhands.server.dependencies import (
    MATCHED,
    OFFERS_SECONDS,
    GatewayOf,
    IfMatch,
    OperatorOfAll,
    Reason,
    ReasonQuery,
    etag_of,
)
from deckhands.server.models import ID, MOMENT
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/schedules", tags=["schedules"])
Name = Annotated[str, Path(pattern=NAME_PATTERN, examples=["nightly"])]


class NewSchedule(JsonBody):
    """A schedule, and the task that each tick submits; see docs/producing-work.md."""

    model_config = ConfigDict(extra="forbid")

    cron: str = Field(examples=["0 6 * * 1-5"])
    zone: str = Field(default="UTC", examples=["Europe/Berlin"])
    overlap: Overlap = "skip"
    catch_up_seconds: float = Field(default=CATCH_UP_SECONDS, ge=0, strict=True)
    request: TaskSpec = Field(examples=[{"task": "Update the dependencies"}])
    reason: str = Field(min_length=1, max_length=500, examples=["asked for by the platform team"])


class ShownSchedule(BaseModel):
    """A schedule and its progress. Its task is left out because it may contain secrets."""

    name: str = Field(examples=["nightly"])
    cron: str = Field(examples=["0 6 * * 1-5"])
    zone: str = Field(examples=["Europe/Berlin"])
    overlap: Overlap
    is_paused: bool = Field(examples=[False])
    next: AwareDatetime | None = Field(examples=[MOMENT])
    last_tick: AwareDatetime | None = Field(examples=[None])
    conversation_id: str = Field(examples=[ID])
    begun: int = Field(examples=[12])
    skipped: int = Field(examples=[1])
    missed: int = Field(examples=[0])
    error: str = Field(examples=[""])

    @classmethod
    def of(cls, entry: StoredSchedule) -> Self:
        """Convert an entry of the schedule repository."""
        planned = entry.schedule.model_dump(include={"name", "cron", "zone", "overlap", "is_paused"})
        status = entry.status.model_dump(exclude={"queued"})
        return cls(**planned, **status, next=entry.due)


def _repository(gateway: GatewayOf) -> ScheduleRepository:
    return ScheduleRepository(gateway.store, gateway.client.secrets)


@contextlib.contextmanager
def _missing_as_404() -> Generator[None]:
    """Raise a 404 problem if a schedule does not exist or was removed."""
    try:
        yield
    except UsageError as error:
        raise Problem(404, "unknown_schedule", error.message) from error


async def _entry(gateway: GatewayOf, name: str) -> StoredSchedule:
    with _missing_as_404():
        return await _repository(gateway).entry(name)


def tag_of(entry: StoredSchedule) -> str:
    """Return the ETag of a schedule's definition."""
    return etag_of(entry.schedule)


async def _make_check(gateway: GatewayOf, name: str, precondition: IfMatch) -> ScheduleCheck:
    """Check that a schedule has not changed since it was read. Return the check, to repeat it at the write."""

    def check(schedule: Schedule) -> None:
        precondition.check(etag_of(schedule))

    check((await _entry(gateway, name)).schedule)
    return check


@routes.get("", summary="List schedules")
async def listing(gateway: GatewayOf, _principal: OperatorOfAll) -> list[ShownSchedule]:
    """List the schedules by name."""
    return [ShownSchedule.of(entry) for entry in await _repository(gateway).all()]


@routes.put("/{name}", status_code=201, summary="Add a schedule", responses={409: {"description": "the name is taken"}})
async def add(
    gateway: GatewayOf, principal: OperatorOfAll, name: Name, new: NewSchedule, response: Response
) -> ShownSchedule:
    """Add a schedule. Its conversations have the label `schedule` with its name."""
    try:
        planned = Schedule(
            name=name, cron=new.cron, zone=new.zone, overlap=new.overlap, catch_up_seconds=new.catch_up_seconds
        )
    except ValueError as error:
        raise UsageError(f"The schedule cannot be used: {str(error).splitlines()[2].strip()}.") from None
    await gateway.record(principal, "schedule.add", name, new.reason)
    try:
        await _repository(gateway).add(planned, new.request, offers_limit_seconds=OFFERS_SECONDS)
    except ScheduleConflict as error:
        raise Problem(409, "conflict", error.message, remedy=error.remedy) from error
    entry = await _entry(gateway, name)
    response.headers["ETag"] = tag_of(entry)
    return ShownSchedule.of(entry)


@routes.get("/{name}", summary="Show a schedule")
async def show(gateway: GatewayOf, _principal: OperatorOfAll, name: Name, response: Response) -> ShownSchedule:
    """Show a schedule, with an ETag of its definition."""
    entry = await _entry(gateway, name)
    response.headers["ETag"] = tag_of(entry)
    return ShownSchedule.of(entry)


async def _set_paused(
    gateway: GatewayOf, principal: OperatorOfAll, name: str, reason: str, precondition: IfMatch, *, is_paused: bool
) -> ShownSchedule:
    check = await _make_check(gateway, name, precondition)
    await gateway.record(principal, "schedule.pause" if is_paused else "schedule.resume", name, reason)
    with _missing_as_404():
        await _repository(gateway).set_paused(name, is_paused=is_paused, check=check)
    return ShownSchedule.of(await _entry(gateway, name))


@routes.post("/{name}/pause", summary="Pause a schedule", responses=MATCHED)
async def pause(
    gateway: GatewayOf, principal: OperatorOfAll, name: Name, why: Reason, precondition: IfMatch
) -> ShownSchedule:
    """Pause a schedule. Ticks that become due while it is paused are skipped."""
    return await _set_paused(gateway, principal, name, why.reason, precondition, is_paused=True)


@routes.post("/{name}/resume", summary="Resume a schedule", responses=MATCHED)
async def resume(
    gateway: GatewayOf, principal: OperatorOfAll, name: Name, why: Reason, precondition: IfMatch
) -> ShownSchedule:
    """Resume a paused schedule."""
    return await _set_paused(gateway, principal, name, why.reason, precondition, is_paused=False)


@routes.delete("/{name}", status_code=204, summary="Remove a schedule", responses=MATCHED)
async def remove(
    gateway: GatewayOf, principal: OperatorOfAll, name: Name, reason: ReasonQuery, precondition: IfMatch
) -> Response:
    """Remove a schedule. Conversations that it has started continue."""
    check = await _make_check(gateway, name, precondition)
    await gateway.record(principal, "schedule.remove", name, reason)
    with _missing_as_404():
        await _repository(gateway).remove(name, check=check)
    return Response(status_code=204)
