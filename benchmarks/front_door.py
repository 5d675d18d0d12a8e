"""The ways in: how many runs each carries, what a run costs, and how soon its model is asked.

    python -m benchmarks.front_door                 all parts
    python -m benchmarks.front_door http celery     some
    python -m benchmarks.front_door --no-peer       without DBOS

One store, ingress, controller, server and no-op tool, and all that asks them, share the machine. A run has one step: a
scripted model finishes at once. Parts take turns within a round, each with its floor (the least that such a program can
do) or peer right beside it. DBOS runs as many workflows of one step, on a private PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from celery import Celery

from benchmarks import ingress_backlog, machine
from benchmarks.bench import Bench, Size
from benchmarks.cluster import BenchCluster, free_port, model_environment, running_cluster
from benchmarks.figures import Figure, Result, Spread, table
from benchmarks.front_door_floors import ANSWER_KEY, TASK
from benchmarks.front_door_floors import QUEUE as FLOOR_QUEUE
from benchmarks.gateway import gateway_of
from benchmarks.machine import cpu_seconds
from benchmarks.peer.dbos_peer import Dbos, running_dbos, set_up
from benchmarks.script import write_script
from broker.store import INBOX, keys
from broker.store.connection import decode_fields
from deckhands.ingress.ingress_app import CONCURRENCY, QUEUE

PARTS = ("inbox", "celery", "http", "first_call", "backlog")
PRODUCER = "benchmark"
REQUESTS_AT_ONCE = 64
OFFERED_A_SECOND = 100.0
LIMIT_SECONDS = 300.0
POLL_SECONDS = 0.01
READ_AT_ONCE = 1_000
RUN_NAME = re.compile(rb"run-\d+-end")


Measure = Callable[["Front", int], Awaitable[None]]


@dataclass
class Model:
    """A model server inside this process: it finishes every run, and notes when each has first asked."""

    asked: dict[str, float] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serve OpenAI's protocol, and yield the address."""
        call = {"name": "finish", "arguments": json.dumps({"message": "Done."})}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 1_000, "completion_tokens": 10, "total_tokens": 1_010}
        reply = {"id": "r", "object": "chat.completion", "created": 1, "model": "scripted", "choices": [choice]}
        body = json.dumps(reply | {"usage": usage}).encode()

        async def answer(request: web.Request) -> web.Response:
            now = time.perf_counter()
            for name in RUN_NAME.findall(await request.read())[:1]:
                self.asked.setdefault(name.decode(), now)
            return web.Response(body=body, content_type="application/json")

        site = web.Application(client_max_size=2**24)
        site.add_routes([web.post("/v1/chat/completions", answer)])
        runner, port = web.AppRunner(site, access_log=None), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


@dataclass
class Front:
    """Everything that runs, and what was found so far.

    Attributes:
        pids: of the processes whose CPU is counted, by role.
        http, http_floor: addresses to post runs to.
        model: name of the scripted model that finishes at once.
        found: a value for each round, by figure.
    """

    cluster: BenchCluster
    pids: Mapping[str, int]
    app: Celery
    session: aiohttp.ClientSession
    http: str
    http_floor: str
    model: str
    asks: Model
    found: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _runs: int = 0

    def name_run(self) -> str:
        """Return a name that no other run has."""
        self._runs += 1
        return f"run-{self._runs}-end"

    @contextlib.contextmanager
    def measure(self, part: str, count: int, *roles: str) -> Iterator[None]:
        """Note runs per second, and the CPU seconds of a run in each role."""
        before, began = [cpu_seconds(self.pids[role]) for role in roles], time.perf_counter()
        yield
        self.found[f"{part} rate"].append(count / (time.perf_counter() - began))
        for role, was in zip(roles, before, strict=True):
            self.found[f"{part} {role}"].append((cpu_seconds(self.pids[role]) - was) / count)


async def measure_inbox(front: Front, count: int) -> None:
    """Add entries at once, and read the replies: rates until the last `accepted`, and until the last `settled`."""
    store, stream = front.cluster.client.store, keys.replies_key(PRODUCER)
    newest = await store.call("XREVRANGE", stream, "+", "-", "COUNT", 1)
    last = newest[0][0] if newest else b"0"
    waiting, ended = {"accepted": count, "settled": count}, {}
    with front.measure("inbox", count, "ingress", "controller", "store"):
        began = time.perf_counter()
        for _ in range(count):
            await _add_entry(front, {"task": "Do it.", "model": front.model})
        async with asyncio.timeout(LIMIT_SECONDS):
            while waiting["settled"]:
                for entry, fields in await store.call("XRANGE", stream, b"(" + last, "+", "COUNT", READ_AT_ONCE):
                    last, reply = entry, decode_fields(fields)
                    assert reply["event"] in waiting, reply
                    waiting[reply["event"]] -= 1
                    ended[reply["event"]] = time.perf_counter()
                await asyncio.sleep(POLL_SECONDS)
    front.found["inbox accepted"].append(count / (ended["accepted"] - began))
    front.found["inbox cpu"].append(
        sum(front.found[f"inbox {role}"][-1] for role in ("ingress", "controller", "store"))
    )


async def _add_entry(front: Front, request: dict[str, Any]) -> None:
    fields = ("v", "1", "request", json.dumps(request), "reply_to", PRODUCER)
    await front.cluster.client.store.call("XADD", INBOX, "*", *fields)


async def measure_celery(front: Front, count: int) -> None:
    """Send tasks that do nothing, then as many runs, each until the last result is in the backend."""
    with front.measure("celery floor", count, "plain"):
        await _send_tasks(front.app, TASK, {}, FLOOR_QUEUE, count)
    with front.measure("celery", count, "ingress", "controller", "store"):
        await _send_tasks(front.app, "deckhands.run", {"model": front.model}, QUEUE, count)
    front.found["celery ratio"].append(front.found["celery ingress"][-1] / front.found["celery floor plain"][-1])


async def _send_tasks(app: Celery, name: str, options: dict[str, str], queue: str, count: int) -> None:
    def send() -> set[str]:
        return {app.send_task(name, ["Do it."], options, queue=queue).id for _ in range(count)}

    waiting = await asyncio.to_thread(send)
    async with asyncio.timeout(LIMIT_SECONDS):
        while waiting:
            waiting -= await asyncio.to_thread(_find_ended, app, sorted(waiting))
            await asyncio.sleep(POLL_SECONDS if len(waiting) < count // 10 else 10 * POLL_SECONDS)


def _find_ended(app: Celery, ids: Sequence[str]) -> set[str]:
    """Return the tasks that have succeeded, in one look at all of them.

    Raises:
        AssertionError: one of them has failed.
    """
    found = app.backend.client.mget([app.backend.get_key_for_task(task_id) for task_id in ids])
    states = {
        task_id: app.backend.decode_result(text)["status"] for task_id, text in zip(ids, found, strict=True) if text
    }
    failed = [task_id for task_id, state in states.items() if state == "FAILURE"]
    assert not failed, f"the task {failed[0]} failed"
    return {task_id for task_id, state in states.items() if state == "SUCCESS"}


async def measure_http(front: Front, count: int) -> None:
    """Post to the bare handler, then as many runs to the server, from as many connections."""
    await front.cluster.client.store.call("SET", ANSWER_KEY, await _post_run(front, front.http))
    with front.measure("http floor", count, "bare"):
        await _post_runs(front, front.http_floor, count)
    with front.measure("http", count, "server", "controller", "store"):
        await _post_runs(front, front.http, count)


async def _post_runs(front: Front, url: str, count: int) -> None:
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await _post_run(front, url)

    async with asyncio.TaskGroup() as group:
        for _ in range(REQUESTS_AT_ONCE):
            group.create_task(work())


async def _post_run(front: Front, url: str, task: str = "Do it.", **further: str) -> bytes:
    async with front.session.post(url, json={"task": task} | (further or {"model": front.model})) as answer:
        body = await answer.read()
        assert answer.status == 200, body
        return body


async def measure_first_call(front: Front, count: int) -> None:
    """Offer runs at a steady rate by each way in, and note how long after its start each has asked its model."""

    async def by_inbox(name: str) -> None:
        await _add_entry(front, {"task": name})

    async def by_celery(name: str) -> None:
        await asyncio.to_thread(front.app.send_task, "deckhands.run", [name], queue=QUEUE, ignore_result=True)

    async def by_http(name: str) -> None:
        async with front.session.post(front.http, json={"task": name}) as answer:
            assert answer.status == 200, await answer.read()

    for way, send in (("inbox", by_inbox), ("celery", by_celery), ("http", by_http)):
        started: dict[str, float] = {}
        front.asks.asked.clear()
        began = time.perf_counter()
        async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / OFFERED_A_SECOND - time.perf_counter()))
                name = front.name_run()
                started[name] = time.perf_counter()
                group.create_task(send(name))
            while len(front.asks.asked) < count:
                await asyncio.sleep(POLL_SECONDS)
        ranked = sorted(front.asks.asked[name] - moment for name, moment in started.items())
        front.found[f"first call {way} p50"].append(ranked[len(ranked) // 2])
        front.found[f"first call {way} p99"].append(ranked[int(0.99 * (len(ranked) - 1))])


async def measure_dbos(peer: Dbos, front: Front, count: int) -> None:
    """Enqueue workflows of one step with DBOS, and wait for their results."""
    took = await asyncio.to_thread(peer.run, count)
    front.found["dbos enqueued"].append(count / took["enqueued"])
    front.found["dbos rate"].append(count / took["seconds"])
    front.found["dbos cpu"].append(took["cpu"] / count)


@contextlib.asynccontextmanager
async def running_front(directory: Path, measures: Iterable[Measure], warm_up_runs: int) -> AsyncIterator[Front]:
    """Start everything, and have each measure warm up with a few runs."""
    asks = Model()
    async with contextlib.AsyncExitStack() as left:
        url = await left.enter_async_context(asks.serve())
        cluster = await left.enter_async_context(running_cluster(directory / "front"))
        port, server, key = await left.enter_async_context(gateway_of(cluster))
        floor_port = free_port()
        worker = ("-A", "benchmarks.front_door_floors", "worker", "-P", "threads", "-c", str(CONCURRENCY))
        quiet = ("-l", "WARNING", "--without-gossip", "--without-mingle")
        pids = {
            "server": server,
            "ingress": await cluster.start_ingress(),
            "controller": await cluster.start_controller(**model_environment("openai", url)),
            "tool": await cluster.start_noop_tool(),
            "store": await cluster.store_pid(),
            "bare": await cluster.start_site(floor_port, "benchmarks.front_door_floors", "--port", str(floor_port)),
            "plain": cluster.launch("celery", {}, *worker, *quiet).pid,
        }
        session = await left.enter_async_context(
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}, connector=aiohttp.TCPConnector(limit=0))
        )
        front = Front(
            cluster,
            pids,
            Celery("benchmark", broker=cluster.store.celery_url, backend=cluster.store.celery_url),
            session,
            f"http://127.0.0.1:{port}/runs/wait",
            f"http://127.0.0.1:{floor_port}/runs/wait",
            f"scripted/{write_script(cluster.directory / 'at-once.json', 0)}",
            asks,
        )
        for measure in measures:
            await measure(front, warm_up_runs)
        front.found.clear()
        yield front


MEASURES: Mapping[str, Measure] = {
    "inbox": measure_inbox,
    "celery": measure_celery,
    "http": measure_http,
    "first_call": measure_first_call,
}


def figures_of(found: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Return the figures of the parts that were measured."""

    def spread(name: str, scale: float = 1.0) -> Spread | None:
        return Spread.of(found[name], scale=scale) if name in found else None

    listed: list[tuple[str, str, str, float | None, bool, str]] = [
        ("inbox: accepted and started a second; DBOS: enqueued", "", "inbox accepted", 1_000, True, "dbos enqueued"),
        ("inbox: settled with reply a second; DBOS", "", "inbox rate", 400, True, "dbos rate"),
        ("inbox: ingress CPU of a run", "ms", "inbox ingress", None, False, ""),
        ("inbox: controller CPU of a run", "ms", "inbox controller", None, False, ""),
        ("inbox: store CPU of a run", "ms", "inbox store", None, False, ""),
        ("inbox: CPU of a run, all three; DBOS and its database", "ms", "inbox cpu", None, False, "dbos cpu"),
        ("Celery: runs a second; a task that does nothing", "", "celery rate", 250, True, "celery floor rate"),
        ("Celery: ingress CPU of a run; the same task", "ms", "celery ingress", 3, False, "celery floor plain"),
        ("Celery: ingress CPU of a run ÷ of that task", "", "celery ratio", 3, False, ""),
        ("Celery: controller CPU of a run", "ms", "celery controller", None, False, ""),
        ("Celery: store CPU of a run", "ms", "celery store", None, False, ""),
        ("HTTP: runs a second; a bare handler", "", "http rate", 250, True, "http floor rate"),
        ("HTTP: server CPU of a run; the same handler", "ms", "http server", 4, False, "http floor bare"),
        ("HTTP: controller CPU of a run", "ms", "http controller", None, False, ""),
        ("HTTP: store CPU of a run", "ms", "http store", None, False, ""),
    ]
    for way, shown in (("inbox", "inbox"), ("celery", "Celery"), ("http", "HTTP")):
        listed += [
            (f"{shown}: until the first model call, p50", "ms", f"first call {way} p50", 10, False, ""),
            (f"{shown}: until the first model call, p99", "ms", f"first call {way} p99", 30, False, ""),
        ]
    listed.append(("result behind a backlog, the slowest", "s", "backlog", 1, False, ""))
    figures = []
    for name, unit, ours, target, is_least, peer in listed:
        scale = 1_000.0 if unit == "ms" else 1.0
        if (spread_of_ours := spread(ours, scale)) is not None:
            figures.append(Figure(name, unit, spread_of_ours, target, spread(peer, scale), is_least))
    return figures


async def run(parts: Sequence[str], bench: Bench, rounds: int, peer: Dbos | None) -> Result:
    """Measure parts in turns, and return their figures."""
    count = bench.choose(smoke=5, short=500, full=2_000)
    measures = {name: MEASURES[name] for name in parts if name in MEASURES}
    found: Mapping[str, list[float]] = defaultdict(list)
    if peer is not None:
        measures["dbos"] = partial(measure_dbos, peer)
    if measures:
        async with running_front(bench.directory, measures.values(), bench.choose(smoke=1, short=20, full=20)) as front:
            found = front.found
            for _ in range(rounds):
                for measure in measures.values():
                    await measure(front, count)
    if "backlog" in parts:
        for number in range(rounds):
            delays, _, _ = await ingress_backlog.run_behind(
                ingress_backlog.choose_backlog(bench), bench.directory / f"backlog-{number}"
            )
            found["backlog"].append(max(delays))
    note = f"{rounds} rounds of {count:,} runs. Goals are those of the fast kind of machine (see README), not scaled."
    return Result("Ways in", figures_of(found), note)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_door", description="Measure the ways in.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"which: {', '.join(PARTS)}; or all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_const", const=Size.FULL, dest="size", help="2,000 runs in a round")
    size.add_argument("--smoke", action="store_const", const=Size.SMOKE, dest="size", help="only see that it works")
    parser.add_argument("--rounds", type=int, help="how many; 5 if not given, 1 with --smoke")
    parser.add_argument("--no-peer", action="store_true", help="leave DBOS out")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}")
    rounds = arguments.rounds or (1 if arguments.size is Size.SMOKE else 5)
    print(f"ten million additions: {machine.addition_seconds():.2f} s; load at the start: {machine.load():.2f}")
    with contextlib.ExitStack() as left:
        directory = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="front-")))
        problem = "left out" if arguments.no_peer else set_up()
        peer = None if problem else left.enter_context(running_dbos(directory / "dbos.log"))
        print(f"DBOS {peer.version}" if peer else f"DBOS: not measured ({problem})")
        result = asyncio.run(run(parts, Bench(directory, arguments.size or Size.SHORT, None), rounds, peer))
    print(f"\n{table(result, peer_name='floor or peer', target_name='goal on the fast kind')}")
    print(f"\nten million additions: {machine.addition_seconds():.2f} s; load at the end: {machine.load():.2f}")


if __name__ == "__main__":
    main()
