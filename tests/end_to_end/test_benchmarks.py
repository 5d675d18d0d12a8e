"""Benchmarks start and print their figures. How large these are is not tested here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.source_code import ROOT

TABLES = {
    ("benchmarks", "--smoke", "--no-peer", "stepping", "recording", "restoring"): (
        "## stepping",
        "## recording",
        "## restoring",
        "load at the end",
    ),
    ("benchmarks.front_door", "--smoke", "--no-peer"): (
        "inbox: settled with reply a second",
        "Celery: ingress CPU of a run",
        "HTTP: runs a second",
        "HTTP: until the first model call, p99",
        "result behind a backlog",
        "load at the end",
    ),
}


@pytest.mark.parametrize("command", TABLES, ids=lambda command: command[0])
def test_benchmark_prints_its_figures(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], check=False, capture_output=True, text=True, timeout=600, cwd=ROOT
    )

    assert done.returncode == 0, done.stderr
    for words in TABLES[command]:
        assert words in done.stdout
