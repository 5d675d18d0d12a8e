"""The process of an ACP agent: its input and output lines, and its end.

Holds: memory is bounded whatever the agent writes, and the agent cannot block the program; stopping or ending the agent
includes all of its descendants.
Does not: reach a process that has left the program's process tree; the workspace host ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque

from tool_worker.host.descendants import kill_descendants, live_descendants

LINE_LIMIT_BYTES = 4 * 2**20
UNREAD_LIMIT_BYTES = 16 * 2**20
ERRORS_KEPT_BYTES = 4096
CHUNK_BYTES = 65536
KILL_ROUNDS = 100
ENDING_READS = 16
"""Enough reads to empty a full pipe."""


class AgentLost(Exception):
    """The agent is no longer usable.

    Attributes:
        code: See `controller_worker.providers.errors`.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class RunningAgent:
    """One agent process, from its start to its end.

    Args:
        command: A command line for bash.
        environment: The whole environment.

    Attributes:
        lines: Lines that were read but not processed yet.
        has_errors: Whether standard error is still open.

    Raises:
        AgentLost: the agent cannot be started.
    """

    def __init__(self, command: str, environment: dict[str, str], directory: str) -> None:
        self.lines: deque[bytes] = deque()
        self.has_errors = True
        self._partial = bytearray()
        self._unwritten = bytearray()
        self._errors = b""
        self._is_stopped = False
        try:
            self._process = subprocess.Popen(  # noqa: S603  (in the sandbox, as every command)
                ["/bin/bash", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory or None,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentLost("service_unavailable", f"The agent cannot be started: {error.strerror}.") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self.out, self.errors = (
            stream.fileno() for stream in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        for descriptor in (self._in, self.out, self.errors):
            os.set_blocking(descriptor, False)

    @property
    def blocked_input(self) -> int | None:
        """The descriptor to poll for writing, while there is unwritten input."""
        return self._in if self._unwritten else None

    def write(self, line: bytes) -> None:
        """Write a line; the part that the agent does not read at once is buffered.

        Raises:
            AgentLost: the agent does not read, and the buffer is over its limit.
        """
        self._unwritten += line
        self.flush()
        if len(self._unwritten) > UNREAD_LIMIT_BYTES:
            raise AgentLost("malformed_reply", "The agent does not read its input.")

    def flush(self) -> None:
        """Write buffered lines as far as the agent reads. Only `read` detects the agent's end."""
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._in, self._unwritten[:CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._unwritten.clear()

    def read(self) -> None:
        """Read some of the available output.

        Raises:
            AgentLost: the agent has ended, or a line is too long.
        """
        try:
            chunk = os.read(self.out, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise AgentLost("service_unavailable", self._describe_end())
        self._partial += chunk
        if b"\n" in chunk:
            *whole, self._partial = self._partial.split(b"\n")
            self.lines.extend(map(bytes, whole))
        if len(self._partial) > LINE_LIMIT_BYTES:
            raise AgentLost("malformed_reply", f"The agent wrote a line of more than {LINE_LIMIT_BYTES} bytes.")

    def read_errors(self) -> None:
        """Read standard error; only its tail is kept."""
        try:
            chunk = os.read(self.errors, CHUNK_BYTES)
        except BlockingIOError:
            return
        self._errors = (self._errors + chunk)[-ERRORS_KEPT_BYTES:]
        self.has_errors = bool(chunk)

    def stop(self) -> None:
        """Stop the agent's processes until `resume`."""
        self._is_stopped = True
        self._signal_tree(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the processes if `stop` has stopped them."""
        if self._is_stopped:
            self._is_stopped = False
            self._signal_tree(signal.SIGCONT)

    def end(self) -> None:
        """Kill the agent and everything it started."""
        for _ in range(KILL_ROUNDS):  # a killed process may have started another one meanwhile
            if not kill_descendants(os.getpid()):
                break
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            try:
                stream.close()
            except OSError:
                continue

    def _signal_tree(self, number: int) -> None:
        signalled: set[int] = set()
        while found := {below.pid for below in live_descendants(os.getpid())} - signalled:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= found

    def _describe_end(self) -> str:
        for _ in range(ENDING_READS):
            self.read_errors()
        try:
            code = str(self._process.wait(timeout=1.0))
        except subprocess.TimeoutExpired:
            code = "none yet"
        said = self._errors.decode("utf-8", "replace").strip()
        return f"The agent has ended (exit code {code})." + (f" It said: {said}" if said else "")
