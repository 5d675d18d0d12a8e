"""A running program of the SDK: started by its controller worker, connected by lines of JSON, ended with it.

Holds: it ends with the worker, even if the worker is killed. Its output is one JSON object per line; any other output
ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from broker.runtime import ChildProcess, failpoint
from controller_worker.loop.sdk.launch import ENVIRONMENT, make_command

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
        """Send a message; does nothing if it has ended."""
        if self._writer is None or self._writer.is_closing():
            return
        failpoint("controller.sdk_told")
        self._writer.write(json.dumps(line).encode() + b"\n")
        if self._writer.transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            self._writer.transport.abort()

    def stop(self) -> None:
        """Stop it and all its child processes at once; `endings` holds the task that waits for that. Idempotent."""
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
