"""Where the CPU of a step goes: the controller's functions under cProfile, and how many of them a step enters.

    python -m benchmarks.step_profile [--backend scripted|anthropic|openai|litellm] [--steps 300] [--top 40]
    python -m benchmarks.step_profile --backend runs     # short runs from the inbox instead: all that a run costs

The profiler makes short functions look longer than they are, so use the shares to find what to change, and `stepping`
and `model` for what it has brought. A function counts as entered by each step if it is called as often as there were
steps.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.cluster import BACKENDS, BenchCluster, model_environment, model_server_arguments, running_cluster
from benchmarks.script import write_script
from benchmarks.stepping import StepWatch, noop_tool, run_steps
from broker.store import INBOX
from tests.model_server.running_server import RunningModelServer

RUNS = "runs"
WRITE_TO = "BENCH_PROFILE"
POLL_SECONDS = 0.01
ROOT = f"{Path(__file__).parents[1]}/"
OURS = ("broker", "controller_worker", "tool_worker", "deckhands")
MOSTLY = 0.9
"""How often per step a function is called that counts as entered by each step; the first and the last step differ."""


def serve() -> None:
    """Run a controller worker whose loop is profiled as long as a file `on` exists, and write the profile after it."""
    from broker.celery import run_worker

    path = Path(os.environ[WRITE_TO])
    profile = cProfile.Profile(time.thread_time)
    make_loop = asyncio.new_event_loop

    def poll(loop: asyncio.AbstractEventLoop, *, was_on: bool = False) -> None:
        is_on = path.with_suffix(".on").exists()
        if is_on and not was_on:
            profile.enable()
        elif was_on and not is_on:
            profile.disable()
            profile.dump_stats(path)
        loop.call_later(POLL_SECONDS, lambda: poll(loop, was_on=is_on))

    def make_profiled_loop() -> asyncio.AbstractEventLoop:
        loop = make_loop()
        loop.call_soon(poll, loop)
        return loop

    asyncio.new_event_loop = make_profiled_loop
    run_worker("controller_worker.app", "controller")


async def measure(backend: str, steps: int) -> pstats.Stats:
    """Return the profile of so many steps, or runs of one step."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "profile"
        async with running_cluster(Path(folder) / "c") as cluster:
            script = write_script(cluster.directory / "model.json", steps)
            server = RunningModelServer(model_server_arguments(script, latency_seconds=0))
            try:
                environment = model_environment(backend, server.url) if backend in BACKENDS else {}
                environment |= {WRITE_TO: str(path)}
                controller = await cluster.start_controller(module="benchmarks.step_profile", **environment)
                is_scripted = backend not in BACKENDS
                if backend == RUNS:
                    await cluster.start_ingress()
                async with noop_tool(cluster) as tool:

                    async def work() -> None:
                        if backend == RUNS:
                            await run_short(cluster, steps)
                        else:
                            await run_steps(cluster, tool, StepWatch(controller), steps, is_scripted=is_scripted)

                    await work()
                    path.with_suffix(".on").touch()
                    await asyncio.sleep(5 * POLL_SECONDS)
                    await work()
                    path.with_suffix(".on").unlink()
                    while not path.exists():
                        await asyncio.sleep(POLL_SECONDS)
                    await asyncio.sleep(1)
            finally:
                server.stop()
        return pstats.Stats(str(path))


async def run_short(cluster: BenchCluster, count: int) -> None:
    """Have so many runs of one step taken from the inbox, as `front_door` does."""
    store, model = cluster.client.store, f"scripted/{write_script(cluster.directory / 'at-once.json', 0)}"
    for _ in range(count):
        request = json.dumps({"task": "Do it.", "model": model})
        await store.call("XADD", INBOX, "*", "v", "1", "request", request, "reply_to", "profile")
    await cluster.until_finished(count)


def report(stats: pstats.Stats, steps: int, top: int) -> None:
    """Print the layers and functions with the largest shares, and how many functions and files a step enters."""
    rows = []
    for (file, line, name), (_, calls, own, cumulative, _) in stats.stats.items():  # type: ignore[attr-defined]
        rows.append((own, cumulative, calls / steps, _shorten(file), line, name))
    rows.sort(reverse=True)
    whole = sum(row[0] for row in rows if "epoll" not in row[5])
    entered = [row for row in rows if row[2] >= MOSTLY]
    ours = [row for row in entered if row[3].startswith(OURS)]
    python = [row for row in entered if row[3] != "~"]
    print(f"{whole / steps * 1_000:.3f} ms of a step under the profiler, {sum(r[2] for r in rows):.0f} calls")
    print(f"entered by each step: {len(python)} functions of {len({r[3] for r in python})} files; of them ours:")
    print(f"{len(ours)} functions of {len({row[3] for row in ours})} files, {sum(r[2] for r in ours):.0f} calls")
    layers: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for own, _, calls, file, _, name in rows:
        if "epoll" not in name:
            layer = layers[_layer(file)]
            layer[0] += own
            layer[1] += calls
    print("\n| layer | share of CPU | calls per step |\n|---|---|---|")
    for name, (own, calls) in sorted(layers.items(), key=lambda item: -item[1][0])[: top // 2]:
        print(f"| {name} | {own / whole:.1%} | {calls:.1f} |")
    print("\n| function | own share | with what it calls | calls per step |\n|---|---|---|---|")
    for own, cumulative, calls, file, line, name in rows[:top]:
        if "epoll" not in name:
            print(f"| {file}:{line} {name} | {own / whole:.1%} | {cumulative / whole:.1%} | {calls:.1f} |")
    print("\n| by all that it calls | | | |\n|---|---|---|---|")
    for own, cumulative, calls, file, line, name in sorted(rows, key=lambda row: -row[1])[: 2 * top]:
        print(f"| {file}:{line} {name} | {own / whole:.1%} | {cumulative / whole:.1%} | {calls:.1f} |")


def _shorten(file: str) -> str:
    if "site-packages/" in file:
        return file.rpartition("site-packages/")[2]
    if "/lib/python" in file:
        return "std/" + file.rpartition("/lib/python")[2].partition("/")[2]
    return file.removeprefix(ROOT)


def _layer(file: str) -> str:
    parts = file.split("/")
    return "/".join(parts[:2]) if parts[0] in (*OURS, "std") else parts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("scripted", RUNS, *BACKENDS), default="scripted")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--top", type=int, default=40)
    arguments = parser.parse_args()
    report(asyncio.run(measure(arguments.backend, arguments.steps)), arguments.steps, arguments.top)


if __name__ == "__main__":
    if WRITE_TO in os.environ:
        serve()
    else:
        main()
