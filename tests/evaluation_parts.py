"""Evaluations in a store, written as a driver writes them."""

from __future__ import annotations

from collections.abc import Sequence

from broker.store.store import Store
from deckhands.evaluation.attempts.catalog import Catalog, EvaluationInfo
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.status import AttemptDetails, EvaluationStatus
from deckhands.evaluation.attempts.steering import EvaluationSteering


def standing_of_rows(
    rows: Sequence[AttemptRow], *, total: int, state: str = "running", under_way: Sequence[AttemptDetails] = ()
) -> EvaluationStatus:
    """Return the status of an evaluation with these ended attempts."""
    return EvaluationStatus(
        state=state,
        total=total,
        ended=len(rows),
        under_way=len(under_way),
        pending=total - len(rows) - len(under_way),
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
        attempts=under_way,
    )


async def write_evaluation(
    store: Store,
    name: str,
    rows: Sequence[AttemptRow],
    *,
    tenant: str = "",
    state: str = "running",
    total: int = 0,
    under_way: Sequence[AttemptDetails] = (),
) -> None:
    catalog = Catalog(store)
    models = tuple(dict.fromkeys(row.model for row in rows))
    await catalog.begin(name, EvaluationInfo(tenant=tenant, dataset="shipped", models=models))
    standing = standing_of_rows(rows, total=total or len(rows), state=state, under_way=under_way)
    now = store.clock.now().timestamp()
    await EvaluationSteering(store, name).publish_status({**standing.as_json(), "at": now})
    await catalog.put(name, rows)
