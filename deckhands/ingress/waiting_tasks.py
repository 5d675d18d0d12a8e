"""The Celery tasks that wait for an evaluation; see `deckhands.ingress.evaluations`.

tasks/ID.json in the directory of the evaluation: a waiting task, with its Celery data tasks/ID.over.json the task once
all attempts have ended, or it was given up

Holds: each task has its own file, so no task replaces another. A waiting task is forgotten only after it was completed,
so a task whose answer was lost is answered once more.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.runtime import SYSTEM_CLOCK, BrokerSettings, new_key
from deckhands import evaluation as evals
from deckhands.ingress.failures import TaskFailure
from deckhands.ingress.ingress_app import make_ingress_app
from deckhands.ingress.ingress_results import Ending, TaskResults, is_temporary

TASKS = "tasks"
WAITS, OVER = ".json", ".over.json"
MAX_OVER = 1_000
"""The number of tasks kept per evaluation; the oldest are removed."""
EVALUATE = "deckhands.evaluate"
MAX_REASON_CHARS = 300

_log = logging.getLogger(__name__)


class WaitingTask(BaseModel):
    """A task that waits, or has waited, for an evaluation.

    Attributes:
        options: its arguments; empty once it is over.
        failure: the reason why it was given up; empty if it was not.
        starts: how often the command for its evaluation was restarted.
        started: when the first command was started, in Unix seconds; 0 if the version that started it did not record
            this.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    task_id: str
    options: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    failure: str = ""
    starts: int = 0
    started: float = 0.0

    @classmethod
    def load_waiting(cls, directory: Path, task_id: str) -> Self | None:
        """Return a task if it waits; None if it does not, or its file is unreadable."""
        return cls._read(_path(directory, task_id, WAITS))

    @classmethod
    def load_over(cls, directory: Path, task_id: str) -> Self | None:
        """Return a task if it no longer waits; None if it does, or never waited."""
        return cls._read(_path(directory, task_id, OVER))

    @classmethod
    def _read(cls, path: Path) -> Self | None:
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        """Record that the task waits. Idempotent."""
        _write(self, _path(directory, self.task_id, WAITS))

    def end(self, directory: Path, failure: str) -> None:
        """Record that the task no longer waits; `forget` records that it has its answer. Idempotent."""
        _forget_oldest(directory)
        ended = self.model_copy(update={"options": {}, "failure": failure})
        _write(ended, _path(directory, self.task_id, OVER))

    def forget(self, directory: Path) -> None:
        """Forget the task. Idempotent."""
        _path(directory, self.task_id, WAITS).unlink(missing_ok=True)


def list_waiting(directory: Path) -> Sequence[tuple[WaitingTask, float]]:
    """Return the tasks that wait for an evaluation, and when each file was written, in Unix seconds."""
    found = []
    for path in sorted((directory / TASKS).glob(f"*{WAITS}")):
        if path.name.endswith(OVER):
            continue
        try:
            found.append((WaitingTask.model_validate_json(path.read_bytes()), path.stat().st_mtime))
        except (OSError, ValidationError):
            continue  # just answered, or unusable
    return found


def complete_tasks(directory: Path, *, failure: Exception | None = None) -> None:
    """Complete the tasks that wait for a finished evaluation. Idempotent.

    Args:
        failure: the reason for giving up the evaluation, if it has not finished.

    Raises:
        OSError, OperationalError, RedisError: the broker is unavailable; the tasks still wait.
    """
    askers = [asker for asker, _ in list_waiting(directory)]
    if not askers:
        return
    settings = BrokerSettings.from_env()
    results = TaskResults(make_ingress_app(settings.celery_url, settings.result_url))
    value = None if failure else json.loads((directory / evals.SUMMARY).read_text(encoding="utf-8"))
    for asker in askers:
        asker.end(directory, str(failure.args[0]) if failure else "")
        seconds = SYSTEM_CLOCK.now().timestamp() - asker.started if asker.started else None
        try:
            unusable = partial(_unusable_callback, directory=directory)
            results.settle(Ending(asker.task_id, asker.kept, value, failure, unusable, EVALUATE, seconds))
        except Exception as error:
            if is_temporary(error):
                raise
            _log.exception("the task %s of an evaluation cannot be completed", ascii(asker.task_id))
        asker.forget(directory)


def _unusable_callback(error: Exception, directory: Path) -> Exception:
    message = (
        f"The evaluation has ended, but the follow-up of its task failed: {type(error).__name__}: "
        f"{str(error)[:MAX_REASON_CHARS]}. The directory {directory.name} has its results."
    )
    return TaskFailure(message, "unusable_callback", "")


def _write(asker: WaitingTask, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{new_key()}")
    draft.write_text(asker.model_dump_json(), encoding="utf-8")
    draft.replace(path)


def _path(directory: Path, task_id: str, ending: str) -> Path:
    """Return the file of a task. Its id is arbitrary text from a producer and cannot be used as a file name."""
    return directory / TASKS / f"{hashlib.sha256(task_id.encode(errors='replace')).hexdigest()[:32]}{ending}"


def _forget_oldest(directory: Path) -> None:
    over = list((directory / TASKS).glob(f"*{OVER}"))
    if len(over) >= MAX_OVER:
        over.sort(key=lambda path: path.stat().st_mtime)
        for path in over[: len(over) - MAX_OVER + 1]:
            path.unlink(missing_ok=True)
