"""Launches of a worker: session programs, and hosts whose process ids may have been reused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from broker.runtime.errors import UsageError
from tool_worker.host.sessions.programs import PROGRAMS, SessionProgramSpec
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import _open_pidfd, start_and_hand_over, wait_until_dead
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


def test_requirements_of_containers_are_in_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_number_of_an_ended_process_is_not_watched() -> None:
    with _open_pidfd(os.getpid()) as descriptor:
        assert descriptor is not None
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        for gone in (thread.native_id, 2**22 - 1, None):
            with _open_pidfd(gone) as descriptor:
                assert descriptor is None
    finally:
        ended.set()
        thread.join()


async def test_host_is_dead_when_its_last_process_releases_the_lock(tmp_path: Path) -> None:
    folder = HostFolder(tmp_path, "conversation")
    folder.pid.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.take_alive_lock()
    assert lock is not None
    main, outer = (subprocess.Popen(["sleep", "1000"], pass_fds=[lock]) for _ in range(2))
    try:
        os.close(lock)
        folder.pid.write_text(json.dumps({"child-pid": main.pid}))
        main.kill()  # not reaped: its number is still its own
        os.waitid(os.P_PID, main.pid, os.WEXITED | os.WNOWAIT)
        waiting = asyncio.create_task(wait_until_dead(folder, 60))
        while not (await asyncio.wait([waiting], timeout=0.1))[0]:
            outer.kill()  # some turns of the loop later than the main one
        assert await waiting
    finally:
        for process in (main, outer):
            process.kill()
            process.wait()


@pytest.mark.parametrize("command", ["exec sleep 1000", "trap '' TERM; exec sleep 1000"])
def test_command_that_starts_no_host_is_ended(tmp_path: Path, command: str) -> None:
    before = {child.pid for child in psutil.Process().children()}
    entrance = tmp_path / "entrance" / "socket"
    with (tmp_path / "log").open("wb") as log, pytest.raises(TimeoutError):
        start_and_hand_over(["/bin/sh", "-c", command], entrance, {}, log.fileno(), 0.2)
    assert {child.pid for child in psutil.Process().children()} <= before
    assert not entrance.exists()


def test_file_in_the_place_of_the_entrance_is_replaced(tmp_path: Path) -> None:
    entrance = tmp_path / "entrance" / "socket"
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(entrance.parent))
    receiver = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1); s.send(b'.')"
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", receiver, str(entrance)]
        pid = start_and_hand_over(command, entrance, {0: log.fileno()}, log.fileno())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert entrance.parent.is_dir()
