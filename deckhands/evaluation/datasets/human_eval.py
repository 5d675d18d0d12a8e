"""Rows in the format of HumanEval: the beginning of a function, and a program that tests it.

    {"task_id": "HumanEval/0", "prompt": "def …", "entry_point": "…", "test": "def check(candidate): …",
     "canonical_solution": "…"}

Source: https://github.com/openai/human-eval. Sets of the same form, such as HumanEval+, work too.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deckhands.evaluation.datasets.file_trees import COMMAND, MemoryFiles, program_files, to_tree
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
        ValueError: the row is invalid.
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
