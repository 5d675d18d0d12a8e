"""The directory of an evaluation: the request and the results.

evaluation.json     the request, from which `eval attach` continues
results.jsonl       a row for each finished attempt
summary.json        the figures, recomputed from the rows
report.html         the same as a page
transcripts/        the transcripts of attempts, shortened, for the page
scripts/            the scripts of the scripted model, if it is evaluated
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.runtime import UsageError, new_conversation_id, new_key
from deckhands.client import ForkPoint
from deckhands.evaluation.attempts.results import read_results
from deckhands.evaluation.attempts.statistics import compute_summary
from deckhands.evaluation.datasets.dataset import read_dataset
from deckhands.evaluation.datasets.instances import Instance, select_instances
from deckhands.evaluation.report import render_html
from deckhands.evaluation.transcripts import read_transcripts

REQUEST, RESULTS, SUMMARY, REPORT, SCRIPTS = (
    *("evaluation.json", "results.jsonl", "summary.json"),
    *("report.html", "scripts"),
)
MAX_TRANSCRIPT_CHARS = 20_000_000
"""The most characters of transcripts in a page; `deckhands eval logs` shows the others."""
SIBLINGS = "siblings"
"""The displayed dataset of siblings that only a critic scores."""


class EvaluationRequest(BaseModel):
    """The part of a request that determines its attempts; see the options of `deckhands eval run`.

    Attributes:
        dataset: empty for siblings that only a critic scores.
        critic: the model that judges attempts; empty for none.
        scorers: functions that score attempts, as `FILE.py@FUNCTION` with absolute paths.
        origin: the conversation and the event from which attempts are forked; empty if they are no forks.
        tenant: the tenant of its conversations; empty for none.
        network: whether the commands of agents reach the network.
        home: the evaluation whose private cluster has the origin; empty for this one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dataset: str
    models: tuple[str, ...]
    attempts: int = 1
    agent: str = "CodeActAgent"
    max_iterations: int = 100
    max_budget: float | None = None
    max_seconds: float | None = None
    only: str = ""
    part: str = ""
    shuffle: bool = False
    seed: int = 0
    repositories: str | None = None
    origin: str = ""
    home: str = ""
    tenant: str = ""
    critic: str = ""
    scorers: tuple[str, ...] = ()
    network: bool = True

    def instances(self) -> list[Instance]:
        """Return the instances to evaluate. Raises the errors of `read_dataset` and `selected`."""
        if not self.dataset:
            name = ForkPoint.parse(self.origin).conversation_id
            return [Instance(name, f"Continue {name}.")]
        file = Path(self.dataset)
        version = file.stat().st_mtime_ns if file.is_file() else new_key()
        found = _read(self.dataset, self.repositories, version, is_scored=bool(self.critic or self.scorers))
        return select_instances(found, only=self.only, part=self.part, shuffle=self.shuffle, seed=self.seed)


@lru_cache(maxsize=1)
def _read(dataset: str, repositories: str | None, _version: object, *, is_scored: bool) -> list[Instance]:
    """Return the instances of a dataset; an unchanged file is not parsed again."""
    mirrors = None if repositories is None else Path(repositories)
    return read_dataset(dataset, repositories=mirrors, is_scored=is_scored)


def record_request(directory: Path, asked: EvaluationRequest) -> EvaluationRequest:
    """Record a request. If the same request is already recorded, return that one, with its name.

    If several commands do this at once, the request of one is recorded.

    Raises:
        UsageError: the directory has another evaluation, or cannot be written.
    """
    path = directory / REQUEST
    if not path.exists():
        asked = asked.model_copy(update={"name": new_conversation_id()})
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _publish_draft(_draft(path, asked.model_dump_json(indent=2) + "\n"), path)
        except OSError as error:
            raise UsageError(f"{directory} cannot be written: {error.strerror}.", remedy="Name another one.") from error
    earlier = load_request(directory)
    if earlier != asked.model_copy(update={"name": earlier.name}):
        raise UsageError(
            f"{directory} has another evaluation.",
            remedy="Name another directory with --out, or continue that one with `deckhands eval attach`.",
        )
    return earlier


def load_request(directory: Path) -> EvaluationRequest:
    """Return the request of an evaluation.

    Raises:
        UsageError: the directory contains no request.
    """
    path = directory / REQUEST
    try:
        return EvaluationRequest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"{directory} has no evaluation: there is no {path.name}, so nothing was started.",
            remedy=f"Name another directory, or start with `deckhands eval run DATASET --model M --out {directory}`.",
        ) from error
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{directory} has no evaluation: {path.name} cannot be read.",
            remedy="If it is damaged, remove it, and repeat `deckhands eval run` with the options of that evaluation. "
            "Its attempts start again then.",
        ) from error


def write_scripts(directory: Path, instances: Sequence[Instance]) -> Path:
    """Write the scripts of the scripted model, and return their directory. Workers may be reading existing scripts.

    Raises:
        UsageError: an instance has no script.
    """
    without = [one.id for one in instances if not one.turns]
    if without:
        raise UsageError(
            f"No script comes with {without[0]!r}.", remedy="Name a script for all: --model scripted/FILE."
        )
    folder = (directory / SCRIPTS).resolve()
    folder.mkdir(exist_ok=True)
    for one in instances:
        path, text = folder / f"{one.id}.json", json.dumps({"turns": one.turns})
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
            _draft(path, text).replace(path)
    return folder


def _publish_draft(draft: Path, path: Path) -> None:
    """Rename a draft to its final name, unless another command has created the file."""
    try:
        path.hardlink_to(draft)  # unlike renaming, linking replaces nothing
    except FileExistsError:
        pass
    except OSError:  # this file system has no links
        draft.replace(path)
    draft.unlink(missing_ok=True)


def _draft(path: Path, text: str) -> Path:
    """Write a text into a temporary file beside its target, so that no process reads a partial file."""
    draft = path.with_name(f".{path.name}.{new_key()}")
    draft.write_text(text, encoding="utf-8")
    return draft


def write_report(directory: Path) -> dict[str, Any]:
    """Write the summary and the page from the rows so far, and return the summary.

    The page also has the configuration, the tasks and the transcripts, as far as they are in the directory.

    Raises:
        UsageError: the rows cannot be read.
    """
    rows = sorted(read_results(directory / RESULTS), key=lambda row: row.key)
    summary = compute_summary(rows)
    configuration: dict[str, Any] = {}
    with suppress(UsageError):  # the rows are enough for the figures
        configuration = load_request(directory).model_dump()
    ids = [row.conversation_id for row in rows if row.conversation_id]
    transcripts = read_transcripts(directory, ids, MAX_TRANSCRIPT_CHARS)
    page = render_html(f"Evaluation {directory.resolve().name}", rows, configuration, transcripts)
    for name, text in ((SUMMARY, json.dumps(summary, indent=2) + "\n"), (REPORT, page)):
        _draft(directory / name, text).replace(directory / name)
    return summary
