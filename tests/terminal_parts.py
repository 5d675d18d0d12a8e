"""A user at a terminal: a command on a pseudo-terminal, and the screen that it draws."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyte

from tests.polling import unhurried

LOOK_SECONDS = 0.05


@dataclass
class Person:
    """A user in front of a screen.

    Attributes:
        raw: all output of the command.
        seen: the screen at each look, newest last.
    """

    running: subprocess.Popen[bytes]
    fd: int
    columns: int
    rows: int
    raw: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.screen = pyte.HistoryScreen(self.columns, self.rows, history=10_000)
        self.screen.write_process_input = self.type  # a terminal says where its cursor is
        self._stream = pyte.ByteStream(self.screen)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def look(self, seconds: float = LOOK_SECONDS) -> bool:
        """Read the output that arrives within some time; False: the command has closed the terminal."""
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if not ready:
            return True
        piece = b""
        with suppress(OSError):  # its last process has ended
            piece = os.read(self.fd, 65_536)
        self.raw += piece
        self._stream.feed(piece)
        return bool(piece)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def scrolled(self) -> list[str]:
        """The lines that have left the screen at its top, and then those that it shows."""
        above = [
            "".join(line[column].data for column in range(self.columns)).rstrip() for line in self.screen.history.top
        ]
        return [*above, *self.lines]

    def waits_for(self, *texts: str, limit: float = 30.0, gone: str = "") -> None:
        """Look until the screen shows all of some texts, and no longer another."""
        until = time.monotonic() + unhurried(limit)
        while not (all(text in self.text for text in texts) and (not gone or gone not in self.text)):
            is_open = self.look()
            found = all(text in self.text for text in texts) and (not gone or gone not in self.text)
            assert found or (is_open and time.monotonic() < until), f"no {texts!r} on the screen:\n{self.text}"

    def leaves(self, limit: float = 60.0) -> int:
        """Look until the command has ended, and return its exit code."""
        until = time.monotonic() + unhurried(limit)
        while self.look() and time.monotonic() < until:
            pass
        return self.running.wait(timeout=unhurried(limit))


@contextmanager
def person(
    command: Sequence[str | Path], env: Mapping[str, str], *, columns: int = 100, rows: int = 30
) -> Iterator[Person]:
    """Start a command on its own terminal; it is ended with the block."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    kept = {name: text for name, text in env.items() if name not in ("COLUMNS", "LINES")}
    running = subprocess.Popen(
        ["setsid", "--ctty", *map(str, command)],  # its controlling terminal, from which Ctrl-C reaches it
        env={"TERM": "xterm-256color", **kept},
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    try:
        yield Person(running, ours, columns, rows)
    finally:
        os.close(ours)  # hangs up
        try:
            running.wait(timeout=unhurried(60))
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
