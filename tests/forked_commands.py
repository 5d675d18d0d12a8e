"""The command `deckhands` for many calls in a row: a process that has imported it, and forks for each call.

Holds: each call is a process with the caller's arguments, directory, environment and open files. The installed command
itself starts workers, because a worker is started from nothing.
Does not: save anything but the imports, which are most of the cost of a short command.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERBS_OF_WORKERS = ("beat", "controller", "demo", "doctor", "jobs", "tools", "up")
CALLER = f"""#!{sys.executable} -IS
import json, os, socket, sys
if sys.argv[1:2] and sys.argv[1] in {VERBS_OF_WORKERS!r}:
    os.execv({str(Path(sys.executable).parent / "deckhands")!r}, ["deckhands", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join(os.path.dirname(os.path.realpath(__file__)), "socket"))
    call = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(call).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(call)
    sys.exit(int.from_bytes(server.recv(1), "big"))
"""


@contextmanager
def forked_commands(directory: Path) -> Iterator[Path]:
    """Put a `deckhands` into a directory that answers as long as the block lasts."""
    command = directory / "deckhands"
    command.write_text(CALLER)
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    arguments = [sys.executable, "-m", "tests.forked_commands", str(directory / "socket")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            yield command
        finally:
            server.terminate()


def serve(path: str) -> None:
    from deckhands.cli import main  # noqa: F401
    from deckhands.client import client  # noqa: F401
    from deckhands.client.runs import headless  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are not awaited
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            with connection:
                if os.fork() == 0:
                    listening.close()
                    _answer(connection)


def _answer(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        size, received = int.from_bytes(head, "big"), bytearray()
        while len(received) < size:
            received += connection.recv(size - len(received))
        arguments, directory, environment = json.loads(received)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        code = _call(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        connection.sendall(bytes([code]))
        os._exit(code)


def _call(arguments: list[str]) -> int:
    from deckhands.cli.main import call

    return call(arguments)


if __name__ == "__main__":
    serve(sys.argv[1])
