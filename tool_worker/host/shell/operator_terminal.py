"""Terminals that operators use: an interactive bash each, on a separate pseudo-terminal.

Holds: a terminal belongs to the client that opened it, and ends with that client's connection. The program's output is
read only when the client asks for it, and its input is refused while the program does not read, so neither takes
unbounded memory. The agent's shells and their commands are not touched.
"""

from __future__ import annotations

import _struct as struct
import binascii
import fcntl
import os
import termios

from tool_worker.host.children import Children
from tool_worker.host.configuration import HostConfiguration
from tool_worker.host.descendants import kill, kill_descendants
from tool_worker.host.loop import BufferedWriter, EventLoop
from tool_worker.host.protocol import HostRequestRefused
from tool_worker.host.shell.shell import become_bash

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Reply = Callable[[dict[str, object]], None]

TERMINALS_LIMIT = 4
"""How many terminals a workspace may have at a time."""
OUTPUT_BYTES = 16 * 2**10
"""The longest output of one reply."""
UNREAD_INPUT_BYTES = 64 * 2**10
"""Input that the program may leave unread before more is refused."""
LARGEST = 1_000
"""The largest number of columns or rows."""


class OperatorTerminal:
    """One terminal.

    Raises:
        OSError: the machine or a limit allows no further terminal or process.
    """

    def __init__(
        self,
        loop: EventLoop,
        children: Children,
        configuration: HostConfiguration,
        directory: str,
        size: tuple[int, int],
    ) -> None:
        self._loop = loop
        self._exit_code: int | None = None
        self._reply: Reply | None = None
        self.is_open = True
        self._master, slave = os.openpty()
        try:
            self.resize(*size)
            os.set_blocking(self._master, False)
            self._pid = children.fork()
        except OSError:
            os.close(slave)
            os.close(self._master)
            raise
        if self._pid == 0:
            # No start-up files: nothing that an agent may have written runs when an operator opens a terminal.
            variables = {"TERM": "xterm-256color", "HISTFILE": "", "PS1": r"\w\$ "}
            become_bash(slave, (slave, slave, slave), configuration, directory, environment=variables)
        os.close(slave)
        self._input = BufferedWriter(loop, self._master)
        children.watch(self._pid, self._on_exit)

    def read(self, reply: Reply) -> None:
        """Reply with the next output, once there is any; after the end of the shell, with its exit code."""
        if self._reply is not None:
            raise HostRequestRefused("terminal_busy", "another request reads this terminal")
        self._reply = reply
        if self._exit_code is not None:
            self._answer()
        else:
            self._loop.on_readable(self._master, self._answer)

    def write(self, keys: bytes) -> None:
        """Send input to the program."""
        if self._input.waiting_bytes + len(keys) > UNREAD_INPUT_BYTES:
            raise HostRequestRefused("terminal_full", "the program does not read its input", is_retryable=True)
        self._input.write(keys)

    def resize(self, columns: int, rows: int) -> None:
        """Set the size; the program gets a SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """Kill the shell and what it has started, unless it was detached from the shell. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        if self._exit_code is None:
            kill_descendants(self._pid)
            kill(self._pid)
        self._input.clear()
        self._loop.on_readable(self._master, None)
        os.close(self._master)
        self._reply = None  # the client that waits for output has closed the terminal, or loses the host

    def _answer(self) -> None:
        self._loop.on_readable(self._master, None)
        try:
            output = os.read(self._master, OUTPUT_BYTES)
        except BlockingIOError:
            output = b""
        except OSError:  # the last program on this terminal has ended; the exit code follows
            output = b""
        reply = self._reply
        if reply is None or (not output and self._exit_code is None):
            return
        self._reply = None
        # Output that the shell left behind comes first, then its exit code.
        exit_code = None if output else self._exit_code
        reply({"output": binascii.b2a_base64(output, newline=False).decode(), "exit_code": exit_code})

    def _on_exit(self, exit_code: int) -> None:
        self._exit_code = exit_code
        if self.is_open and self._reply is not None:
            self._answer()


class OperatorTerminals:
    """The operators' terminals of one workspace."""

    def __init__(self, loop: EventLoop, children: Children, configuration: HostConfiguration) -> None:
        self._loop = loop
        self._children = children
        self._configuration = configuration
        self._newest = 0
        self._open: dict[int, tuple[object, OperatorTerminal]] = {}

    @property
    def is_used(self) -> bool:
        """Whether any terminal is open."""
        return bool(self._open)

    def serve(self, client: object, message: dict[str, object], directory: str, reply: Reply) -> None:
        """Serve a request of a client: `open`, `read`, `write`, `resize` or `close`; see `protocol`.

        Raises:
            HostRequestRefused: the request is invalid, or cannot be served now.
        """
        what = message.get("what")
        if what == "open":
            reply({"terminal": self._start(client, _size_in(message), directory)})
            return
        number = message.get("terminal")
        owner, terminal = self._open.get(number, (None, None)) if isinstance(number, int) else (None, None)
        if terminal is None or owner is not client:
            raise HostRequestRefused("no_terminal", f"there is no terminal {number!r}")
        assert isinstance(number, int)
        if what == "read":
            terminal.read(reply)
            return
        if what == "write":
            terminal.write(_input_in(message))
        elif what == "resize":
            terminal.resize(*_size_in(message))
        elif what == "close":
            del self._open[number]
            terminal.close()
        else:
            raise HostRequestRefused("bad_arguments", f"there is no request {what!r} of terminals")
        reply({})

    def forget(self, client: object) -> None:
        """Close the terminals of a client."""
        for number, (owner, terminal) in list(self._open.items()):
            if owner is client:
                del self._open[number]
                terminal.close()

    def close(self) -> None:
        """Close all terminals."""
        for _, terminal in self._open.values():
            terminal.close()
        self._open.clear()

    def _start(self, client: object, size: tuple[int, int], directory: str) -> int:
        if len(self._open) >= TERMINALS_LIMIT:
            text = f"the workspace has {TERMINALS_LIMIT} open terminals; close one first"
            raise HostRequestRefused("too_many_terminals", text, is_retryable=True)
        try:
            terminal = OperatorTerminal(self._loop, self._children, self._configuration, directory, size)
        except OSError as error:
            raise HostRequestRefused("no_terminal", f"no terminal can be opened: {error.strerror}") from error
        self._newest += 1
        self._open[self._newest] = (client, terminal)
        return self._newest


def _size_in(message: dict[str, object]) -> tuple[int, int]:
    columns, rows = message.get("columns"), message.get("rows")
    if isinstance(columns, int) and isinstance(rows, int) and 0 < columns <= LARGEST and 0 < rows <= LARGEST:
        return columns, rows
    raise HostRequestRefused("bad_arguments", f"`columns` and `rows` are not numbers from 1 to {LARGEST}")


def _input_in(message: dict[str, object]) -> bytes:
    keys = message.get("input")
    try:
        if isinstance(keys, str):
            return binascii.a2b_base64(keys.encode("ascii"), strict_mode=True)
    except ValueError:
        pass
    raise HostRequestRefused("bad_arguments", "`input` is not in base64")
