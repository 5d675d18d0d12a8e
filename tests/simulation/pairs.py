"""Every ordered pair of the fourteen faults, with the first of them at every boundary of the canonical conversation.

A cell is a boundary, a fault there, and a second fault some boundaries later; the distance follows from the cell and
the round, so another round tries other distances. The cells of a round are run in an order that spreads over all
boundaries and pairs, so that a part of them says something about all.

Holds: a sweep that was ended continues where it was. It starts again when the conversation's boundaries change.
"""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.simulation.canonical import Plan, simulate
from tests.simulation.checks import broken
from tests.simulation.faults import Fault
from tests.simulation.shrinking import command_of, shrink

FAULTS = tuple(Fault)
DISTANCES = (1, 2, 3, 5, 8, 13, 21, 34)
MAX_FAILURES = 10
SAVED_AFTER = 100


@dataclass
class Sweep:
    """What a part of the sweep has done.

    Attributes:
        boundaries: how many the conversation has, and a checksum of them.
        position: how many cells of the part were run; `struck`: in how many both faults struck.
        failures: of each failing cell, its shrunk plan's command and what was wrong.
    """

    boundaries: tuple[int, int]
    round: int
    part: int
    parts: int
    position: int = 0
    struck: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def cells(self) -> range:
        """The numbers of the cells of this part."""
        return range(self.part, self.boundaries[0] * len(FAULTS) ** 2, self.parts)


def find_boundaries(model: Mapping[str, str]) -> tuple[int, int]:
    """Return how many boundaries the conversation has when nothing fails, and a checksum of their names."""
    passed = simulate(Plan(), model).cluster.wire.passed
    return len(passed), crc32("\n".join(passed).encode())


def plan_of(cell: int, size: int, number_of_round: int) -> Plan:
    """Return the plan of a cell of so many boundaries."""
    count = size * len(FAULTS) ** 2
    cell = cell * _coprime(count) % count  # neighbours in the order are far apart
    at, pair = cell % size + 1, cell // size
    first, second = FAULTS[pair % len(FAULTS)], FAULTS[pair // len(FAULTS)]
    distance = DISTANCES[(crc32(b"%d" % cell) + number_of_round) % len(DISTANCES)]
    later = at + distance if at + distance <= size else at + 1
    return Plan(0, {at: first, later: second}, controllers=2 if Fault.STOP in (first, second) else 1)


def _coprime(count: int) -> int:
    """Return a large step through a number of cells that reaches all of them."""
    step = int(count * 0.618) | 1
    while gcd(step, count) != 1:
        step += 2
    return step


def run_part(
    model: Mapping[str, str], progress: Path | None, seconds: float, number_of_round: int, part: int, parts: int
) -> Sweep:
    """Run cells of a part until all are done, or the time is over."""
    until = time.monotonic() + seconds
    sweep = _load(progress, Sweep(find_boundaries(model), number_of_round, part, parts))
    while sweep.position < len(sweep.cells) and time.monotonic() < until and len(sweep.failures) < MAX_FAILURES:
        plan = plan_of(sweep.cells[sweep.position], sweep.boundaries[0], sweep.round)
        began = time.process_time()
        outcome = simulate(plan, model)
        sweep.position += 1
        sweep.struck += outcome.struck == len(plan.faults)
        sweep.virtual_seconds += outcome.cluster.clock.monotonic()
        if found := broken(outcome):
            sweep.failures.append(describe_failure(plan, found, model))
        sweep.cpu_seconds += time.process_time() - began
        if sweep.position % SAVED_AFTER == 0:
            _save(progress, sweep)
    _save(progress, sweep)
    return sweep


def describe_failure(plan: Plan, found: list[str], model: Mapping[str, str]) -> str:
    """Return what is wrong with a plan, and the command that repeats the least plan that fails."""
    least = shrink(plan, lambda other: bool(broken(simulate(other, model))))
    return f"{command_of(least)}\n    (of {command_of(plan)})\n    {found}"


def run_sweep(
    model: Mapping[str, str], *, jobs: int, seconds: float, number_of_round: int = 0, folder: Path | None = None
) -> list[Sweep]:
    """Run the parts of a sweep side by side, and return what they have done."""
    files = [None if folder is None else folder / f"pairs-{number_of_round}-{n}-of-{jobs}.json" for n in range(jobs)]
    with ProcessPoolExecutor(jobs) as pool:
        run = partial(run_part, model)
        futures = [pool.submit(run, file, seconds, number_of_round, n, jobs) for n, file in enumerate(files)]
        return [future.result() for future in futures]


def summarize(sweeps: list[Sweep]) -> dict[str, Any]:
    """Return the coverage of the parts of a round."""
    done, struck = sum(sweep.position for sweep in sweeps), sum(sweep.struck for sweep in sweeps)
    return {
        "boundaries": sweeps[0].boundaries[0],
        "pairs": len(FAULTS) ** 2,
        "cells": sum(len(sweep.cells) for sweep in sweeps),
        "done": done,
        "both struck": struck,
        "virtual hours": sum(sweep.virtual_seconds for sweep in sweeps) / 3_600,
        "CPU hours": sum(sweep.cpu_seconds for sweep in sweeps) / 3_600,
        "failures": sum(len(sweep.failures) for sweep in sweeps),
    }


def _load(progress: Path | None, fresh: Sweep) -> Sweep:
    if progress is None or not progress.exists():
        return fresh
    kept = json.loads(progress.read_text())
    kept["boundaries"] = tuple(kept["boundaries"])
    found = Sweep(**kept)
    is_same = (found.boundaries, found.round, found.parts) == (fresh.boundaries, fresh.round, fresh.parts)
    return found if is_same else fresh


def _save(progress: Path | None, sweep: Sweep) -> None:
    if progress is not None:
        progress.parent.mkdir(parents=True, exist_ok=True)
        temporary = progress.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(sweep)))
        temporary.replace(progress)
