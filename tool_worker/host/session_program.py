"""A program beside the shell that runs the calls of one tool, such as an IPython kernel or a browser.

The first call starts it, and it stays alive between calls. It finds a socket at `SESSION_FD` and exchanges lines of
JSON:

    us → it   {"call": n, "arguments": {…}}      {"interrupt": n}
    it → us   {"call": n, "result": {…}}

Holds: calls run one at a time, in the order of their requests. Each is answered exactly once, even if the program ends,
exceeds its call's time limit or sends invalid messages; the next call then starts a new program. Its temporary files
are in a separate directory (`TMPDIR`), which is removed with it.
Does not: interpret results, or arguments except `timeout`.
"""

from __future__ import annotations

import os
import socket
from collections import deque

from tool_worker.host import protocol
from tool_worker.host.compiled import signal
from tool_worker.host.descendants import kill, kill_descendants, kill_marked
from tool_worker.host.hardening import lower_limits
from tool_worker.host.loop import BufferedWriter, EventLoop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tool_worker.host.children import Children
    from tool_worker.host.configuration import HostConfiguration

SESSION_FD = 3
QUEUE_LIMIT = 64
GRACE_SECONDS = 15.0
"""Time beyond a call's limit in which the program may still end the call itself."""
INTERRUPT_GRACE_SECONDS = 3.0
NEW_SESSION = "[This is a new {} session. What an earlier one held, such as variables or open pages, is lost.]\n"

_MAX_FD = 1 << 20

Result = dict[str, object]


class SessionCall:
    """A call that has not been answered yet."""

    def __init__(
        self, program: SessionProgram, arguments: Result, begin: Callable[[], bool], finish: Callable[[Result], None]
    ) -> None:
        self.arguments = arguments
        self.begin = begin
        self.finish = finish
        self._program = program

    def interrupt(self) -> bool:
        """Stop the call; its result follows soon."""
        return self._program.interrupt(self)


class SessionProgram:
    """One program, started when it is needed.

    Args:
        name: The name of its tool. If the first word of its command line has no slash, it is looked up in the shell's
            `PATH`.
        follows_another: Whether an earlier host served the workspace; the model may remember that host's program.
    """

    def __init__(
        self,
        loop: EventLoop,
        children: Children,
        configuration: HostConfiguration,
        *,
        name: str,
        follows_another: bool,
    ) -> None:
        self._loop = loop
        self._children = children
        self._configuration = configuration
        self._name = name
        self._command = configuration.programs[name]
        self._pid = 0
        self._folder = ""
        self._connection: socket.socket | None = None
        self._writer: BufferedWriter | None = None
        self._lines = protocol.Lines()
        self._number = 0
        self._call: SessionCall | None = None
        self._queue: deque[SessionCall] = deque()
        self._limit = loop.timer(self._on_timeout)
        self._notice = NEW_SESSION.format(name) if follows_another and name in configuration.sessions else ""

    @property
    def resting_pid(self) -> int:
        """The pid of the program while it is idle; 0 if it runs a call or does not exist."""
        return 0 if self._call is not None else self._pid

    @property
    def is_full(self) -> bool:
        """Whether the queue of calls is full."""
        return len(self._queue) >= QUEUE_LIMIT

    def ask(self, arguments: Result, begin: Callable[[], bool], finish: Callable[[Result], None]) -> SessionCall:
        """Queue a call.

        Args:
            begin: Called before the call runs; returns False if the call must not run because it was answered.
            finish: Receives the result.
        """
        call = SessionCall(self, arguments, begin, finish)
        self._queue.append(call)
        self._start_next()
        return call

    def interrupt(self, call: SessionCall) -> bool:
        """Stop a call: a waiting one is answered at once, a running one soon."""
        if call is self._call:
            self._send({"interrupt": self._number})
            self._limit.set(self._loop.now() + INTERRUPT_GRACE_SECONDS)
            return True
        self._queue.remove(call)
        call.finish({"content": "[The call was cancelled before it ran.]", "is_error": True})
        return True

    def close(self) -> None:
        """Kill the program; pending calls get no answer."""
        self._queue.clear()
        self._call = None
        self._end_program()

    def _start_next(self) -> None:
        while self._call is None and self._queue:
            call = self._queue.popleft()
            if not call.begin():
                continue
            self._call = call
            self._number += 1
            if self._connection is None and not self._start():
                continue
            self._send({"call": self._number, "arguments": call.arguments})
            timeout = call.arguments.get("timeout")
            seconds = timeout if isinstance(timeout, int | float) and timeout > 0 else 0
            self._limit.set(self._loop.now() + seconds + GRACE_SECONDS if seconds else None)

    def _start(self) -> bool:
        ours, theirs = socket.socketpair()
        whose = self._configuration.environment.get("DECKHANDS_HOST_ID", "")[:8]  # other hosts may share the directory
        prefix = f".{self._name}-{whose}-"  # short, because the paths of sockets are below it
        temporary = self._configuration.temporary_directory
        folder = os.path.join(temporary, f"{prefix}{os.urandom(4).hex()}")
        try:
            # Remove leftovers of ended hosts; a host that was killed could not remove its own.
            for left in [entry for entry in os.listdir(temporary) if entry.startswith(prefix)]:
                _remove(os.path.join(temporary, left))
            os.mkdir(folder, 0o700)
            self._folder = folder
            self._pid = self._children.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._answer(f"ERROR: {self._name} cannot be started: {error.strerror}.")
            return False
        if self._pid == 0:
            _become(self._command, theirs, self._configuration, folder)
        theirs.close()
        ours.setblocking(False)
        self._connection = ours
        self._writer = BufferedWriter(self._loop, ours.fileno())
        self._lines = protocol.Lines()
        self._loop.on_readable(ours.fileno(), self._read)
        pid = self._pid
        self._children.watch(pid, lambda _: self._on_exit(pid))
        return True

    def _read(self) -> None:
        assert self._connection is not None
        try:
            chunk = self._connection.recv(65536)
            lines = self._lines.feed(chunk)
            for line in lines:
                self._handle_message(protocol.decode(line))
        except BlockingIOError:
            return
        except (OSError, protocol.ProtocolError):
            chunk = b""
        if not chunk and self._connection is not None:
            self._handle_loss("ended")

    def _handle_message(self, message: dict[str, object]) -> None:
        result = message.get("result")
        if self._call is None or message.get("call") != self._number or not isinstance(result, dict):
            return  # the late answer to a call that was given up
        content = result.get("content")
        if self._notice and isinstance(content, str):
            result["content"] = self._notice + content
        self._notice = ""
        self._finish(result)

    def _send(self, message: dict[str, object]) -> None:
        if self._writer is not None:
            self._writer.write(protocol.encode(message))

    def _on_timeout(self) -> None:
        self._handle_loss("did not stop in time and was killed")

    def _on_exit(self, pid: int) -> None:
        if pid != self._pid:
            return  # a program that this host has killed
        self._pid = 0
        if self._connection is not None:
            self._read()
        if self._connection is not None:
            self._handle_loss("ended")

    def _handle_loss(self, how: str) -> None:
        self._end_program()
        if self._call is not None:
            self._answer(f"ERROR: {self._name} {how}. Its state is lost; the next call starts a new one.")
        else:
            self._notice = f"[{self._name} had ended. This is a new one; the old state is lost.]\n"
        self._start_next()

    def _end_program(self) -> None:
        self._limit.set(None)
        if self._connection is not None:
            assert self._writer is not None
            self._writer.clear()
            self._loop.on_readable(self._connection.fileno(), None)
            self._connection.close()
            self._connection = self._writer = None
        if self._pid:
            kill_descendants(self._pid)
            kill(self._pid)
            self._pid = 0
        if self._folder:
            # A killed program leaves its children to this host, where they may be anywhere among its descendants.
            kill_marked(os.getpid(), f"TMPDIR={self._folder}")
            _remove(self._folder)
            self._folder = ""

    def _answer(self, text: str) -> None:
        self._finish({"content": text, "is_error": True})

    def _finish(self, result: Result) -> None:
        call, self._call = self._call, None
        self._limit.set(None)
        assert call is not None
        call.finish(result)
        self._start_next()


def _remove(folder: str) -> None:
    """Remove a directory in a separate process, because it may be large and the host must not block."""
    nowhere = [(os.POSIX_SPAWN_OPEN, target, os.devnull, os.O_RDWR, 0) for target in (0, 1, 2)]
    try:
        os.posix_spawn("/bin/rm", ["rm", "-rf", "--", folder], {}, file_actions=nowhere)
    except OSError:
        return  # it is removed with the host's temporary directory


def _become(command: list[str], connection: socket.socket, configuration: HostConfiguration, temporary: str) -> None:
    """Turn the forked child into the program; never returns."""
    try:
        os.setsid()
        os.dup2(connection.fileno(), SESSION_FD)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(nowhere, target)
        os.closerange(SESSION_FD + 1, _MAX_FD)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        lower_limits(configuration)
        if os.path.isdir(configuration.workspace):
            os.chdir(configuration.workspace)
        os.execvpe(command[0], command, {**configuration.environment, "TMPDIR": temporary})  # noqa: S606  (a program of our own)
    finally:
        os._exit(127)
