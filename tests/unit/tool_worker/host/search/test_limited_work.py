"""Work with a limit of time ends with all that it has started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.polling import until
from tool_worker.host.search.limited_work import run_limited


async def test_what_the_work_has_started_ends_with_it(tmp_path: Path) -> None:
    said = tmp_path / "pid"

    def work(_: Callable[[str], None]) -> None:
        with subprocess.Popen(["sleep", "1000"], env=None) as running:
            said.write_text(str(running.pid))

    _, is_ended = run_limited(3.0, work)
    assert not is_ended
    pid = int(said.read_text())

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    try:
        await until(is_gone, what="the end of the program")
    finally:
        if not is_gone():
            os.kill(pid, 9)
