"""The benchmark included in Deckhands: small projects with real bugs, and hidden tests; see its README.

Holds: a script solves each instance by writing the corrected files, so that an evaluation can be tried without a model.
"""

from __future__ import annotations

import base64
import shlex
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.runtime import UsageError
from deckhands.evaluation.datasets.file_trees import COMMAND, build_test_check, read_tree
from deckhands.evaluation.datasets.instances import Instance

DIRECTORY = Path(__file__).parents[2] / "examples" / "shipped"


def read_shipped_instances() -> list[Instance]:
    """Return the instances whose programs are installed on this machine.

    Raises:
        UsageError: no such program is installed.
    """
    found = []
    for folder in sorted(DIRECTORY.iterdir()):
        if not (folder / "instance.toml").is_file():
            continue
        about = tomllib.loads((folder / "instance.toml").read_text(encoding="utf-8"))
        if any(shutil.which(program) is None for program in about["needs"]):
            continue
        found.append(read_shipped_instance(folder, about))
    if not found:
        raise UsageError("No instance can be tried on this machine.", remedy="Install Python 3 as `python3`.")
    return found


def read_shipped_instance(folder: Path, about: Mapping[str, Any]) -> Instance:
    """Return the instance in a directory, given its `instance.toml`."""
    asked = {name: about[name] for name in ("isolated", "in_process", "sources", "limit_seconds") if name in about}
    return Instance(
        folder.name,
        (folder / "task.md").read_text(encoding="utf-8"),
        workspace=folder / "workspace",
        hidden=build_test_check(folder / "hidden", tuple(about["tests"]), **asked),
        check=COMMAND,
        tags=(about["level"], about["language"]),
        turns=tuple(_turns(folder / "solution")),
    )


def _turns(solution: Path) -> list[dict[str, Any]]:
    """Return a script that writes the files of a solution, and finishes."""
    writing = []
    for name, file in sorted(read_tree(solution).items()):
        content = base64.b64encode(file.content).decode()
        writing.append(
            f"mkdir -p {shlex.quote(str(Path(name).parent))}; echo {content} | base64 -d > {shlex.quote(name)}"
        )
    calls = [{"name": "execute_bash", "arguments": {"command": command}} for command in writing]
    turns: list[dict[str, Any]] = [{"text": "I will repair it.", "tool_calls": [call]} for call in calls]
    return [*turns, {"tool_calls": [{"name": "finish", "arguments": {"message": "Repaired."}}]}]
