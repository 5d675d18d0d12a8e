"""The contract between a run and its workspace: the folders, the README, and the result that the agent must leave.

    README.md                                the agreement (README.deckhands.md if the user has a README already)
    experiments/<id>/results/final.json      the result: a JSON object, which the agent writes
    logs/<id>/                               run.log while it runs; events.jsonl and summary.json at its end

Holds: each run of one experiment leaves the same files. A result of an earlier run never counts for a later one: it is
renamed to `final.previous.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from broker.contract import GoalSpec
from broker.runtime import UsageError, new_conversation_id
from deckhands.client import ExitCode
from deckhands.interop.headless.inside import Inside

MAX_ITERATIONS = 80
MAX_SECONDS = 30 * 60.0
README, OTHER_README = "README.md", "README.deckhands.md"
MARK = "<!-- Written by Deckhands. A run replaces this file. -->"
_EXPERIMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_README = """{mark}

# Workspace

Agents work in this directory, and in no other.

## The latest task

Experiment: `{experiment}`

{task}

## Contract

- The agent leaves its result as a JSON object in `{final}`. Without it the run has failed.
- Further files of the result are in `{results}/`.
- The logs of the run are in `{logs}/`.
- A run has at most {iterations} iterations and {minutes:g} minutes.
- A second run of the same experiment leaves the same files. It renames the earlier result to `final.previous.json`.
"""
_INSTRUCTIONS = """{task}

# Result

Work only in the current directory. When the task is done, write the result into `{final}`: one JSON object, such as \
{{"status": "success", "summary": "…"}}. Put further files of the result into the same folder. You can finish only \
when `{final}` exists and is not empty.
"""


class HeadlessExit(IntEnum):
    """Exit codes of a headless run, in addition to those of `ExitCode`."""

    MISSING_ARTIFACT = 8
    PATH_DENIED = 9


REASONS: Mapping[int, str] = {
    ExitCode.FINISHED: "finished",
    ExitCode.ERROR: "error",
    ExitCode.USAGE: "usage",
    ExitCode.REJECTED: "rejected",
    ExitCode.OUT_OF_TIME: "out_of_time",
    ExitCode.NEEDS_PERSON: "needs_person",
    ExitCode.LIMIT: "limit_reached",
    ExitCode.INTERRUPTED: "interrupted",
    HeadlessExit.MISSING_ARTIFACT: "missing_artifact",
    HeadlessExit.PATH_DENIED: "path_denied",
}
"""The meaning of an exit code, in one word."""


@dataclass(frozen=True, slots=True)
class Contract:
    """The contract of one experiment."""

    root: Path
    experiment: str

    @property
    def results(self) -> str:
        """The folder of the results."""
        return f"experiments/{self.experiment}/results"

    @property
    def final(self) -> str:
        """The file that the agent must leave."""
        return f"{self.results}/final.json"

    @property
    def logs(self) -> str:
        """The folder of the logs."""
        return f"logs/{self.experiment}"

    @property
    def inside(self) -> Inside:
        """The files of the workspace."""
        return Inside(self.root)

    @property
    def goal(self) -> GoalSpec:
        """The goal that decides whether a finish of the agent counts."""
        return GoalSpec(check=f"test -s '{self.final}'")

    def instructions(self, task: str) -> str:
        """Return the task with the agent's instructions from the contract."""
        return _INSTRUCTIONS.format(task=task.rstrip(), final=self.final)

    def prepare(self, task: str, *, iterations: int, seconds: float) -> None:
        """Create the folders, write the README, and rename an earlier result.

        Raises:
            PathDenied: a folder or file of the contract is a link.
            DeckhandsError: the workspace cannot be written.
        """
        inside = self.inside
        inside.make(self.results)
        inside.make(self.logs)
        inside.move(self.final, "final.previous.json")
        text = _README.format(
            mark=MARK,
            experiment=self.experiment,
            task="\n".join(f"> {line}".rstrip() for line in task.strip().splitlines()),
            final=self.final,
            results=self.results,
            logs=self.logs,
            iterations=iterations,
            minutes=seconds / 60,
        )
        inside.write(self._readme(), text.encode())

    def _readme(self) -> str:
        """Return the path of our README; a README of the user is kept."""
        try:
            (self.root / README).lstat()
        except FileNotFoundError:
            return README
        try:
            found = self.inside.read(README)
        except UsageError:  # another program's link
            found = None
        return README if found is not None and found.startswith(MARK.encode()) else OTHER_README

    def find_fault(self) -> str:
        """Return the fault of the result; empty if it has none."""
        content = self.inside.read(self.final)
        if content is None:
            return f"{self.final} is missing."
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return f"{self.final} is not JSON."
        return "" if isinstance(found, dict) else f"{self.final} is not a JSON object."

    def artifacts(self) -> tuple[Path, ...]:
        """Return the files of the results and the logs, relative to the workspace."""
        inside = self.inside
        return tuple(Path(path) for folder in (self.results, self.logs) for path in inside.files(folder))


def experiment_id(name: str | None) -> str:
    """Return the id of an experiment with this name; without a name, a new id.

    Raises:
        UsageError: the name cannot be part of a path.
    """
    if name is None:
        return new_conversation_id()
    if not _EXPERIMENT.fullmatch(name):
        raise UsageError(
            f"The run cannot be called {ascii(name)[:100]}.",
            remedy="Use up to 64 letters, digits, '.', '_' and '-', starting with a letter or digit.",
        )
    return name
