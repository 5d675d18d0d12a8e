"""The programs that run in the workspaces of checks, and decide whether tests have passed.

Holds: they are laid over last, in a directory where no file of an agent counts, and Python starts them with `-I`: the
workspace, the environment and the user's packages cannot influence their imports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deckhands.evaluation.datasets.file_trees import File, Files, Tree, tree_of

FOLDER = ".deckhands_check"
DIRECTORY = Path(__file__).parents[2] / "examples" / "checks"
COMMAND = f"python3 -I {FOLDER}/run.py"
_PARTS = ("guarded.py", "separate.py", "node_tests.js")


@dataclass(frozen=True, slots=True)
class Overlaid:
    """Files, with other files laid over them."""

    below: Path | Files | None
    above: Tree

    def read(self) -> dict[str, File]:
        """Return the files. Raises the errors of `tree_of`."""
        return {**tree_of(self.below), **self.above}


def program_files(name: str, asked: Mapping[str, Any]) -> dict[str, File]:
    """Return the files of a program that `COMMAND` runs, with its input."""
    found = {f"{FOLDER}/{part}": File((DIRECTORY / part).read_bytes()) for part in _PARTS}
    return found | {
        f"{FOLDER}/run.py": File((DIRECTORY / f"{name}.py").read_bytes()),
        f"{FOLDER}/asked.json": File(json.dumps(asked).encode()),
    }


def named_tests(hidden: Path | Files | None, files: tuple[str, ...], **asked: Any) -> Overlaid:
    """Return hidden files with the program that runs the tests in some of them."""
    return Overlaid(
        hidden, program_files("named_tests", {"files": files, "isolated": False, "in_process": [], **asked})
    )
