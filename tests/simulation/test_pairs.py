"""The sweep over pairs of faults reaches every cell once and continues; a failing plan is shrunk to what matters."""

from pathlib import Path

from tests.simulation.canonical import Plan, environment
from tests.simulation.faults import Fault
from tests.simulation.pairs import FAULTS, plan_of, run_part
from tests.simulation.shrinking import command_of, shrink


def test_cells_are_all_pairs_at_all_boundaries() -> None:
    size = 50
    plans = [plan_of(cell, size, 0) for cell in range(size * len(FAULTS) ** 2)]
    found = {(min(plan.faults), *(fault for _, fault in sorted(plan.faults.items()))) for plan in plans}
    assert len(FAULTS) == 14
    assert found == {(at, one, two) for at in range(1, size + 1) for one in FAULTS for two in FAULTS}


def test_another_round_has_other_distances() -> None:
    assert any(plan_of(cell, 50, 0).faults.keys() != plan_of(cell, 50, 1).faults.keys() for cell in range(10))


def test_sweep_continues_where_it_was(tmp_path: Path) -> None:
    model, progress, parts = environment(tmp_path), tmp_path / "progress.json", 10_000
    first = run_part(model, progress, 3_600.0, 0, 0, parts)
    assert (first.position, first.failures) == (len(first.cells), [])
    assert run_part(model, progress, 0.0, 0, 0, parts) == first
    assert run_part(model, progress, 0.0, 1, 0, parts).position == 0


def test_failing_plan_is_shrunk_to_what_matters() -> None:
    faults = dict.fromkeys(range(1, 17), Fault.KILL) | {5: Fault.CUT, 12: Fault.LOST_TAIL}
    runs = 0

    def is_failing(plan: Plan) -> bool:
        nonlocal runs
        runs += 1
        return plan.faults.get(5) is Fault.CUT and plan.faults.get(12) is Fault.LOST_TAIL

    least = shrink(Plan(3, faults, controllers=2, tools=2), is_failing)
    assert dict(least.faults) == {5: Fault.CUT, 12: Fault.LOST_TAIL}
    assert (least.controllers, least.tools) == (1, 1)
    assert runs < 40
    assert command_of(least) == "python -m tests.simulation plan 5:cut 12:lost_tail --seed 3 --controllers 1 --tools 1"
