"""`deckhands eval`: evaluate agents on a dataset, continue an evaluation, and report it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from broker.contract import NAME_PATTERN
from broker.runtime import UsageError
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.eval_export import export
from deckhands.cli.commands.eval_steering import (
    COMMANDS,
    AtOnceType,
    at_once_option,
    budget_option,
    retries_option,
    token_budget_option,
    until_option,
)
from deckhands.cli.options import Amount, json_option
from deckhands.client import note, print_json, print_text
from deckhands.evaluation import (
    DOCKER,
    MAX_SCORE,
    RESULTS,
    AttemptRow,
    EvaluationRequest,
    Scoring,
    Tuning,
    build_request,
    check_redo,
    compare_runs,
    compare_siblings,
    detach,
    format_mean,
    list_left_out,
    load_request,
    load_scorers,
    print_summary,
    read_defaults,
    read_results,
    record_request,
    redo_option,
    resolve_model,
    resolve_repositories,
    run_evaluation,
    to_absolute_name,
    to_absolute_scorer,
    write_report,
)
from deckhands.ingress import complete_tasks

SECTION = "Evaluate agents"
SUMMARIES = {"eval": "Evaluate agents on a dataset: run, steer, report, compare, export, fork."}


class RepositoriesType(click.Path):
    """A directory, or `docker`."""

    name = "repositories"

    def __init__(self) -> None:
        super().__init__(path_type=Path, exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path; None for `docker`."""
        return Path(DOCKER) if value == DOCKER else super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRunOptions:
    """Options of `eval run`."""

    dataset: str
    models: tuple[str, ...]
    at_once: int | None
    attempts: int | None
    budget: float | None
    token_budget: float | None
    out: Path
    agent: str
    max_iterations: int | None
    max_budget: float | None
    max_seconds: float | None
    only: str
    part: str
    shuffle: bool
    seed: int
    repositories: Path | None
    tenant: str
    has_network: bool
    critic: str
    scorers: tuple[str, ...]
    redo: tuple[str, ...]
    retries: int | None
    until: str | None
    is_detached: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAttachOptions:
    """Options of `eval attach`."""

    directory: Path
    at_once: int | None
    budget: float | None
    token_budget: float | None
    retries: int | None
    until: str | None
    redo: tuple[str, ...]
    as_json: bool


@dataclass(frozen=True, slots=True)
class EvalReportOptions:
    """Options of `eval report`."""

    directory: Path
    as_json: bool


@dataclass(frozen=True, slots=True)
class EvalCompareOptions:
    """Options of `eval compare`; `models` is empty, or A, or A,B."""

    first: Path
    second: Path
    models: str | None
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalForkOptions:
    """Options of `eval fork`; `point` is RUN@EVENT, `origin` the directory of its evaluation."""

    point: str
    models: tuple[str, ...]
    siblings: int
    out: Path
    origin: Path | None
    check: str | None
    hidden: Path | None
    critic: str
    tenant: str
    at_once: int | None
    as_json: bool


@click.group("eval")
def eval_() -> None:
    """Evaluate agents on a dataset, durably on a cluster, or on a private one if none is running."""


_directory = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
for _command in (*COMMANDS, export):
    eval_.add_command(_command)


@eval_.command()
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--model", "models", required=True, multiple=True, metavar="M[,M2]", help="The models, or profiles, to evaluate."
)
@at_once_option
@click.option(
    "-k",
    "--attempts",
    type=click.IntRange(1, 1_000),
    help="How often each instance is tried; by default 1, or the epochs of an inspect task.",
)
@budget_option
@token_budget_option
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="For results and report.")
@click.option("--agent", default="CodeActAgent", show_default=True, help="The agent that does the tasks.")
@click.option(
    "-i", "--max-iterations", type=click.IntRange(min=1),
    help="The steps of one attempt; by default 100, or half the message_limit of an inspect task.",
)  # fmt: skip
@click.option("-b", "--max-budget", type=Amount(min=0, min_open=True), help="The budget of one attempt, in USD.")
@click.option("--max-seconds", type=Amount(min=0, min_open=True), help="How long an attempt may work.")
@click.option("--filter", "only", default="", metavar="REGEX", help="Only instances whose id or a tag matches.")
@click.option(
    "--slice",
    "part",
    default="",
    metavar="A:B",
    help="Only this slice of the instances, as in Python: :20, 20:40, -5:.",
)
@click.option("--shuffle", is_flag=True, help="In a random order given by --seed.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--repositories", type=RepositoriesType(), metavar="DIR|docker",
    help="Mirrors or archives of the repositories that SWE-bench rows name, or the images of the docker engine here.",
)  # fmt: skip
@click.option("--tenant", default="", metavar="NAME", help="The tenant of its conversations and costs.")
@click.option("--network/--no-network", "has_network", default=True, help="Let the agents' commands reach the network.")
@click.option(
    "--scorer", "scorers", multiple=True, metavar="FILE.py@FUNCTION",
    help="A Python function that scores each attempt. May be given several times.",
)  # fmt: skip
@click.option(
    "--critic", default="", metavar="M",
    help="A model that scores each attempt; it decides those that have no check, answer or scorer.",
)  # fmt: skip
@redo_option
@retries_option
@until_option
@click.option("--detach", "is_detached", is_flag=True, help="Run in the background; `eval attach` reattaches.")
@json_option
@with_options(EvalRunOptions)
def run(options: EvalRunOptions) -> int:
    """Evaluate models on DATASET: `shipped`, a file of rows, a directory of tasks, or the name of an installed dataset.

    Repeat the command to complete an interrupted evaluation. `--model scripted` solves `shipped` offline.
    """
    models = [name for text in options.models for name in text.split(",")]
    if not all(models) or len(set(models)) < len(models):
        raise UsageError("--model has an empty name, or a name twice.", remedy="Write --model A,B.")
    dataset = to_absolute_name(options.dataset)
    given = {name: getattr(options, name) for name in ("attempts", "max_iterations", "max_budget", "max_seconds")}
    settings, notes = read_defaults(dataset).resolve(given)
    asked = EvaluationRequest(
        name="",
        dataset=dataset,
        models=tuple(map(resolve_model, models)),
        **settings,
        agent=options.agent,
        only=options.only,
        part=options.part,
        shuffle=options.shuffle,
        seed=options.seed,
        repositories=None if options.repositories is None else resolve_repositories(options.repositories),
        tenant=_tenant(options.tenant),
        network=options.has_network,
        critic=resolve_model(options.critic) if options.critic else "",
        scorers=tuple(map(to_absolute_scorer, options.scorers)),
    )
    load_scorers(asked.scorers)
    instances = asked.instances()  # before anything is written
    for line in (*notes, *list_left_out(instances)):
        note(line)
    tuning = _tuning(options)
    tuning.check(len(models), asked.attempts)
    _note_obstacle(tuning, asked)
    check_redo(options.redo, instances)
    asked = record_request(options.out, asked)
    if options.is_detached:
        pid = detach(options.out, tuning.as_arguments())
        note(f"The evaluation {asked.name} runs in the background (pid {pid}).")
        note(f"`deckhands eval attach {options.out}` reattaches, and `deckhands eval status` shows its progress.")
        return 0
    return run_evaluation(
        options.out, asked, tuning, follows=False, as_json=options.as_json, on_finished=complete_tasks
    )


@eval_.command()
@_directory
@at_once_option
@budget_option
@token_budget_option
@retries_option
@until_option
@redo_option
@json_option
@with_options(EvalAttachOptions)
def attach(options: EvalAttachOptions) -> int:
    """Reattach to the evaluation in DIR: follow the command that drives it, or continue it.

    Work that the workers did in the meantime counts, and nothing is started twice.
    """
    tuning = _tuning(options)
    asked = load_request(options.directory)
    _note_obstacle(tuning, asked)
    return run_evaluation(
        options.directory, asked, tuning, follows=True, as_json=options.as_json, on_finished=complete_tasks
    )


@eval_.command()
@_directory
@json_option
@with_options(EvalReportOptions)
def report(options: EvalReportOptions) -> None:
    """Write summary.json and report.html of DIR again, from results.jsonl alone."""
    summary: dict[str, Any] = write_report(options.directory)
    siblings = None
    with suppress(UsageError):  # the rows are enough for everything else
        siblings = compare_siblings(options.directory) if load_request(options.directory).origin else None
    if siblings is None or options.as_json:
        print_summary(summary if siblings is None else {**summary, "siblings": siblings}, as_json=options.as_json)
        return
    print_summary(summary, as_json=False)
    _show_siblings(siblings)


@eval_.command()
@click.argument("first", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("second", metavar="DIR2", type=click.Path(path_type=Path))
@click.option(
    "--model",
    "models",
    metavar="A[,B]",
    help="Only attempts with outcome A, or with A in DIR and B in DIR2, which may be DIR.",
)
@json_option
@with_options(EvalCompareOptions)
def compare(options: EvalCompareOptions) -> None:
    """Compare two evaluations over the instances that both have scored: the difference, and McNemar's exact test."""
    found = compare_runs(*_rows_to_compare(options))
    if not found["instances"]:
        raise UsageError(
            f"{options.first} and {options.second} have no scored instance in common, so there is nothing to compare.",
            remedy="Compare evaluations of the same dataset.",
        )
    if options.as_json:
        print_json(found)
        return
    print_text(
        f"{found['instances']} instances in both: {found['resolved'][0]} and {found['resolved'][1]} resolved; "
        f"{len(found['only_first'])} only by the first, {len(found['only_second'])} only by the second; "
        f"p = {found['p_value']:.3g}"
    )
    interval = found["interval"]
    within = "no interval: too few instances" if interval is None else f"95 %: {interval[0]:+.1%} to {interval[1]:+.1%}"
    print_text(f"The first resolves {found['difference']:+.1%} ({within}) of the attempts more than the second.")
    if found["reward"] is not None:
        print_text(f"The first's reward is larger by {format_mean(found['reward'])}.")
    if found["setup_failed"]:
        print_text(f"Without a score, because the set-up failed: {', '.join(found['setup_failed'])}.")
    if not found["differing"] and not found["differing_rewards"]:
        print_text("No instance differs.")
    for one in found["differing"]:
        print_text(f"  {one['instance']}: {one['first']:.0%} and {one['second']:.0%}")
    for one in found["differing_rewards"]:
        print_text(f"  {one['instance']}: rewards {one['first']:.4g} and {one['second']:.4g}")


def _rows_to_compare(options: EvalCompareOptions) -> list[list[AttemptRow]]:
    """Return the rows of each side.

    Raises:
        UsageError: the results cannot be read, or contain none of a given model.
    """
    sides = [read_results(folder / RESULTS) for folder in (options.first, options.second)]
    if options.models is None:
        if any(len({row.model for row in rows}) > 1 for rows in sides):
            note("There are several models, and the attempts of all models count together: name one with --model.")
        return sides
    names = options.models.split(",")
    if len(names) > 2:
        raise UsageError(f"--model {options.models!r} has more than two names.", remedy="Write --model A,B.")
    chosen = []
    for folder, rows, name in zip((options.first, options.second), sides, (names[0], names[-1]), strict=True):
        chosen.append([row for row in rows if row.model == name])
        if not chosen[-1]:
            known = ", ".join(sorted({row.model for row in rows}))
            raise UsageError(f"--model {name!r} matches no attempt in {folder}.", remedy=f"Its models: {known}.")
    return chosen


def _tenant(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"--tenant {name!r} is not a name.", remedy="Use letters, digits and _ . -")
    return name


@eval_.command()
@click.argument("point", metavar="RUN@EVENT")
@click.option(
    "--model", "models", multiple=True, metavar="M[,M2]", help="The models of the siblings; by default its own."
)
@click.option(
    "-n",
    "--siblings",
    type=click.IntRange(1, 1_000),
    default=8,
    show_default=True,
    help="Number of attempts with each model.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="For results and report.")
@click.option(
    "--of", "origin", type=click.Path(path_type=Path), metavar="DIR", help="The evaluation that RUN is part of."
)
@click.option("--check", help="A command in the workspace of each sibling, copied; exit code 0 means right.")
@click.option("--hidden", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Files for the check.")
@click.option(
    "--critic", default="", metavar="M",
    help="A model that scores each sibling; with a check, it only ranks those that pass.",
)  # fmt: skip
@click.option(
    "--tenant", default="", metavar="NAME", help="The tenant of the conversations and costs; by default that of RUN."
)
@click.option(
    "--concurrency",
    "at_once",
    type=AtOnceType(),
    help="Maximum number of attempts at the same time, or `auto`. By default 4.",
)
@json_option
@with_options(EvalForkOptions)
def fork(options: EvalForkOptions) -> int:
    """Try alternative continuations of a conversation from EVENT on, compare them, and name the best.

    Each sibling starts with the events up to EVENT, and with the files of the checkpoint nearest to it. It is scored
    like the evaluation attempt that RUN is (--of), by --check, or by a model (--critic).
    """
    models = [name for text in options.models for name in text.split(",")]
    if not all(models) or len(set(models)) < len(models):
        raise UsageError("--model has an empty name, or a name twice.", remedy="Write --model A,B.")
    models = list(map(resolve_model, models))
    scoring = Scoring(
        of=options.origin,
        check=options.check,
        hidden=options.hidden,
        critic=resolve_model(options.critic) if options.critic else "",
        tenant=_tenant(options.tenant),
    )
    asked = build_request(options.point, models, options.out, scoring)
    asked = record_request(options.out, asked.model_copy(update={"attempts": options.siblings}))
    tuning = Tuning(at_once=options.at_once, budget=None, retries=None, until=None)
    as_json = None if options.as_json else False
    code = run_evaluation(options.out, asked, tuning, follows=False, as_json=as_json, on_finished=complete_tasks)
    found = compare_siblings(options.out)
    if options.as_json:
        print_json(found)
        return code
    _show_siblings(found)
    return code


def _show_siblings(found: dict[str, Any]) -> None:
    """Print the comparison of siblings."""
    for pair in found["comparisons"]:
        p_value = pair["p_value"]
        found_out = "nothing to compare: one has no scored sibling" if p_value is None else f"p = {p_value:.3g}"
        print_text(f"{' and '.join(pair['models'])}: {found_out}")
    best = found["best"]
    if found["has_critic"]:
        print_text(f"The critic cost ${found['critic_cost_usd']:.4f}.")
    if best is None:
        print_text("None is right, so none is the best.")
        return
    print_text(f"The best is {best['conversation_id']}, {best['model']}.")
    if best["score"] is not None:
        print_text(f"The critic gave it {best['score']:g} of {MAX_SCORE}: {best['verdict']}")


def _note_obstacle(tuning: Tuning, asked: EvaluationRequest) -> None:
    obstacle = tuning.find_obstacle(asked)
    if obstacle:
        note(obstacle)


def _tuning(options: EvalRunOptions | EvalAttachOptions) -> Tuning:
    return Tuning(
        at_once=options.at_once,
        budget=options.budget,
        token_budget=options.token_budget,
        retries=options.retries,
        until=options.until,
        redo=options.redo,
    )
