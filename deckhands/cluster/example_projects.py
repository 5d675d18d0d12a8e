"""The example projects of Deckhands: each is a small program with a failing test, and a model script that fixes it.

They are in the folder `examples/` of the repository, which is also part of the installed package.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from broker.runtime import DeckhandsError

FOLDER = Path(__file__).resolve().parents[1] / "examples"
TASK = "A test of this project fails. Find out why, fix the program, and make sure that all tests pass."


@dataclass(frozen=True, slots=True)
class Example:
    """One example project and the script of its model."""

    name: str
    project: Path
    script: Path

    @property
    def model(self) -> str:
        """Name of the scripted model."""
        return f"scripted/{self.script}"

    @property
    def turns(self) -> int:
        """Number of replies in the script."""
        return len(json.loads(self.script.read_text(encoding="utf-8"))["turns"])

    def copy_to(self, directory: Path) -> Path:
        """Copy the project into a new directory and return it."""
        shutil.copytree(self.project, directory, ignore=shutil.ignore_patterns("__pycache__"))
        return directory


def load_examples() -> list[Example]:
    """Return the examples by name.

    Raises:
        DeckhandsError: The examples are missing.
    """
    scripts = sorted((FOLDER / "scripts").glob("*.json"))
    found = [Example(script.stem, FOLDER / "projects" / script.stem, script) for script in scripts]
    found = [example for example in found if example.project.is_dir()]
    if not found:
        raise DeckhandsError(f"There are no examples in {FOLDER}.", remedy="Install Deckhands again.")
    return found
