"""`deckhands.evaluate`: run an evaluation from a program, like `deckhands eval run`.

Holds: the request and the results are in `out`. A second call with the same arguments completes the first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from anyio.from_thread import start_blocking_portal

from broker.contract import AgentSpec, Limits
from broker.runtime import UsageError
from deckhands.client import resolve_script_path
from deckhands.evaluation.attempts.record import ProgressRecord
from deckhands.evaluation.attempts.results import AttemptRow, Results
from deckhands.evaluation.datasets.dataset import read_defaults, to_absolute_name
from deckhands.evaluation.datasets.docker_images import DOCKER
from deckhands.evaluation.datasets.instances import list_left_out
from deckhands.evaluation.detached_runs import check_redo
from deckhands.evaluation.directory import REQUEST, RESULTS, EvaluationRequest, record_request, write_report
from deckhands.evaluation.runner import SCRIPTED, Tuning, build_plan, evaluate_plan
from deckhands.evaluation.scorers import load_scorers, to_absolute_scorer
from deckhands.settings import CliSettings

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

ROWS = "dataset.jsonl"
Dataset = str | PathLike[str] | Iterable[Mapping[str, Any]]


async def evaluate_async(
    dataset: Dataset,
    models: str | Sequence[str],
    *,
    out: str | PathLike[str],
    attempts: int | None = None,
    concurrency: int | None = None,
    budget_usd: float | None = None,
    token_budget: float | None = None,
    agent: str = "CodeActAgent",
    limits: Limits | None = None,
    only: str = "",
    part: str = "",
    shuffle: bool = False,
    seed: int = 0,
    repositories: str | PathLike[str] | None = None,
    retries: int | None = None,
    until: str | None = None,
    redo: Sequence[str] = (),
    network: bool = True,
    critic: str = "",
    scorers: Sequence[str] = (),
    cluster: str | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Evaluate models on a dataset, and return the summary when every attempt has ended.

    Idempotent: results in `out` are kept. The other arguments correspond to the options of `deckhands eval run`.

    Args:
        dataset: a name as for the command, or rows of our own format; paths in them are relative to `out`.
        attempts: the attempts for each instance and model; None for 1, or for the epochs of an inspect task.
        limits: the limits of each attempt; tokens cannot be limited here. None for `Limits()`, or for those of an
            inspect task.
        cluster: the URL of a store; None for the running cluster, or a private one if none is running.
        on_row: called with each result as soon as it is written; not for earlier results.

    Returns:
        The content of `summary.json`: `{"models": {MODEL: figures}}`.

    Raises:
        UsageError: an argument is invalid, or another program runs the evaluation in `out`; nothing was started.
        StoreError: the cluster cannot be reached; call it again.
    """
    directory = Path(out)
    names = _check_names(models)
    mirrors = None if repositories is None else resolve_repositories(repositories)
    name = _write_rows(dataset, directory)
    given = {
        "attempts": attempts,
        "max_iterations": None if limits is None else limits.max_iterations,
        "max_budget": None if limits is None else limits.max_budget_usd,
        "max_seconds": None if limits is None else limits.max_seconds,
    }
    chosen, notes = read_defaults(name).resolve(given)
    chosen.setdefault("max_iterations", Limits().max_iterations)
    asked = EvaluationRequest(
        name="",
        dataset=name,
        models=tuple(map(resolve_model, names)),
        **chosen,
        agent=agent,
        only=only,
        part=part,
        shuffle=shuffle,
        seed=seed,
        repositories=mirrors,
        network=network,
        critic=resolve_model(critic) if critic else "",
        scorers=tuple(map(to_absolute_scorer, scorers)),
    )
    load_scorers(asked.scorers)
    tuning = Tuning(
        at_once=concurrency,
        budget=budget_usd,
        token_budget=token_budget,
        retries=retries,
        until=until,
        redo=tuple(redo),
    )
    instances = asked.instances()
    for line in (*notes, *list_left_out(instances)):
        _log.warning("%s", line)
    check_redo(redo, instances)
    tuning.check(len(names), asked.attempts)
    if obstacle := tuning.find_obstacle(asked):
        _log.warning("%s", obstacle)
    asked = record_request(directory, asked)
    plan = build_plan(directory, asked, tuning)
    settings = CliSettings.from_env()
    if cluster is not None:
        named = {"DECKHANDS_URL": cluster, "DECKHANDS_URL_FILE": ""}
        settings = replace(settings, url=cluster, environment={**settings.environment, **named})
    with Results(directory / RESULTS) as results, ProgressRecord(directory) as record:

        def keep(row: AttemptRow) -> None:
            record.add_row(row)
            on_row(row.model_dump())

        place = asked.home or asked.name
        await evaluate_plan(settings, place, plan, results, tuning=tuning, on_row=keep, on_status=record.add_status)
    return dict(write_report(directory))


def _check_names(models: str | Sequence[str]) -> list[str]:
    names = [models] if isinstance(models, str) else list(models)
    if not names or not all(names) or len(set(names)) < len(names):
        raise UsageError("The argument models is empty, or has a name twice.", remedy="Pass one name, or several.")
    return names


def _blocking(work: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    @wraps(work)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        with start_blocking_portal() as portal:
            result: R = portal.call(partial(work, *arguments, **options))
            return result

    call.__name__ = call.__qualname__ = work.__name__.removesuffix("_async")
    return call


evaluate = _blocking(evaluate_async)
"""The blocking variant, for programs that are not asynchronous."""


def resolve_repositories(place: str | PathLike[str]) -> str:
    """Return the location of repositories, independent of the working directory; `docker` is not a directory."""
    return DOCKER if str(place) == DOCKER else str(Path(place).resolve())


def resolve_model(model: str) -> str:
    """Return a model's name for workers: the path of a script becomes absolute.

    Raises:
        UsageError: there is no such script.
    """
    if model == SCRIPTED:
        return model
    agent = AgentSpec()
    spec = resolve_script_path(agent.model_copy(update={"llm": agent.llm.model_copy(update={"model": model})}))
    return spec.llm.model or model


def _write_rows(dataset: Dataset, directory: Path) -> str:
    """Return the name of a dataset; rows are written into the directory first."""
    if isinstance(dataset, str | PathLike):
        return to_absolute_name(str(dataset))
    try:
        text = "".join(json.dumps(dict(row), sort_keys=True) + "\n" for row in dataset)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The argument dataset has a row that is not JSON: {error}.", remedy="Pass mappings."
        ) from error
    path = directory / ROWS
    if (directory / REQUEST).exists() and path.exists() and path.read_text(encoding="utf-8") != text:
        raise UsageError(f"{directory} has another evaluation.", remedy="Pass another directory as `out`.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror}.", remedy="Name another one.") from error
    return str(path.resolve())
