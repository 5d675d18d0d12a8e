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

from deckhands.evaluation.datasets.file_trees import FileSource, Tree, TreeFile, read_tree

FOLDER = ".deckhands_check"
DIRECTORY = Path(__file__).parents[2] / "examples" / "checks"
COMMAND = f"python3 -I {FOLDER}/run.py"
_PARTS = ("guarded.py", "separate.py", "node_tests.js")


@dataclass(frozen=True, slots=True)
class OverlaidFiles:
    """Files, with other files laid over them."""

    below: Path | FileSource | None
    above: Tree

    def read(self) -> dict[str, TreeFile]:
        """Return the files. Raises the errors of `read_tree`."""
        return {**read_tree(self.below), **self.above}


def program_files(name: str, asked: Mapping[str, Any]) -> dict[str, TreeFile]:
    """Return the files of a program that `COMMAND` runs, with its input."""
    found = {f"{FOLDER}/{part}": TreeFile((DIRECTORY / part).read_bytes()) for part in _PARTS}
    return found | {
        f"{FOLDER}/run.py": TreeFile((DIRECTORY / f"{name}.py").read_bytes()),
        f"{FOLDER}/asked.json": TreeFile(json.dumps(asked).encode()),
    }


def build_test_check(hidden: Path | FileSource | None, files: tuple[str, ...], **asked: Any) -> OverlaidFiles:
    """Return hidden files with the program that runs the tests in some of them."""
    return OverlaidFiles(
        hidden, program_files("named_tests", {"files": files, "isolated": False, "in_process": [], **asked})
    )
