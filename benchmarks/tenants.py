"""What one tenant at a hundred times the load of others costs them.

Tenants begin conversations over HTTP at a steady rate, and time the first reply of a model that takes half a second:
once among themselves, and once beside a tenant that begins a hundred times as many as each of them, and first opens all
the streams that the server gives it. The load comes from this process, on the same processors.

Times depend on these processors; turns do not. So the logs also say how long each station took (the server, the line of
conversations without an owner, the model with what is before and after it), and how many conversations of the greedy
tenant were taken from that line while one of a modest tenant waited in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from benchmarks.bench import Bench
from benchmarks.cluster import BenchCluster, free_port, running_cluster
from benchmarks.figures import Figure, Result, Spread
from broker.contract.events import EventSource, ModelReply
from broker.contract.specs import Tenancy
from broker.log.conversations import Conversations
from deckhands.server.auth.api_keys import ApiKeys, Scope
from deckhands.server.serving import raise_file_limit

MODEST = ("modest-1", "modest-2", "modest-3", "modest-4")
GREEDY = "greedy"
TIMES_THE_LOAD = 100
EACH_SECONDS = 4.0
"""How often a modest tenant begins a conversation."""
MODEL_SECONDS = 0.5
TARGET_RATIO = 1.2
LIMIT_SECONDS = 300.0
WARM_UP = 8
MOST_STREAMS = 1_000
"""Of the server; each costs this process a connection, too."""
MOST_AT_ONCE = 200


@dataclass(slots=True)
class Seen:
    """The first replies of modest tenants, in seconds from before the request, and what became of the greedy one."""

    first_reply: list[float] = field(default_factory=list)
    begun: int = 0
    refused: int = 0
    not_sent: int = 0
    streams: int = 0
    asked: dict[str, float] = field(default_factory=dict)
    greedy: list[str] = field(default_factory=list)

    def percentile(self, part: float) -> float:
        """Return a percentile of the first replies in ms."""
        ranked = sorted(self.first_reply)
        return ranked[min(int(len(ranked) * part), len(ranked) - 1)] * 1_000


async def measure(bench: Bench) -> Result:
    """Time first replies without and with a greedy tenant, in turns."""
    seconds = bench.choose(smoke=4, short=30, full=180)
    rounds = bench.choose(smoke=1, short=2, full=3)
    alone, beside = Seen(), Seen()
    raise_file_limit()
    async with running_cluster(bench.directory / "tenants") as cluster:
        # On a machine with others to serve, a busy worker would now and then be presumed dead.
        usual = {"DECKHANDS_HEARTBEAT_TTL_SECONDS": "10"}
        await cluster.start_controller(**usual)
        await cluster.start_tools(DECKHANDS_SANDBOX="none", **usual)
        port = free_port()
        serve = ("serve", "--port", str(port), "--max-streams", str(MOST_STREAMS))
        await cluster.start_site(port, "deckhands", *serve)
        script = _write_script(cluster.directory)
        async with _clients(cluster, port) as clients:
            for _ in range(WARM_UP):
                await _one(cluster, clients[MODEST[0]], script, Seen())
            for _ in range(rounds):
                await _run(cluster, clients, script, seconds, alone, is_greedy=False)
                await _run(cluster, clients, script, seconds, beside, is_greedy=True)
                await _drain(cluster)
        stations = await _read_stations(cluster, alone, beside)
    ratio = beside.percentile(0.99) / alone.percentile(0.99)
    figures = [
        Figure("first reply of a tenant, p50, alone", "ms", Spread.of([alone.percentile(0.5)])),
        Figure("the same beside a tenant with 100 times its load", "ms", Spread.of([beside.percentile(0.5)])),
        Figure("first reply of a tenant, p99, alone", "ms", Spread.of([alone.percentile(0.99)])),
        Figure("the same beside a tenant with 100 times its load", "ms", Spread.of([beside.percentile(0.99)])),
        Figure("ratio of the p99", "", Spread.of([ratio]), TARGET_RATIO),
        *stations,
        Figure("conversations that the greedy tenant began", "", Spread.of([beside.begun])),
        Figure("streams that it could open", "", Spread.of([beside.streams])),
    ]
    note = (
        f"{rounds} rounds of {seconds} s each way, {len(alone.first_reply)} and {len(beside.first_reply)} first "
        f"replies of {len(MODEST)} tenants that each begin a conversation every {EACH_SECONDS:g} s; the greedy one "
        f"began {TIMES_THE_LOAD} times as many ({beside.refused} of its requests were refused, "
        f"{beside.not_sent} not sent because {MOST_AT_ONCE} were under way) and held its share of the streams. "
        "The model takes "
        f"{MODEL_SECONDS:g} s. One controller, one tool worker, one server."
    )
    return Result("Tenants", figures, note)


def _write_script(folder: Path) -> Path:
    path = folder / "tenant.json"
    end = {"tool_calls": [{"name": "finish", "arguments": {"message": "Done."}}], "usage": {"prompt_tokens": 100}}
    path.write_text(json.dumps({"description": "tenant", "latency_seconds": MODEL_SECONDS, "turns": [end]}))
    return path


@contextlib.asynccontextmanager
async def _clients(cluster: BenchCluster, port: int) -> AsyncIterator[dict[str, httpx2.AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for tenant in (*MODEST, GREEDY):
            keys = ApiKeys(cluster.client.store)
            limits = {"requests_per_minute": 1_000_000, "streams": 100_000}
            _, key = await keys.add("benchmark", tenant=tenant, scopes=Scope, **limits)
            client = httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {key}"},
                timeout=LIMIT_SECONDS,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=50),
            )
            found[tenant] = await stack.enter_async_context(client)
        yield found


async def _begin(client: httpx2.AsyncClient, script: Path) -> httpx2.Response:
    return await client.post("/conversations", json={"task": "Do it.", "model": f"scripted/{script}"})


async def _one(cluster: BenchCluster, client: httpx2.AsyncClient, script: Path, seen: Seen) -> None:
    began, at = time.perf_counter(), time.time()
    answer = (await _begin(client, script)).raise_for_status()
    seen.asked[answer.json()["conversation_id"]] = at
    async with asyncio.timeout(LIMIT_SECONDS):
        async for event in cluster.client.log.tail(answer.json()["conversation_id"]):
            if isinstance(event, ModelReply):
                seen.first_reply.append(time.perf_counter() - began)
                return


async def _run(
    cluster: BenchCluster,
    clients: dict[str, httpx2.AsyncClient],
    script: Path,
    seconds: float,
    seen: Seen,
    *,
    is_greedy: bool,
) -> None:
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        greedy = None
        if is_greedy:
            seen.streams = max(seen.streams, await _take_streams(cluster, clients[GREEDY], stack))
            greedy = asyncio.create_task(_flood(clients[GREEDY], script, seen))
        began = time.perf_counter()
        for number in range(int(seconds / EACH_SECONDS * len(MODEST))):
            at = began + number * EACH_SECONDS / len(MODEST)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            group.create_task(_one(cluster, clients[MODEST[number % len(MODEST)]], script, seen))
        await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
        if greedy is not None:
            greedy.cancel()
            await asyncio.gather(greedy, return_exceptions=True)


async def _take_streams(cluster: BenchCluster, client: httpx2.AsyncClient, stack: contextlib.AsyncExitStack) -> int:
    """Open streams until the server refuses one, and return how many are open until the stack is left."""
    cid = await cluster.client.submit("Wait.", tenancy=Tenancy(tenant=GREEDY))
    opened = 0
    while True:
        answer = await stack.enter_async_context(client.stream("GET", f"/conversations/{cid}/stream"))
        if answer.status_code != 200:
            return opened
        opened += 1


async def _flood(client: httpx2.AsyncClient, script: Path, seen: Seen) -> None:
    """Begin conversations at the rate of a modest tenant times `TIMES_THE_LOAD`, until cancelled."""
    pause = EACH_SECONDS / TIMES_THE_LOAD
    began, number = time.perf_counter(), 0
    under_way: set[asyncio.Task[None]] = set()

    async def begin() -> None:
        answer = await _begin(client, script)
        if answer.status_code < 400:
            seen.begun += 1
            seen.greedy.append(answer.json()["conversation_id"])
        seen.refused += answer.status_code >= 400

    try:
        while True:
            await asyncio.sleep(max(0.0, began + number * pause - time.perf_counter()))
            number += 1
            if len(under_way) >= MOST_AT_ONCE:
                seen.not_sent += 1
                continue
            task = asyncio.create_task(begin())
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _read_times(cluster: BenchCluster, cid: str) -> tuple[float, float, float]:
    """Return when a conversation was created, when a controller first wrote to it, and when its first reply came."""
    created, *later = await cluster.client.events(cid)
    first = next(one for one in later if one.source not in (created.source, EventSource.USER))
    reply = next(one for one in later if isinstance(one, ModelReply))
    times = [one.timestamp.timestamp() for one in (created, first, reply) if one.timestamp is not None]
    return times[0], times[1], times[2]


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(int(len(seconds) * 0.99), len(seconds) - 1)]


async def _read_stations(cluster: BenchCluster, alone: Seen, seen: Seen) -> list[Figure]:
    """Return what each station took, and how many of the greedy tenant's conversations went first, from the logs."""
    own = {cid: await _read_times(cluster, cid) for cid in seen.asked}
    before = [await _read_times(cluster, cid) for cid in alone.asked]
    firsts = [(await _read_times(cluster, cid))[1] for cid in seen.greedy]
    inside = [_p99([reply - created for created, _, reply in times]) for times in (before, [*own.values()])]
    waits = [
        (created - seen.asked[cid], first - created, reply - first) for cid, (created, first, reply) in own.items()
    ]
    figures = [
        Figure("from the creation to the first reply, p99, alone", "ms", Spread.of([inside[0]], scale=1_000)),
        Figure("the same beside a tenant with 100 times its load", "ms", Spread.of([inside[1]], scale=1_000)),
        Figure("ratio of the p99 from the creation on", "", Spread.of([inside[1] / inside[0]]), TARGET_RATIO),
    ]
    for name, times in zip(("the server", "the line", "the model"), zip(*waits, strict=True), strict=True):
        ranked = sorted(times)
        for part in (0.5, 0.99):
            at = ranked[min(int(len(ranked) * part), len(ranked) - 1)] * 1_000
            figures.append(Figure(f"of it at {name}, p{part * 100:g}", "ms", Spread.of([at])))
    ahead = [sum(created < other < first for other in firsts) for created, first, _ in own.values()]
    figures.append(Figure("greedy conversations taken while a modest one waits in line", "", Spread.of(ahead)))
    return figures


async def _drain(cluster: BenchCluster) -> None:
    """Wait until no conversation works, so that a round starts as the first one did."""
    index = Conversations(cluster.client.store)
    async with asyncio.timeout(LIMIT_SECONDS):
        while any(row.state in ("loading", "running") for row in await index.list_recent(limit=500)):
            await asyncio.sleep(0.2)
