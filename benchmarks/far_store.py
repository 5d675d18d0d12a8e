"""How long a step takes when the store is far: real workers behind a proxy that delays every command and every reply.

A step runs `echo hi` in a real workspace, with a model that answers at once. What it takes beyond a step beside the
store, divided by the round trip, is the number of round trips that wait for each other: those on the way, however many
others run beside them. The first step lasts from the user's message until its observation: claim, restore, first
appends, and a workspace.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.cluster import running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.script import write_script
from broker.contract.actions import MessageAction
from broker.contract.observations import CmdOutputObservation
from deckhands.chaos.proxy import StoreProxy

ROUND_TRIPS_MS = (0, 50, 200, 700)
MOST_ROUND_TRIPS = 3
LOCAL_WORK_SECONDS = 0.3
"""What a step may take besides, on a busy machine."""


async def measure(bench: Bench) -> Result:
    """Run a conversation of some commands at each distance."""
    steps = bench.choose(smoke=3, short=10, full=30)
    figures = []
    beside = (0.0, 0.0)
    async with running_cluster(bench.directory / "far") as cluster:
        path = Path(cluster.store.socket)
        proxy = StoreProxy(cluster.store.url, Path(f"{path}.proxy"))
        async with proxy:
            url = f"{cluster.store.url}.proxy"
            await cluster.start_controller(DECKHANDS_URL=url, DECKHANDS_ANY_MODEL=f"{path}.proxy")
            await cluster.start_tools(DECKHANDS_URL=url)
            script = write_script(cluster.directory / "echo.json", steps, command="echo hi")
            for round_trip_ms in ROUND_TRIPS_MS:
                proxy.delay_seconds = round_trip_ms / 2_000
                workspace = bench.directory.resolve() / f"workspace-{round_trip_ms}"
                workspace.mkdir()
                cid = await cluster.submit(model=f"scripted/{script}", pool="bash", workspace=workspace)
                await cluster.until_finished(1)
                events = await cluster.client.events(cid)
                stamped = [(event, event.timestamp.timestamp()) for event in events if event.timestamp is not None]
                asked = next(at for event, at in stamped if isinstance(event, MessageAction))
                times = [at for event, at in stamped if isinstance(event, CmdOutputObservation)]
                seconds = [after - before for before, after in pairwise(times)]
                name = f"one step at a round trip of {round_trip_ms} ms"
                target = MOST_ROUND_TRIPS * round_trip_ms / 1_000 + LOCAL_WORK_SECONDS
                figures.append(Figure(name, "s", Spread.of(seconds), target))
                taken = statistics.median(seconds), times[0] - asked
                if not round_trip_ms:
                    beside = taken
                    continue
                step, first = ((far - near) * 1_000 / round_trip_ms for far, near in zip(taken, beside, strict=True))
                figures += [
                    Figure(f"round trips of a step at {round_trip_ms} ms", "", Spread.of([step]), MOST_ROUND_TRIPS),
                    Figure(f"round trips of the first step at {round_trip_ms} ms", "", Spread.of([first])),
                ]
            proxy.delay_seconds = 0.0
            await cluster.stop_workers()
    note = "Both workers reach the store through the proxy; the shell and the proxy itself are part of a step."
    return Result("A far store", figures, note)
