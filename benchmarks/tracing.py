"""What traces cost the controller: the same conversation without and with them, in turns, and the calls when off."""

from __future__ import annotations

import os
import statistics
import time

from benchmarks.bench import Bench
from benchmarks.cluster import running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.stepping import StepWatch, mean_of, noop_tool, run_steps
from broker.runtime.tracing import Tracing
from controller_worker.model.call_spans import add_traceparent
from tests.otlp_receiver import receiving

WARM_UP_STEPS = 50
OFF_TARGET_PERCENT = 1.0
ON_TARGET_PERCENT = 10.0
OFF_CALLS = 20_000


async def measure(bench: Bench) -> Result:
    """Run a conversation on a cluster that traces and on one that does not, in turns, and compare their CPU."""
    steps = bench.choose(smoke=12, short=500, full=1_000)
    rounds = bench.choose(smoke=1, short=7, full=15)
    found: dict[bool, list[float]] = {False: [], True: []}
    with receiving() as receiver:
        async with running_cluster(bench.directory / "off") as off, running_cluster(bench.directory / "on") as on:
            clusters = {False: off, True: on}
            controllers = {
                False: await off.start_controller(),
                True: await on.start_controller(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url),
            }
            async with noop_tool(off) as silent, noop_tool(on) as traced:
                seats = {False: silent, True: traced}
                for is_on in (False, True):
                    await run_steps(clusters[is_on], seats[is_on], StepWatch(controllers[is_on]), WARM_UP_STEPS)
                for number in range(rounds):
                    for is_on in (True, False) if number % 2 else (False, True):
                        watch = StepWatch(controllers[is_on], (os.getpid(),))
                        found[is_on].append(mean_of(await run_steps(clusters[is_on], seats[is_on], watch, steps)))
        assert receiver.spans, "no span has come"
    ratios = [on / off - 1 for off, on in zip(found[False], found[True], strict=True)]
    off_seconds = _off_seconds()
    share = off_seconds / statistics.median(found[False])
    figures = [
        Figure("controller CPU of a step, traces off", "ms", Spread.of(found[False], scale=1_000)),
        Figure("controller CPU of a step, traces on", "ms", Spread.of(found[True], scale=1_000)),
        Figure("cost of traces, on", "%", Spread.of(ratios, scale=100), ON_TARGET_PERCENT),
        Figure("what is called in a step when off", "µs", Spread.of([off_seconds], scale=1e6)),
        Figure("cost of traces, off", "%", Spread.of([share], scale=100), OFF_TARGET_PERCENT),
    ]
    note = (
        f"{rounds} rounds of {steps} steps each way, in turns; the cost is that of each pair. A scripted model inside "
        "the controller and a no-op tool, so a step costs as little as it can. The collector is not in the figures."
    )
    return Result("Traces", figures, note)


def _off_seconds() -> float:
    """Return the CPU time of what tracing does in a step when it is off."""
    tracing = Tracing()
    began = time.process_time()
    for _ in range(OFF_CALLS):
        with tracing.span("chat", None) as span:
            span.add({})
        add_traceparent(span.traceparent, ())
    return (time.process_time() - began) / OFF_CALLS
