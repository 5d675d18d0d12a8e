"""Evaluations requested by Celery tasks: a command beside the ingress worker drives each, and answers at its end.

Holds: the message of a task starts the evaluation, or finds it in flight; when all attempts have ended, the command
completes the task. A later message stores the result again if it was lost. A producer can name only paths below the
directory of evaluations, and no part of a request is run as a program on the worker's machine. A command that ends
before its evaluation is started again, up to `MAX_STARTS` times; then the waiting tasks fail.
Does not: restart a command that a worker on another machine started, unless both use the same directory.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.runtime import SYSTEM_CLOCK, UsageError, new_key, wait_for_tick
from deckhands import evaluation as evals
from deckhands.ingress.failures import TaskExpired, refusal, to_exception
from deckhands.ingress.waiting_tasks import TASKS, WaitingTask, complete_tasks, list_waiting
from deckhands.settings import CliSettings

PLACES = ("workspace", "hidden", "images")
MAX_ROWS = 10_000
MAINTENANCE_SECONDS = 5.0
FORSAKEN_AFTER_SECONDS = 20.0
"""The minimum age of a task before its command counts as dead: a new command needs some seconds to start."""
MAX_STARTS = 5

_log = logging.getLogger(__name__)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dataset: str | list[dict[str, Any]]
    models: str | list[str]
    out: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    attempts: int = Field(default=1, ge=1, le=1_000)
    concurrency: int | None = Field(default=None, ge=1, le=10_000)
    budget_usd: float | None = Field(default=None, ge=0)
    token_budget: float | None = Field(default=None, ge=0)
    agent: str = Field(default="CodeActAgent", max_length=100)
    max_iterations: int = Field(default=100, ge=1)
    max_budget_usd: float | None = Field(default=None, gt=0)
    max_seconds: float | None = Field(default=None, gt=0)
    only: str = Field(default="", max_length=1_000)
    part: str = Field(default="", max_length=100)
    shuffle: bool = False
    seed: int = 0
    repositories: str | None = None
    network: bool = True
    retries: int | None = Field(default=None, ge=0, le=100)
    until: str | None = Field(default=None, max_length=100)

    @property
    def tuning(self) -> evals.Tuning:
        """The options of its driver."""
        return evals.Tuning(
            at_once=self.concurrency,
            budget=self.budget_usd,
            token_budget=self.token_budget,
            retries=self.retries,
            until=self.until,
        )


class EvaluationTasks:
    """The evaluations requested by tasks."""

    def __init__(self, root: str, url: str) -> None:
        self._root = Path(root).expanduser().absolute() if root else None
        self._url = url

    def take(
        self,
        task_id: str,
        previous: Sequence[Any],
        options: Mapping[str, Any],
        kept: Mapping[str, Any],
        *,
        is_late: bool = False,
        on_new: Callable[[], None] = lambda: None,
    ) -> dict[str, Any] | UsageError | None:
        """Start an evaluation, or return its summary; None if it is in flight. Idempotent.

        Args:
            is_late: the message has expired.
            on_new: called for a new task, before its command starts.

        Returns:
            An error instead of the summary if it was given up.

        Raises:
            UsageError: the request is invalid; nothing was started.
            TaskExpired: the message has expired, and no earlier delivery has started the evaluation.
        """
        if self._root is None:
            raise UsageError(
                "This ingress worker takes no evaluations.",
                remedy="Set DECKHANDS_EVALUATIONS to the directory of evaluations, and restart it.",
            )
        request = _parse_request(previous, options)
        directory = self._root / request.out
        ended = WaitingTask.load_over(directory, task_id)
        if ended is not None:
            if ended.failure:
                return UsageError(ended.failure)
            found: dict[str, Any] = json.loads((directory / evals.SUMMARY).read_text(encoding="utf-8"))
            return found
        earlier = WaitingTask.load_waiting(directory, task_id)
        if is_late and earlier is None:
            raise TaskExpired
        models = [request.models] if isinstance(request.models, str) else request.models
        asked = evals.EvaluationRequest(
            name="",
            dataset=self._dataset(request, directory),
            models=tuple(models),
            attempts=request.attempts,
            agent=request.agent,
            max_iterations=request.max_iterations,
            max_budget=request.max_budget_usd,
            max_seconds=request.max_seconds,
            only=request.only,
            part=request.part,
            shuffle=request.shuffle,
            seed=request.seed,
            network=request.network,
            repositories=None
            if request.repositories is None
            else str(self._below("repositories", request.repositories)),
        )
        for line in evals.list_left_out(asked.instances()):
            _log.warning("%s", line)
        request.tuning.check(len(models))
        evals.record_request(directory, asked)
        is_new = earlier is None
        started = earlier.started if earlier else SYSTEM_CLOCK.now().timestamp()
        # Before checking the command: a running command answers all waiting tasks when it ends.
        asker = WaitingTask(task_id=task_id, options=dict(options), kept=dict(kept), started=started)
        asker.write(directory)
        if is_new:
            on_new()
        try:
            if not evals.is_driven(directory):
                self._start(directory, request.tuning, is_new=is_new)
        except UsageError:
            asker.forget(directory)
            raise
        return None

    def _start(self, directory: Path, tuning: evals.Tuning, *, is_new: bool) -> None:
        """Start the command that drives an evaluation.

        Raises:
            UsageError: the command ended immediately; the text says why.
        """
        # The request's settings were written into the store at the first start; they may have been changed since.
        progress = directory / evals.PROGRESS
        has_begun = not is_new and progress.exists() and progress.stat().st_size > 0
        environment = {**CliSettings.from_env().environment, "DECKHANDS_URL": self._url, "DECKHANDS_URL_FILE": ""}
        evals.detach(directory, [] if has_begun else tuning.as_arguments(), environment=environment)

    async def run_maintenance(self) -> None:
        """Restart commands that ended before their evaluations, forever; return at once without a directory of them."""
        while self._root is not None:
            await wait_for_tick(MAINTENANCE_SECONDS)
            try:
                await asyncio.to_thread(self.restart_commands)
            except Exception:  # noqa: BLE001  (the outer edge: the next look tries again)
                _log.exception("cannot check the commands of evaluations")

    def restart_commands(self) -> None:
        """Restart commands that ended before their evaluations, and give up evaluations that fail repeatedly.

        An error of one evaluation, such as an unavailable broker, is logged and retried at the next scan.
        """
        for tasks in sorted(self._root.glob(f"*/{TASKS}")) if self._root is not None else ():
            try:
                self._check_evaluation(tasks.parent)
            except Exception:  # noqa: BLE001  (one evaluation holds up no other)
                _log.exception("cannot check the command of the evaluation %s", tasks.parent.name)

    def _check_evaluation(self, directory: Path) -> None:
        waiting = list_waiting(directory)
        now = SYSTEM_CLOCK.now().timestamp()
        if (
            not waiting
            or any(now - since < FORSAKEN_AFTER_SECONDS for _, since in waiting)
            or evals.is_driven(directory)
        ):
            return
        askers = [asker for asker, _ in waiting]
        if all(asker.starts >= MAX_STARTS for asker in askers):
            why = f"The command that carries out the evaluation {directory.name} has ended too early too often"
            given_up = UsageError(f"{why}; {evals.LOG} in its directory says more.")
            complete_tasks(directory, failure=to_exception(refusal(given_up)))
            return
        for asker in askers:
            asker.model_copy(update={"starts": asker.starts + 1}).write(directory)
        try:
            self._start(directory, _parse_request((), askers[0].options).tuning, is_new=False)
        except UsageError as error:
            _log.warning("%s", error.message)

    def _dataset(self, request: _Request, directory: Path) -> str:
        if isinstance(request.dataset, list):
            return self._write_rows(request.dataset, directory)
        name = request.dataset
        if name == evals.SHIPPED or name.partition(":")[0] in evals.list_installed():
            return name
        return str(self._below("dataset", name))

    def _write_rows(self, rows: list[dict[str, Any]], directory: Path) -> str:
        """Write the rows beside the results. They may contain files, but not refer to files of this machine."""
        for number, row in enumerate(rows[:MAX_ROWS], 1):
            for name in PLACES:
                values = row.get(name) if name == "images" else [row.get(name)]
                if any(isinstance(value, str) and "://" not in value for value in values or ()):
                    raise UsageError(
                        f"The request cannot be used: dataset: row {number}: {name} is a path.",
                        remedy="Pass files as {path: text}, and pictures as addresses.",
                    )
        path = directory / evals.ROWS
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise UsageError(f"The request cannot be used: out: {directory.name} has another evaluation.")
            return str(path)
        draft = directory / f"draft-{new_key()}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8")
            evals.read_dataset(draft)
            draft.replace(path)  # atomically: a command that reads it never sees half of it
        except OSError as error:
            raise UsageError(f"{directory} cannot be written: {error.strerror}.") from error
        finally:
            draft.unlink(missing_ok=True)
        return str(path)

    def _below(self, name: str, text: str) -> Path:
        assert self._root is not None
        path = (self._root / text).resolve()
        if not evals.is_safe(text) or not path.is_relative_to(self._root.resolve()):
            raise UsageError(
                f"The request cannot be used: {name}: {ascii(text)[:200]} is not below the directory of evaluations.",
                remedy="Name a relative path there.",
            )
        return path


def _parse_request(previous: Sequence[Any], options: Mapping[str, Any]) -> _Request:
    if previous:
        raise UsageError("The request cannot be used: deckhands.evaluate has named arguments only.")
    try:
        return _Request.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"The request cannot be used: {place}: {first['msg']}.") from error
