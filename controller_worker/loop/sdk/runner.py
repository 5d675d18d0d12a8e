"""A running program of the SDK: started by its controller worker, connected by lines of JSON, ended with it.

The program starts with a clean environment, and in a sandbox if bubblewrap works.

Holds: it ends with the worker, even if the worker is killed. Its output is one JSON object per line; any other output
ends it. The program inherits no variable, no directory of ours, and no descriptor except its socket. In the sandbox, it
sees the system's programs, the interpreter's packages and this package, all read-only, and an empty `/tmp`; its only
network is its own loopback.
Does not: limit memory; a worker limits the number of programs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from broker.runtime import ChildProcess, failpoint

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
ENVIRONMENT = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
TRIAL_LIMIT_SECONDS = 10.0

_OWN = Path(__file__).parent
_LIBRARIES = ("bin", "sbin", "lib", "lib32", "lib64")


PROGRAM = (sys.executable, "-I", "-m", f"{__package__}.program")


def make_command(program: Sequence[str], descriptor: int, *, is_sandboxed: bool) -> Sequence[str]:
    """Return the command that starts the program of a session.

    Args:
        program: `PROGRAM`, or another one with the same protocol.
        descriptor: its socket's descriptor, the same in the child.
    """
    command = [*program, str(descriptor)]
    return [*_make_sandbox_command(), "--", *command] if is_sandboxed else command


@functools.cache
def can_sandbox() -> bool:
    """Return whether bubblewrap is installed and works; tried once."""
    if shutil.which("bwrap", path=SYSTEM_PATH) is None:
        return False
    trial = [*_make_sandbox_command(), "--", sys.executable, "-I", "-c", "pass"]
    try:
        tried = subprocess.run(trial, env={}, capture_output=True, timeout=TRIAL_LIMIT_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _make_sandbox_command() -> Sequence[str]:
    found = shutil.which("bwrap", path=SYSTEM_PATH) or "bwrap"
    return [
        found,
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sdk"),
        *("--cap-drop", "ALL", "--new-session", "--die-with-parent"),
        *("--ro-bind", "/usr", "/usr", *_find_system_mounts(), "--proc", "/proc", "--dev", "/dev"),
        *("--tmpfs", "/tmp", *_find_package_mounts(), "--remount-ro", "/", "--chdir", "/tmp"),  # noqa: S108  (mounts of the sandbox)
    ]


def _find_system_mounts() -> Iterator[str]:
    for name in _LIBRARIES:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def _find_package_mounts() -> Iterator[str]:
    """Yield the mounts of the interpreter, of its packages, and of this package, the only one of ours."""
    places = {Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parent.parent}
    places |= {Path(place) for place in site.getsitepackages()}
    kept = [place for place in sorted(places) if place.is_dir() and not place.is_relative_to("/usr")]
    for place in kept:
        if not any(place != other and place.is_relative_to(other) for other in kept):
            yield from ("--ro-bind", str(place), str(place))
    if not any(_OWN.is_relative_to(place) for place in (*kept, Path("/usr"))):
        face = _OWN.parent / "__init__.py"
        for place in (_OWN.parents[1] / "__init__.py", face, face.with_suffix(".pyi"), _OWN):
            yield from ("--ro-bind", str(place), str(place))


MAX_LINE_BYTES = 2**20
MAX_WAITING_BYTES = 64 * 2**20
"""Bytes that the program has not read yet; it normally reads everything at once."""
OUTPUT_BYTES = 2_000
INSIST_SECONDS = 3.0

Line = Mapping[str, Any]


class SdkRunner:
    """A running program of the SDK.

    Args:
        on_line: called with each message.
        on_end: called once if it ends by itself, with the end of its output.
        endings: receives the tasks that wait for the end of a stopped program.
    """

    def __init__(
        self, *, on_line: Callable[[Line], None], on_end: Callable[[str], None], endings: set[asyncio.Task[None]]
    ) -> None:
        self._endings = endings
        self._on_line = on_line
        self._on_end = on_end
        self._child: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._last_signal = signal.SIGKILL
        self._is_stopped = False
        self._folder = Path()

    @property
    def pid(self) -> int | None:
        """The process id of the program, or of the sandbox around it."""
        return self._child.pid if self._child is not None else None

    async def start(self, program: Sequence[str], *, is_sandboxed: bool) -> None:
        """Start the program.

        Raises:
            OSError: no process can be started.
        """
        # Without a sandbox the program must remove its home; a sandbox ends with everything in it.
        self._last_signal = signal.SIGKILL if is_sandboxed else signal.SIGTERM
        ours, theirs = socket.socketpair()
        folder = self._folder = Path(tempfile.mkdtemp(prefix="deckhands-sdk-"))
        try:
            with theirs:
                log = folder / "log"
                self._child = ChildProcess.start(
                    make_command(program, theirs.fileno(), is_sandboxed=is_sandboxed),
                    log=log,
                    env=ENVIRONMENT if is_sandboxed else {**ENVIRONMENT, "TMPDIR": str(folder)},
                    last_signal=self._last_signal,
                    inherited=(theirs.fileno(),),
                    directory=folder,
                )
                said = log.open("rb")
            if is_sandboxed:  # it leaves nothing behind, even if this worker is killed
                shutil.rmtree(folder, ignore_errors=True)
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        except OSError:
            ours.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._reading = asyncio.create_task(self._read(reader, said), name="lines of the SDK")

    def send(self, **line: Any) -> None:
        """Send a message, unless the program has ended."""
        if self._writer is None or self._writer.is_closing():
            return
        failpoint("controller.sdk_told")
        self._writer.write(json.dumps(line).encode() + b"\n")
        if self._writer.transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            self._writer.transport.abort()

    def stop(self) -> None:
        """Kill the program and all its child processes; `endings` has the task that waits for their end. Idempotent."""
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._child is not None and not self._is_stopped:
            self._is_stopped = True
            ending = asyncio.create_task(self._end(self._child, self._folder), name="end of the SDK")
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _end(self, child: ChildProcess, folder: Path) -> None:
        _send_signal(child, self._last_signal)
        try:
            async with asyncio.timeout(INSIST_SECONDS):
                await child.wait()
        except TimeoutError:
            _send_signal(child, signal.SIGKILL)
            await child.wait()
        shutil.rmtree(folder, ignore_errors=True)

    async def _read(self, reader: asyncio.StreamReader, said: BinaryIO) -> None:
        text = ""
        try:
            with suppress(ValueError, OSError):  # a line that is too long, or invalid
                while line := await reader.readline():
                    found = json.loads(line)
                    if not isinstance(found, dict):
                        break
                    self._on_line(found)
            text = said.read(OUTPUT_BYTES).decode("utf-8", "replace").strip()
        finally:
            said.close()
            self.stop()
        self._on_end(text)


def _send_signal(child: ChildProcess, number: signal.Signals) -> None:
    """Send a signal to a program and all its child processes."""
    if child.exit_status is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
