"""Workers and model servers for many tests: a process that has imported what they import, and forks for each of them.

Holds: each program is a process as `python -m …` would be: it leads a session, has the caller's arguments, environment
and output, runs the whole module, can be killed and stopped, and keeps its pid until the test has waited for it.
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
from collections.abc import Mapping
from functools import cache
from importlib import import_module

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
    "deckhands.cli.commands.gateway",
    "deckhands.cli.commands.serve",
    "deckhands.cli.main",
    "deckhands.ingress.service",
    "deckhands.ingress.tasks",
    "deckhands.operations.jobs.beat",
    "deckhands.operations.jobs.service",
    "deckhands.operations.jobs.tasks",
    "deckhands.server.application",
    "deckhands.server.serving",
    "kombu.transport.redis",
    "mcp",
    "mcp.client.auth.extensions.client_credentials",
    "mcp.client.sse",
    "mcp.client.streamable_http",
    "mcp.client.subscriptions",
    "redbeat",
    "tests.model_server.scripts",
    "tests.model_server.server",
    "tool_worker.settings",
    "tool_worker.tools.mcp.http_connection",
    "tool_worker.worker.consumer",
)


class ForkedProgram:
    """A program, with those parts of `subprocess.Popen` that tests use.

    Args:
        output: the file for its output; None is a null device.
        errors: the file for its errors; None is the same as `output`.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        output: int | None,
        errors: int | None = None,
    ) -> None:
        self._keeper, theirs = socket.socketpair()
        nothing = os.open(os.devnull, os.O_RDWR)
        files = [nothing if output is None else output]
        files.append(files[0] if errors is None else errors)
        with theirs:
            socket.send_fds(_server(), [b"."], [theirs.fileno(), nothing, *files])
        os.close(nothing)
        self._keeper.sendall(
            json.dumps([module, *arguments]).encode() + b"\n" + json.dumps(dict(environment)).encode() + b"\n"
        )
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
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
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
    """Fork for each call, until no caller is left; return in each forked program, with the module it is to run."""
    for module in IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()  # or each program would copy the pages of all that was imported as soon as it collects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers are not awaited
    calls = socket.socket(fileno=os.dup(0))
    while True:
        _, files, _, _ = socket.recv_fds(calls, 1, 4)
        if not files:
            sys.exit()
        connection = socket.socket(fileno=files[0])
        if os.fork() == 0:
            calls.close()
            return _keep(connection, files[1:])
        connection.close()
        for file in files[1:]:
            os.close(file)


def _keep(connection: socket.socket, files: list[int]) -> str:
    """Fork a program, report its end, and release it when no caller waits for it any more; return in the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as calls:
        arguments, environment = json.loads(calls.readline()), json.loads(calls.readline())
    if (pid := os.fork()) == 0:
        connection.close()
        _become(arguments, environment, files)
        return str(arguments[0])
    for file in files:
        os.close(file)
    connection.sendall(b"%d\n" % pid)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    try:
        connection.sendall(b"%d\n" % (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
        connection.recv(1)
    finally:
        os._exit(0)


def _become(arguments: list[str], environment: dict[str, str], files: list[int]) -> None:
    """Take what a new program would have got from its caller."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments[1:]
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)


if __name__ == "__main__":
    runpy.run_module(serve(), run_name="__main__", alter_sys=True)
