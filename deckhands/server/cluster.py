"""The cluster behind a server: readiness, workers, queues, quotas, budgets, and offers (tools, agents, models)."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Path, Query
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from broker.coordination import FIELD, Quarantine, list_members, read_figures
from broker.limits import (
    SETTABLE,
    BudgetAccount,
    Ledger,
    QuotaPool,
    check_limits,
    make_experiment_account,
    make_tenant_account,
    parse_account,
    render_set_limits,
    set_limits,
)
from broker.runtime import DeckhandsError
from broker.store import WORKER_FIELD, ShardKeys, decode_fields
from broker.tools import ToolOffers
from deckhands.client import parse_offers
from deckhands.operations import CONTENT_TYPE, DAY, HOUR, ClusterSample, find_dead_conversations, read_quotas
from deckhands.server.auth.api_keys import Scope
from deckhands.server.dependencies import MATCHED, AdminOfAll, GatewayOf, IfMatch, Operator, Reader, etag_of
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import ID, MOMENT
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.problems import Problem
from deckhands.server.terminals import reveal

routes = APIRouter(tags=["cluster"])
AccountName = Annotated[str, Path(max_length=200, examples=["tenant:acme"])]
READY_SECONDS = 3.0
CLASSES = ("0", "1", "2")
OPERATION_ID = r"^([0-9]{1,15}-[0-9]{1,10})?$"
SHOWN_FACTS = ("node", "pools", "agents")
SHOWN_LOADS = ("conversations", "running", "host_cpu", "host_memory_free", "loop_lag_seconds")
MAX_VERSION_CHARS = 40
STREAMS = {"ready": "controllers", "ready:interactive": "controllers"}


class Alive(BaseModel):
    """The server is alive."""

    status: str = Field(default="ok", examples=["ok"])


class Readiness(BaseModel):
    """Whether newly accepted tasks make progress, and which part does not work."""

    ready: bool
    store: bool = Field(description="whether the store answers")
    controllers: bool = Field(description="whether a controller worker has a valid heartbeat")
    tools: bool = Field(description="whether a tool worker has a valid heartbeat")


class ShownWorker(BaseModel):
    """A worker. `left_seconds` is the time until its heartbeat lapses; negative after that.

    Attributes:
        version: of Deckhands; empty if the worker has not named it.
        load: the latest of its gauges: held conversations, running actions, busy CPU and free memory of its machine
            (shares of 1), and the largest delay of its event loop.
    """

    worker_id: str = Field(examples=["n1:controller:4711"])
    role: str = Field(examples=["controller"])
    left_seconds: float = Field(examples=[12.5])
    version: str = Field(examples=["0.1.0"])
    load: dict[str, float] = Field(examples=[{"conversations": 12.0, "host_cpu": 0.4}])
    facts: dict[str, str] = Field(examples=[{"node": "n1", "pools": "bash"}])


class Queue(BaseModel):
    """A stream of wake-ups of one shard, and its length.

    Attributes:
        waiting: entries that no worker has received.
        pending: entries that a worker has received and not acknowledged.
        in_line: conversations that wait for their turn to enter the stream.
    """

    shard: int = Field(examples=[0])
    name: str = Field(examples=["ready"])
    waiting: int = Field(examples=[2])
    pending: int = Field(examples=[1])
    in_line: int = Field(examples=[0])


class Queues(BaseModel):
    """The queues of all shards. `parked` conversations wait for a time; `dead` ones need an operator."""

    queues: list[Queue]
    parked: int = Field(examples=[3])
    dead: int = Field(examples=[0])


class Budget(BaseModel):
    """The current state of an account; `limit_usd` is null if there is no limit."""

    account: str = Field(examples=["tenant:acme"])
    limit_usd: float | None = Field(examples=[25.0])
    spent_usd: float = Field(examples=[3.5])
    reserved_usd: float = Field(examples=[0.25])
    lost_usd: float = Field(examples=[0.0])
    left_usd: float | None = Field(examples=[21.25])
    calls: int = Field(examples=[120])
    waiting: int = Field(examples=[0])

    @classmethod
    def of(cls, account: BudgetAccount) -> Self:
        """Convert an account of the ledger."""
        names = ("limit_usd", "spent_usd", "reserved_usd", "lost_usd", "left_usd", "calls", "waiting")
        return cls(account=account.name, **{name: getattr(account, name) for name in names})


class QuotaLimit(BaseModel):
    """One limit of a key. `left` remains of `at_once`, the part that may be used now.

    Attributes:
        field: its name in a change; empty if it cannot be changed.
        published: what the controllers' file says.
    """

    name: str = Field(examples=["requests a minute"])
    field: str = Field(examples=["requests"])
    published: float = Field(examples=[600.0])
    limit: float = Field(examples=[600.0])
    at_once: float = Field(examples=[10.0])
    left: float = Field(examples=[7.5])


class QuotaKey(BaseModel):
    """One key of a quota.

    Attributes:
        name: the environment variable of the controller workers that holds the key, or `own`.
        blocked_seconds: how long the provider has asked to wait; 0 if not at all.
        share: the share of its limits in use, reduced after the provider refused calls; 1 means all.
        binds: the limit that blocks further calls now; empty if none does.
    """

    name: str = Field(examples=["own"])
    in_flight: int = Field(examples=[3])
    blocked_seconds: float = Field(examples=[0.0])
    share: float = Field(examples=[1.0])
    limits: list[QuotaLimit]
    binds: str = Field(examples=["calls at once"])
    set: str = Field(examples=["requests=300"], description="the limits that an administrator has set")
    is_published: bool = Field(examples=[True], description="whether the controllers' file still has the key")


class ShownQuota(BaseModel):
    """The quota of some models. `waiting` is the number of conversations in its queue."""

    models: str = Field(examples=["openai/*"])
    waiting: int = Field(examples=[2])
    keys: list[QuotaKey]


class ShownSample(ClusterSample):
    """The figures of the cluster at one time: rates and counts."""

    at: AwareDatetime = Field(examples=[MOMENT])


class ShownHistory(BaseModel):
    """Samples, oldest first. A gap is a time at which no server took samples."""

    step_seconds: int = Field(examples=[5])
    samples: list[ShownSample]


class DeadLetter(BaseModel):
    """A conversation that crashed three workers in a row. No worker claims it until it is requeued.

    Attributes:
        died: when those workers were found dead, the latest last, as far as the store remembers.
        workers: their names, for keys with the scope `admin` for all tenants; empty for others.
        last_error: empty if none is recorded.
    """

    conversation_id: str = Field(examples=[ID])
    title: str = Field(examples=["Update the dependencies"])
    tenant: str = Field(examples=["acme"])
    labels: dict[str, str] = Field(examples=[{"team": "web"}])
    died: list[AwareDatetime] = Field(examples=[[MOMENT]])
    workers: list[str] = Field(examples=[["n1:controller:4711"]])
    last_error: str = Field(examples=[""])


class UnreadableEntry(BaseModel):
    """An entry of a stream, or a whole key, that no worker could read."""

    key: str = Field(examples=["deck:inbox"])
    entry_id: str = Field(examples=["1763916000000-0"])
    why: str = Field(examples=["it has no field `request`"])


class DeadLetters(BaseModel):
    """The dead letters, which need an operator.

    Entries are shown only to keys with the scope `admin` for all tenants.
    """

    conversations: list[DeadLetter]
    entries: list[UnreadableEntry]


class NewLimit(JsonBody):
    """The spending limit of an account; null means unlimited. The reason is recorded."""

    model_config = ConfigDict(extra="forbid")

    limit_usd: Annotated[float, Field(strict=True)] | None = Field(ge=0, le=1_000_000, examples=[25.0])
    reason: str = Field(min_length=1, max_length=500, examples=["the contract of March"])


class ShownTool(BaseModel):
    """A tool that tool workers offer, for the field `tools` of a task."""

    key: str = Field(examples=["github/create_issue"])
    description: str = Field(examples=["Open an issue."])
    parameters: dict[str, Any] = Field(
        examples=[{"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}]
    )


class Offered(BaseModel):
    """Names that are on offer now."""

    names: list[str] = Field(examples=[["CodeActAgent"]])


class OfferedModels(BaseModel):
    """The models that a conversation of the key's tenant may name as its `model`.

    Attributes:
        names: all allowed names; one that ends with `/*` stands for every model of a provider.
        profiles: the names that are profiles of the controller workers.
        defaults: the models used if none is named.
    """

    names: list[str] = Field(examples=[["anthropic/claude-sonnet-4-5", "gemini/*", "long", "spare"]])
    profiles: list[str] = Field(examples=[["long", "spare"]])
    defaults: list[str] = Field(examples=[["anthropic/claude-sonnet-4-5"]])


class ShownOperation(BaseModel):
    """An operation that was done, or tried, through the server."""

    id: str = Field(examples=["1763916000000-0"])
    at: AwareDatetime = Field(examples=[MOMENT])
    author: str = Field(examples=["key kuxjk6bk2pku (ops)"])
    tenant: str = Field(examples=["acme"])
    action: str = Field(examples=["budget.set"])
    target: str = Field(examples=["tenant:acme"])
    reason: str = Field(examples=["25.0 USD: the contract of March"])


@routes.get("/health", summary="Check that the server is alive")
async def health() -> Alive:
    """Report that the server is alive. Needs no key and does not ask the store."""
    return Alive()


@routes.get(
    "/ready", response_model=Readiness, responses={503: {"model": Readiness}}, summary="Check that work makes progress"
)
async def ready(gateway: GatewayOf) -> Response:
    """Report whether a task accepted now would make progress. Only progress sends the workers' heartbeats."""
    found = await check_readiness(gateway)
    return JSONResponse(found.model_dump(), 200 if found.ready else 503)


async def check_readiness(gateway: Gateway) -> Readiness:
    """Return which parts of the cluster work."""
    try:
        async with asyncio.timeout(READY_SECONDS):
            roles = {member.role for member in await list_members(gateway.store) if member.left_seconds > 0}
    except (DeckhandsError, TimeoutError):
        return Readiness(ready=False, store=False, controllers=False, tools=False)
    has_all = {"controller", "tool"} <= roles and not gateway.is_stopping.is_set()
    return Readiness(ready=has_all, store=True, controllers="controller" in roles, tools="tool" in roles)


@routes.get("/workers", summary="List workers")
async def workers(gateway: GatewayOf, _principal: AdminOfAll) -> list[ShownWorker]:
    """List the workers of the cluster, longest silent first."""
    return [
        ShownWorker(
            worker_id=member.worker_id,
            role=member.role,
            left_seconds=member.left_seconds,
            version=member.about.get(WORKER_FIELD, "").partition(" ")[0][:MAX_VERSION_CHARS],
            load={
                name: values[""]
                for name, values in read_figures(member.about.get(FIELD, "")).items()
                if name in SHOWN_LOADS and "" in values
            },
            facts={name: member.about[name] for name in SHOWN_FACTS if name in member.about},
        )
        for member in await list_members(gateway.store)
    ]


@routes.get(
    "/metrics",
    summary="Show metrics for Prometheus",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {"example": "deckhands_store_up 1.0"}}}},
)
async def metrics(gateway: GatewayOf, _principal: AdminOfAll) -> Response:
    """Show the metrics of the cluster and of this server in Prometheus' text format."""
    return Response(await gateway.exposition.text(), media_type=CONTENT_TYPE)


def _refuse_number(after: object) -> object:
    """Refuse seconds since the epoch, which Pydantic would accept as a date."""
    if isinstance(after, str) and after.replace(".", "", 1).lstrip("+-").isdigit():
        raise ValueError("not a date and time such as 2026-11-30T12:00:00Z")
    return after


@routes.get("/history", summary="Show recent figures of the cluster")
async def history(
    gateway: GatewayOf,
    _principal: AdminOfAll,
    of: Annotated[
        Literal["hour", "day"], Query(description="the last hour every 5 s, or the last day every minute")
    ] = "hour",
    after: Annotated[
        AwareDatetime | None, BeforeValidator(_refuse_number), Query(description="only samples after this time")
    ] = None,
) -> ShownHistory:
    """Show steps, spending, takeovers, running conversations and queues over time, as recorded by the servers."""
    resolution = HOUR if of == "hour" else DAY
    found = await gateway.history.read(resolution, after=after)
    samples = [ShownSample(at=at, **sample.model_dump()) for at, sample in found]
    return ShownHistory(step_seconds=resolution.step_seconds, samples=samples)


@routes.get("/queues", summary="Show queues")
async def queues(gateway: GatewayOf, _principal: AdminOfAll) -> Queues:
    """Show the backlog for controller workers in each shard."""
    store = gateway.store

    async def read(names: ShardKeys, name: str, group: str) -> Queue:
        stream, line = f"{names.root}:{name}", f"{names.root}:turns:{name}"
        commands = [("EXISTS", stream), ("XLEN", stream), *(("ZCARD", f"{line}:{number}") for number in CLASSES)]
        is_there, length, *in_line = await store.call_many(commands)
        groups = await store.connection.call("XINFO", "GROUPS", stream) if is_there else []
        facts = next((fact for flat in groups if (fact := _facts(flat))["name"] == group), {})
        waiting, pending = min(int(facts.get("lag") or 0), length), int(facts.get("pending") or 0)
        return Queue(shard=names.shard, name=name, waiting=waiting, pending=pending, in_line=sum(in_line))

    shards = await store.load_shards()
    found = await asyncio.gather(*(read(names, *stream) for names in shards for stream in STREAMS.items()))
    counts = [("ZCARD", key) for names in shards for key in (names.parked, names.dead)]
    counted = await store.call_many(counts)
    return Queues(queues=found, parked=sum(counted[::2]), dead=sum(counted[1::2]))


def _facts(flat: list[Any]) -> dict[str, str]:
    return decode_fields([part if isinstance(part, bytes) else str(part or 0).encode() for part in flat])


@routes.get("/dead-letters", summary="List dead letters")
async def dead_letters(gateway: GatewayOf, principal: Operator) -> DeadLetters:
    """List the dead conversations of the key's tenant, and unreadable entries; a key for all tenants sees all.

    `POST /conversations/{id}/requeue` gives a conversation another three workers; `POST /conversations/{id}/close` ends
    it.
    """
    sees_workers = principal.is_for_all_tenants and Scope.ADMIN in principal.key.scopes
    found = await find_dead_conversations(gateway.store)
    entries = await Quarantine(gateway.store).list_items() if sees_workers else []
    return DeadLetters(
        conversations=[
            DeadLetter(
                conversation_id=one.conversation_id,
                title=one.title,
                tenant=one.tenant,
                labels=dict(one.labels),
                died=list(map(datetime.fromisoformat, one.died)),
                workers=list(one.workers) if sees_workers else [],
                last_error=one.last_error,
            )
            for one in found
            if principal.is_for_all_tenants or one.tenant == principal.tenant
        ],
        entries=[UnreadableEntry(key=one.key, entry_id=one.entry_id, why=one.why) for one in entries],
    )


@routes.get("/quotas", summary="Show quotas")
async def quotas(gateway: GatewayOf, _principal: AdminOfAll) -> list[ShownQuota]:
    """Show the remaining quotas of models, the conversations waiting for them, and the limits that bind."""
    return [ShownQuota.model_validate(asdict(found)) for found in await read_quotas(gateway.store)]


class NewQuotaLimits(JsonBody):
    """Limits of a key to use instead of those of the controllers' file; none to use the file's again."""

    model_config = ConfigDict(extra="forbid")

    key: str = Field(min_length=1, max_length=200, examples=["own"])
    limits: dict[str, int] = Field(max_length=len(SETTABLE), examples=[{"requests": 300}])
    reason: str = Field(min_length=1, max_length=500, examples=["the provider is slow today"])


QuotaModels = Annotated[str, Path(description="the models of a quota, as they are listed", examples=["openai/*"])]


@routes.get("/quotas/{models:path}", summary="Show a quota")
async def quota(gateway: GatewayOf, _principal: AdminOfAll, models: QuotaModels, response: Response) -> ShownQuota:
    """Show a quota, with an ETag of the limits that administrators have set."""
    found = await _find_quota(gateway, models)
    response.headers["ETag"] = _quota_tag(found)
    return found


@routes.put("/quotas/{models:path}", summary="Set limits of a quota", responses=MATCHED)
async def set_quota(
    gateway: GatewayOf, principal: AdminOfAll, models: QuotaModels, new: NewQuotaLimits, *, precondition: IfMatch
) -> ShownQuota:
    """Set limits of a key of a quota, which hold until they are removed, also when controllers start again.

    Only limits that the controllers' file has can be changed. Those of a key that it has no longer can be removed.
    """
    found = await _find_quota(gateway, models)
    precondition.check(_quota_tag(found))
    key = next((each for each in found.keys if each.name == new.key), None)
    if key is None:
        raise Problem(404, "unknown_quota", f"The quota has no key {new.key}.", remedy="`GET /quotas` lists them.")
    known = {limit.field for limit in key.limits if limit.field}
    if missing := [name for name in new.limits if name not in known]:
        text = f"The controllers' file has no limit {missing[0]} for this key."
        remedy = f"Set one of: {', '.join(sorted(known))}." if known else "Remove the set limits: name none."
        raise Problem(422, "no_such_limit", text, remedy=remedy)
    check_limits(new.limits)
    wanted, target = render_set_limits(new.limits), f"{models} {new.key}"
    await gateway.record(principal, "quota.set", target, f"{wanted or 'as in the file'}: {new.reason}")
    pool = QuotaPool(model=models, quotas=()).name
    if await set_limits(gateway.store, pool, new.key, key.set, new.limits) is not None:
        await gateway.record(principal, "quota.unchanged", target, "another administrator has changed them meanwhile")
        raise Problem(412, "precondition_failed", "The limits were changed meanwhile.", remedy="Read them again.")
    return await _find_quota(gateway, models)


async def _find_quota(gateway: Gateway, models: str) -> ShownQuota:
    for found in await read_quotas(gateway.store):
        if found.models == models:
            return ShownQuota.model_validate(asdict(found))
    raise Problem(404, "unknown_quota", "No controller has such a quota.", remedy="`GET /quotas` lists them.")


def _quota_tag(found: ShownQuota) -> str:
    return f'"{sha256(repr([(key.name, key.set) for key in found.keys]).encode()).hexdigest()[:32]}"'


@routes.get("/budgets", summary="List budgets")
async def budgets(gateway: GatewayOf, principal: Reader) -> list[Budget]:
    """List the budgets and spending of the key's tenant and its experiments; a key for all tenants lists all."""
    found = await Ledger(gateway.store).load_accounts()
    return [Budget.of(account) for account in found if _is_visible(account.name, principal)]


def _is_visible(account: str, principal: Principal) -> bool:
    own = make_tenant_account(principal.tenant), make_experiment_account(principal.tenant, "")
    return principal.is_for_all_tenants or account == own[0] or account.startswith(own[1])


def _limit_tag(account: BudgetAccount) -> str:
    """Return the ETag of the configured limit. Spending does not change it."""
    return etag_of(NewLimit(limit_usd=account.limit_usd, reason="-"))


@routes.get("/budgets/{account:path}", summary="Show a budget")
async def budget(gateway: GatewayOf, principal: Reader, account: AccountName, response: Response) -> Budget:
    """Show the budget and the spending of an account, with an ETag of its limit."""
    parse_account(account)
    if not _is_visible(account, principal):
        raise Problem(404, "unknown_account", "There is no such account.")
    found = await Ledger(gateway.store).load_account(account)
    response.headers["ETag"] = _limit_tag(found)
    return Budget.of(found)


@routes.put("/budgets/{account:path}", summary="Set a limit", responses=MATCHED)
async def set_budget(
    gateway: GatewayOf,
    principal: AdminOfAll,
    account: AccountName,
    new: NewLimit,
    *,
    precondition: IfMatch,
) -> Budget:
    """Set the budget of an account. Conversations that wait for it continue."""
    parse_account(account)
    ledger = Ledger(gateway.store)

    def check(known: BudgetAccount) -> None:
        precondition.check(_limit_tag(known))

    if precondition.is_given:
        check(await ledger.load_account(account))
    await gateway.record(principal, "budget.set", account, f"{new.limit_usd} USD: {new.reason}")
    checks = check if precondition.is_given else None
    return Budget.of(await ledger.set_limit(account, new.limit_usd, check=checks))


@routes.get("/tools", summary="List tools on offer")
async def tools(gateway: GatewayOf, _principal: Reader) -> list[ShownTool]:
    """List the tools that tool workers offer."""
    found = await ToolOffers(gateway.store).load_all()
    return [
        ShownTool(key=key, description=offer.description, parameters=offer.parameters) for key, offer in found.items()
    ]


@routes.get("/agents", summary="List agents on offer")
async def agents(gateway: GatewayOf, _principal: Reader) -> Offered:
    """List the agents that running controller workers know."""
    alive = [member for member in await list_members(gateway.store) if member.left_seconds > 0]
    found = {name for member in alive for name in member.about.get("agents", "").split(",")}
    return Offered(names=sorted(found - {""}))


@routes.get("/models", summary="List models on offer")
async def models(gateway: GatewayOf, principal: Reader) -> OfferedModels:
    """List the models that running controller workers offer to the key's tenant. Other models cannot be named."""
    tenant = None if principal.is_for_all_tenants else principal.tenant
    offered, profiles, defaults = set[str](), set[str](), set[str]()
    for member in await list_members(gateway.store):
        table = parse_offers(member) if member.left_seconds > 0 else None
        if table is not None:
            names = set(table.list_names(tenant))
            default, *named = member.about.get("models", "").split("\n")
            offered |= names
            profiles |= names.intersection(named)
            defaults |= names & {default}
    return OfferedModels(names=sorted(offered), profiles=sorted(profiles), defaults=sorted(defaults))


@routes.get("/operations", summary="List operations through the server")
async def operations(
    gateway: GatewayOf,
    _principal: AdminOfAll,
    before: Annotated[str, Query(pattern=OPERATION_ID, description="the id of an entry: only older ones")] = "",
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> list[ShownOperation]:
    """List operations that no conversation log records, newest first: deletions, budgets, schedules, terminals."""
    found = await gateway.operations.latest(before=before, limit=limit)
    return [
        ShownOperation(
            id=each.id,
            at=each.at,
            author=each.author,
            tenant=each.tenant,
            action=each.action,
            target=each.target,
            reason=await reveal(gateway, each.action, each.target, each.reason),
        )
        for each in found
    ]
