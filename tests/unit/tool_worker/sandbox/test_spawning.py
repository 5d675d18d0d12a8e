"""Programs that outlive the tool worker start in a clean state."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tool_worker.sandbox.spawning import spawn

REPORT = "cd /proc/self; echo $(ls fd); ls -l fd/7 | grep -c target; grep Sig[BI] status; cut -d' ' -f6 stat; echo $$"


def test_program_gets_a_session_descriptors_and_signals_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        with (tmp_path / "out").open("wb") as out, (tmp_path / "target").open() as target, (tmp_path / "x").open("wb"):
            pid = spawn(["/bin/sh", "-c", f"exec 2>&1; /usr/bin/env; {REPORT}"], {1: out.fileno(), 7: target.fileno()})
        assert os.waitpid(pid, 0) == (pid, 0)
    finally:
        signal.signal(signal.SIGPIPE, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    *environment, descriptors, found, mask, ignored, session, own = (tmp_path / "out").read_text().splitlines()
    assert all(line.partition("=")[0] in ("PWD", "SHLVL", "_", "OLDPWD") for line in environment)
    assert {"1", "2", "7"} <= set(descriptors.split())
    assert found == "1"
    assert int(mask.split()[1], 16) == 0
    assert not int(ignored.split()[1], 16) & 1 << (signal.SIGPIPE - 1)
    assert session == own == str(pid)


def test_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        spawn([str(tmp_path / "missing")], {})


def test_word_with_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        spawn(["/bin/true\0/bin/false"], {})
