"""A failing plan with as few faults as still fail, and the command that repeats it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.simulation.canonical import Plan
from tests.simulation.faults import Fault

IsFailing = Callable[[Plan], bool]
NARROWER: tuple[Callable[[Plan], Plan], ...] = (
    lambda plan: replace(plan, controllers=1),
    lambda plan: replace(plan, tools=1),
    lambda plan: replace(plan, host_deaths=()),
)


def shrink(plan: Plan, is_failing: IsFailing) -> Plan:
    """Return a plan that fails although no single fault, and no second worker, can be left out.

    Large pieces are left out first, so that a plan of n faults takes about n runs if few of them matter.
    """
    faults = list(plan.faults.items())
    size = max(1, len(faults) // 2)
    while True:
        for start in range(0, len(faults), size):
            fewer = faults[:start] + faults[start + size :]
            if is_failing(replace(plan, faults=dict(fewer))):
                faults = fewer
                break
        else:
            if size == 1:
                break
            size //= 2
        size = max(1, min(size, len(faults)))
        if not faults:
            break
    least = replace(plan, faults=dict(faults))
    for narrow in NARROWER:
        narrower = narrow(least)
        if narrower != least and is_failing(narrower):
            least = narrower
    return least


def describe_faults(faults: Mapping[int, Fault]) -> list[str]:
    """Return faults as `python -m tests.simulation plan` reads them: `137:kill`."""
    return [f"{at}:{fault.name.lower()}" for at, fault in sorted(faults.items())]


def command_of(plan: Plan) -> str:
    """Return the command that runs a plan again."""
    options = [f"--seed {plan.seed}", f"--controllers {plan.controllers}", f"--tools {plan.tools}"]
    options += [f"--host-death {at}" for at in plan.host_deaths]
    options += [] if plan.is_watched_to_the_end else ["--until-settled"]
    return " ".join(["python -m tests.simulation plan", *describe_faults(plan.faults), *options])
