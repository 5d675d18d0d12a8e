"""Evaluations over HTTP: the list, and the progress, figures and attempts of each.

Holds: a key sees only the evaluations of its tenant; those of other tenants appear not to exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import AwareDatetime, BaseModel, Field

from broker.store import parse_number
from deckhands import evaluation as evals
from deckhands.evaluation import Outcome
from deckhands.server.dependencies import GatewayOf, Reader
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import ID, MOMENT
from deckhands.server.problems import Problem
from deckhands.server.web.overviews import EvaluationOverview, Overviews

routes = APIRouter(prefix="/evaluations", tags=["evaluations"])


def _overviews_of(request: Request) -> Overviews:
    found: Overviews = request.app.state.overviews
    return found


OverviewsOf = Annotated[Overviews, Depends(_overviews_of)]
EvaluationName = Annotated[str, Path(max_length=64, description="the name of an evaluation", examples=[ID])]
MODEL = "anthropic/claude-sonnet-4-5"


class ShownEvaluation(BaseModel):
    """An evaluation as a list shows it.

    Attributes:
        name: the value of the label `evaluation` of its conversations.
        state: the desired state (`running`, `paused` or `cancelled`), or `over` once all attempts have ended; empty if
            not reported yet.
        is_driven: whether a command drives it now.
        at: when the progress was last reported.
        outcomes: the number of ended attempts by outcome.
        cost_usd: the cost so far, including critics and failed tries.
        eta_seconds: at the pace of the last two minutes; null if unknown.
        bound: the limit that binds.
        stopped: why it ended early; empty if it did not.
        warning: why its budget has no effect; empty if it has one, or if there is no budget.
    """

    name: str = Field(examples=[ID])
    tenant: str = Field(examples=["acme"])
    dataset: str = Field(examples=["shipped"])
    models: list[str] = Field(examples=[[MODEL]])
    state: str = Field(examples=["running"])
    is_driven: bool
    at: AwareDatetime = Field(examples=[MOMENT])
    total: int = Field(examples=[40])
    ended: int = Field(examples=[31])
    in_flight: int = Field(examples=[4])
    outcomes: dict[str, int] = Field(examples=[{"resolved": 25, "unresolved": 6}])
    cost_usd: float = Field(examples=[1.75])
    tokens: int = Field(examples=[812000])
    eta_seconds: float | None = None
    bound: str = ""
    stopped: str = ""
    warning: str = ""

    @classmethod
    def of(cls, listed: evals.EvaluationListing) -> Self:
        """Convert an evaluation of the catalog."""
        return cls.model_validate(_fields_of(listed))


class AttemptInFlight(BaseModel):
    """An attempt in flight.

    Attributes:
        waits_for: empty if it waits for nothing.
        cause: the reason of its last failure, or of its failing call; empty if there is none.
    """

    instance: str = Field(examples=["cart-total"])
    model: str = Field(examples=[MODEL])
    attempt: int = Field(examples=[1])
    state: str = Field(examples=["running"])
    waits_for: str = ""
    seconds: float = Field(examples=[41.5])
    iterations: int = Field(examples=[7])
    cost_usd: float = Field(examples=[0.04])
    conversation_id: str = Field(examples=[ID])
    cause: str = ""

    @classmethod
    def of(cls, shown: evals.AttemptDetails) -> Self:
        """Convert an attempt, without its worker: only operators may see workers."""
        return cls(
            instance=shown.instance,
            model=shown.model,
            attempt=shown.attempt,
            state=shown.state,
            waits_for=shown.waits_for,
            seconds=parse_number(shown.seconds),
            iterations=shown.iterations,
            cost_usd=parse_number(shown.cost_usd),
            conversation_id=shown.conversation_id,
            cause=shown.cause,
        )


class Spread(BaseModel):
    """A distribution; nine of ten values are at most `p90`."""

    median: float = Field(examples=[0.04])
    p90: float = Field(examples=[0.09])
    most: float = Field(examples=[0.12])

    @classmethod
    def of(cls, spread: Mapping[str, float]) -> Self:
        """Convert a distribution of `compute_summary`."""
        return cls(median=spread["median"], p90=spread["p90"], most=spread["most"])


class Mean(BaseModel):
    """A mean over instances, with its 95 % interval; null if there are too few instances for one."""

    mean: float = Field(examples=[0.5])
    interval: list[float] | None = Field(examples=[[0.42, 0.58]])
    instances: int = Field(examples=[31])


class ModelFigures(BaseModel):
    """The figures of one model, computed from the ended attempts.

    Attributes:
        pass_at_1: the share of instances that one attempt resolves; null if no attempt was scored.
        interval: its 95 % interval; null if there are too few instances for one.
        total_cost_usd: the cost of the attempts, without critics and failed tries.
        critic_cost_usd: the cost of critics.
        lost_cost_usd: the cost of tries that failed in the infrastructure.
        has_unknown_cost: the price of some calls is unknown, so the true cost is higher.
        reward: null if no attempt has one; an attempt without a reward counts as 1 if it is resolved, else as 0.
        metrics: by name.
        infrastructure_failures: failures after which attempts were started again or given up.
    """

    model: str = Field(examples=[MODEL])
    instances: int = Field(examples=[31])
    attempts: int = Field(examples=[31])
    outcomes: dict[str, int] = Field(examples=[{"resolved": 25, "unresolved": 6}])
    pass_at_1: float | None = Field(examples=[0.806])
    interval: list[float] | None = Field(examples=[[0.637, 0.908]])
    total_cost_usd: float = Field(examples=[1.5])
    critic_cost_usd: float = Field(examples=[0.0])
    lost_cost_usd: float = Field(examples=[0.25])
    has_unknown_cost: bool
    tokens: int = Field(examples=[640000])
    infrastructure_failures: int = Field(examples=[1])
    cost_usd: Spread
    seconds: Spread
    iterations: Spread
    reward: Mean | None = None
    metrics: dict[str, Mean] = Field(default_factory=dict)


class ShownDistribution(BaseModel):
    """The distribution of a value: `counts` by model, in bins of equal width from 0 to `most`."""

    value: str = Field(examples=["cost_usd"])
    most: float = Field(examples=[0.12])
    counts: dict[str, list[int]] = Field(examples=[{MODEL: [3, 12, 9, 4, 2, 1]}])


class ShownFailureClass(BaseModel):
    """Unresolved attempts that ended in the same way; `cause` is empty if a score decided."""

    outcome: str = Field(examples=["limit"])
    cause: str = Field(examples=["max_iterations"])
    attempts: dict[str, int] = Field(examples=[{MODEL: 3}])


class EvaluationDetails(ShownEvaluation):
    """An evaluation with its figures.

    Attributes:
        attempts: those in flight, longest first, at most 100.
        failure_classes: the most frequent first.
    """

    attempts: list[AttemptInFlight]
    figures: list[ModelFigures]
    distributions: list[ShownDistribution]
    failure_classes: list[ShownFailureClass]


class ShownAttempt(BaseModel):
    """The result of an attempt.

    Attributes:
        cause: a code: the limit that was reached, or the code of the error; empty if a score decided.
        evidence: the output of the check, the answer, or the error; truncated.
        checked_id: the conversation in which the check ran; empty if none.
        round: how often it was requeued.
        tries: the number of starts; more than one after failures of the infrastructure, whose codes are in `failures`.
        waiting_seconds: by reason.
        cost_usd: the cost of the last try; `lost_cost_usd` is that of earlier tries that failed in the infrastructure.
        critic_id: the conversation of its critic, with the cost `critic_cost_usd`; empty if there is none.
        reward: the number from the check or a scorer; null if there is only the outcome.
        metrics: further numbers of the check and scorers, by name.
        step_rewards: one for each step of the agent; empty if none.
        critic_tokens: the tokens of its critic; `lost_tokens` are those of tries without a result. `tokens` includes
            neither.
    """

    instance: str = Field(examples=["cart-total"])
    model: str = Field(examples=[MODEL])
    attempt: int = Field(examples=[1])
    outcome: str = Field(examples=["unresolved"])
    cause: str = ""
    evidence: str = Field(examples=["1 failed, 13 passed"])
    conversation_id: str = Field(examples=[ID])
    checked_id: str = ""
    round: int = 0
    tries: int = 1
    failures: list[str] = Field(default_factory=list)
    iterations: int = Field(examples=[12])
    cost_usd: float = Field(examples=[0.05])
    critic_cost_usd: float = 0.0
    lost_cost_usd: float = 0.0
    has_unknown_cost: bool = False
    tokens: int = Field(examples=[21000])
    seconds: float = Field(examples=[63.5])
    working_seconds: float = Field(examples=[55.0])
    waiting_seconds: dict[str, float] = Field(default_factory=dict, examples=[{"worker": 8.5}])
    tags: list[str] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    critic_id: str = ""
    score: float | None = None
    verdict: str = ""
    reward: float | None = Field(default=None, examples=[0.5])
    metrics: dict[str, float] = Field(default_factory=dict, examples=[{"speed": 3.2}])
    step_rewards: list[float] = Field(default_factory=list)
    critic_tokens: int = 0
    lost_tokens: int = 0

    @classmethod
    def of(cls, row: evals.AttemptRow) -> Self:
        """Convert a row."""
        names = [name for name in cls.model_fields if name != "tokens"]
        fields = {name: getattr(row, name) for name in names}
        return cls(**fields, tokens=row.prompt_tokens + row.completion_tokens)


class AttemptPage(BaseModel):
    """Attempts in order.

    `total` counts all matches; pass `next_after` as `after` for the next page; it is null on the last page.
    """

    attempts: list[ShownAttempt]
    total: int = Field(examples=[6])
    next_after: int | None = None


@routes.get("", summary="List evaluations")
async def listing(
    gateway: GatewayOf, principal: Reader, limit: Annotated[int, Query(ge=1, le=500)] = 100
) -> list[ShownEvaluation]:
    """List the evaluations of the key's tenant, most recently driven first. Kept for a month."""
    tenant = None if principal.is_for_all_tenants else principal.tenant
    return [ShownEvaluation.of(one) for one in await evals.Catalog(gateway.store).latest(tenant=tenant, limit=limit)]


async def _visible(gateway: Gateway, principal: Principal, name: str) -> evals.EvaluationListing:
    found = await evals.Catalog(gateway.store).find(name)
    if found is None or not (principal.is_for_all_tenants or found.about.tenant == principal.tenant):
        raise Problem(404, "unknown_evaluation", "There is no such evaluation.", remedy="GET /evaluations lists them.")
    return found


@routes.get("/{evaluation}", summary="Show an evaluation")
async def show(
    gateway: GatewayOf, principal: Reader, overviews: OverviewsOf, evaluation: EvaluationName
) -> EvaluationDetails:
    """Show the progress of an evaluation, with the figures of its ended attempts."""
    listed = await _visible(gateway, principal, evaluation)
    return _details(listed, await overviews.of(evals.Catalog(gateway.store), listed))


@routes.get("/{evaluation}/attempts", summary="List attempts that have ended")
async def attempts(
    gateway: GatewayOf,
    principal: Reader,
    overviews: OverviewsOf,
    evaluation: EvaluationName,
    outcome: Annotated[list[Outcome], Query(description="only attempts with one of these outcomes")] = [],  # noqa: B006
    *,
    cause: Annotated[
        str | None, Query(max_length=500, description="only attempts with this cause; empty for those without one")
    ] = None,
    model: Annotated[str | None, Query(max_length=300)] = None,
    instance: Annotated[str, Query(max_length=300, description="a part of the instance's id")] = "",
    after: Annotated[int, Query(ge=0, le=100_000)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> AttemptPage:
    """List ended attempts by model, instance and number. Patches are in the evaluation's directory."""
    catalog = evals.Catalog(gateway.store)
    overview = await overviews.of(catalog, await _visible(gateway, principal, evaluation))
    meant = [
        one.key
        for one in overview.entries
        if (not outcome or one.outcome in outcome)
        and cause in (None, one.cause)
        and model in (None, one.model)
        and instance in one.instance
    ]
    shown = [ShownAttempt.of(row) for row in await catalog.some_rows(evaluation, meant[after : after + limit])]
    following = after + limit if after + limit < len(meant) else None
    return AttemptPage(attempts=shown, total=len(meant), next_after=following)


def _fields_of(listed: evals.EvaluationListing) -> dict[str, Any]:
    status, about = listed.status, listed.about
    fields: dict[str, Any] = {
        "name": listed.name,
        "tenant": about.tenant,
        "dataset": about.dataset,
        "models": list(about.models),
        "at": listed.at,
        "is_driven": listed.is_driven and status is not None and status.state != "over",
    }
    return fields | _status_fields(status)


def _status_fields(status: evals.EvaluationStatus | None) -> dict[str, Any]:
    if status is None:
        return {"state": "", "total": 0, "ended": 0, "in_flight": 0, "outcomes": {}, "cost_usd": 0.0, "tokens": 0}
    return {
        "state": status.state,
        "total": status.total,
        "ended": status.ended,
        "in_flight": status.in_flight,
        "outcomes": {name: count for name in evals.OUTCOMES if (count := status.outcomes.get(name, 0)) > 0},
        "cost_usd": parse_number(status.cost_usd),
        "tokens": status.tokens,
        "eta_seconds": None if status.eta_seconds is None else parse_number(status.eta_seconds),
        "bound": status.bound,
        "stopped": status.stopped,
        "warning": status.warning,
    }


def _details(listed: evals.EvaluationListing, overview: EvaluationOverview) -> EvaluationDetails:
    status = listed.status
    fields = _fields_of(listed) | {
        "attempts": [AttemptInFlight.of(one) for one in (status.attempts if status is not None else ())],
        "figures": [_figures(model, found) for model, found in overview.models.items()],
        "distributions": [
            ShownDistribution(
                value=name, most=one.most, counts={model: list(each) for model, each in one.counts.items()}
            )
            for name, one in overview.distributions.items()
        ],
        "failure_classes": [
            ShownFailureClass(outcome=one.outcome, cause=one.cause, attempts=dict(one.attempts))
            for one in overview.failure_classes
        ],
    }
    return EvaluationDetails.model_validate(fields)


def _figures(model: str, found: Mapping[str, Any]) -> ModelFigures:
    return ModelFigures(
        model=model,
        instances=found["instances"],
        attempts=found["attempts"],
        outcomes={name: count for name, count in found["outcomes"].items() if count},
        pass_at_1=found.get("pass@1"),
        interval=found["pass@1_interval"],
        total_cost_usd=found["cost_usd"]["total"],
        critic_cost_usd=found["critic_cost_usd"],
        lost_cost_usd=found["lost_cost_usd"],
        has_unknown_cost=found["has_unknown_cost"],
        tokens=found["tokens"],
        infrastructure_failures=found["infrastructure_failures"],
        cost_usd=Spread.of(found["cost_usd"]),
        seconds=Spread.of(found["seconds"]),
        iterations=Spread.of(found["iterations"]),
        reward=found.get("reward"),
        metrics=found.get("metrics", {}),
    )
