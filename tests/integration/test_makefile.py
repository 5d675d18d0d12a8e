"""The preparations of `make`, with variables of other programs in the user's environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = {"MAKEFLAGS": "", "MAKEOVERRIDES": ""}
"""Variables that `make test VENV=…` has been given are not for the calls here."""


def test_foreign_environment_folder_and_python_are_left_alone() -> None:
    env = os.environ | OURS | {"VENV": "/others/environments", "PYTHON": "/others/python2"}
    told = subprocess.run(
        ["make", "--dry-run", "--always-make", "run"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert ".venv/bin/deckhands demo" in told.stdout
    assert "/others/" not in told.stdout


def test_programs_keep_their_bytecode() -> None:
    """The tests start hundreds of interpreters; without it each compiles all that it imports."""
    env = os.environ | OURS | {"PYTHONDONTWRITEBYTECODE": "1"}
    asked = 'include Makefile\nasked:\n\t@echo "<$$PYTHONDONTWRITEBYTECODE>"\n'
    told = subprocess.run(
        ["make", "-s", "-f", "-", "asked"], cwd=ROOT, env=env, input=asked, capture_output=True, text=True, check=True
    )
    assert told.stdout == "<>\n"
