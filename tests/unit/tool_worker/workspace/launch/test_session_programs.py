"""Which session programs a worker's workspaces have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from tool_worker.host.sessions.programs import PROGRAMS, SessionProgramSpec
from tool_worker.workspace.launch.session_programs import find_session_programs


def test_worker_without_the_pool_shows_its_sandboxes_nothing() -> None:
    programs = find_session_programs(["bash", "gpu"])
    assert programs.commands == {}
    assert programs.read_only == ()


def test_a_program_runs_on_our_own_python() -> None:
    programs = find_session_programs(["bash", "ipython"])
    interpreter, *_, program = programs.commands["ipython"]
    assert interpreter == sys.executable
    assert Path(program).is_file()
    assert Path(sys.prefix) in programs.read_only
    assert any(Path(program).is_relative_to(path) for path in programs.read_only)


def test_a_missing_package_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "ipython", SessionProgramSpec("sessions/ipython_session.py", ("no_such_package",)))
    with pytest.raises(UsageError, match=r'needs the package no_such_package.*Install "deckhands\[ipython\]"'):
        find_session_programs(["ipython"])


def test_what_containers_need_is_for_their_images_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "ipython", SessionProgramSpec("sessions/ipython_session.py", ("no_such_package",)))
    programs = find_session_programs(["ipython"], sandbox="docker")
    assert programs.commands == {}
    assert programs.in_containers["ipython"][-1] == "ipython"


def test_the_browser_is_told_where_chromium_is(tmp_path: Path) -> None:
    chromium = tmp_path / "place" / "chrome"
    chromium.parent.mkdir()
    chromium.write_text("#!/bin/sh\n")
    chromium.chmod(0o755)
    programs = find_session_programs(["browser"], chromium=str(chromium))
    assert programs.commands["browser"][-1] == str(chromium)
    assert chromium.parent in programs.read_only


def test_missing_chromium_is_reported_at_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "chrome")
    with pytest.raises(UsageError, match=r"DECKHANDS_CHROMIUM is .*, which is not a program.*apt-get install chromium"):
        find_session_programs(["browser"], chromium=missing)
