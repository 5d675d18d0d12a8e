"""The cost of a running attempt, also of a fork or with a critic."""

from __future__ import annotations

from deckhands.evaluation.attempts.in_flight import AttemptInFlight
from deckhands.evaluation.attempts.plan import Attempt
from deckhands.evaluation.datasets.instances import Instance


def test_cancelled_sibling_costs_its_own_work() -> None:
    one = AttemptInFlight(Attempt(Instance("a", "t"), "m", 1), 0, 0.0, shared=(3, 1.0, 100), lost_cost_usd=0.125)
    one.seen.iterations, one.seen.cost_usd = 5, 1.5
    one.judged.cost_usd = 0.25
    row = one.build_row("not-run", "cancelled")
    assert (row.iterations, row.cost_usd, row.critic_cost_usd, row.lost_cost_usd) == (2, 0.5, 0.25, 0.125)
    assert one.spent_usd == row.spent_usd == 0.875
    one.seen.iterations, one.seen.cost_usd = 0, 0.0  # its index was not read yet
    assert (one.build_row("not-run", "cancelled").iterations, one.cost_usd) == (0, 0.0)
