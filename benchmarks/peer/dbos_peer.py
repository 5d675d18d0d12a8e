"""DBOS with a private PostgreSQL, as processes that take orders; see dbos_driver.py, which runs in its environment.

PostgreSQL keeps its defaults but for `synchronous_commit`: like a private store with `appendfsync everysec`, it may
lose the last moments to a power cut, and nothing to a killed process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "dbos-venv" / "bin" / "python"
SETUP_LIMIT_SECONDS = 900.0
READY_LIMIT_SECONDS = 60.0
STOP_LIMIT_SECONDS = 20.0
POLL_SECONDS = 0.1
USER = "postgres"
OPTIONS = ("-c", "listen_addresses=", "-c", "synchronous_commit=off", "-c", "log_min_messages=fatal")


def set_up() -> str:
    """Install DBOS if need be, and return why that is not possible; empty: it is there."""
    try:
        done = subprocess.run(
            [ROOT / "benchmarks" / "peer" / "dbos.sh"],
            check=False,
            capture_output=True,
            text=True,
            timeout=SETUP_LIMIT_SECONDS,
        )
    except (subprocess.SubprocessError, OSError) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it has failed"])[-1]


class Dbos:
    """A running driver with its database. Between its runs it is stopped, so that it does not poll.

    Attributes:
        version: of `dbos`.
    """

    def __init__(self, driver: subprocess.Popen[str], postgres: int) -> None:
        self._driver, self._postgres = driver, psutil.Process(postgres)
        self.version = self._answer()["version"]
        self._driver.send_signal(signal.SIGSTOP)

    def run(self, count: int) -> dict[str, float]:
        """Run one-step workflows; seconds until all are `enqueued`, `seconds` until all have results, and `cpu`.

        CPU seconds are those of DBOS and of its database.
        """
        assert self._driver.stdin is not None
        before = self._database_cpu()
        self._driver.send_signal(signal.SIGCONT)
        self._driver.stdin.write(f"{count}\n")
        self._driver.stdin.flush()
        found = self._answer()
        self._driver.send_signal(signal.SIGSTOP)
        return found | {"cpu": found["cpu"] + self._database_cpu() - before}

    def _answer(self) -> dict[str, Any]:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise RuntimeError(f"DBOS' driver ended with status {self._driver.wait()}.")
        found: dict[str, Any] = json.loads(line)
        return found

    def _database_cpu(self) -> float:
        own = self._postgres.cpu_times()
        total = own.user + own.system + own.children_user + own.children_system
        for child in self._postgres.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                total += times.user + times.system
        return total


@contextlib.contextmanager
def running_dbos(log: Path) -> Iterator[Dbos]:
    """Run DBOS until left; the environment must be installed."""
    with contextlib.ExitStack() as left, log.open("ab") as errors:
        folder = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="dbos-", ignore_cleanup_errors=True)))
        user = USER if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
        if user is not None:
            shutil.chown(folder, user)
        programs = max(Path("/usr/lib/postgresql").glob("*/bin"))
        data = folder / "data"
        subprocess.run(
            [programs / "initdb", "-D", data, "-A", "trust", "-U", USER, "--no-sync"],
            check=True,
            stdout=errors,
            stderr=errors,
            user=user,
            cwd=folder,
        )
        postgres = subprocess.Popen(
            [programs / "postgres", "-D", data, "-k", folder, *OPTIONS],
            stdout=errors,
            stderr=errors,
            user=user,
            cwd=folder,
        )
        left.callback(_stop, postgres)
        _wait_until_ready(programs, folder)
        driver = subprocess.Popen(
            [
                PYTHON,
                Path(__file__).with_name("dbos_driver.py"),
                f"postgresql+psycopg://{USER}@/benchmark?host={folder}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        left.callback(_stop, driver)
        yield Dbos(driver, postgres.pid)


def _wait_until_ready(programs: Path, folder: Path) -> None:
    limit = time.monotonic() + READY_LIMIT_SECONDS
    while subprocess.run([programs / "pg_isready", "-q", "-h", folder], check=False).returncode:
        if time.monotonic() > limit:
            raise RuntimeError("PostgreSQL does not answer.")
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[Any]) -> None:
    """End a process: SIGINT ends PostgreSQL at once, and the driver too."""
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(STOP_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
