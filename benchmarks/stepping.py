"""What one step of one conversation costs: milliseconds, and CPU, at the beginning and after hundreds of steps.

The benchmark itself is the tool worker that answers the actions at once: it notes the time, and the CPU clocks of the
processes it watches, whenever an action arrives. A step is what lies between two arrivals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.bare_exchange import BareExchange
from benchmarks.bench import Bench, spread
from benchmarks.cluster import BACKENDS, BenchCluster, model_environment, model_server_arguments, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import cpu_seconds
from benchmarks.noop_tool import NoopTool
from benchmarks.script import write_script
from broker.contract.condenser_specs import DEFAULT_CONDENSER, CondenserSpec, NoOpCondenserSpec
from broker.contract.observations import CmdOutputObservation
from tests.model_server.running_server import RunningModelServer

CPU_TARGET_MS = 1.0
GROWTH_TARGET = 1.2
BASH_TARGET_MS = 15.0
FLOOR_TARGET = 1.6
"""What a step's controller may cost, in bare exchanges of its model call."""
FLOOR_CALLS = 30
WARM_UP_STEPS = 10
EARLY = 20
AT = (10, 100, 300)


@dataclass(slots=True)
class StepWatch:
    """Notes at each arrival of an action."""

    controller: int
    others: Sequence[int] = ()
    seconds: list[float] = field(default_factory=list)
    controller_cpu: list[float] = field(default_factory=list)
    whole_cpu: list[float] = field(default_factory=list)

    def note(self) -> None:
        """Note an arrival."""
        controller = cpu_seconds(self.controller)
        self.seconds.append(time.perf_counter())
        self.controller_cpu.append(controller)
        self.whole_cpu.append(controller + sum(cpu_seconds(pid) for pid in self.others))


def around(arrivals: Sequence[float], step: int, *, reach: int = 5) -> float:
    """Return the median length of the steps from `step - reach` to `step + reach`."""
    inside = arrivals[max(step - reach - 1, 0) : step + reach + 1]
    return statistics.median(after - before for before, after in pairwise(inside))


async def measure(bench: Bench) -> Result:
    """Run conversations with a model that answers at once, from inside the controller, in turns with the peer."""
    late = bench.choose(smoke=40, short=2_000, full=2_000)
    peer_steps = bench.choose(smoke=12, short=311, full=311)
    rounds = bench.choose(smoke=1, short=3, full=5)
    ours: list[StepWatch] = []
    theirs: list[list[float]] = []
    async with _cluster(bench, "stepping") as (cluster, _):
        controller = await cluster.start_controller()
        async with noop_tool(cluster) as tool:
            await run_steps(cluster, tool, StepWatch(controller), WARM_UP_STEPS)
            for round_number in range(rounds):
                watch = StepWatch(controller, (cluster.store.child.pid, os.getpid()))
                ours.append(await run_steps(cluster, tool, watch, late + 20))
                if round_number < bench.choose(smoke=1, short=1, full=3):
                    answer = await bench.peer("steps", count=peer_steps, url=None)
                    theirs += [_arrivals(answer["seconds"])] if answer else []
    figures = [
        Figure(
            f"one step, around step {step}",
            "ms",
            Spread.of((around(watch.seconds, step) for watch in ours), scale=1_000),
            None,
            spread([around(arrivals, step) for arrivals in theirs], scale=1_000),
        )
        for step in _within(AT, peer_steps)
    ]
    early = [around(watch.controller_cpu, EARLY, reach=10) for watch in ours]
    at_end = [around(watch.controller_cpu, late, reach=10) for watch in ours]
    growth = [after / before for before, after in zip(early, at_end, strict=True)]
    figures += [
        Figure("controller CPU of a step, all steps", "ms", Spread.of(map(mean_of, ours), scale=1_000), CPU_TARGET_MS),
        Figure(f"controller CPU around step {EARLY}", "ms", Spread.of(early, scale=1_000)),
        Figure(f"controller CPU around step {late:,}", "ms", Spread.of(at_end, scale=1_000)),
        Figure(f"CPU around step {late:,} ÷ step {EARLY}", "", Spread.of(growth), GROWTH_TARGET),
    ]
    note = (
        "One conversation, no-op tool, a scripted model inside the controller (the SDK: its TestLLM). "
        "Means over all steps contain heartbeats and snapshots; figures around a step are medians of steps."
    )
    return Result("Stepping", figures, note)


async def measure_with_model(bench: Bench) -> Result:
    """The same against the local model server, through each backend: here the history is sent at each step."""
    steps = bench.choose(smoke=12, short=311, full=311)
    rounds = bench.choose(smoke=1, short=1, full=3)
    places = _within((11, 100, 300), steps)
    ours: dict[str, list[StepWatch]] = {name: [] for name in BACKENDS}
    floors: dict[tuple[str, int], list[float]] = {(name, step): [] for name in BACKENDS for step in places}
    theirs: list[list[float]] = []
    async with _cluster(bench, "stepping-http") as (cluster, script):
        turns = write_script(script / "model.json", steps)
        server = RunningModelServer(model_server_arguments(turns, latency_seconds=0, records=steps + 1))
        try:
            for _ in range(rounds):
                for name in BACKENDS:
                    controller = await cluster.start_controller(**model_environment(name, server.url))
                    async with noop_tool(cluster) as tool:
                        watch = StepWatch(controller, (cluster.store.child.pid, os.getpid()))
                        # The server counts the turns in the history, so nothing of it may be condensed.
                        ours[name].append(
                            await run_steps(
                                cluster, tool, watch, steps, is_scripted=False, condenser=NoOpCondenserSpec()
                            )
                        )
                    await cluster.stop_workers()
                    recorded = server.requests()
                    for step in places:
                        async with BareExchange(server.url, recorded[step]) as exchange:
                            floors[name, step].append(await exchange.cpu_seconds(FLOOR_CALLS))
                    server.clear()
                answer = await bench.peer("steps", count=steps, url=server.url)
                theirs += [_arrivals(answer["cpu"])] if answer else []
        finally:
            server.stop()
    figures = []
    for step in places:
        peer = spread([around(arrivals, step) for arrivals in theirs], scale=1_000)
        for name in BACKENDS:
            whole = Spread.of((around(watch.whole_cpu, step) for watch in ours[name]), scale=1_000)
            controller_part = Spread.of((around(watch.controller_cpu, step) for watch in ours[name]), scale=1_000)
            figures += [
                Figure(f"CPU around step {step}, {name}: controller", "ms", controller_part, None, peer),
                Figure(f"CPU around step {step}, {name}: all processes", "ms", whole, None, peer),
                Figure(f"a bare exchange of step {step}, {name}", "ms", Spread.of(floors[name, step], scale=1_000)),
                Figure(
                    f"CPU around step {step}, {name}: controller ÷ bare exchange",
                    "",
                    Spread.of(
                        around(watch.controller_cpu, step) / floor
                        for watch, floor in zip(ours[name], floors[name, step], strict=True)
                    ),
                    FLOOR_TARGET if name != "litellm" else None,
                ),
            ]
    note = (
        "All processes: controller, store and tool worker; the SDK is one process and uses litellm. "
        "The model server is a separate process and in none of the figures. A bare exchange sends the bytes of that "
        "step with aiohttp and reads the reply as JSON, in the same round."
    )
    return Result("CPU with a model client", figures, note)


async def measure_bash(bench: Bench) -> Result:
    """Run `echo hi` in a real workspace, step by step, in turns with the SDK's terminal."""
    steps = bench.choose(smoke=5, short=30, full=100)
    ours: list[float] = []
    theirs: list[float] = []
    async with _cluster(bench, "bash") as (cluster, scripts):
        await cluster.start_controller()
        await cluster.start_tools()
        script = write_script(scripts / "echo.json", steps, command="echo hi")
        for round_number in range(bench.choose(smoke=1, short=3, full=5)):
            workspace = bench.directory.resolve() / f"workspace-{round_number}"
            workspace.mkdir()
            cid = await cluster.submit(model=f"scripted/{script}", pool="bash", workspace=workspace)
            await cluster.until_finished(1)
            times = [
                event.timestamp.timestamp()
                for event in await cluster.client.events(cid)
                if isinstance(event, CmdOutputObservation) and event.timestamp is not None and event.exit_code == 0
            ]
            assert len(times) == steps, f"{len(times)} of {steps} commands succeeded"
            await cluster.close(cid)
            ours.append(around(times, steps // 2, reach=steps))
            answer = await bench.peer("terminal", count=bench.choose(smoke=3, short=10, full=30))
            theirs += [statistics.median(answer["seconds"])] if answer else []
    figure = Figure(
        "a step that runs `echo hi`", "ms", Spread.of(ours, scale=1_000), BASH_TARGET_MS, spread(theirs, scale=1_000)
    )
    note = "A real tool worker and a sandboxed workspace host; the SDK runs its terminal tool in tmux, unsandboxed."
    return Result("A shell command", (figure,), note)


async def run_steps(
    cluster: BenchCluster,
    tool: NoopToolTask,
    watch: StepWatch,
    steps: int,
    *,
    is_scripted: bool = True,
    condenser: CondenserSpec = DEFAULT_CONDENSER,
) -> StepWatch:
    """Run one conversation of so many steps and return what was noted of it."""
    tool.watch = watch
    model = None
    if is_scripted:
        model = f"scripted/{write_script(cluster.directory / f'{steps}.json', steps)}"
    await cluster.submit(model=model, condenser=condenser)
    await cluster.until_finished(1)
    assert len(watch.seconds) == steps, f"{len(watch.seconds)} steps instead of {steps}"
    return watch


@dataclass(slots=True)
class NoopToolTask:
    """The no-op tool inside this process, and who notes its arrivals."""

    watch: StepWatch | None = None

    def note(self) -> None:
        """Pass an arrival on."""
        if self.watch is not None:
            self.watch.note()


@contextlib.asynccontextmanager
async def noop_tool(cluster: BenchCluster) -> AsyncIterator[NoopToolTask]:
    """Answer the actions of a cluster in this process."""
    seat = NoopToolTask()
    task = asyncio.create_task(NoopTool(cluster.client.store, on_action=seat.note).run())
    try:
        yield seat
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _cluster(bench: Bench, name: str) -> AsyncIterator[tuple[BenchCluster, Path]]:
    async with running_cluster(bench.directory / name) as cluster:
        yield cluster, cluster.directory


def _arrivals(lengths: Sequence[float]) -> list[float]:
    """Turn lengths of steps back into arrivals."""
    arrivals = [0.0]
    for length in lengths:
        arrivals.append(arrivals[-1] + length)
    return arrivals


def mean_of(watch: StepWatch) -> float:
    """Return the controller's CPU seconds of a step, on average."""
    return (watch.controller_cpu[-1] - watch.controller_cpu[0]) / (len(watch.controller_cpu) - 1)


def _within(steps: Sequence[int], count: int) -> list[int]:
    return [step for step in steps if step < count]
