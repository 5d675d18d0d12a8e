"""One simulated run as a program: `python -m tests.simulation.one_run FOLDER SEED…` prints what happened, line by line."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from broker.contract.codec import encode
from tests.simulation.canonical import Outcome, environment, simulate
from tests.simulation.errand import sender
from tests.simulation.plans import random_plan


def traced(folder: Path, seed: int) -> list[str]:
    """Run the canonical conversation and the errand with the seed's faults; return the exact trace."""
    plan = replace(random_plan(seed), is_traced=True)
    outcomes = simulate(plan, environment(folder)), simulate(plan, {}, person=sender(folder))
    return [line for outcome in outcomes for line in lines_of(outcome)]


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Yield every boundary of a run, then its logs, and how it ended."""
    yield from outcome.cluster.wire.trace
    logs = {outcome.row.conversation_id if outcome.row else "": outcome.events, **outcome.others}
    for conversation_id, events in logs.items():
        for event in events:
            yield f"{conversation_id} {event.id} {event.kind} {crc32(encode(event.wire())):08x}"
    yield f"{outcome.cluster.loop.callbacks} callbacks, {outcome.cluster.clock.monotonic():.6f} s, {outcome.failure!r}"


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for number in sys.argv[2:]:
        print(f"seed {number}", *traced(Path(sys.argv[1]), int(number)), sep="\n")
