"""Evaluations that Celery tasks ask for: each is carried out by a command beside the door, and answered at its end.

Holds: a task is carried out in two halves, like a run. The first begins the evaluation, or finds it under way; when all
attempts have ended, the command sends the second, which returns the summary. Either may come twice. A producer names
places below the directory of evaluations only, and nothing of a request is run on the door's machine as a program.
Does not: answer a task whose command was killed; the same task sent again continues the evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.runtime.errors import UsageError
from deckhands.attempts.results import BeingWritten, Results
from deckhands.datasets.dataset import read_dataset
from deckhands.datasets.instances import SHIPPED
from deckhands.datasets.plugins import installed
from deckhands.datasets.repositories import is_safe
from deckhands.evaluation.answering import Asker
from deckhands.evaluation.carrying_out import Tuning
from deckhands.evaluation.detaching import detach
from deckhands.evaluation.directory import RESULTS, SUMMARY, Asked, ask
from deckhands.evaluation.evaluating import ROWS
from deckhands.settings import FaceSettings

PLACES = ("workspace", "hidden", "images")
MAX_ROWS = 10_000


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dataset: str | list[dict[str, Any]]
    models: str | list[str]
    out: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    attempts: int = Field(default=1, ge=1, le=1_000)
    concurrency: int | None = Field(default=None, ge=1, le=10_000)
    budget_usd: float | None = Field(default=None, ge=0)
    agent: str = Field(default="CodeActAgent", max_length=100)
    max_iterations: int = Field(default=100, ge=1)
    max_budget_usd: float | None = Field(default=None, gt=0)
    max_seconds: float | None = Field(default=None, gt=0)
    only: str = Field(default="", max_length=1_000)
    part: str = Field(default="", max_length=100)
    shuffle: bool = False
    seed: int = 0
    repositories: str | None = None
    retries: int | None = Field(default=None, ge=0, le=100)
    until: str | None = Field(default=None, max_length=100)


class Evaluations:
    """What tasks ask of evaluations."""

    def __init__(self, root: str, url: str) -> None:
        self._root = Path(root).expanduser().absolute() if root else None
        self._url = url

    def take(
        self, task_id: str, previous: Sequence[Any], options: Mapping[str, Any], kept: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """Begin an evaluation, or return its summary and what was kept; None: it is under way.  Idempotent.

        Raises:
            UsageError: the request cannot be used; nothing was begun.
        """
        if self._root is None:
            raise UsageError(
                "This door takes no evaluations.",
                remedy="Start it with DECKHANDS_EVALUATIONS=DIR, where they are kept.",
            )
        request = _parsed(previous, options)
        directory = self._root / request.out
        asker = Asker.read(directory)
        if asker is not None and asker.task_id == task_id and asker.is_over:
            return json.loads((directory / SUMMARY).read_text(encoding="utf-8")), asker.kept
        models = [request.models] if isinstance(request.models, str) else request.models
        asked = Asked(
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
            repositories=None
            if request.repositories is None
            else str(self._below("repositories", request.repositories)),
        )
        tuning = Tuning(
            at_once=request.concurrency, budget=request.budget_usd, retries=request.retries, until=request.until
        )
        asked.instances()
        tuning.check(len(models))
        ask(directory, asked)
        Asker(task_id=task_id, options=dict(options), kept=dict(kept)).write(directory)
        try:
            Results(directory / RESULTS).__exit__()
        except BeingWritten:
            return None
        environment = {**FaceSettings.from_env().environment, "DECKHANDS_URL": self._url}
        detach(directory, tuning.as_arguments(), environment=environment)
        return None

    def _dataset(self, request: _Request, directory: Path) -> str:
        if isinstance(request.dataset, list):
            return self._written(request.dataset, directory)
        name = request.dataset
        if name == SHIPPED or name.partition(":")[0] in installed():
            return name
        return str(self._below("dataset", name))

    def _written(self, rows: list[dict[str, Any]], directory: Path) -> str:
        """Write rows beside the results; they may bring files, and not name any of this machine."""
        for number, row in enumerate(rows[:MAX_ROWS], 1):
            for name in PLACES:
                values = row.get(name) if name == "images" else [row.get(name)]
                if any(isinstance(value, str) and "://" not in value for value in values or ()):
                    raise UsageError(
                        f"The request cannot be used: dataset: row {number}: {name} is a path.",
                        remedy="Pass files as {path: text}, and pictures as addresses.",
                    )
        path = directory / ROWS
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UsageError(f"The request cannot be used: out: {directory.name} has another evaluation.")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            read_dataset(path)
        except UsageError:
            path.unlink()
            raise
        except OSError as error:
            raise UsageError(f"{directory} cannot be written: {error.strerror}.") from error
        return str(path)

    def _below(self, name: str, text: str) -> Path:
        assert self._root is not None
        path = (self._root / text).resolve()
        if not is_safe(text) or not path.is_relative_to(self._root.resolve()):
            raise UsageError(
                f"The request cannot be used: {name}: {ascii(text)[:200]} is not below the directory of evaluations.",
                remedy="Name a relative path there.",
            )
        return path


def _parsed(previous: Sequence[Any], options: Mapping[str, Any]) -> _Request:
    if previous:
        raise UsageError("The request cannot be used: deckhands.evaluate has named arguments only.")
    try:
        return _Request.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"The request cannot be used: {place}: {first['msg']}.") from error
