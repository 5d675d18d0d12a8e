"""Who is served when more waits than one controller and one tool worker can do.

Two thousand batch conversations step as fast as they can, with a scripted model inside the controller and a tool that
takes `TOOL_SECONDS` inside a real tool worker. Meanwhile a person begins a conversation now and then, and the benchmark
follows its log. Then two tenants with weights 3 and 1 share the cluster, once where the controller is what is scarce,
once where the tool worker's places are.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.figures import Figure, Result, Spread
from broker.contract.events import AgentSpec, Limits, LLMSpec, ModelReply
from broker.contract.observations import ToolCallObservation
from broker.contract.specs import PriorityName, Tenancy
from broker.log.conversations import Conversations
from broker.tools.custom_tools import custom_tool
from deckhands.client.client import Client

TOOL_SECONDS = 0.002
SLOW_SECONDS = 0.02
STEPS = 500
"""More than any conversation makes."""
SETTLED_STEPS = 2
"""After so many steps of a conversation, its first action has been carried out."""
LIMIT_SECONDS = 600.0
PAUSE_SECONDS = 0.2
POLL_SECONDS = 0.1
WEIGHTS = 'tenants = {"heavy" = 3, "light" = 1}'
SAMPLED = 200


@custom_tool(outcome="idempotent")
async def tick(number: int, seconds: float = TOOL_SECONDS) -> str:
    """Take a moment."""
    await asyncio.sleep(seconds)
    return str(number)


@dataclass(frozen=True, slots=True)
class Shares:
    """What part of the actions the heavier tenant got.

    Attributes:
        first: while first actions waited in the line of their pool.
        later: afterwards.
        whole: of all.
    """

    first: float
    later: float
    whole: float


@dataclass(slots=True)
class Waits:
    """How long people waited, in seconds from before the submission."""

    first_reply: list[float] = field(default_factory=list)
    first_action: list[float] = field(default_factory=list)
    longest_pause: float = 0.0
    steps_a_second: float = 0.0


async def measure(bench: Bench) -> Result:
    """Let people come while batch work waits, and let two tenants share what there is."""
    crowd = bench.choose(smoke=40, short=2_000, full=2_000)
    people = bench.choose(smoke=3, short=100, full=300)
    seconds = bench.choose(smoke=2, short=20, full=60)
    async with running_cluster(bench.directory / "people") as cluster:
        waits = await _people(cluster, crowd, people)
    each = bench.choose(smoke=20, short=400, full=400)
    shares = {}
    for what, places, tool_seconds in (
        ("controller", 64, TOOL_SECONDS),
        ("tool worker", 2, TOOL_SECONDS),
        ("slow tool worker", 2, SLOW_SECONDS),
    ):
        async with running_cluster(bench.directory / what.replace(" ", "-")) as cluster:
            shares[what] = await _share(cluster, each, seconds, places, tool_seconds)
    figures = [
        Figure("a person's first reply of the model, p50", "ms", _percentile(waits.first_reply, 0.5)),
        Figure("a person's first reply of the model, p95", "ms", _percentile(waits.first_reply, 0.95), 300),
        Figure("a person's first action carried out, p50", "ms", _percentile(waits.first_action, 0.5)),
        Figure("a person's first action carried out, p95", "ms", _percentile(waits.first_action, 0.95), 300),
        Figure("longest pause between two events of a batch conversation", "s", Spread.of([waits.longest_pause]), 30),
        Figure("steps of batch conversations a second", "", Spread.of([waits.steps_a_second])),
    ]
    figures += [
        Figure(f"share of the tenant with weight 3 of 4, {what} scarce{when}", "%", Spread.of([share], scale=100))
        for what, found in shares.items()
        for when, share in ((", first actions", found.first), (", later", found.later), ("", found.whole))
    ]
    note = (
        f"{crowd:,} batch conversations step without end; {people} conversations of people, one after another, each "
        f"from before its submission until a follower sees the event. Pauses are those of {SAMPLED} of the batch "
        f"conversations, from their beginning to the end. Shares: of all actions until {seconds} s after the "
        f"last first action of {2 * each} conversations, and of those up to this one and behind it. One "
        "controller and one tool worker."
    )
    return Result("Fairness", figures, note)


async def _people(cluster: BenchCluster, crowd: int, people: int) -> Waits:
    await _start(cluster, places=64)
    script, short = _scripts(cluster.directory)
    ids = [await _submit(cluster.client, script, priority="batch") for _ in range(crowd)]
    waits, before, began = Waits(), await _steps(cluster.client, ids), time.perf_counter()
    for _ in range(people):
        await _one_person(cluster.client, short, waits)
        await asyncio.sleep(PAUSE_SECONDS)
    took = time.perf_counter() - began
    waits.steps_a_second = (sum(await _steps(cluster.client, ids)) - sum(before)) / took
    ended = time.time()
    for cid in ids[:: max(1, crowd // SAMPLED)]:
        times = [event.timestamp.timestamp() for event in await cluster.client.events(cid) if event.timestamp]
        # What waits now has waited until now.
        pauses = [after - earlier for earlier, after in zip(times, [*times[1:], max(ended, times[-1])], strict=True)]
        waits.longest_pause = max(waits.longest_pause, *pauses)
    return waits


async def _one_person(client: Client, script: Path, waits: Waits) -> None:
    began = time.perf_counter()
    cid = await _submit(client, script, priority="interactive")
    async with asyncio.timeout(LIMIT_SECONDS):
        async for event in client.log.tail(cid):
            if isinstance(event, ModelReply) and len(waits.first_reply) == len(waits.first_action):
                waits.first_reply.append(time.perf_counter() - began)
            if isinstance(event, ToolCallObservation):
                waits.first_action.append(time.perf_counter() - began)
                return


async def _share(cluster: BenchCluster, each: int, seconds: float, places: int, tool_seconds: float) -> Shares:
    """Return the shares of the heavier tenant's steps while both have work that waits."""
    await _start(cluster, places=places, DECKHANDS_TENANTS=WEIGHTS)
    script, _ = _scripts(cluster.directory, tool_seconds)
    ids: dict[str, list[str]] = {"heavy": [], "light": []}
    for _ in range(each):
        for tenant, own in ids.items():
            own.append(await _submit(cluster.client, script, priority="batch", tenant=tenant))
    # The first action of a conversation waits in the line of its pool, all others in the line of its node.
    await _until_all_made(cluster, [*ids["heavy"], *ids["light"]], SETTLED_STEPS)
    await asyncio.sleep(seconds)
    done = {tenant: [await _times_of_actions(cluster.client, cid) for cid in own] for tenant, own in ids.items()}
    settled = max(times[0] for found in done.values() for times in found)
    ended = settled + seconds
    return Shares(*(_share_of_heavy(done, *span) for span in ((0.0, settled), (settled, ended), (0.0, ended))))


def _share_of_heavy(done: Mapping[str, Sequence[Sequence[float]]], begin: float, end: float) -> float:
    made = {tenant: sum(begin < time <= end for times in found for time in times) for tenant, found in done.items()}
    return made["heavy"] / sum(made.values())


async def _times_of_actions(client: Client, cid: str) -> list[float]:
    """Return when the actions of a conversation had been carried out, in seconds of the epoch."""
    events = await client.events(cid)
    return [
        event.timestamp.timestamp() for event in events if isinstance(event, ToolCallObservation) and event.timestamp
    ]


async def _start(cluster: BenchCluster, *, places: int, **environment: str) -> None:
    # On a machine with others to serve, a busy worker would now and then be presumed dead and begin with all again.
    environment["DECKHANDS_HEARTBEAT_TTL_SECONDS"] = "10"
    await cluster.start_controller(**environment)
    await cluster.start_tools(
        DECKHANDS_TOOLS="benchmarks.fairness:tick",
        DECKHANDS_CONCURRENCY=str(places),
        DECKHANDS_SANDBOX="none",
        **environment,
    )


async def _submit(client: Client, script: Path, *, priority: PriorityName, tenant: str = "") -> str:
    return await client.submit(
        "Do it.",
        agent=AgentSpec(llm=LLMSpec(model=f"scripted/{script}")),
        tools=("tick",),
        limits=Limits(max_iterations=100_000),
        headless=priority == "batch",
        tenancy=Tenancy(priority=priority, tenant=tenant),
    )


async def _until_all_made(cluster: BenchCluster, ids: Sequence[str], steps: int) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while min(await _steps(cluster.client, ids)) < steps:
            await asyncio.sleep(POLL_SECONDS)


async def _steps(client: Client, ids: Sequence[str]) -> list[int]:
    rows = await Conversations(client.store).load_rows(ids)
    return [int(row.fields.get("iterations", "0")) for row in rows]


def _scripts(folder: Path, tool_seconds: float = TOOL_SECONDS) -> tuple[Path, Path]:
    """Write what batch conversations do, and what people's do."""
    found = []
    for name, count in (("batch", STEPS), ("person", 1)):
        calls = [
            {
                "tool_calls": [{"name": "tick", "arguments": {"number": n, "seconds": tool_seconds}}],
                "usage": {"prompt_tokens": 100},
            }
            for n in range(count)
        ]
        end = {"tool_calls": [{"name": "finish", "arguments": {"message": "Done."}}]}
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"description": name, "turns": [*calls, end]}))
        found.append(path)
    return found[0], found[1]


def _percentile(seconds: Sequence[float], part: float) -> Spread:
    return Spread.of([sorted(seconds)[min(int(len(seconds) * part), len(seconds) - 1)]], scale=1_000)
