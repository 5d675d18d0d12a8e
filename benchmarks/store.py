"""A store on 1, 2 and 3 primaries of a cluster: appends and steps a second, and the CPU of each part.

    python -m benchmarks.store [--conversations 240] [--steps 10] [--write-as NAME]
    python -m benchmarks.store moves [--conversations 300] [--node-timeout 2000] [--kills 5]
    python -m benchmarks.store names
    python -m benchmarks.store clients [--rounds 5]

The first form runs the same work on clusters without replicas. *Appends*: this process appends observations of 1.4 KB
to the logs of all shards, 64 at once. *Steps*: a controller with a scripted model inside it and a no-op tool, both
separate processes. The machine's cores are shared by all of them, so rates say nothing about more machines; the CPU of
a step on each primary does, and the share of the busiest one. The CPU of the heartbeats is measured before with idle
workers, and subtracted. Memory is the growth of the primaries' `used_memory`.

*moves*: conversations whose model takes four seconds a step work on three primaries with replicas. A fourth primary
joins and gets a quarter of the shards, slot by slot; then it gives them back and leaves; then a primary is killed. A
pause is the longest time between two events of a conversation as a reader of its log sees them, without the four
seconds, and the model calls end at different moments; timestamps of events would not show it, because the store's time
stands still in an outage. *Nothing happens* shows what the busy machine alone does. A pause after a kill has two
parts: the cluster serves not all of its slots, which plain connections watch beside ours, and then our processes find
them and continue. `--kills N` kills a primary so many times and does nothing else.

*names*: what a model call costs the primary that has the budgets and the quotas, when all are in one slot, as in a
store that was created with one shard: a reservation and a settlement in each, for 1,000 conversations of 100 tenants.
And what is global, in the slot of shard 0 however many shards there are: the check and the count of an API key, which
each request over HTTP needs, an entry of the record of operations, and what an evaluation reads and reports.

*clients*: calls of one process to a cluster of three primaries, in turns by our own connections, by redis-py's client
for clusters, and by valkey-glide if it can be installed (into `build/glide-venv`): 64 tasks add entries of 200 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.append import observation
from benchmarks.cluster import ROOT, BenchCluster, read_used_memory
from benchmarks.eval_figures import Line, percentile, show
from benchmarks.machine import addition_seconds, cpu_seconds
from benchmarks.script import write_script
from broker.contract.events import ConversationCreated
from broker.contract.fencing import Ownership
from broker.limits.governor import CallGranted, CallOutcome, Governor
from broker.limits.ledger import Ledger, list_accounts
from broker.limits.quotas import QuotaTable
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.runtime.ids import new_conversation_id
from broker.store.connection import MultiplexedConnection
from broker.store.embedded import EmbeddedValkey
from broker.store.routing import SLOTS, find_slot
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.evaluation.attempts.catalog import Catalog, EvaluationInfo
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.steering import EvaluationSteering
from deckhands.server.auth.api_keys import ApiKeys, Scope
from deckhands.server.auth.operations import Operations
from tests.broker_parts import enter
from tests.clusters import NODE_TIMEOUT_MS, Cluster, SlotGroup
from tests.polling import until
from tests.sentinels import PASSWORD, Server
from tests.stores import server_program

SIZES = (1, 2, 3)
SHARDS = 64
APPENDERS = 64
APPENDS_OF_EACH = 100
LATENCY_SECONDS = 4.0
WAVES = 10
SLOW_STEPS = 6
WAIT_SECONDS = 600.0
SHARE_LIMIT = 1.1
PAUSE_SECONDS = 2.0
IDLE_SECONDS = 10.0
PROBE_SECONDS, PROBE_PAUSE_SECONDS = 1.0, 0.05
TENANTS = 100
CALLERS = 1_000
NAMED_CALLS = 6_400
API_KEYS = 100
EVALUATIONS = 20
CLIENT_CALLS = 1_000
CLIENT_LIMIT_SECONDS = 300.0
GLIDE = ROOT / "build" / "glide-venv" / "bin" / "python"


@contextlib.asynccontextmanager
async def workers_on(nodes: Cluster, folder: Path) -> AsyncIterator[tuple[BenchCluster, dict[str, str]]]:
    """Open the store of a cluster; yield it, and the environment of its workers. Celery's broker is another server."""
    queue = EmbeddedValkey(folder / "queue")
    await queue.start()
    client = Client(await open_store(nodes.url, shards=SHARDS, patience_seconds=None))
    cluster = BenchCluster(folder, queue, client)
    try:
        yield cluster, {"DECKHANDS_URL": nodes.url, "LLM_SCRIPTS_DIR": "/"}
    finally:
        await cluster.stop_workers()
        await client.aclose()
        await queue.stop()


class Watch:
    """The CPU of processes, and the time, from its creation on."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._before = {name: cpu_seconds(pid) for name, pid in pids.items()}

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the seconds, and the CPU seconds of each process."""
        used = {name: cpu_seconds(pid) - self._before[name] for name, pid in self._pids.items()}
        return time.monotonic() - self._began, used


async def append_events(client: Client) -> int:
    """Append to logs in all shards, and return how many events there were."""
    log = EventLog(client.store)
    events = [observation(cause) for cause in range(2, APPENDS_OF_EACH + 2)]

    async def append(conversation_id: str) -> None:
        await log.create(ConversationCreated(conversation_id=conversation_id))
        for event in events:
            await log.append_observation(conversation_id, event, worker_id="bench")

    await asyncio.gather(*(append(new_conversation_id()) for _ in range(APPENDERS)))
    return APPENDERS * (APPENDS_OF_EACH + 1)


async def until_settled(client: Client, ids: Sequence[str]) -> int:
    """Wait until all conversations have settled, and return how many have failed."""
    async with asyncio.timeout(WAIT_SECONDS):
        for conversation_id in ids:
            await client.wait_until_settled(conversation_id)
    rows = await Conversations(client.store).load_rows(list(ids))
    return sum(row.state != "finished" for row in rows)


async def submit(cluster: BenchCluster, model: str, count: int) -> list[str]:
    """Start conversations whose actions go to the no-op tool."""
    return list(await asyncio.gather(*(cluster.submit(model=model) for _ in range(count))))


async def measure_size(folder: Path, primaries: int, conversations: int, steps: int) -> list[Line]:
    """Measure a cluster of so many primaries."""
    folder.mkdir()
    nodes = Cluster(server_program("valkey"), folder, primaries=primaries, replicas=0)
    async with nodes.running(), workers_on(nodes, folder) as (cluster, environment):
        client = cluster.client
        pids = {f"primary {at}": node.process.pid for at, node in enumerate(nodes.nodes) if node.process is not None}
        watch = Watch(**pids)
        appended = await append_events(client)
        seconds, used = watch.read()
        lines = [
            Line(f"{primaries} primaries: appends", round(appended / seconds), "a second"),
            *_share_lines(f"{primaries} primaries: an append", used, appended),
        ]
        controller = await cluster.start_controller(**environment)
        tool = await cluster.start_process("benchmarks.noop_tool", environment)
        model = f"scripted/{write_script(folder / 'script.json', steps)}"
        failed = await until_settled(
            client, await submit(cluster, model, SHARDS)
        )  # everything is imported and connected
        watch = Watch(controller=controller, **pids)
        await asyncio.sleep(IDLE_SECONDS)
        idle_seconds, idle = watch.read()
        before = await read_used_memory(client)
        watch = Watch(controller=controller, tool=tool, **pids)
        ids = await submit(cluster, model, conversations)
        failed += await until_settled(client, ids)
        assert not failed, failed
        seconds, used = watch.read()
        count = conversations * steps
        each = (await read_used_memory(client) - before) / conversations
        workers = {name: used.pop(name) for name in ("controller", "tool")}
        beats = idle.pop("controller") / idle_seconds
        beyond = {name: used[name] - idle[name] * seconds / idle_seconds for name in used}
        lines += [
            Line(f"{primaries} primaries: steps", round(count / seconds), "a second"),
            *_share_lines(f"{primaries} primaries: a step", beyond, count),
            *[
                Line(f"{primaries} primaries: a step, {name}", round(1e3 * seconds / count, 3), "ms of CPU")
                for name, seconds in workers.items()
            ],
            Line(f"{primaries} primaries: a conversation of {steps} steps", round(each / 1024, 1), "KiB of memory"),
            Line(
                f"{primaries} primaries: idle workers, all primaries",
                round(100 * sum(idle.values()) / idle_seconds, 2),
                "% of a core",
            ),
            Line(f"{primaries} primaries: an idle controller", round(100 * beats, 2), "% of a core"),
        ]
        return lines


def _share_lines(name: str, used: dict[str, float], count: int) -> list[Line]:
    total, busiest = sum(used.values()), max(used.values())
    ratio = busiest / total * len(used)
    return [
        Line(f"{name}, all primaries", round(1e6 * total / count, 1), "µs of CPU"),
        Line(f"{name}, the busiest primary", round(1e6 * busiest / count, 1), "µs of CPU"),
        Line(f"{name}, share of the busiest times primaries", round(ratio, 3), "", SHARE_LIMIT),
    ]


class SlotWatch:
    """When a cluster does not serve all slots: asked every 50 ms by plain connections, beside our own."""

    def __init__(self, nodes: Cluster, store: Store) -> None:
        found = {find_slot(names.root) * len(SIZES) // SLOTS: names.root for names in store.all_shards}
        self._commands = [("EXISTS", root) for root in found.values()]  # one for each primary
        self._links = [MultiplexedConnection(node.url, reply_timeout_seconds=PROBE_SECONDS) for node in nodes.nodes]
        self._served = time.monotonic()
        self._outages: list[tuple[float, float]] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[SlotWatch]:
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            for link in self._links:
                await link.aclose()

    @property
    def outage_seconds(self) -> float:
        """How long some slot was not served, from the last time that all were to the first time that all are."""
        return sum(end - start for start, end in self._outages)

    def count_outage(self, start: float, end: float) -> float:
        """Return the part of a time in which some slot was not served."""
        return sum(max(0.0, min(end, last) - max(start, first)) for first, last in self._outages)

    async def _watch(self) -> None:
        while True:
            asked = (link.exchange(self._commands) for link in self._links)
            replies = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, list)]
            now = time.monotonic()
            if all(any(isinstance(reply[at], int) for reply in replies) for at in range(len(self._commands))):
                if self._outages and self._outages[-1][0] == self._served:
                    self._outages[-1] = (self._served, now)
                self._served = now
            elif not self._outages or self._outages[-1][0] != self._served:
                self._outages.append((self._served, now))
            else:
                self._outages[-1] = (self._served, now)
            await asyncio.sleep(PROBE_PAUSE_SECONDS)


async def measure_moves(
    folder: Path, program: str, conversations: int, node_timeout_ms: int, kills: int = 0
) -> list[Line]:
    """Scale a cluster from 3 to 4 primaries and back, and kill one, while conversations work.

    Args:
        kills: how many primaries to kill instead, one after the other.
    """
    program = server_program("redis" if "redis" in program else "valkey")
    nodes = Cluster(program, folder, node_timeout_ms=node_timeout_ms)
    async with nodes.running(), workers_on(nodes, folder) as (cluster, environment):
        await cluster.start_controller(DECKHANDS_MAX_CONVERSATIONS="1000", **environment)
        await cluster.start_process("benchmarks.noop_tool", environment)
        slots = [find_slot(names.root) for names in cluster.client.store.all_shards]
        joined: list[Server] = []
        promotions: list[float] = []

        async def scale_out() -> None:
            joined.append(await nodes.add_node())
            for slot in slots[::4]:
                await nodes.move_slot(slot, joined[0])

        async def scale_in() -> None:
            for slot in range(SLOTS):
                if slot in slots and await nodes.find_node(slot) is joined[0]:
                    await nodes.move_slot(slot, nodes.nodes[slot % 3])
            await nodes.remove_node(joined[0])

        async def kill() -> None:
            old = await nodes.find_node(slots[0])
            old.kill()
            killed = time.monotonic()
            await until(partial(nodes.is_served, slots[0], other_than=old), limit=60, what="promotion")
            promotions.append(time.monotonic() - killed)
            await nodes.until_promoted(slots[0], other_than=old)
            old.start()

        lines = []
        works: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("nothing happens", lambda: asyncio.sleep(IDLE_SECONDS)),
            ("3 to 4 primaries", scale_out),
            ("4 to 3 primaries", scale_in),
            ("a primary is killed", kill),
        ]
        for name, work in [(f"kill {number}", kill) for number in range(1, kills + 1)] or works:
            async with SlotWatch(nodes, cluster.client.store).watching() as watch:
                found, pauses = await _run_beside(cluster, folder, name, work, conversations)
            if work is kill:
                ours = [pause - watch.count_outage(end - pause, end) for pause, end in pauses]
                found += [
                    Line(f"{name}: the cluster promotes a replica after", round(promotions[-1], 2), "s"),
                    Line(f"{name}: the cluster does not serve all slots for", round(watch.outage_seconds, 2), "s"),
                    Line(f"{name}: rest of a pause, while it serves all, p99", round(percentile(ours, 0.99), 2), "s"),
                ]
                await SlotGroup(nodes, slots[0]).until_whole()
            print(*found, sep="\n", flush=True)
            lines += found
        return [*lines, Line("node timeout", node_timeout_ms, "ms")]


async def _run_beside(
    cluster: BenchCluster, folder: Path, name: str, work: Callable[[], Awaitable[None]], conversations: int
) -> tuple[list[Line], list[tuple[float, float]]]:
    """Let conversations work until something else is done, and a little longer.

    Returns:
        What was found, and the longest pause of each conversation with the time of its end.
    """
    client = cluster.client
    script = json.loads(write_script(folder / "slow.json", SLOW_STEPS).read_text()) | {
        "latency_seconds": LATENCY_SECONDS
    }
    (folder / "slow.json").write_text(json.dumps(script))
    ids: list[str] = []
    for wave in range(WAVES):  # so that the model calls of some conversations end at any moment
        ids += await submit(cluster, f"scripted/{folder / 'slow.json'}", conversations // WAVES)
        await asyncio.sleep(LATENCY_SECONDS / WAVES if wave < WAVES - 1 else 0)
    arrivals: dict[str, list[float]] = {one: [] for one in ids}
    watching = [asyncio.create_task(_watch(client, one, arrivals[one])) for one in ids]
    await cluster.until_stepping(ids[-1])
    began = time.monotonic()
    await work()
    took = time.monotonic() - began
    failed = await until_settled(client, ids)
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    longest, violations = [], 0
    for conversation_id in ids:
        events = await client.events(conversation_id)
        violations += len(find_violations(events, conversation_id=conversation_id, is_strict=True))
        gaps = [
            (max(0.0, after - before - LATENCY_SECONDS), after) for before, after in pairwise(arrivals[conversation_id])
        ]
        longest.append(max(gaps, default=(0.0, 0.0)))
    pauses = [pause for pause, _ in longest]
    return [
        Line(f"{name}: took", round(took, 1), "s"),
        Line(f"{name}: conversations that failed, of {len(ids)}", failed, "", 0),
        Line(f"{name}: violations of the log's invariants", violations, "", 0),
        Line(f"{name}: longest pause of a conversation, median", round(percentile(pauses, 0.5), 2), "s"),
        Line(f"{name}: longest pause of a conversation, p99", round(percentile(pauses, 0.99), 2), "s", PAUSE_SECONDS),
    ], longest


async def _watch(client: Client, conversation_id: str, arrivals: list[float]) -> None:
    async for _ in client.tail(conversation_id, is_endless=True):
        arrivals.append(time.monotonic())  # noqa: PERF401  (it is cancelled at the end)


async def measure_names(folder: Path) -> list[Line]:
    """Measure the calls to keys that have one slot: budgets, quotas and global ones."""
    nodes = Cluster(server_program("valkey"), folder, primaries=1, replicas=0)
    async with nodes.running():
        process = nodes.nodes[0].process
        assert process is not None
        store = await open_store(nodes.url, shards=1, patience_seconds=None)
        ledger = Ledger(store)
        governor = Governor(store, QuotaTable.parse('[[quota]]\nmodel = "m"\nrequests_per_minute = 1_000_000_000'))
        pool = governor.find_pool("m", "")
        assert pool is not None
        await governor.publish()
        await enter(store, "worker")

        async def call_ledger(number: int) -> None:
            cid, tenant = f"conversation-{number}", f"tenant-{number % TENANTS}"
            owner, accounts = Ownership(cid, "worker", "1"), list_accounts(cid, tenant=tenant)
            assert await ledger.reserve(owner, accounts, worst_usd=0.1, total_usd=0.0) is None
            await ledger.settle(owner, accounts, total_usd=0.01)

        async def call_governor(number: int) -> None:
            about = (pool, f"conversation-{number}", "worker")
            asked = await governor.reserve(*about, input_tokens=9, output_tokens=9, tenant=f"t-{number % TENANTS}")
            assert isinstance(asked, CallGranted)
            await governor.settle(*about, CallOutcome.OK, input_tokens=9, output_tokens=9)

        keys = ApiKeys(store)
        made = [
            await keys.add("bench", tenant="t", scopes=[Scope.READ], requests_per_minute=1_000_000)
            for _ in range(API_KEYS)
        ]
        catalog, operations = Catalog(store), Operations(store)
        names = [f"evaluation-{number}" for number in range(EVALUATIONS)]
        for name in names:
            await catalog.begin(name, EvaluationInfo(dataset="bench", models=("m",), instances=1_000))

        async def admit(number: int) -> None:
            await keys.admit(made[number % API_KEYS][1])

        async def record(number: int) -> None:
            await operations.record("key:bench", "t", "stop", f"conversation-{number}", "it is stopped by a benchmark")

        async def find_evaluation(number: int) -> None:
            assert await catalog.find(names[number % EVALUATIONS]) is not None

        async def drive(number: int) -> None:
            name = names[number % EVALUATIONS]
            steering = EvaluationSteering(store, name)
            await steering.read()
            await steering.publish_status({"state": "running", "total": 1_000, "ended": number, "bound": "x" * 400})
            row = AttemptRow(instance=f"i-{number}", model="m", attempt=1, outcome="resolved", evidence="x" * 1_000)
            await catalog.put(name, [row])

        lines = []
        calls: dict[str, Callable[[int], Awaitable[None]]] = {
            "model calls, budgets": call_ledger,
            "model calls, a quota": call_governor,
            "HTTP requests, API key": admit,
            "operations, their record": record,
            "look-ups of an evaluation": find_evaluation,
            "evaluations, a report a second": drive,
        }
        for name, call in calls.items():
            await asyncio.gather(*(call(number) for number in range(APPENDERS)))
            watch = Watch(primary=process.pid)
            for first in range(0, NAMED_CALLS, APPENDERS):
                await asyncio.gather(*(call((first + at) % CALLERS) for at in range(APPENDERS)))
            _, used = watch.read()
            each = used["primary"] / NAMED_CALLS
            lines += [
                Line(name, round(1e6 * each), "µs of CPU of the primary for each"),
                Line(f"{name}: one core of a primary serves", round(1 / each), "a second"),
            ]
        await store.aclose()
        return lines


async def measure_clients(folder: Path, rounds: int) -> list[Line]:
    """Let clients make the same calls in turns, each in a separate process."""
    drivers = {"deckhands": Path(sys.executable), "redis-py": Path(sys.executable), "valkey-glide": GLIDE}
    if why := _install_glide():
        del drivers["valkey-glide"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in drivers}
    nodes = Cluster(server_program("valkey"), folder, replicas=0)
    async with nodes.running():
        for at in range(rounds):
            turn = list(drivers.items())
            for name, python in turn[at % len(turn) :] + turn[: at % len(turn)]:
                found[name].append(await _drive_client(python, name, nodes))
    lines = []
    for name, runs in found.items():
        each = [1e6 * run["cpu"] / run["calls"] for run in runs]
        rates = [run["calls"] / run["seconds"] for run in runs]
        shown = f"{name} {runs[0]['version']}"
        lines += [
            Line(f"{shown}: calls", round(percentile(rates, 0.5)), "a second"),
            Line(f"{shown}: a call, median", round(percentile(each, 0.5), 1), "µs of CPU of the client"),
            Line(f"{shown}: a call, least and most", f"{min(each):.1f} to {max(each):.1f}", "µs"),
        ]
        pairs = [run["cpu"] / ours["cpu"] for run, ours in zip(runs, found["deckhands"], strict=True)]
        if name != "deckhands":
            lines.append(Line(f"{shown}: CPU of a call ÷ ours, in pairs", round(percentile(pairs, 0.5), 2), "median"))
    return [*lines, Line("valkey-glide", why)] if why else lines


def _install_glide() -> str:
    """Install valkey-glide if need be, and return why that is not possible; empty: it is there."""
    try:
        subprocess.run([ROOT / "benchmarks" / "peer" / "glide.sh"], check=True, timeout=CLIENT_LIMIT_SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        return f"left out, it cannot be installed ({error})"
    return ""


async def _drive_client(python: Path, name: str, nodes: Cluster) -> dict[str, Any]:
    driver = ROOT / "benchmarks" / "peer" / "cluster_driver.py"
    arguments = (name, f"127.0.0.1:{nodes.nodes[0].port}", PASSWORD, str(APPENDERS), str(CLIENT_CALLS))
    process = await asyncio.create_subprocess_exec(
        *(python, driver, *arguments), env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(CLIENT_LIMIT_SECONDS):
        written, _ = await process.communicate()
    assert process.returncode == 0, name
    result: dict[str, Any] = json.loads(written.splitlines()[-1])  # a client may have something to say before
    return result


async def measure(directory: Path, arguments: argparse.Namespace) -> None:
    """Run once and print what was found."""
    if arguments.part == "moves":
        lines = await measure_moves(
            directory, arguments.program, arguments.conversations or 300, arguments.node_timeout, arguments.kills
        )
        show(arguments.write_as or "store_moves", "Slots that move while conversations work", lines)
        return
    if arguments.part == "names":
        show(arguments.write_as or "store_names", "What has one slot, on one primary", await measure_names(directory))
        return
    if arguments.part == "clients":
        lines = await measure_clients(directory, arguments.rounds)
        show(arguments.write_as or "store_clients", f"{APPENDERS} tasks call a cluster of 3 primaries", lines)
        return
    lines = [Line("ten million additions", round(addition_seconds(), 2), "s")]
    for primaries in SIZES:
        count = arguments.conversations or 240
        lines += await measure_size(directory / str(primaries), primaries, count, arguments.steps)
    show(arguments.write_as or "store", f"A store on {', '.join(map(str, SIZES))} primaries, {SHARDS} shards", lines)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("sizes", "moves", "names", "clients"), default="sizes")
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--node-timeout", type=int, default=NODE_TIMEOUT_MS, help="of the cluster, in ms, for moves")
    parser.add_argument("--program", default="valkey-server", help="valkey-server or redis-server")
    parser.add_argument("--kills", type=int, default=0, help="kill so many primaries and do nothing else, for moves")
    parser.add_argument("--rounds", type=int, default=5, help="of clients")
    parser.add_argument("--write-as", metavar="NAME", help="the name of the file written")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        asyncio.run(measure(Path(folder), parser.parse_args()))


if __name__ == "__main__":
    main()
