"""Searches by simulation: `python -m tests.simulation pairs|hours|plan`; each prints what it covered.

pairs   all ordered pairs of the faults at all boundaries of the canonical conversation; continues where it was
hours   hours of clusters at work, one seed after the other, under faults that come by the clock
plan    one plan, such as `plan 137:kill 150:cut`; what a failing search prints
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.proof import OPTION, Proof
from tests.simulation.canonical import Plan, environment, simulate
from tests.simulation.checks import broken
from tests.simulation.faults import Fault
from tests.simulation.hours import run_all_seeds
from tests.simulation.pairs import run_sweep, summarize

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
    hours = commands.add_parser("hours", help="simulate hours of clusters at work")
    hours.add_argument("--seconds", type=float, default=600.0, help="how long to run (default 600)")
    hours.add_argument("--jobs", type=int, default=2, help="how many processes (default 2)")
    hours.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    hours.add_argument(OPTION, type=Path, help="the folder for the result; `make proof` gives it")
    hours.set_defaults(run=_hours)
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


def _hours(options: argparse.Namespace, _: Path) -> int:
    began = time.monotonic()
    total = run_all_seeds(options.seconds, jobs=options.jobs, first=options.seed)
    taken = (time.monotonic() - began) / 3_600
    figures: dict[str, str | int | float] = {
        "cluster hours": f"{total.hours:,.1f}, {total.leapt / total.hours:.0%} of them left out because nothing happened",
        "cluster hours per hour of this run": f"{total.hours / taken:,.0f} with {options.jobs} processes",
        "cluster hours per hour of CPU": f"{total.hours / total.cpu_hours:,.0f}",
        "faults that struck": total.faults,
        "events in logs": total.events,
        "commands to stores": total.commands,
    }
    print(json.dumps(figures, indent=1))
    print(*total.failures, sep="\n")
    Proof(options.proof, "").record(
        "clusters at work",
        trials=total.runs,
        failures=len(total.failures),
        unit="simulated clusters of about four hours",
        seed=f"{options.seed} and later",
        figures=figures,
    )
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
