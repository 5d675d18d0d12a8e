"""Run the evaluation of a directory, on the running cluster or a private one; show and record its progress."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.contract import AgentSpec, Limits
from broker.runtime import UsageError
from deckhands.client import (
    Client,
    ExitCode,
    ForkPoint,
    check_acp_command,
    cluster_client,
    find_unpriced_models,
    note,
    print_json,
    print_text,
)
from deckhands.cluster import Cluster, ClusterSpec, Home, supervise
from deckhands.evaluation.attempts.driver import ModelSilent
from deckhands.evaluation.attempts.plan import AT_ONCE, RETRIES, EvaluationPlan
from deckhands.evaluation.attempts.record import ProgressRecord
from deckhands.evaluation.attempts.results import AttemptRow, Results, ResultsInUse
from deckhands.evaluation.attempts.statistics import format_interval, format_mean, further_costs, list_means
from deckhands.evaluation.attempts.status import EvaluationStatus, ProgressScreen
from deckhands.evaluation.attempts.steering import MAX_AT_ONCE, MAX_RETRIES, DesiredState, EvaluationSteering
from deckhands.evaluation.attempts.stopping import ENOUGH, StoppingCriterion
from deckhands.evaluation.detached_runs import build_orders, follow
from deckhands.evaluation.directory import RESULTS, SIBLINGS, EvaluationRequest, write_report, write_scripts
from deckhands.evaluation.evaluation import Evaluation
from deckhands.evaluation.scorers import load_scorers
from deckhands.settings import MODEL_VARIABLES, CliSettings

SCRIPTED = "scripted"
MAX_ATTEMPTS = 1_000
PRICED_MODELS = "DECKHANDS_PRICED_MODELS"
"""The setting of private workers that names the models of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The tuning options of an evaluation command; None for the value of an earlier command, or the default."""

    at_once: int | None
    budget: float | None
    token_budget: float | None = None
    retries: int | None
    until: str | None
    redo: tuple[str, ...] = ()

    def check(self, models: int, attempts: int = 1) -> None:
        """Check the options.

        Raises:
            UsageError: a number is out of its bounds, or the criterion does not fit.
        """
        _require("attempts", attempts, 1, MAX_ATTEMPTS)
        _require("concurrency", self.at_once, 1, MAX_AT_ONCE)
        _require("retries", self.retries, 0, MAX_RETRIES)
        if self.budget is not None and not self.budget >= 0:
            raise UsageError(f"The argument budget_usd {self.budget} is not at least 0.")
        if self.token_budget is not None and not self.token_budget >= 0:
            raise UsageError(f"The argument token_budget {self.token_budget} is not at least 0.")
        if self.until:
            StoppingCriterion.parse(self.until, models)

    def find_obstacle(self, asked: EvaluationRequest) -> str:
        """Return a note that the stopping criterion can never be met; empty if it can, or if there is no criterion.

        Raises:
            UsageError: the text is not a criterion.
        """
        if not self.until:
            return ""
        return StoppingCriterion.parse(self.until, len(asked.models)).render_obstacle(
            len(asked.instances()), asked.attempts
        )

    def as_desired(self) -> dict[str, object]:
        """Return the options as arguments of `EvaluationSteering.set_desired`."""
        return {
            "at_once": self.at_once,
            "budget_usd": self.budget,
            "token_budget": self.token_budget,
            "retries": self.retries,
            "until": self.until,
        }

    def as_arguments(self) -> list[str]:
        """Return the options as arguments of `eval attach`."""
        given = {
            "--concurrency": self.at_once,
            "--budget": self.budget,
            "--token-budget": self.token_budget,
            "--retries": self.retries,
            "--until": self.until,
        }
        again = [("--redo", what) for what in self.redo]
        return [part for pair in (*given.items(), *again) if pair[1] is not None for part in (pair[0], str(pair[1]))]


def _require(name: str, number: int | None, least: int, most: int) -> None:
    if number is not None and not least <= number <= most:
        raise UsageError(f"The argument {name} {number} is not from {least} to {most:,}.")


def run_evaluation(
    directory: Path,
    asked: EvaluationRequest,
    tuning: Tuning,
    *,
    follows: bool,
    as_json: bool | None,
    on_finished: Callable[[Path], None],
) -> int:
    """Run an evaluation, or its remaining attempts, and return the exit code.

    Args:
        as_json: whether to print the summary as JSON; None not to print it.
        follows: if another command runs it, show the progress until that command ends.
        on_finished: called with the directory once its summary is written.

    Raises:
        BeingWritten: another command runs it.
        UsageError, StoreError: the evaluation cannot be run.
    """
    plan = build_plan(directory, asked, tuning)
    place, settings = asked.home or asked.name, CliSettings.from_env()
    results = _results(directory, asked.name, place, follows=follows)
    with results, ProgressRecord(directory) as record, ProgressScreen() as screen:

        def on_status(status: EvaluationStatus) -> None:
            record.add_status(status)
            screen.show(status)

        try:
            asyncio.run(
                evaluate_plan(settings, place, plan, results, tuning=tuning, on_row=record.add_row, on_status=on_status)
            )
        except ModelSilent:
            write_report(directory)  # of the attempts that have ended
            raise
    summary = write_report(directory)
    on_finished(directory)
    if as_json is not None:
        print_summary(summary, as_json=as_json)
    has_failed = any(row.outcome in ("infra-abandoned", "setup_failed") for row in results.rows.values())
    return int(ExitCode.ERROR if has_failed else ExitCode.FINISHED)


def build_plan(directory: Path, asked: EvaluationRequest, tuning: Tuning) -> EvaluationPlan:
    """Return the plan of an evaluation, with its scripts written.

    Raises:
        UsageError: the dataset or the tuning cannot be used.
    """
    check_acp_command(asked.agent)
    instances = asked.instances()
    tuning.check(len(asked.models))
    return EvaluationPlan(
        asked.name,
        instances,
        asked.models,
        attempts=asked.attempts,
        agent=AgentSpec(name=asked.agent),
        limits=Limits(
            max_iterations=asked.max_iterations, max_budget_usd=asked.max_budget, max_seconds=asked.max_seconds
        ),
        at_once=tuning.at_once or AT_ONCE,
        retries=RETRIES if tuning.retries is None else tuning.retries,
        budget_usd=tuning.budget,
        token_budget=tuning.token_budget,
        scripts=write_scripts(directory, instances) if SCRIPTED in asked.models else None,
        until=tuning.until or "",
        tenant=asked.tenant,
        dataset=Path(asked.dataset).name or SIBLINGS,
        critic=asked.critic,
        scorers=load_scorers(asked.scorers),
        network=asked.network,
        origin=ForkPoint.parse(asked.origin) if asked.origin else None,
    )


def print_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    """Print the summary of an evaluation."""
    if as_json:
        print_json(summary)
        return
    for model, figures in summary["models"].items():
        outcomes = ", ".join(f"{count} {name}" for name, count in figures["outcomes"].items() if count)
        least = "at least " if figures["has_unknown_cost"] else ""
        further = "".join(f", {what} ${usd:.4f}" for what, usd in further_costs(figures))
        print_text(
            f"{model}: {outcomes}; {_render_score(figures)}, "
            f"{least}${figures['cost_usd']['total']:.4f}{further}; "
            f"infrastructure failures: {figures['infrastructure_failures']} in "
            f"{figures['conversations']:,} conversations, {figures['infrastructure_failures_per_1000']:.1f} per 1,000"
        )
        if figures["has_unknown_cost"]:
            print_text(f"  The price of {model} is unknown in part: --budget counts its calls as $0.")
        for name, mean in list_means(figures):
            print_text(f"  {name}: {format_mean(mean)}")
        for cause in figures["causes"]:
            if cause.startswith(ENOUGH):
                print_text(f"Ended early: {cause.removeprefix(ENOUGH)}; the rest was not run.")


def _render_score(figures: Mapping[str, Any]) -> str:
    """Return pass@1 with its interval, if any attempt counts."""
    if "pass@1" not in figures:
        return "no score"
    return f"pass@1 {figures['pass@1']:.1%} ({format_interval(figures['pass@1_interval'])})"


def _results(directory: Path, name: str, place: str, *, follows: bool) -> Results:
    while True:
        try:
            return Results(directory / RESULTS)
        except ResultsInUse:
            if not follows:
                raise
            follow(directory, name, place)


async def evaluate_plan(
    settings: CliSettings,
    place: str,
    plan: EvaluationPlan,
    results: Results,
    *,
    tuning: Tuning,
    on_row: Callable[[AttemptRow], None],
    on_status: Callable[[EvaluationStatus], None],
) -> None:
    """Run a plan on the cluster that the settings select. Idempotent."""
    async with _client(settings, place, plan) as client:
        steering = EvaluationSteering(client.store, plan.name)
        await _require_prices(client, plan, (await steering.read()).desired, tuning)
        await steering.set_desired(**tuning.as_desired())
        for order in build_orders(tuning.redo):
            await steering.requeue(order)
        await Evaluation(client, plan, results, on_row=on_row, on_status=on_status).run()


async def _require_prices(client: Client, plan: EvaluationPlan, earlier: DesiredState, tuning: Tuning) -> None:
    """Refuse a budget in USD that cannot bind.

    Raises:
        UsageError: the price of a model is unknown, and there is no budget of tokens.
    """
    budget = earlier.budget_usd if tuning.budget is None else tuning.budget
    tokens = earlier.token_budget if tuning.token_budget is None else tuning.token_budget
    if budget is None or math.isinf(budget) or (tokens is not None and not math.isinf(tokens)):
        return
    unpriced = await find_unpriced_models(client.store, [*plan.models, *filter(None, [plan.critic])])
    if unpriced:
        raise UsageError(
            f"The price of {', '.join(unpriced)} is unknown, so --budget cannot bind.",
            remedy="Give the price in the model's configuration (input_cost_per_token and output_cost_per_token), or "
            "limit the tokens with --token-budget.",
        )


@asynccontextmanager
async def _client(settings: CliSettings, place: str, plan: EvaluationPlan) -> AsyncIterator[Client]:
    """Connect to the running cluster, or start a private one that keeps its results for the next call."""
    home = Home(settings.home)
    if settings.url is not None or home.cluster_url is not None:
        async with cluster_client(settings) as client:
            yield client
        return
    folder = home.evaluation_folder(place)
    home.prepare(folder)
    known = {MODEL_VARIABLES[0]: plan.models[0]} if plan.models[0] != SCRIPTED else {}
    named = [name for name in (*plan.models, plan.critic) if name and "," not in name]
    with supervise(folder, "An evaluation"):
        spec = ClusterSpec(
            folder,
            environment={**known, **settings.environment, PRICED_MODELS: ",".join(named)},
            is_private=True,
            checked_models=[name for name in dict.fromkeys([*plan.models, plan.critic]) if name and name != SCRIPTED],
        )
        cluster = Cluster(spec, on_notice=note)
        try:
            await cluster.start()
            await cluster.until_ready()
            async with await Client.connect(cluster.url) as client:
                yield client
        finally:
            await cluster.stop()
