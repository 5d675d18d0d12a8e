"""`deckhands eval`: evaluate agents on a dataset, continue that, and report it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
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
from deckhands.cli.progress import Progress
from deckhands.cli.task_options import with_script_here
from deckhands.cli.verbs import options_as
from deckhands.client.client import Client
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec
from deckhands.datasets.dataset import absolute
from deckhands.evaluation.directory import RESULTS, Asked, ask, asked_in, write_report, write_scripts
from deckhands.evaluation.evaluation import Evaluation, Plan
from deckhands.evaluation.exporting import EXPORTS, FORMATS, PREDICTIONS, chosen, write_export, write_predictions
from deckhands.evaluation.results import OUTCOMES, Results, Row, read_results
from deckhands.evaluation.statistics import comparison_of
from deckhands.home import Home, supervising
from deckhands.reading.summary import ExitCode
from deckhands.reading.terminal import counted, print_text
from deckhands.settings import MODEL_VARIABLES, FaceSettings

SECTION = "Evaluate agents"
VERBS = {"eval": "Evaluate agents on a dataset: run, attach, report, compare, export."}
SCRIPTED = "scripted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `eval run`."""

    dataset: str
    models: tuple[str, ...]
    at_once: int
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
    repositories: Path | None
    retries: int
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """Options of `eval attach`."""

    directory: Path
    at_once: int
    budget: float | None
    retries: int
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


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of `eval export`."""

    directory: Path
    form: str
    out: Path | None
    outcomes: tuple[str, ...]


@click.group("eval")
def eval_() -> None:
    """Evaluate agents on a dataset, as durable work of a cluster, or of a private one if none is running."""


_directory = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
_at_once = click.option(
    "-n", "--concurrency", "at_once", type=click.IntRange(1, 10_000), default=4, show_default=True,
    help="How many attempts are under way at once.",
)  # fmt: skip
_budget = click.option(
    "--budget", type=click.FloatRange(min=0), help="Begin no attempt once all of them have cost so much, in USD."
)
_retries = click.option(
    "--retries", type=click.IntRange(0, 100), default=3, show_default=True,
    help="How often an attempt that the infrastructure has failed is begun again.",
)  # fmt: skip


@eval_.command()
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--model", "models", required=True, multiple=True, metavar="M[,M2]", help="The models, or profiles, to evaluate."
)
@_at_once
@click.option("-k", "--attempts", type=click.IntRange(1, 1_000), default=1, show_default=True, help="Of each instance.")
@_budget
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="For results and report.")
@click.option("--agent", default="CodeActAgent", show_default=True, help="The agent that does the tasks.")
@click.option("-i", "--max-iterations", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("-b", "--max-budget", type=click.FloatRange(min=0, min_open=True), help="Of one attempt, in USD.")
@click.option("--max-seconds", type=click.FloatRange(min=0, min_open=True), help="How long an attempt may work.")
@click.option("--filter", "only", default="", metavar="REGEX", help="Only instances whose id or a tag matches.")
@click.option("--slice", "part", default="", metavar="A:B", help="Only these, as in Python: :20, 20:40, -5:.")
@click.option("--shuffle", is_flag=True, help="In an order that --seed decides.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--repositories", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Mirrors or archives of the repositories that SWE-bench rows name.",
)  # fmt: skip
@_retries
@json_option
@options_as(RunOptions)
def run(options: RunOptions) -> int:
    """Evaluate models on DATASET: `shipped`, a file of rows, a directory of tasks, or the name of an installed one.

    Repeat the command to complete an evaluation that was interrupted. `--model scripted` solves `shipped` offline.
    """
    models = [name for text in options.models for name in text.split(",")]
    if not all(models) or len(set(models)) < len(models):
        raise UsageError("--model has an empty name, or a name twice.", remedy="Write --model A,B.")
    asked = Asked(
        name="",
        dataset=absolute(options.dataset),
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
        repositories=None if options.repositories is None else str(options.repositories.resolve()),
    )
    asked.instances()  # before anything is written
    asked = ask(options.out, asked)
    return _carry_out(options.out, asked, options)


@eval_.command()
@_directory
@_at_once
@_budget
@_retries
@json_option
@options_as(AttachOptions)
def attach(options: AttachOptions) -> int:
    """Continue the evaluation in DIR: what the workers have done meanwhile counts, and nothing is begun twice."""
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


@eval_.command()
@_directory
@click.option("--format", "form", type=click.Choice(FORMATS), required=True, help="Of which tool.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="By default exports/FORMAT in it.")
@click.option("--outcome", "outcomes", type=click.Choice(OUTCOMES), multiple=True, help="Only these; may be repeated.")
@options_as(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write the attempts of DIR for another tool, or for training."""
    asked = asked_in(options.directory)
    rows = chosen(options.directory, options.form, options.outcomes)
    out = options.out or options.directory / EXPORTS / options.form
    if options.form == PREDICTIONS:
        written, left_out = write_predictions(rows, out)
        for line in left_out:
            note(f"Not in the patch: {line}")
    else:
        written = asyncio.run(_export(asked, rows, options.form, out))
    print_text(f"{len(rows)} attempts in {counted(len(written), 'file')} below {out}")


async def _export(asked: Asked, rows: list[Row], form: str, out: Path) -> list[Path]:
    async with cluster_for(FaceSettings.from_env(), asked.name, asked.models[0]) as client:
        return await write_export(client, asked, rows, form, out)


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
        at_once=options.at_once,
        retries=options.retries,
        budget_usd=options.budget,
        scripts=scripts,
    )
    with Results(directory / RESULTS) as results, Progress("attempts", plan.size) as progress:
        progress.add(len(results.rows))
        counts: Counter[str] = Counter()

        def on_row(row: Row) -> None:
            counts[row.outcome] += 1
            progress.add()

        asyncio.run(_evaluate(plan, results, on_row))
    _show(write_report(directory), as_json=options.as_json)
    abandoned = any(row.outcome == "infra-abandoned" for row in results.rows.values())
    return int(ExitCode.ERROR if abandoned else ExitCode.FINISHED)


async def _evaluate(plan: Plan, results: Results, on_row: Any) -> None:
    settings = FaceSettings.from_env()
    async with cluster_for(settings, plan.name, plan.models[0]) as client:
        await Evaluation(client, plan, results, on_row=on_row).run()


@asynccontextmanager
async def cluster_for(settings: FaceSettings, name: str, model: str) -> AsyncIterator[Client]:
    """Connect to the running cluster, or start a private one that keeps what it has done for the next call."""
    home = Home(settings.home)
    if settings.url is not None or home.cluster_url is not None:
        async with cluster_client(settings) as client:
            yield client
        return
    folder = home.evaluation_folder(name)
    home.prepare(folder)
    known = {MODEL_VARIABLES[0]: model} if model != SCRIPTED else {}
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
            f"${figures['cost_usd']['total']:.4f}"
        )
