"""A persistent bash on a pseudo-terminal.

Bash is interactive, so an interrupt ends the command and not the shell, and job control works. It reads its commands
from a socket instead of the terminal: there is no line limit and no echo, and text typed for a program is never run as
a command. Its own standard error is /dev/null, which hides prompts and traces of our lines.

Holds: one command at a time; output takes bounded memory; a program's output cannot end a command; a bash that no
longer accepts commands is ended within `UNRESPONSIVE_SECONDS`.
Does not: survive a command that ends it (`exit`, `exec`, `kill $$`); `on_exit` reports it, and a new shell is a new
object.
"""

from __future__ import annotations

import _struct as struct
import fcntl
import os
import termios

from tool_worker.host.children import Children
from tool_worker.host.compiled import signal, socket
from tool_worker.host.configuration import HostConfiguration
from tool_worker.host.descendants import (
    command_line,
    current_tick,
    find_children,
    find_started_since,
    handles_signal,
    kill,
)
from tool_worker.host.hardening import lower_limits
from tool_worker.host.loop import BufferedWriter, EventLoop
from tool_worker.host.shell.command_marks import CommandEnd, CommandMark, MarkScanner, end_line, quote, start_line
from tool_worker.host.shell.output_buffer import OutputBuffer, OutputFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BASH = "/bin/bash"
ROWS = COLUMNS = 1000
INPUT_LINE_LIMIT_BYTES = 4095
"""Maximum length of a terminal input line; the kernel drops the rest."""

IDLE = "idle"
SUBMITTED = "submitted"
STARTED = "started"
ENDED = "ended"

KILL_ROUNDS = 50
"""Maximum searches for more processes of a command; a fork bomb that survives them ends with the workspace."""

REPEAT_SECONDS = 0.2
REPEATS = 24
"""Interval and maximum number of repetitions of a lost Ctrl-C: see `press`."""

HANG_CHECK_SECONDS = 2.5
UNRESPONSIVE_SECONDS = {SUBMITTED: 30.0, STARTED: 5.0}
"""Maximum time until a command starts (includes the start of bash on a busy machine), or until its end is reported."""

_READ_BYTES = 65536
_MAX_FD = 1 << 20


class ShellEvents:
    """The callbacks of a shell: output, the end of a command, its own end (exit code, state until then)."""

    __slots__ = ("on_end", "on_exit", "on_output")

    def __init__(
        self,
        *,
        on_output: Callable[[], None],
        on_end: Callable[[CommandEnd], None],
        on_exit: Callable[[int, str], None],
    ) -> None:
        self.on_output = on_output
        self.on_end = on_end
        self.on_exit = on_exit


class Shell:
    """One bash.

    Raises:
        OSError: the machine or a limit allows no further terminal or process.

    Attributes:
        state: `IDLE`; `SUBMITTED`: a command was sent; `BEGUN`: the command runs; `ENDED`: bash has exited.
        output: The unreported output.
        whole_output: The whole output of the current command.
        is_unresponsive: Whether the shell was ended because it no longer accepted commands.
        previous_exit_code: The exit code that the next command sees as `$?`.
    """

    def __init__(
        self, loop: EventLoop, reaper: Children, configuration: HostConfiguration, cwd: str, events: ShellEvents
    ) -> None:
        self._loop = loop
        self._reaper = reaper
        self._events = events
        self._scanner = MarkScanner()
        self.whole_output = OutputFile(configuration.temporary_directory)
        self.output = OutputBuffer(configuration.output_limit_bytes, self.whole_output)
        self._nonce = ""
        self._typed_early = b""
        self.previous_exit_code = 0
        self._command_tick = 0
        self._earlier: frozenset[int] = frozenset()
        self.state = IDLE
        self.is_unresponsive = False
        self._unresponsive_since: float | None = None
        self._master, self._slave = os.openpty()
        self._commands, theirs = socket.socketpair()
        try:
            self._terminal = os.ttyname(self._slave)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            os.set_blocking(self._master, False)
            self._commands.setblocking(False)
            self._source = f"socket:[{os.fstat(theirs.fileno()).st_ino}]"
            self.pid = reaper.fork()
        except OSError:
            theirs.close()
            self._close()
            raise
        if self.pid == 0:
            options = ("--noediting", "+H", "+o", "history")
            become_bash(self._slave, (theirs.fileno(), None, None), configuration, cwd, options=options)
        theirs.close()
        self._to_bash = BufferedWriter(loop, self._commands.fileno())
        self._to_program = BufferedWriter(loop, self._master)
        self._hang_check = loop.timer(self._check_responsive)
        self._repeat = loop.timer(self._press_again)
        self._repeats_left = 0
        self._pressed_for = 0
        self._again = self._press_interrupt_again
        loop.on_readable(self._master, self._read)
        reaper.watch(self.pid, self._on_exit)

    @property
    def is_busy(self) -> bool:
        """Whether a command was submitted or runs."""
        return self.state in (SUBMITTED, STARTED)

    def submit(self, command: str, *, environment: dict[str, str], cwd: str | None) -> None:
        """Run a command; the shell must be idle. `cwd` moves the shell, like `cd`."""
        assert self.state == IDLE
        self._nonce = os.urandom(16).hex()
        self._scanner.expect(self._nonce.encode())
        self.state = SUBMITTED
        self._command_tick = current_tick()
        self._earlier = find_children(self.pid) | find_children(os.getpid())
        self._settle_terminal()
        line = start_line(
            self._nonce,
            command,
            self._terminal,
            previous_exit_code=self.previous_exit_code,
            environment=environment,
            cwd=cwd,
        )
        self._to_bash.write(line + end_line(self._nonce, self._terminal))
        self._unresponsive_since = None
        self._hang_check.set(self._loop.now() + HANG_CHECK_SECONDS)

    def prepare(self, script: str) -> None:
        """Run a script without input and output before the first command."""
        self._to_bash.write(f"\\builtin eval {quote(script)} </dev/null >/dev/null 2>&1\n".encode("utf-8", "replace"))

    def type_text(self, text: str) -> bool:
        """Type lines and a final Enter for the running program; return False if the terminal would cut a line."""
        line = text.removesuffix("\n").encode("utf-8", "replace") + b"\n"
        is_by_line = termios.tcgetattr(self._slave)[3] & termios.ICANON
        if is_by_line and max(map(len, line.split(b"\n"))) > INPUT_LINE_LIMIT_BYTES:
            return False
        self._type(line)
        return True

    def press(self, key: str) -> None:
        r"""Send Ctrl and this key to the running program.

        Ctrl-C is lost if it arrives between two programs of the command, or before the next program's exec; the command
        then continues. So Ctrl-C is repeated until a program receives it. Ctrl-\ is repeated while the same program
        still runs, so that no other program receives it.
        """
        if key.upper() == "C":
            self._repeats_left = REPEATS
            self._press_interrupt()
        elif key == "\\":
            self._repeats_left = REPEATS
            self._press_quit()
        else:
            self._type(bytes([ord(key.upper()) & 0x1F]))

    def interrupt(self) -> None:
        """Send SIGINT to the foreground process group, whatever state the terminal is in."""
        foreground = os.tcgetpgrp(self._master)
        if self.state == STARTED and foreground > 0:
            try:
                os.killpg(foreground, signal.SIGINT)
            except ProcessLookupError:
                return
            self._ask_for_end_again()

    def kill(self) -> None:
        """Kill the shell and the processes of the current command; earlier background jobs continue."""
        # Find the processes first, because the tree falls apart with its root. Kill them after bash, which would print
        # "Killed".
        victims = self._find_started()
        kill(self.pid)
        for pid in victims:
            kill(pid)
        self.kill_started()

    def leave(self) -> None:
        """End the shell without killing its jobs."""
        kill(self.pid)

    def kill_started(self) -> None:
        """Kill the processes that the latest command has left behind."""
        killed: set[int] = set()
        # Repeat until no new process is found: a process may have forked between being found and being killed.
        for _ in range(KILL_ROUNDS):
            victims = set(self._find_started()) - killed
            for pid in victims:
                kill(pid)
            if not victims:
                break
            killed |= victims

    def _find_started(self) -> list[int]:
        """Return the processes of the latest command, daemons included, but not those of other shells."""
        spared = (self._earlier | self._reaper.watched) - {self.pid}
        return [pid for pid in find_started_since(os.getpid(), self._command_tick, spared) if pid != self.pid]

    def _type(self, keys: bytes) -> None:
        # An interrupt before the start of the command would hit bash while it reads the command.
        if self.state == STARTED:
            self._to_program.write(keys)
        else:
            self._typed_early += keys

    def _press_interrupt(self) -> None:
        group = os.tcgetpgrp(self._master)
        is_handled = self._has_handler(group, signal.SIGINT)
        self._type(b"\x03")
        self._ask_for_end_again()
        self._repeat_for(group, self._press_interrupt_again, is_handled=is_handled)

    def _press_quit(self) -> None:
        group = os.tcgetpgrp(self._master)
        is_handled = not self._has_started(group) or self._has_handler(group, signal.SIGQUIT)
        self._type(b"\x1c")
        self._repeat_for(group, self._press_quit_again, is_handled=is_handled)

    def _repeat_for(self, group: int, again: Callable[[], None], *, is_handled: bool) -> None:
        """Schedule a check that the group has received the key, unless a program handles the signal itself."""
        is_signal = self.state == STARTED and termios.tcgetattr(self._slave)[3] & termios.ISIG
        if is_signal and self._repeats_left > 0 and not is_handled:
            self._repeats_left -= 1
            self._pressed_for = group
            self._again = again
            self._repeat.set(self._loop.now() + REPEAT_SECONDS)

    def _press_again(self) -> None:
        self._again()

    def _press_quit_again(self) -> None:
        r"""Press Ctrl-\ again if the same program still runs."""
        if self.state == STARTED and os.tcgetpgrp(self._master) == self._pressed_for:
            self._press_quit()

    def _press_interrupt_again(self) -> None:
        """Press Ctrl-C again if the command still runs with another program."""
        group = os.tcgetpgrp(self._master)
        if group == self._pressed_for == self.pid:
            self._repeats_left -= 2  # fewer repeats: bash itself rarely loses one, and may have a trap
        if self.state == STARTED and (group != self._pressed_for or group == self.pid or self._has_started(group)):
            self._press_interrupt()

    def _has_handler(self, group: int, number: signal.Signals) -> bool:
        """Return whether the leader of this group is a program that handles the signal and so decides itself."""
        return self._has_started(group) and handles_signal(group, number)

    def _has_started(self, group: int) -> bool:
        """Return whether a program leads this group, rather than bash or a copy of bash before exec."""
        return command_line(group) not in (b"", command_line(self.pid))

    def _ask_for_end_again(self) -> None:
        # The interrupt may arrive just after the command has ended, and discard the line that prints the end mark.
        self._to_bash.write(end_line(self._nonce, self._terminal))

    def _check_responsive(self) -> None:
        """Kill a bash that does not report the start or the end of its command."""
        now = self._loop.now()
        if self.state == SUBMITTED or self._stdin_target() == self._source:
            self._unresponsive_since = self._unresponsive_since or now
            if now - self._unresponsive_since >= UNRESPONSIVE_SECONDS[self.state]:
                self.is_unresponsive = True
                self.kill()
                return
        else:
            self._unresponsive_since = None
        self._hang_check.set(now + HANG_CHECK_SECONDS)

    def _stdin_target(self) -> str:
        """Return the file on bash's standard input. Between two commands, it is the socket."""
        try:
            return os.readlink(f"/proc/{self.pid}/fd/0")
        except OSError:
            return ""

    def _settle_terminal(self) -> None:
        """Reset the terminal after earlier programs: no echo, no translation, no pending input.

        Keys that send a signal must not discard output, because the output may already be the end mark of the command.
        """
        attributes = termios.tcgetattr(self._slave)
        attributes[0] = (attributes[0] | termios.ICRNL | termios.BRKINT) & ~(termios.IXON | termios.IGNCR)
        attributes[1] &= ~termios.OPOST
        attributes[3] |= termios.ICANON | termios.ISIG | termios.IEXTEN | termios.NOFLSH
        attributes[3] &= ~(termios.ECHO | termios.ECHONL | termios.TOSTOP)
        termios.tcsetattr(self._slave, termios.TCSANOW, attributes)
        termios.tcflush(self._slave, termios.TCIFLUSH)

    def _read(self) -> None:
        try:
            chunk = os.read(self._master, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            # The terminal was hung up; the exit status reports the end of the shell.
            self._loop.on_readable(self._master, None)
            return
        self._scan(chunk)

    def _scan(self, chunk: bytes) -> None:
        for piece in self._scanner.feed(chunk):
            if isinstance(piece, bytes):
                self.output.add(piece)
                self._events.on_output()
            elif piece.nonce == self._nonce.encode() and self.is_busy:
                self._handle_mark(piece)

    def _handle_mark(self, mark: CommandMark) -> None:
        if mark.fields is None:
            self.state = STARTED
            typed, self._typed_early = self._typed_early, b""
            if typed:
                self._to_program.write(typed)
            return
        self.state = IDLE
        self._hang_check.set(None)
        self._repeat.set(None)
        self._to_program.clear()
        end = CommandEnd(mark.fields)
        self.previous_exit_code = end.exit_code
        if self._stdin_target() not in (self._source, ""):
            # Bash does not read the socket any more and takes its commands from elsewhere.
            self.kill()
        self._events.on_end(end)

    def _on_exit(self, exit_code: int) -> None:
        # Read the output from before the exit; the deadline covers jobs that keep writing.
        deadline = self._loop.now() + 0.5
        while self._loop.now() < deadline:
            try:
                self._scan(os.read(self._master, _READ_BYTES))
            except OSError:
                break
        last_state, self.state = self.state, ENDED
        self._loop.drop(self._hang_check)
        self._loop.drop(self._repeat)
        self._to_bash.clear()
        self._to_program.clear()
        self._loop.on_readable(self._master, None)
        self._close()
        self._events.on_exit(exit_code, last_state)
        self.whole_output.end()

    def _close(self) -> None:
        os.close(self._master)
        os.close(self._slave)
        self._commands.close()


def become_bash(
    terminal: int,
    files: tuple[int | None, int | None, int | None],
    configuration: HostConfiguration,
    cwd: str,
    *,
    options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> None:
    """Turn the forked child into an interactive bash that reads no start-up files; never returns.

    Args:
        files: its input, output and errors; None is the null device.
        cwd: where it starts; the workspace if this directory is gone.
        options: further options of bash.
        environment: further variables.
    """
    try:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for target, source in enumerate(files):
            os.dup2(nowhere if source is None else source, target)
        os.closerange(3, _MAX_FD)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            # Signals that are ignored when bash starts stay ignored in all its children.
            signal.signal(number, signal.SIG_DFL)
        lower_limits(configuration)
        for directory in (cwd, configuration.workspace, "/"):
            if os.path.isdir(directory):
                os.chdir(directory)
                break
        arguments = ["bash", "--norc", "--noprofile", *options, "-i"]
        os.execve(BASH, arguments, {**configuration.environment, **(environment or {})})  # noqa: S606  (the shell)
    finally:
        os._exit(127)
