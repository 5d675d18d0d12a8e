"""Rows in the format of HumanEval: the beginning of a function, and a program that tests it.

    {"task_id": "HumanEval/0", "prompt": "def …", "entry_point": "…", "test": "def check(candidate): …",
     "canonical_solution": "…"}

Source: https://github.com/openai/human-eval. Sets of the same form, such as HumanEval+, work too.

The benchmark included in Deckhands: small projects with real bugs, and hidden tests; see its README.

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

from pydantic import BaseModel, ConfigDict, Field

from broker.runtime import UsageError
from deckhands.evaluation.datasets.file_trees import (
    COMMAND,
    MemoryFiles,
    build_test_check,
    program_files,
    read_tree,
    to_tree,
)
from deckhands.evaluation.datasets.instances import MAX_ID_CHARS, Instance

KEYS = frozenset({"task_id", "prompt", "entry_point", "test"})
FILE = "solution.py"
TASK = (
    f"Complete the function `{{entry_point}}` in {FILE}. It should do what its docstring says. Keep its name and its "
    "parameters; hidden tests call it.\n\n```python\n{prompt}\n```"
)


class _HumanEvalRow(BaseModel):
    model_config = ConfigDict(extra="ignore")

    task_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=MAX_ID_CHARS)
    prompt: str = Field(min_length=1, max_length=50_000)
    entry_point: str = Field(pattern=r"^[A-Za-z_]\w*$")
    test: str = Field(min_length=1)
    canonical_solution: str | None = None


def human_eval_instance(row: Mapping[str, Any]) -> Instance:
    """Return the instance of a row.

    Raises:
        ValueError: it cannot be used.
    """
    found = _HumanEvalRow.model_validate(row)
    asked = {"test": found.test, "entry_point": found.entry_point, "module": FILE.removesuffix(".py")}
    solution = found.canonical_solution
    return Instance(
        found.task_id.replace("/", "-"),
        TASK.format(entry_point=found.entry_point, prompt=found.prompt.rstrip()),
        workspace=to_tree({FILE: found.prompt}),
        hidden=MemoryFiles(program_files("human_eval", asked)),
        check=COMMAND,
        turns=() if solution is None else make_file_script(FILE, found.prompt + solution),
    )


def make_file_script(name: str, content: str) -> tuple[dict[str, Any], ...]:
    """Return a script that writes a file and finishes."""
    packed = base64.b64encode(content.encode()).decode()
    return make_command_script(f"echo {packed} | base64 -d > {name}")


def make_command_script(command: str, message: str = "Done.") -> tuple[dict[str, Any], ...]:
    """Return a script that runs a command and finishes with a message."""
    return (
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": command}}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": message}}]},
    )


DIRECTORY = Path(__file__).parents[2] / "examples" / "shipped"


def read_shipped_instances() -> list[Instance]:
    """Return the instances whose programs are installed on this machine.

    Raises:
        UsageError: there are none.
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
