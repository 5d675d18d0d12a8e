"""The session program that runs an ACP agent; `session_program` describes its connection to the workspace host.

A call prompts the agent, answers its question or resumes it. The result of a call is the agent's next report. Between
calls, the agent's output is not read, and after `REST_SECONDS` its processes are stopped. So an agent does nothing
while its conversation is paused, over budget or without a controller.

Holds: every call is answered, whatever the agent does; when an agent is lost, everything it started is killed.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tempfile
import time

if __name__ == "__main__":  # started by its path, with only the standard library
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from tool_worker.host.acp.client_requests import ClientRequests
from tool_worker.host.acp.reports import Fields, fields_in, text_in
from tool_worker.host.acp.running_agent import AgentLost, RunningAgent
from tool_worker.host.acp.session import AcpSession

SESSION_FD = 3
REPORT_SECONDS = 60.0
"""A report is due after this time, even an empty one."""
REST_SECONDS = 5.0
CANCEL_SECONDS = 2.0
SUPERSEDE_SECONDS = 20.0
"""Time for an agent to end a turn that a new prompt replaces."""
DEFAULT_SILENCE_SECONDS = 900.0
NOT_RUNNING = "The agent is not running any more."
LINES_AT_ONCE = 64
POLL_SECONDS = 0.05
"""Poll interval while a wait request is pending: a command may end while other processes keep its output open."""


class AcpProgram:
    """The agent of one workspace.

    Args:
        line: The connection to the workspace host.
        rest_seconds: How long the agent may run after a call was answered.
    """

    def __init__(self, line: socket.socket, rest_seconds: float = REST_SECONDS) -> None:
        self._line = line
        self._rest_seconds = rest_seconds
        self._received = b""
        self._process: RunningAgent | None = None
        self._session: AcpSession | None = None
        self._requests: ClientRequests | None = None
        self._call = 0
        self._report_at = 0.0
        self._heard_at = 0.0
        self._rest_at = 0.0
        self._cancel_at = 0.0
        self._silence_seconds = DEFAULT_SILENCE_SECONDS
        self._silent_before = 0.0

    def run(self) -> None:
        """Serve the workspace host until it closes the connection."""
        try:
            while self._wait():
                if self._call:
                    self._advance()
        finally:
            self._end_agent()

    def _wait(self) -> bool:
        """Wait for input and read it; return False if the host has closed the connection."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        process, requests = self._process, self._requests
        readers = {}
        if self._call and process is not None and requests is not None:
            if not process.lines:
                readers[process.out] = process.read
            readers |= {terminal.out: terminal.read for terminal in requests.terminals.values() if terminal.is_open}
            if process.has_errors:
                poll.register(process.errors, select.POLLIN)
            if process.blocked_input is not None:
                poll.register(process.blocked_input, select.POLLOUT)
        for descriptor in readers:
            poll.register(descriptor, select.POLLIN)
        found = dict(poll.poll(self._wait_milliseconds()))
        if self._line.fileno() in found and not self._receive():
            return False
        if process is None or process is not self._process or not self._call:
            if self._rest_at and time.monotonic() >= self._rest_at and not self._call:
                self._rest_at = 0.0
                if self._process is not None:
                    self._process.stop()
            return True
        try:
            for descriptor, read in readers.items():
                if descriptor in found:
                    read()
                    self._heard_at = time.monotonic()
                    self._silent_before = 0.0
            if process.errors in found:
                process.read_errors()
            if requests is not None:
                requests.poll()
            if process.blocked_input in found:
                process.flush()
        except AgentLost as lost:
            self._fail_call(lost)
        return True

    def _wait_milliseconds(self) -> int | None:
        if self._call:
            if self._process is not None and self._process.lines:
                return 0
            soonest = min(self._report_at, self._silent_at, self._cancel_at or self._report_at)
            if self._requests is not None and self._requests.has_waiters:
                soonest = min(soonest, time.monotonic() + POLL_SECONDS)
            return max(int((soonest - time.monotonic()) * 1000) + 1, 0)
        if self._rest_at:
            return max(int((self._rest_at - time.monotonic()) * 1000) + 1, 0)
        return None

    @property
    def _silent_at(self) -> float:
        return self._heard_at + max(self._silence_seconds - self._silent_before, 0.0)

    def _receive(self) -> bool:
        chunk = self._line.recv(65536)
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "call" in message:
                self._start_call(message["call"], fields_in(message.get("arguments")))
            elif message.get("interrupt") == self._call and self._session is not None:
                self._cancel_at = time.monotonic() + CANCEL_SECONDS
                try:
                    self._session.cancel()
                except AgentLost as lost:
                    self._fail_call(lost)
        return bool(chunk)

    def _start_call(self, number: int, asked: Fields) -> None:
        now = time.monotonic()
        self._call = number
        self._report_at = now + REPORT_SECONDS
        self._heard_at = now
        self._rest_at = 0.0
        self._cancel_at = 0.0
        silence = asked.get("silence_seconds")
        self._silence_seconds = silence if isinstance(silence, int | float) else DEFAULT_SILENCE_SECONDS
        prompt = str(asked.get("prompt") or "")
        wanted = str(asked.get("session_id") or "")
        try:
            if self._session is not None and prompt and wanted != self._session.session_id:
                self._end_agent()
            if self._session is None and prompt:
                self._start(asked, wanted)
            if self._session is None or self._process is None:
                self._answer({"state": "lost", "session_id": wanted, "reason": NOT_RUNNING})
                return
            self._process.resume()
            self._session.start_report()
            if prompt:
                if self._session.is_turn_open:
                    self._cancel_at = now + SUPERSEDE_SECONDS
                self._silent_before = 0.0
                self._session.prompt(prompt)
            elif asked.get("permission"):
                self._session.answer(int(asked["permission"]), str(asked.get("option_id") or ""))
            elif not self._session.is_turn_open:
                self._answer({"state": "lost", "session_id": wanted, "reason": "The agent has no turn under way."})
        except AgentLost as lost:
            self._fail_call(lost)

    def _start(self, asked: Fields, wanted: str) -> None:
        # The separate directory for temporary files marks the agent's processes, see `session_program`.
        given = {**fields_in(asked.get("variables")), "TMPDIR": tempfile.gettempdir(), **fields_in(asked.get("env"))}
        environment = {str(name): str(value) for name, value in given.items()}
        directory = os.getcwd()
        process = RunningAgent(str(asked.get("command") or ""), environment, directory)
        self._process = process
        self._requests = ClientRequests(environment, directory)

        def send(message: Fields) -> None:
            process.write(json.dumps({"jsonrpc": "2.0", **message}).encode("ascii") + b"\n")

        self._session = AcpSession(send, self._requests, directory, wanted)

    def _advance(self) -> None:
        """Process input until the report is complete or due, then send it."""
        process, session = self._process, self._session
        if process is None or session is None:
            return
        try:
            for _ in range(LINES_AT_ONCE):
                if session.outcome or not process.lines:
                    break
                session.process_line(process.lines.popleft())
        except AgentLost as lost:
            self._fail_call(lost)
            return
        now = time.monotonic()
        if session.outcome == "lost":
            fields = {**session.render_report(), "state": "lost", "session_id": ""}
            self._end_agent()
            self._answer(fields)
        elif session.outcome:
            self._answer({**session.render_report(), "state": session.outcome})
        elif self._cancel_at and now >= self._cancel_at and session.is_cancelled:
            self._fail_call(AgentLost("timeout", "The agent did not end its turn when it was cancelled."))
        elif now >= self._silent_at and not process.lines:
            self._fail_call(AgentLost("timeout", f"The agent has said nothing for {self._silence_seconds:g} s."))
        elif now >= self._report_at:
            self._answer({**session.render_report(), "state": "working"})

    def _fail_call(self, lost: AgentLost) -> None:
        """End an agent that is not usable, and report the failure."""
        said = self._session.render_report() if self._session is not None else {}
        self._end_agent()
        failed = {"state": "failed", "code": lost.code, "reason": text_in(str(lost), 4000)}
        self._answer({**said, "call": said.get("call"), **failed})

    def _answer(self, fields: Fields) -> None:
        if not self._call:
            return
        number, self._call, self._cancel_at = self._call, 0, 0.0
        now = time.monotonic()
        self._silent_before += now - self._heard_at
        self._rest_at = now + self._rest_seconds
        answer = {"call": number, "result": {"content": "", "report": fields}}
        self._line.sendall(json.dumps(answer).encode("ascii") + b"\n")

    def _end_agent(self) -> None:
        process, requests = self._process, self._requests
        self._process = self._session = self._requests = None
        if requests is not None:
            requests.close()
        if process is not None:
            process.end()


def main() -> None:
    """Serve the workspace host that started this program."""
    with socket.socket(fileno=SESSION_FD) as line:
        AcpProgram(line).run()


if __name__ == "__main__":
    main()
