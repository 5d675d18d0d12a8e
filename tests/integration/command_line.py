"""The command line for tests: called in this process, or started as a process; and a cluster kept up by it."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.coordination.action_streams import WorkspaceOrders
from deckhands import Client
from deckhands.cli.main import call
from tests.turns import finish, script  # noqa: F401  (turns, for the tests of commands)

COMMAND = (sys.executable, "-P", "-m", "deckhands")
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[Any]:
        """The objects it printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.StringIO):
    """A standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Return this environment without any setting of ours, and with the given ones."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("DECKHANDS_", "LLM_", "LITELLM_"))
    }
    return kept | {"DECKHANDS_HOME": str(home), "LLM_SCRIPTS_DIR": "/"} | variables


def deckhands(*arguments: str | Path, env: Mapping[str, str], stdin: io.TextIOBase | str = "") -> Done:
    """Call the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    before, before_stdin = dict(os.environ), sys.stdin
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = io.StringIO(stdin) if isinstance(stdin, str) else stdin
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = call([str(argument) for argument in arguments])
    finally:
        sys.stdin = before_stdin
        os.environ.clear()
        os.environ.update(before)
    return Done(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class CommandLine:
    """The command on one store, called in this process."""

    env: dict[str, str]

    @property
    def url(self) -> str:
        return self.env["DECKHANDS_URL"]

    def __call__(self, *arguments: str | Path) -> Done:
        return deckhands(*arguments, env=self.env)

    def ask(self, question: Callable[[Client], Awaitable[Any]]) -> Any:
        """Ask a client of the store."""

        async def answer() -> Any:
            async with await Client.connect(self.url) as client:
                return await question(client)

        return asyncio.run(answer())


@contextmanager
def started(*arguments: str | Path, env: Mapping[str, str], before: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start the command as a separate process; it is interrupted at the end of the block if it still runs.

    Args:
        before: a program that starts it, such as `nohup`.
    """
    command = [*before.split(), *COMMAND, *map(str, arguments)]
    with subprocess.Popen(
        command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGINT)
                try:
                    running.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    running.kill()


def on_terminal(*arguments: str, env: Mapping[str, str], columns: int = 80) -> str:
    """Call the command on a terminal of some width, and return its output there; it has to succeed."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    mine = {name: env[name] for name in ("NO_COLOR", "TERM") if env.get(name) != os.environ.get(name)}
    kept = {name: text for name, text in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "TERM")}
    shown = b""
    with subprocess.Popen(
        [*COMMAND, *arguments], env={**kept, "TERM": "xterm", **mine}, stdin=its, stdout=its, stderr=its
    ) as running:
        os.close(its)
        with suppress(OSError):  # it is closed at the end
            while piece := os.read(ours, 65_536):
                shown += piece
        os.close(ours)
        assert running.wait(timeout=LIMIT_SECONDS) == 0, shown
    return shown.decode().replace("\r\n", "\n")


def finished(running: subprocess.Popen[str]) -> Done:
    """Wait until a started command has ended."""
    out, err = running.communicate(timeout=LIMIT_SECONDS)
    return Done(running.returncode, out, err)


def read_until(running: subprocess.Popen[str], text: str) -> list[str]:
    """Read its output up to and including the first line that contains a text."""
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"no {text!r} in {lines}")


@contextmanager
def cluster(home: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Keep a cluster up in a home directory by `deckhands up`, as long as the block lasts."""
    with started("up", "--jobs", "0", "--beats", "0", *arguments, env=environment(home, **variables)) as running:
        read_until(running, "Ctrl-C stops it")
        yield running
        if running.poll() is None:
            asyncio.run(_end_sessions((home / "cluster" / "url").read_text().strip()))


async def _end_sessions(url: str) -> None:
    """End the workspace hosts, which outlive a cluster."""
    async with await Client.connect(url) as client:
        for row in await client.recent(limit=1_000):
            await WorkspaceOrders(client.store).end_sessions(row.conversation_id, limit_seconds=LIMIT_SECONDS)


def run_command(command: str, **fields: Any) -> dict[str, Any]:
    """Return a turn that runs a command."""
    return {"tool_calls": [{"name": "execute_bash", "arguments": {"command": command}}], **fields}
