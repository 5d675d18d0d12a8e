"""`deckhands eval`: evaluate agents on a dataset, continue that, and report it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from broker.contract.events import AgentSpec, Limits
from broker.runtime.errors import UsageError
from deckhands.cli.connecting import cluster_client
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json
from deckhands.cli.task_options import with_script_here
from deckhands.cli.verbs import options_as
from deckhands.client.client import Client
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec
from deckhands.evaluation.directory import RESULTS, Asked, ask, asked_in, write_report, write_scripts
from deckhands.evaluation.evaluation import Evaluation
from deckhands.evaluation.plan import AT_ONCE, RETRIES, Plan
from deckhands.evaluation.results import BeingWritten, Results, Row, read_results
from deckhands.evaluation.running.detaching import detach, follow
from deckhands.evaluation.running.record import Record
from deckhands.evaluation.running.screen import Screen
from deckhands.evaluation.running.standing import Standing
from deckhands.evaluation.running.steering import Steering
from deckhands.evaluation.running.stopping import ENOUGH, Until
from deckhands.evaluation.running.verbs import (
    COMMANDS,
    at_once_option,
    budget_option,
    retries_option,
    until_option,
)
from deckhands.evaluation.statistics import comparison_of
from deckhands.home import Home, supervising
from deckhands.reading.summary import ExitCode
from deckhands.reading.terminal import print_text
from deckhands.settings import MODEL_VARIABLES, FaceSettings

SECTION = "Evaluate agents"
VERBS = {"eval": "Evaluate agents on a dataset: run, steer, report, compare, fork."}
SCRIPTED = "scripted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `eval run`."""

    dataset: str
    models: tuple[str, ...]
    at_once: int | None
    attempts: int
    budget: float | None
    out: Path
    agent: str
    max_iterations: int
    max_budget: float | None
    max_seconds: float | None
    only: str
    part: str
    shuffle: bool
    seed: int
    retries: int | None
    until: str | None
    is_detached: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """Options of `eval attach`."""

    directory: Path
    at_once: int | None
    budget: float | None
    retries: int | None
    until: str | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of `eval report`."""

    directory: Path
    as_json: bool


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of `eval compare`."""

    first: Path
    second: Path
    as_json: bool


@click.group("eval")
def eval_() -> None:
    """Evaluate agents on a dataset, as durable work of a cluster, or of a private one if none is running."""


_directory = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
for _command in COMMANDS:
    eval_.add_command(_command)


@eval_.command()
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--model", "models", required=True, multiple=True, metavar="M[,M2]", help="The models, or profiles, to evaluate."
)
@at_once_option
@click.option("-k", "--attempts", type=click.IntRange(1, 1_000), default=1, show_default=True, help="Of each instance.")
@budget_option
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="For results and report.")
@click.option("--agent", default="CodeActAgent", show_default=True, help="The agent that does the tasks.")
@click.option("-i", "--max-iterations", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("-b", "--max-budget", type=click.FloatRange(min=0, min_open=True), help="Of one attempt, in USD.")
@click.option("--max-seconds", type=click.FloatRange(min=0, min_open=True), help="How long an attempt may work.")
@click.option("--filter", "only", default="", metavar="REGEX", help="Only instances whose id or a tag matches.")
@click.option("--slice", "part", default="", metavar="A:B", help="Only these, as in Python: :20, 20:40, -5:.")
@click.option("--shuffle", is_flag=True, help="In an order that --seed decides.")
@click.option("--seed", type=int, default=0, show_default=True)
@retries_option
@until_option
@click.option("--detach", "is_detached", is_flag=True, help="Let it run in the background; `eval attach` comes back.")
@json_option
@options_as(RunOptions)
def run(options: RunOptions) -> int:
    """Evaluate models on DATASET: a file of JSON lines, or `shipped`.

    Repeat the command to complete an evaluation that was interrupted. `--model scripted` solves `shipped` offline.
    """
    models = [name for text in options.models for name in text.split(",")]
    if not all(models) or len(set(models)) < len(models):
        raise UsageError("--model has an empty name, or a name twice.", remedy="Write --model A,B.")
    dataset = options.dataset if "/" not in options.dataset and not Path(options.dataset).exists() else None
    asked = Asked(
        name="",
        dataset=dataset or str(Path(options.dataset).resolve()),
        models=tuple(map(_here, models)),
        attempts=options.attempts,
        agent=options.agent,
        max_iterations=options.max_iterations,
        max_budget=options.max_budget,
        max_seconds=options.max_seconds,
        only=options.only,
        part=options.part,
        shuffle=options.shuffle,
        seed=options.seed,
    )
    asked.instances()  # before anything is written
    if options.until:
        Until.parse(options.until, len(models))
    asked = ask(options.out, asked)
    if options.is_detached:
        pid = detach(options.out, _as_arguments(options))
        note(f"The evaluation {asked.name} runs in the background (pid {pid}).")
        note(f"`deckhands eval attach {options.out}` comes back to it, `deckhands eval status` shows how it stands.")
        return 0
    return _carry_out(options.out, asked, options)


@eval_.command()
@_directory
@at_once_option
@budget_option
@retries_option
@until_option
@json_option
@options_as(AttachOptions)
def attach(options: AttachOptions) -> int:
    """Come back to the evaluation in DIR: follow the command that carries it out, or continue it.

    What the workers have done meanwhile counts, and nothing is begun twice.
    """
    return _carry_out(options.directory, asked_in(options.directory), options)


@eval_.command()
@_directory
@json_option
@options_as(ReportOptions)
def report(options: ReportOptions) -> None:
    """Write summary.json and report.html of DIR again, from results.jsonl alone."""
    _show(write_report(options.directory), as_json=options.as_json)


@eval_.command()
@click.argument("first", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("second", metavar="DIR2", type=click.Path(path_type=Path))
@json_option
@options_as(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Compare two evaluations over the instances that both have, by McNemar's exact test."""
    found = comparison_of(*(read_results(folder / RESULTS) for folder in (options.first, options.second)))
    if options.as_json:
        print_json(found)
        return
    print_text(
        f"{found['instances']} instances in both: {found['resolved'][0]} and {found['resolved'][1]} resolved; "
        f"{len(found['only_first'])} only by the first, {len(found['only_second'])} only by the second; "
        f"p = {found['p_value']:.3g}"
    )


def _here(model: str) -> str:
    if model == SCRIPTED:
        return model
    agent = AgentSpec()
    spec = with_script_here(agent.model_copy(update={"llm": agent.llm.model_copy(update={"model": model})}))
    return spec.llm.model or model


def _carry_out(directory: Path, asked: Asked, options: RunOptions | AttachOptions) -> int:
    instances = asked.instances()
    scripts = write_scripts(directory, instances) if SCRIPTED in asked.models else None
    plan = Plan(
        asked.name,
        instances,
        asked.models,
        attempts=asked.attempts,
        agent=AgentSpec(name=asked.agent),
        limits=Limits(
            max_iterations=asked.max_iterations, max_budget_usd=asked.max_budget, max_seconds=asked.max_seconds
        ),
        at_once=options.at_once or AT_ONCE,
        retries=RETRIES if options.retries is None else options.retries,
        budget_usd=options.budget,
        scripts=scripts,
        until=options.until or "",
    )
    while True:
        try:
            results = Results(directory / RESULTS)
        except BeingWritten:
            if isinstance(options, RunOptions):
                raise
            follow(directory, asked.name)
            continue
        break
    with results, Record(directory) as record, Screen() as screen:

        def on_standing(standing: Standing) -> None:
            record.standing(standing)
            screen.show(standing)

        asyncio.run(_evaluate(plan, results, _wishes(options), record.row, on_standing))
    _show(write_report(directory), as_json=options.as_json)
    abandoned = any(row.outcome == "infra-abandoned" for row in results.rows.values())
    return int(ExitCode.ERROR if abandoned else ExitCode.FINISHED)


def _wishes(options: RunOptions | AttachOptions) -> dict[str, object]:
    """Return what was asked for by the command, and holds for later ones too."""
    return {
        "at_once": options.at_once,
        "budget_usd": options.budget,
        "retries": options.retries,
        "until": options.until,
    }


def _as_arguments(options: RunOptions) -> list[str]:
    given = {
        "--concurrency": options.at_once,
        "--budget": options.budget,
        "--retries": options.retries,
        "--until": options.until,
    }
    return [part for name, value in given.items() if value is not None for part in (name, str(value))]


async def _evaluate(
    plan: Plan,
    results: Results,
    wishes: dict[str, object],
    on_row: Callable[[Row], None],
    on_standing: Callable[[Standing], None],
) -> None:
    settings = FaceSettings.from_env()
    async with _client(settings, plan) as client:
        await Steering(client.store, plan.name).wish(**wishes)
        await Evaluation(client, plan, results, on_row=on_row, on_standing=on_standing).run()


@asynccontextmanager
async def _client(settings: FaceSettings, plan: Plan) -> AsyncIterator[Client]:
    """Connect to the running cluster, or start a private one that keeps what it has done for the next call."""
    home = Home(settings.home)
    if settings.url is not None or home.cluster_url is not None:
        async with cluster_client(settings) as client:
            yield client
        return
    folder = home.evaluation_folder(plan.name)
    home.prepare(folder)
    known = {MODEL_VARIABLES[0]: plan.models[0]} if plan.models[0] != SCRIPTED else {}
    with supervising(folder, "An evaluation"):
        cluster = Cluster(ClusterSpec(folder, environment={**known, **settings.environment}), on_notice=note)
        try:
            await cluster.start()
            await cluster.until_ready()
            async with await Client.connect(cluster.url) as client:
                yield client
        finally:
            await cluster.stop()


def _show(summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    for model, figures in summary["models"].items():
        low, high = figures["pass@1_interval"]
        outcomes = ", ".join(f"{count} {name}" for name, count in figures["outcomes"].items() if count)
        print_text(
            f"{model}: {outcomes}; pass@1 {figures.get('pass@1', 0.0):.1%} ({low:.1%} to {high:.1%}), "
            f"${figures['cost_usd']['total']:.4f}; infrastructure failures: {figures['infrastructure_failures']} in "
            f"{figures['conversations']:,} conversations, {figures['infrastructure_failures_per_1000']:.1f} per 1,000"
        )
        for cause in figures["causes"]:
            if cause.startswith(ENOUGH):
                print_text(f"Ended early: {cause.removeprefix(ENOUGH)}; the rest was not run.")
