"""Projects with packages of npm, which some tests need; without npm they are skipped."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.polling import unhurried

LIMIT_SECONDS = 120.0


def install_packages(project: Path, folder: Path) -> Path:
    """Copy a project into a folder that does not exist, install its packages without their scripts, and return it."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    shutil.copytree(project, folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(
        command, cwd=folder, check=False, capture_output=True, text=True, timeout=unhurried(LIMIT_SECONDS)
    )
    if done.returncode != 0:
        pytest.skip(f"npm cannot install the packages of {project.name}: {done.stderr[-300:]}")
    return folder
