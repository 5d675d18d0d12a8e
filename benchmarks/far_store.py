"""How long a step takes when the store is far: real workers behind a proxy that delays every command and every reply.

A step runs `echo hi` in a real workspace, with a model that answers at once. What it takes beyond a step beside the
store, divided by the round trip, is the number of round trips that wait for each other.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.cluster import running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.script import write_script
from broker.contract.observations import CmdOutputObservation
from tests.faults.proxy import SlowProxy

ROUND_TRIPS_MS = (0, 50, 200, 700)
MOST_ROUND_TRIPS = 3
LOCAL_WORK_SECONDS = 0.3
"""What a step may take besides, on a busy machine."""


async def measure(bench: Bench) -> Result:
    """Run a conversation of some commands at each distance."""
    steps = bench.choose(smoke=3, short=10, full=30)
    figures = []
    async with running_cluster(bench.directory / "far") as cluster:
        path = Path(cluster.store.socket)
        proxy = SlowProxy(Path(f"{path}.proxy"), path)
        async with proxy.running():
            url = f"{cluster.store.url}.proxy"
            await cluster.start_controller(DECKHANDS_URL=url)
            await cluster.start_tools(DECKHANDS_URL=url)
            script = write_script(cluster.directory / "echo.json", steps, command="echo hi")
            for round_trip_ms in ROUND_TRIPS_MS:
                proxy.delay_seconds = round_trip_ms / 2_000
                workspace = bench.directory.resolve() / f"workspace-{round_trip_ms}"
                workspace.mkdir()
                cid = await cluster.submit(model=f"scripted/{script}", pool="bash", workspace=workspace)
                await cluster.until_finished(1)
                times = [
                    event.timestamp.timestamp()
                    for event in await cluster.client.events(cid)
                    if isinstance(event, CmdOutputObservation) and event.timestamp is not None
                ]
                seconds = [after - before for before, after in pairwise(times)]
                name = f"one step at a round trip of {round_trip_ms} ms"
                target = MOST_ROUND_TRIPS * round_trip_ms / 1_000 + LOCAL_WORK_SECONDS
                figures.append(Figure(name, "s", Spread.of(seconds), target))
                if round_trip_ms:
                    trips = statistics.median(seconds) / (round_trip_ms / 1_000)
                    figures.append(Figure(f"round trips of a step at {round_trip_ms} ms", "", Spread.of([trips])))
            proxy.delay_seconds = 0.0
            await cluster.stop_workers()
    note = "Both workers reach the store through the proxy; the shell and the proxy itself are part of a step."
    return Result("A far store", figures, note)
