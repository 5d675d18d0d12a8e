"""Workers for many tests: a process that has imported what workers import, and forks for each of them.

Holds: each worker is a process as `python -m …` would be: it leads a session, has the caller's environment and output,
runs the whole module, can be killed and stopped, and keeps its pid until the test has waited for it.
Does not: show that the imports of a role suffice; `tests/end_to_end/test_worker_commands.py` starts each one.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

IMPORTED = (
    "broker.celery.bootstep",
    "broker.celery.worker_main",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.concurrency.thread",
    "celery.events.state",
    "celery.worker.consumer",
    "controller_worker.loop.consumer",
    "controller_worker.settings",
    "deckhands.ingress.service",
    "deckhands.ingress.tasks",
    "deckhands.operations.jobs.beat",
    "deckhands.operations.jobs.service",
    "deckhands.operations.jobs.tasks",
    "kombu.transport.redis",
    "redbeat",
    "tool_worker.settings",
    "tool_worker.worker.consumer",
)


class ForkedWorker:
    """A worker, with those parts of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, environment: dict[str, str], log: Path) -> None:
        log.touch()  # a test may read it at once
        self._keeper, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_server(), [b"."], [theirs.fileno()])
        self._keeper.sendall(json.dumps([module, environment, str(log)]).encode() + b"\n")
        self._told = self._keeper.makefile("rb")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        return self.wait(timeout=0) if self.returncode is None and self._has_ended(0) else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends and return its exit status."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._keeper.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended: until then, its pid is not reused."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._keeper], [], [], timeout)[0])


@cache
def _server() -> socket.socket:
    """Start the process that forks, and return where it takes calls until this end is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen([sys.executable, "-m", __name__], stdin=theirs, start_new_session=True)

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def serve() -> str:
    """Fork for each call, until no caller is left; return in each forked worker, with the module it is to run."""
    for module in IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()  # or each worker would copy the pages of all that was imported as soon as it collects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers are not awaited
    calls = socket.socket(fileno=os.dup(0))
    while True:
        _, files, _, _ = socket.recv_fds(calls, 1, 1)
        if not files:
            sys.exit()
        connection = socket.socket(fileno=files[0])
        if os.fork() == 0:
            calls.close()
            return _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> str:
    """Fork a worker, report its end, and release it when no caller waits for it any more; return in the worker."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as calls:
        module, environment, log = json.loads(calls.readline())
    if (pid := os.fork()) == 0:
        connection.close()
        _become(environment, log)
        return str(module)
    connection.sendall(b"%d\n" % pid)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    try:
        connection.sendall(b"%d\n" % (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
        connection.recv(1)
    finally:
        os._exit(0)


def _become(environment: dict[str, str], log: str) -> None:
    """Take what a new program would have got from its caller."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for own, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(own, number)
    os.close(nothing)
    os.close(output)


if __name__ == "__main__":
    runpy.run_module(serve(), run_name="__main__", alter_sys=True)
