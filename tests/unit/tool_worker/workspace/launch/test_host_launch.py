"""Processes of hosts, whose numbers may be those of others by now."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from pathlib import Path

from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import _open_pidfd, wait_until_dead


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
