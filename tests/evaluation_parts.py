"""Evaluations for tests: their instances, and their state in a store as a driver writes it."""

from __future__ import annotations

from collections.abc import Sequence

from broker.store.store import Store
from deckhands.evaluation.attempts.catalog import Catalog, EvaluationInfo
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.status import AttemptDetails, EvaluationStatus
from deckhands.evaluation.attempts.steering import EvaluationSteering
from deckhands.evaluation.datasets.instances import Instance


def questions(*names: str) -> list[Instance]:
    return [Instance(name, "What is 2 * 3?", answer="6") for name in names]


def status_of_rows(
    rows: Sequence[AttemptRow], *, total: int, state: str = "running", in_flight: Sequence[AttemptDetails] = ()
) -> EvaluationStatus:
    """Return the status of an evaluation with these ended attempts."""
    return EvaluationStatus(
        state=state,
        total=total,
        ended=len(rows),
        in_flight=len(in_flight),
        pending=total - len(rows) - len(in_flight),
        outcomes={outcome: sum(row.outcome == outcome for row in rows) for outcome in {row.outcome for row in rows}},
        cost_usd=sum(row.cost_usd for row in rows),
        tokens=sum(row.prompt_tokens + row.completion_tokens for row in rows),
        usd_per_minute=0.0,
        tokens_per_minute=0.0,
        eta_seconds=None,
        refused=0,
        limit=4,
        limits={},
        found={},
        bound="-n 4",
        attempts=in_flight,
    )


async def write_evaluation(
    store: Store,
    name: str,
    rows: Sequence[AttemptRow],
    *,
    tenant: str = "",
    state: str = "running",
    total: int = 0,
    in_flight: Sequence[AttemptDetails] = (),
) -> None:
    catalog = Catalog(store)
    models = tuple(dict.fromkeys(row.model for row in rows))
    await catalog.begin(name, EvaluationInfo(tenant=tenant, dataset="shipped", models=models))
    status = status_of_rows(rows, total=total or len(rows), state=state, in_flight=in_flight)
    now = store.clock.now().timestamp()
    await EvaluationSteering(store, name).publish_status({**status.as_json(), "at": now})
    await catalog.put(name, rows)
