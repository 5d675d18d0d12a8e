"""Evaluations and the exchange with other programs are optional: without their packages, everything else works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.command_line import COMMAND, environment, finish, script

OPTIONAL = ("deckhands.evaluation.", "deckhands.interop.")
WITHOUT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({OPTIONAL}):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return the environment of processes in which no module of the optional packages can be imported."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    return environment(tmp_path / "home", PYTHONPATH=str(tmp_path))


def test_processes_start_without_the_optional_packages(env: dict[str, str]) -> None:
    workers = "controller_worker.app, tool_worker.app, deckhands.ingress.app, deckhands.operations.jobs.app"
    program = [sys.executable, "-c", f"import {workers}, deckhands.cli.main"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_server_loads_no_more_than_the_outcomes_of_attempts() -> None:
    program = f"import deckhands.server.application, sys; print([m for m in sys.modules if m.startswith({OPTIONAL})])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    results = ["deckhands.evaluation.attempts", "deckhands.evaluation.attempts.results"]
    assert done.stdout.strip() == str(results)


def test_a_run_and_its_log_need_no_optional_package(env: dict[str, str], tmp_path: Path) -> None:
    model = script(tmp_path / "script.json", finish("Done."))
    workspace = tmp_path / "workspace"
    workspace.mkdir()

    def command(*arguments: str) -> str:
        done = subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = command("run", "-t", "Do it.", "-w", str(workspace), "--model", model, "--sandbox", "none", "--json")
    assert "Done." in command("logs", json.loads(run.splitlines()[-1])["conversation_id"])
