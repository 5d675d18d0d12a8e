"""Rollout runs over HTTP: start a run, read its groups with their tokens, acknowledge them, and announce weights.

Holds: a key sees only the runs of its tenant; those of other tenants appear not to exist. A run that is started here
refers to nothing on its driver's machine: no files, no code, no addresses.
Does not: drive runs. `deckhands rollouts attach` does, on a machine of the operator.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from broker.contract import NAME_PATTERN
from broker.runtime import UsageError, is_conversation_id, new_conversation_id
from deckhands.server.dependencies import (
    GatewayOf,
    IdempotencyKey,
    Operator,
    Reader,
    Reason,
    Writer,
    run_once,
    scoped_key,
)
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import ID
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.problems import Problem
from deckhands.server.streams import reserve_stream
from deckhands.server.trajectories import ShownSegment, ShownTrajectory

if TYPE_CHECKING:
    from deckhands.rollouts import Group, RolloutRun

routes = APIRouter(prefix="/rollouts", tags=["rollouts"])
POLL_SECONDS = 0.3
LONGEST_SECONDS = 300.0
SHOWN_EVENTS = 100
NAME_CHARS = 40
MAX_RUNS = 1_000
MAX_DELIVERY = 2**53 - 1
MAX_VERSION = 2**31 - 1
"""That of `deckhands.rollouts`, which is loaded with the first request."""
PROMPT = {"id": "sum-1", "task": "What is 1 + 1? Say the answer.", "answer": "2"}
RunName = f"h-{ID}"


class NewRun(JsonBody):
    """A run, with the fields of a `RolloutSpec` that a caller may choose; see docs/rollouts.md."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[dict[str, Any]] = Field(min_length=1, max_length=10_000, examples=[[PROMPT]])
    model: str = Field(min_length=1, max_length=300, examples=["openai/stub"])
    tenant: str | None = Field(
        default=None, pattern=NAME_PATTERN, description="the tenant; only for keys of all tenants"
    )
    group_size: int | None = None
    extra: int | None = None
    epochs: int | None = None
    agent: str | None = None
    delegation: bool | None = None
    max_iterations: int | None = None
    max_staleness: int | None = None
    trajectory_seconds: float | None = None
    group_seconds: float | None = None
    smallest_group: int | None = None
    partial: Literal["keep", "drop"] | None = None
    window: int | None = None
    waiting: int | None = None
    at_once: int | None = None
    retries: int | None = None
    critic: str | None = None
    weights: dict[str, float] | None = Field(default=None, examples=[{"check": 1.0}])
    shuffle: bool | None = None
    seed: int | None = None
    network: bool | None = None


class ShownRun(BaseModel):
    """A rollout run.

    Attributes:
        state: `running`, `paused`, `aborted` or `over`.
        version: the version of the policy that was announced last.
        is_driven: a driver is at work.
        groups: the number of delivered groups; `waiting` counts the unacknowledged ones.
    """

    name: str = Field(examples=[RunName])
    tenant: str = Field(examples=["acme"])
    model: str = Field(examples=["openai/stub"])
    state: str = Field(examples=["running"])
    version: int = Field(examples=[3])
    is_driven: bool
    groups: int = Field(examples=[12])
    waiting: int = Field(examples=[2])


class RunDetails(ShownRun):
    """A rollout run with its last events, such as `weights_changed`, `paused` and `dropped`; at most 100."""

    events: list[dict[str, Any]] = Field(examples=[[{"kind": "weights_changed", "at": 1785000000.0, "version": 3}]])


class NextGroup(JsonBody):
    """A request for the next group of a run.

    Attributes:
        consumer: the name of this reader. A restarted reader continues under the same name.
        after: the number of the last group that it has read; 0 to start with the first unacknowledged one.
        timeout_seconds: how long the answer may wait for a group.
    """

    model_config = ConfigDict(extra="forbid")

    consumer: str = Field(default="trainer", pattern=NAME_PATTERN, min_length=1, max_length=100)
    after: int = Field(default=0, ge=0, le=MAX_DELIVERY, examples=[7])
    timeout_seconds: float = Field(default=30.0, ge=0, le=LONGEST_SECONDS)


class ShownRollout(BaseModel):
    """One trajectory of a group, with its tokens and its reward."""

    conversation_id: str = Field(examples=[ID])
    segments: list[ShownSegment]
    reward: float = Field(examples=[1.0])
    rewards: dict[str, float] = Field(examples=[{"check": 1.0}])
    step_rewards: list[float] = Field(examples=[[]])
    outcome: str = Field(examples=["resolved"])
    cause: str = Field(examples=[""])
    is_partial: bool
    min_version: int | None = Field(examples=[3])
    max_version: int | None = Field(examples=[3])
    delegates: list[ShownTrajectory] = Field(description="the trajectories of its delegates", examples=[[]])


class ShownGroup(BaseModel):
    """A finished group: trajectories of one prompt. `number` is that of its delivery."""

    number: int = Field(examples=[7])
    id: str = Field(examples=["sum-1-r0"])
    index: int = Field(examples=[0])
    instance: str = Field(examples=["sum-1"])
    round: int = Field(examples=[0])
    version: int = Field(examples=[3])
    min_version: int = Field(examples=[3])
    rollouts: list[ShownRollout]

    @classmethod
    def of(cls, group: Group) -> Self:
        """Convert a group."""
        return cls.model_validate(group.as_json())


class FoundGroup(BaseModel):
    """The next group; null if there is none yet. If `is_over` is set, there will be none."""

    group: ShownGroup | None
    is_over: bool = False


class Weights(JsonBody):
    """The version of the policy that the engines have from now on."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0, le=MAX_VERSION, examples=[4])


async def _find(gateway: Gateway, principal: Principal, name: str) -> RolloutRun:
    """Return a run that the principal may see."""
    from deckhands.rollouts import RolloutRun

    if is_conversation_id(name):
        run = RolloutRun(gateway.client, name)
        try:
            spec = await run.load_spec()
        except UsageError:
            spec = None
        if spec is not None and (principal.is_for_all_tenants or spec.tenant == principal.tenant):
            return run
    raise Problem(404, "unknown_rollout_run", "There is no such run.", remedy="GET /rollouts lists them.")


Name = Annotated[str, Path(max_length=64, description="the name of a rollout run", examples=[RunName])]


async def _find_readable(gateway: GatewayOf, principal: Reader, run: Name) -> RolloutRun:
    return await _find(gateway, principal, run)


async def _find_writable(gateway: GatewayOf, principal: Writer, run: Name) -> RolloutRun:
    return await _find(gateway, principal, run)


async def _find_operable(gateway: GatewayOf, principal: Operator, run: Name) -> RolloutRun:
    return await _find(gateway, principal, run)


if TYPE_CHECKING:
    ReadableRun = RolloutRun
    WritableRun = RolloutRun
    OperableRun = RolloutRun
else:
    ReadableRun = Annotated[Any, Depends(_find_readable)]
    WritableRun = Annotated[Any, Depends(_find_writable)]
    OperableRun = Annotated[Any, Depends(_find_operable)]


@routes.get("", summary="List rollout runs")
async def listing(
    gateway: GatewayOf,
    principal: Reader,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=MAX_RUNS, description="the most runs to return")] = 100,
    after: Annotated[str | None, Query(max_length=100, description="the `Next-After` of the page before")] = None,
) -> list[ShownRun]:
    """List the runs of the key's tenant, the latest change first. Kept for a month.

    The header `Next-After` has the value of `after` for the next page; it is missing on the last one.
    """
    from deckhands.rollouts import NEXT_HEADER, describe_runs

    tenant = None if principal.is_for_all_tenants else principal.tenant
    rows, cursor = await describe_runs(gateway.store, tenant=tenant, limit=limit, after=after or "")
    if cursor:
        response.headers[NEXT_HEADER] = cursor
    return [ShownRun.model_validate(row) for row in rows]


@routes.post("", status_code=201, response_model=ShownRun, summary="Start a rollout run")
async def start(
    gateway: GatewayOf, principal: Writer, request: Request, new: NewRun, key: IdempotencyKey = None
) -> Response:
    """Record a run; drivers start its trajectories, which have the key's tenant.

    The prompts are rows whose files are given as texts. Only a run of the operator can have `scorers` and `engines`.
    """
    from deckhands.rollouts import RolloutRun, RolloutSpec

    if new.tenant is not None and not principal.is_for_all_tenants and new.tenant != principal.tenant:
        raise UsageError("tenant: the key is for one tenant.", remedy="Leave it out.")
    tenant = (new.tenant or "") if principal.is_for_all_tenants else principal.tenant
    spec = RolloutSpec.parse({**new.model_dump(exclude_none=True), "tenant": tenant})
    own = scoped_key(principal, key)

    async def act() -> dict[str, Any]:
        run = await RolloutRun.start_served(gateway.client, spec, own[:NAME_CHARS] if own else new_conversation_id())
        return ShownRun.model_validate(await run.describe()).model_dump(mode="json")

    return await run_once(gateway, request, own, act, status=201)


@routes.get("/{run}", summary="Show a rollout run")
async def show(run: ReadableRun) -> RunDetails:
    """Show the state of a run, and its last events."""
    events = await run.list_events(limit=SHOWN_EVENTS)
    return RunDetails.model_validate({**await run.describe(), "events": events})


@routes.post("/{run}/groups", summary="Read the next group")
async def next_group(
    gateway: GatewayOf, principal: Writer, _reader: Reader, run: WritableRun, asked: NextGroup
) -> FoundGroup:
    """Return the next group with its tokens, once there is one.

    A group that is not acknowledged is returned again to a request of the same consumer with a lower `after`. A group
    is dropped, and its prompt retried, if it is too old or its tokens can no longer be read.
    """
    reserve_stream(gateway, principal)
    end = asyncio.get_running_loop().time() + asked.timeout_seconds
    while True:
        is_over = (await run.load_state()).is_ended
        group = await run.take_next(asked.consumer, after=asked.after)
        if group is not None:
            return FoundGroup(group=await asyncio.to_thread(ShownGroup.of, group))
        if is_over or gateway.is_stopping.is_set() or asyncio.get_running_loop().time() >= end:
            return FoundGroup(group=None, is_over=is_over)
        await asyncio.sleep(POLL_SECONDS)


@routes.post("/{run}/groups/{number}/ack", status_code=204, summary="Acknowledge a group")
async def ack(
    run: WritableRun,
    number: Annotated[int, Path(ge=1, le=MAX_DELIVERY, description="the number of its delivery", examples=[7])],
) -> None:
    """Acknowledge a group, so that it is not delivered again. Idempotent."""
    await run.acknowledge(number)


@routes.post("/{run}/weights", summary="Announce new weights")
async def weights(run: WritableRun, announced: Weights) -> ShownRun:
    """Record that the engines have the weights of a version from now on. Versions never decrease. Idempotent."""
    await run.weights_changed(announced.version)
    return ShownRun.model_validate(await run.describe())


@routes.post("/{run}/pause", summary="Pause a rollout run")
async def pause(principal: Operator, run: OperableRun, why: Reason) -> ShownRun:
    """Pause a run: no trajectory starts or takes a further step. Replies in flight end."""
    await run.pause(by=principal.author, reason=why.reason)
    return ShownRun.model_validate(await run.describe())


@routes.post("/{run}/resume", summary="Continue a rollout run")
async def resume(principal: Operator, run: OperableRun, why: Reason) -> ShownRun:
    """Continue a paused run."""
    await run.resume(by=principal.author, reason=why.reason)
    return ShownRun.model_validate(await run.describe())


@routes.post("/{run}/abort", summary="End a rollout run")
async def abort(principal: Operator, run: OperableRun, why: Reason) -> ShownRun:
    """End a run: no further group is delivered, and its conversations are cancelled. Idempotent."""
    await run.abort(by=principal.author, reason=why.reason)
    return ShownRun.model_validate(await run.describe())
