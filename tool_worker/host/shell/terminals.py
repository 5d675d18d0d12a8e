"""The terminals of a conversation: its main shell, named shells, and one for each background job.

A background job is a command in a separate terminal. So it supports everything that a running command supports:
reading its output, typing, interrupting, waiting for its end.

Holds: each call is answered exactly once; there are at most `TERMINALS_LIMIT` terminals. They end with the host.
"""

from __future__ import annotations

import os

from tool_worker.host.children import Children
from tool_worker.host.configuration import HostConfiguration
from tool_worker.host.loop import EventLoop
from tool_worker.host.shell.bash_call import KILL, LIST, RESET, BashCall
from tool_worker.host.shell.bash_session import COMPLETED, REFUSED, BashSession

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Finish = Callable[[dict[str, object]], None]

MAIN = "main"
TERMINALS_LIMIT = 16
BRIEF_SECONDS = 1.0
"""Default duration of a call to a background job: long enough for a command that fails at once."""
SHOWN_COMMAND_CHARS = 100
GONE = "Terminals and background jobs end with the workspace's processes, which end when nobody uses them."


class NamedTerminal:
    """A named shell; `is_job`: it was made for one command and ends with it."""

    def __init__(self, session: BashSession, began_at: float, *, is_job: bool) -> None:
        self.session = session
        self.began_at = began_at
        self.is_job = is_job


class Terminals:
    """The terminals of one conversation."""

    def __init__(self, loop: EventLoop, children: Children, configuration: HostConfiguration) -> None:
        self._loop = loop
        self._children = children
        self._configuration = configuration
        self._jobs = 0
        restored = configuration.shell_state
        directory = str(restored["directory"]) if restored is not None else ""
        self.main = self._shell(directory if os.path.isdir(directory) else None)
        if restored is not None:
            self.main.restore(str(restored["script"]), restored.get("event"))
        self._others: dict[str, NamedTerminal] = {}

    @property
    def resting_pids(self) -> set[int]:
        """The pids of idle shells."""
        sessions = [self.main, *(terminal.session for terminal in self._others.values())]
        return {session.shell_pid for session in sessions if not session.has_running_command}

    def is_free(self, call: BashCall) -> bool:
        """Return whether a call can start now; each terminal runs one call at a time."""
        session = self._find_session(call.terminal)
        return call.is_static or bool(call.control) or session is None or not session.is_busy

    def start(self, call: BashCall, finish: Finish) -> BashSession | None:
        """Start a call; `finish` receives its result, possibly at once.

        Returns:
            The session to interrupt; None if the call is already answered.
        """
        if call.control:
            finish(_make_result(self._run_control(call)))
            return None
        if call.is_static:
            return self._start_static(call, finish)
        name = call.terminal
        if not name and call.is_background and call.command and not call.is_input:
            self._jobs += 1
            name = f"job-{self._jobs}"
        session = self._find_session(name)
        if session is None:
            if call.is_input or not call.command:
                refusal = f"There is no terminal `{name}`. {GONE}\n{self._list_terminals()}"
            else:
                refusal = self._open(name, is_job=not call.terminal)
            if refusal:
                finish(_make_result(f"ERROR: {refusal}", is_error=True))
                return None
            session = self._others[name].session
        terminal = self._others.get(name)
        is_look = terminal is not None and terminal.is_job and call.no_change_timeout is not None
        if call.is_background or is_look:
            call.answer_within(BRIEF_SECONDS)
        if terminal is None:
            session.start(call, finish)
            return session
        if call.command and not (call.is_input or session.has_running_command):
            terminal.began_at = self._loop.now()
        session.start(call, lambda result: self._finish(name, terminal, finish, result))
        return session

    def close(self) -> None:
        """Kill all shells; pending calls get no answer."""
        self.main.close()
        for terminal in self._others.values():
            terminal.session.close()
        self._others.clear()

    def _find_session(self, name: str) -> BashSession | None:
        if name in ("", MAIN):
            return self.main
        terminal = self._others.get(name)
        return terminal.session if terminal is not None else None

    def _open(self, name: str, *, is_job: bool) -> str:
        """Create a terminal in the main shell's directory; return the error text, or empty."""
        if len(self._others) >= TERMINALS_LIMIT:
            self._forget_ended_job()
        if len(self._others) >= TERMINALS_LIMIT:
            return f"There are {TERMINALS_LIMIT} terminals already. Kill one first.\n{self._list_terminals()}"
        try:
            session = self._shell(self.main.working_dir)
        except OSError as error:
            return f"The terminal cannot be opened: {error.strerror}."
        self._others[name] = NamedTerminal(session, self._loop.now(), is_job=is_job)
        return ""

    def _forget_ended_job(self) -> None:
        for name, terminal in self._others.items():
            if terminal.is_job and terminal.session.has_unreported_end:
                terminal.session.leave()
                del self._others[name]
                return

    def _start_static(self, call: BashCall, finish: Finish) -> BashSession:
        session = self._shell(call.cwd)

        def finish_and_close(result: dict[str, object]) -> None:
            finish(result)
            session.close()

        session.start(call, finish_and_close)
        return session

    def _finish(self, name: str, terminal: NamedTerminal, finish: Finish, result: dict[str, object]) -> None:
        metadata = result["metadata"]
        assert isinstance(metadata, dict)
        metadata["suffix"] = f"{metadata.get('suffix', '')}\n[Terminal: {name}]"
        finish(result)
        session = terminal.session
        is_over = not (session.has_running_command or session.has_unreported_end)
        if terminal.is_job and is_over and self._others.get(name) is terminal:
            del self._others[name]
            session.leave()

    def _run_control(self, call: BashCall) -> str:
        if call.control == LIST:
            return self._list_terminals()
        name = call.terminal or MAIN
        session = self._find_session(name)
        if session is None:
            return f"There is no terminal `{name}`. {GONE}\n{self._list_terminals()}"
        if session is self.main:
            try:
                fresh = self._shell(None)
            except OSError as error:
                return f"No new shell can be started: {error.strerror}. The old one is still there."
            session.kill()
            self.main = fresh
            return f"The shell was killed. This is a new one in {self.main.working_dir}; the old variables are lost."
        session.kill()
        del self._others[name]
        if call.control == RESET:
            return self._open(name, is_job=False) or f"The terminal `{name}` was killed and begun again."
        assert call.control == KILL
        return f"The terminal `{name}` was killed, with what its command had started."

    def _list_terminals(self) -> str:
        named = {MAIN: self.main, **{name: terminal.session for name, terminal in self._others.items()}}
        return "\n".join(f"{name}: {self._state(name, session)}" for name, session in named.items())

    def _state(self, name: str, session: BashSession) -> str:
        command = session.command.partition("\n")[0]
        shown = command[:SHOWN_COMMAND_CHARS]
        if shown != session.command:
            shown += "…"
        if session.has_running_command:
            terminal = self._others.get(name)
            lasted = f" for {self._loop.now() - terminal.began_at:.0f} s" if terminal is not None else ""
            return f"running{lasted}: {shown}"
        if session.has_unreported_end:
            return f"ended, and not looked at since: {shown}"
        return f"waits for a command in {session.working_dir}"

    def _shell(self, cwd: str | None) -> BashSession:
        return BashSession(self._loop, self._children, self._configuration, cwd=cwd)


def _make_result(text: str, *, is_error: bool = False) -> dict[str, object]:
    """Return the result of a call that runs no command."""
    metadata = {"exit_code": 1 if is_error else 0, "pid": -1, "prefix": "", "suffix": ""}
    return {
        "content": text,
        "state": REFUSED if is_error else COMPLETED,
        "omitted_bytes": 0,
        "metadata": metadata,
    }
