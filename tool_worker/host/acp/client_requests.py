"""An ACP agent's requests to its client: read and write files, run commands. They run in the agent's own sandbox.

Holds: a request gives an agent no new access, because it runs as the same user in the same sandbox; memory and the
number of terminals are bounded; a device or a FIFO cannot block the program.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable

from tool_worker.host.acp.reports import Fields, fields_in, list_in, text_in
from tool_worker.host.descendants import kill, kill_descendants

FILE_LIMIT_BYTES = 8 * 2**20
TERMINALS_LIMIT = 16
KEPT_BYTES = 64 * 1024
CHUNK_BYTES = 65536
ARGUMENTS_LIMIT = 4096


class Unanswerable(Exception):
    """A request that cannot be served; the text is for the agent."""


class AgentTerminal:
    """A command that the agent has started, and the tail of its output."""

    def __init__(self, process: subprocess.Popen[bytes], kept_bytes: int) -> None:
        self.waiting: list[Callable[[Fields], None]] = []
        self.is_open = True
        assert process.stdout is not None
        self.out = process.stdout.fileno()
        os.set_blocking(self.out, False)
        self._process = process
        self._kept_bytes = kept_bytes
        self._kept = b""
        self._is_cut = False

    @property
    def text(self) -> str:
        """The tail of the output."""
        return self._kept.decode("utf-8", "ignore")

    @property
    def status(self) -> Fields | None:
        """The exit status in the protocol's form; None while the command runs."""
        code = self._process.poll()
        if code is None:
            return None
        return {"exitCode": code if code >= 0 else None, "signal": str(-code) if code < 0 else None}

    def output(self) -> Fields:
        """Return the answer to `terminal/output`."""
        return {"output": self.text, "truncated": self._is_cut, "exitStatus": self.status}

    def read(self) -> None:
        """Read some of the available output."""
        try:
            chunk = os.read(self.out, CHUNK_BYTES)
        except BlockingIOError:
            return
        self._kept += chunk
        if len(self._kept) > self._kept_bytes:
            self._kept = self._kept[-self._kept_bytes :]
            self._is_cut = True
        self.is_open = bool(chunk)

    def poll(self) -> None:
        """Answer pending wait requests if the command has finished."""
        if self.waiting and self.status is not None:
            if self.is_open:
                self.read()
            self.answer_waiting()

    def answer_waiting(self) -> None:
        """Send the exit status to all pending wait requests."""
        for answer in self.waiting:
            answer(self.status or {"exitCode": None, "signal": None})
        self.waiting.clear()

    def kill(self) -> None:
        """Kill the command and everything it started."""
        if self._process.poll() is None:
            kill_descendants(self._process.pid)
            kill(self._process.pid)

    def close(self) -> None:
        """Kill the command and close its output."""
        self.kill()
        self._process.wait()
        self.is_open = False
        self.answer_waiting()
        assert self._process.stdout is not None
        self._process.stdout.close()


class ClientRequests:
    """Serves the requests `fs/*` and `terminal/*`."""

    def __init__(self, environment: dict[str, str], directory: str) -> None:
        self.terminals: dict[str, AgentTerminal] = {}
        self._texts: dict[str, str] = {}
        self._environment = environment
        self._directory = directory
        self._number = 0

    def serve(self, method: str, asked: Fields, answer: Callable[[Fields | None], None]) -> None:
        """Serve a request, and answer it now or later.

        Raises:
            Unanswerable: the method does not exist, or the request fails.
        """
        if method == "fs/read_text_file":
            answer({"content": _read(asked)})
        elif method == "fs/write_text_file":
            _write(asked)
            answer(None)
        elif method == "terminal/create":
            answer({"terminalId": self._create(asked)})
        elif method == "terminal/output":
            answer(self._terminal(asked).output())
        elif method == "terminal/wait_for_exit":
            terminal = self._terminal(asked)
            if len(terminal.waiting) >= TERMINALS_LIMIT:
                raise Unanswerable("Too many wait for this terminal.")
            terminal.waiting.append(answer)
            terminal.poll()
        elif method == "terminal/kill":
            self._terminal(asked).kill()
            answer(None)
        elif method == "terminal/release":
            number = text_in(asked.get("terminalId"))
            self._terminal(asked).close()
            self._texts = {**dict(list(self._texts.items())[-TERMINALS_LIMIT:]), number: self.terminals[number].text}
            del self.terminals[number]
            answer(None)
        else:
            raise Unanswerable(f"There is no method {method[:100]!r}.")

    @property
    def has_waiters(self) -> bool:
        """Whether the agent waits for a command to finish."""
        return any(terminal.waiting for terminal in self.terminals.values())

    def poll(self) -> None:
        """Answer pending wait requests for finished commands."""
        for terminal in self.terminals.values():
            terminal.poll()

    def collect_output(self, terminal_ids: list[str]) -> str:
        """Return the output of terminals, released ones included."""
        found = [
            self.terminals[number].text if number in self.terminals else self._texts.get(number, "")
            for number in terminal_ids
        ]
        return "\n".join(filter(None, found))

    def close(self) -> None:
        """Kill all commands."""
        for terminal in self.terminals.values():
            terminal.waiting.clear()
            terminal.close()
        self.terminals.clear()

    def _terminal(self, asked: Fields) -> AgentTerminal:
        terminal = self.terminals.get(text_in(asked.get("terminalId")))
        if terminal is None:
            raise Unanswerable("There is no such terminal.")
        return terminal

    def _create(self, asked: Fields) -> str:
        command = asked.get("command")
        if not isinstance(command, str) or not command or "\0" in command:
            raise Unanswerable("The command is missing.")
        if len(self.terminals) >= TERMINALS_LIMIT:
            raise Unanswerable(f"{TERMINALS_LIMIT} terminals are open; release one.")
        arguments = [str(argument) for argument in list_in(asked.get("args"), ARGUMENTS_LIMIT)]
        variables = [fields_in(variable) for variable in list_in(asked.get("env"), ARGUMENTS_LIMIT)]
        environment = {str(each.get("name")): str(each.get("value")) for each in variables}
        kept = asked.get("outputByteLimit")
        try:
            process = subprocess.Popen(  # noqa: S603  (in the sandbox, as every command)
                [command, *arguments] if arguments else ["/bin/bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=text_in(asked.get("cwd"), FILE_LIMIT_BYTES) or self._directory or None,
                env={**self._environment, **environment},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise Unanswerable(f"The command cannot be started: {error}.") from error
        self._number += 1
        number = f"terminal-{self._number}"
        is_limit = isinstance(kept, int) and not isinstance(kept, bool) and 0 < kept < KEPT_BYTES
        self.terminals[number] = AgentTerminal(process, kept if is_limit and isinstance(kept, int) else KEPT_BYTES)
        return number


def _open_regular_file(asked: Fields, flags: int) -> int:
    path = asked.get("path")
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise Unanswerable("The path has to be absolute.")
    try:
        # Do not block: the other end of a FIFO may never be opened.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except (OSError, UnicodeError) as error:
        raise Unanswerable(f"{text_in(path)}: {error}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unanswerable(f"{text_in(path)} is no regular file.")
    return descriptor


def _read(asked: Fields) -> str:
    with open(_open_regular_file(asked, os.O_RDONLY), "rb") as file:
        read = file.read(FILE_LIMIT_BYTES + 1)
    if len(read) > FILE_LIMIT_BYTES:
        raise Unanswerable(f"The file has more than {FILE_LIMIT_BYTES} bytes.")
    text = read.decode("utf-8", "replace")
    line, limit = asked.get("line"), asked.get("limit")
    if isinstance(line, int) or isinstance(limit, int):
        first = max(line, 1) - 1 if isinstance(line, int) else 0
        last = first + max(limit, 0) if isinstance(limit, int) else None
        text = "".join(text.splitlines(keepends=True)[first:last])
    return text


def _write(asked: Fields) -> None:
    content = asked.get("content")
    if not isinstance(content, str):
        raise Unanswerable("The content is no text.")
    path = asked.get("path")
    if isinstance(path, str) and path.startswith("/") and "\0" not in path:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except (OSError, UnicodeError) as error:
            raise Unanswerable(f"{text_in(path)}: {error}.") from error
    try:
        with open(_open_regular_file(asked, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate()
            file.write(content.encode("utf-8", "replace"))
    except OSError as error:
        raise Unanswerable(f"{text_in(path)}: {error}.") from error
