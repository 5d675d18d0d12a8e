"""Searches by simulation: `python -m tests.simulation pairs|plan|speed`; each prints what it covered.

pairs   all ordered pairs of the faults at all boundaries of the canonical conversation; continues where it was
plan    one plan, such as `plan 137:kill 150:cut`; what a failing search prints
speed   how many hours of a cluster at work are simulated per hour of a core
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.proof import OPTION, Proof
from tests.simulation.canonical import Plan, environment, simulate
from tests.simulation.checks import broken
from tests.simulation.faults import Fault
from tests.simulation.pairs import run_sweep, summarize
from tests.simulation.speed import COMMAND_SECONDS, MODEL_SECONDS, measure_speed

PROGRESS = Path("build/simulation")


def main() -> int:
    """Run a search and return its exit code: 1 if something was found."""
    options = parser().parse_args()
    logging.disable(logging.CRITICAL)
    with TemporaryDirectory() as folder:
        found: int = options.run(options, Path(folder))
        return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    commands = found.add_subparsers(required=True)
    pairs = commands.add_parser("pairs", help="sweep over all pairs of faults at all boundaries")
    pairs.add_argument("--seconds", type=float, default=600.0, help="how long to run (default 600)")
    pairs.add_argument("--jobs", type=int, default=2, help="how many processes (default 2)")
    pairs.add_argument("--round", type=int, default=0, help="another round has other distances between the two")
    pairs.add_argument("--progress", type=Path, default=PROGRESS, help="the folder that keeps what was done")
    pairs.set_defaults(run=_pairs)
    pairs.add_argument(OPTION, type=Path, help="the folder for the result; `make proof` gives it")
    plan = commands.add_parser("plan", help="run one plan")
    plan.add_argument("faults", nargs="*", type=_fault, help="boundary:fault")
    plan.add_argument("--seed", type=int, default=0)
    plan.add_argument("--controllers", type=int, default=1)
    plan.add_argument("--tools", type=int, default=1)
    plan.add_argument("--host-death", type=float, action="append", default=[], help="when workspace hosts are killed")
    plan.add_argument("--until-settled", action="store_true", help="end with the conversation")
    plan.set_defaults(run=_plan)
    speed = commands.add_parser("speed", help="measure the speed")
    speed.set_defaults(run=_speed)
    return found


def _fault(text: str) -> tuple[int, Fault]:
    at, _, name = text.partition(":")
    return int(at), Fault[name.upper()]


def _pairs(options: argparse.Namespace, folder: Path) -> int:
    model = environment(folder)
    sweeps = run_sweep(
        model, jobs=options.jobs, seconds=options.seconds, number_of_round=options.round, folder=options.progress
    )
    summary = summarize(sweeps)
    print(f"round {options.round}: {summary['done']:,} of {summary['cells']:,} pairs at boundaries are done")
    print(json.dumps(summary))
    for failure in (failure for sweep in sweeps for failure in sweep.failures):
        print(failure)
    share = f"{summary['done']:,} of {summary['cells']:,} ({summary['done'] / summary['cells']:.0%})"
    figures = {"coverage: pairs at boundaries": share, "boundaries of the conversation": summary["boundaries"]}
    figures |= {"ordered pairs of faults": summary["pairs"], "runs in which both faults struck": summary["both struck"]}
    figures |= {"simulated hours of a cluster at work": f"{summary['virtual hours']:.1f}"}
    Proof(options.proof, "").record(
        "pairs of faults at boundaries",
        trials=summary["done"],
        failures=summary["failures"],
        unit="simulated runs with two faults",
        seed=f"round {options.round}",
        figures=figures,
    )
    return 1 if summary["failures"] else 0


def _plan(options: argparse.Namespace, folder: Path) -> int:
    plan = Plan(
        options.seed,
        dict(options.faults),
        controllers=options.controllers,
        tools=options.tools,
        host_deaths=tuple(options.host_death),
        is_watched_to_the_end=not options.until_settled,
    )
    outcome = simulate(plan, environment(folder))
    for at, fault, process, boundary in outcome.cluster.wire.struck:
        print(f"boundary {at}: {fault} strikes {process} {boundary}")
    for event in outcome.events:
        print(f"{event.id} {event.kind}")
    found = broken(outcome)
    print(*(found or ["Nothing is wrong."]), sep="\n")
    return 1 if found else 0


def _speed(_: argparse.Namespace, folder: Path) -> int:
    speed = measure_speed(folder)
    print(f"model calls of {MODEL_SECONDS:g} s, commands of {COMMAND_SECONDS:g} s, three conversations, two workers")
    print(f"at work: {speed.busy:,.0f} cluster-hours per CPU hour, {speed.boundaries_per_cpu_second:,.0f} boundaries/s")
    print(f"idle:    {speed.idle:,.0f} cluster-hours per CPU hour")
    return 0


if __name__ == "__main__":
    sys.exit(main())
