"""The host's service: attached tool workers, their requests, and the actions that the requests start.

Holds:
    - An action is started at most once, unless the client allows repeating an unknown outcome.
    - The start of an action is in the journal before its effect, and the result before the first reply. Later or
      repeated requests get the same result.
    - Memory is bounded per client, per action and in the number of clients.
Does not: authenticate clients; every process that can reach the socket may send any request.
"""

from __future__ import annotations

import os

from tool_worker.host import protocol
from tool_worker.host.children import Children, OomScore
from tool_worker.host.compiled import accept, signal, socket
from tool_worker.host.configuration import HISTORY_FD, HostConfiguration
from tool_worker.host.descendants import kill_descendants, live_descendants
from tool_worker.host.egress import HostEgress
from tool_worker.host.journal import LONG_TEXT_CHARS, SHORT_TEXT_CHARS, Journal, JournalError, truncate_result
from tool_worker.host.json_text import dumps
from tool_worker.host.loop import BufferedWriter, EventLoop
from tool_worker.host.protocol import HostRequestRefused, action_id_of, fingerprint_in
from tool_worker.host.shell.bash_call import BashCall, BashCallError
from tool_worker.host.shell.terminals import Terminals

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing the module `typing` would take as long as importing all of this one
    from tool_worker.host.editor.file_tools import FileTools
    from tool_worker.host.session_program import SessionCall, SessionProgram
    from tool_worker.host.shell.bash_session import BashSession
    from tool_worker.host.shell.operator_terminal import OperatorTerminals

CLIENT_LIMIT = 64
UNREAD_LIMIT_BYTES = 2 * protocol.FRAME_LIMIT_BYTES
QUEUE_LIMIT = 256
JOURNAL_LIMIT_BYTES = 512 * 2**20
END_LIMIT_SECONDS = 2.0
CHECK_SECONDS = 10.0


class HostClient:
    """One attached tool worker."""

    def __init__(self, loop: EventLoop, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = protocol.Lines()
        self.writer = BufferedWriter(loop, connection.fileno())
        self.is_open = True


class Execution:
    """An action in flight: the requests that wait for its result, and the session that runs it.

    Attributes:
        call: The shell call of a command; None if a session program runs the action.
        waiting: Pairs of a client and its request number; each gets the result.
    """

    def __init__(self, action_id: int, fingerprint: str, call: BashCall | None) -> None:
        self.action_id = action_id
        self.fingerprint = fingerprint
        self.call = call
        self.session: BashSession | SessionCall | None = None
        self.waiting: list[tuple[HostClient, object]] = []


class HostServer:
    """Serves one workspace until it is closed, is idle for `idle_seconds`, or has no client for `ttl_seconds`."""

    def __init__(
        self,
        loop: EventLoop,
        configuration: HostConfiguration,
        listener: socket.socket,
        journal: Journal,
        score: OomScore,
    ) -> None:
        self._loop = loop
        self._configuration = configuration
        self._listener = listener
        self._journal = journal
        self._children = Children(loop, score)
        if not journal.is_empty:
            configuration.shell_state = None  # it was restored by the first host
        self._terminals = Terminals(loop, self._children, configuration)
        self._operators: OperatorTerminals | None = None
        self._files: FileTools | None = None
        self._egress = HostEgress(configuration.egress_port)
        self._clients: set[HostClient] = set()
        self._executions: dict[int, Execution] = {}
        self._queue: list[Execution] = []
        self._programs: dict[str, SessionProgram] = {}
        self._follows_another = not journal.is_empty
        if self._follows_another:
            self._terminals.main.announce_new_shell()
        self._unattached = loop.timer(loop.stop)
        self._idle = loop.timer(self._end_if_resting)
        self._next = loop.timer(self._start_next)
        loop.on_readable(listener.fileno(), self._accept)
        self._note_activity()

    def end(self) -> None:
        """Kill all processes that the host has started, and wait up to two seconds until they are gone."""
        self._terminals.close()
        if self._operators is not None:
            self._operators.close()
        for program in self._programs.values():
            program.close()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        deadline = self._loop.now() + END_LIMIT_SECONDS
        while self._loop.now() < deadline:
            was_alive = kill_descendants(os.getpid())
            if not self._children.reap() and not was_alive:
                return
            signal.sigtimedwait([signal.SIGCHLD], 0.01)

    def _accept(self) -> None:
        try:
            connection = accept(self._listener)
        except OSError:
            return
        if len(self._clients) >= CLIENT_LIMIT:
            connection.close()
            return
        connection.setblocking(False)
        client = HostClient(self._loop, connection)
        self._clients.add(client)
        self._loop.on_readable(connection.fileno(), lambda: self._read(client))
        self._note_activity()

    def _read(self, client: HostClient) -> None:
        try:
            chunk = client.connection.recv(65536)
            lines = client.lines.feed(chunk)
            if not chunk:
                self._disconnect(client)
            for line in lines:
                self._serve(client, protocol.decode(line))
        except BlockingIOError:
            return
        except (OSError, protocol.ProtocolError):
            self._disconnect(client)

    def _disconnect(self, client: HostClient) -> None:
        if client.is_open:
            client.is_open = False
            self._clients.discard(client)
            self._egress.forget(client)
            if self._operators is not None:
                self._operators.forget(client)
            client.writer.clear()
            self._loop.on_readable(client.connection.fileno(), None)
            client.connection.close()
            self._note_activity()

    def _note_activity(self) -> None:
        """Start the idle time if no action runs, and the time to live if no client is attached either."""
        now = self._loop.now()
        is_needed = self._clients or self._executions
        self._unattached.set(None if is_needed else now + self._configuration.ttl_seconds)
        self._idle.set(None if self._executions else now + self._configuration.idle_seconds)

    def _end_if_resting(self) -> None:
        if self._is_resting() and not self._has_operators():
            self._loop.stop()
        else:
            self._idle.set(self._loop.now() + self._configuration.idle_seconds)

    def _is_resting(self) -> bool:
        """Return whether nothing runs in the workspace but idle shells.

        An idle code search program does not count either, because its data can be read again.
        """
        resting = self._terminals.resting_pids
        if "code" in self._programs:
            resting.add(self._programs["code"].resting_pid)
        return not self._executions and all(below.pid in resting for below in live_descendants(os.getpid()))

    def _has_operators(self) -> bool:
        return self._operators is not None and self._operators.is_used

    def _retire(self, *, may_kill: bool) -> bool:
        is_closing = self._is_resting() or (may_kill and not self._executions and not self._has_operators())
        if is_closing:
            self._loop.stop()
        return is_closing

    def _reply(self, client: HostClient, request: object, fields: dict[str, object]) -> None:
        self._send(client, protocol.encode({"request": request, **fields}))

    def _reply_result(self, client: HostClient, request: object, body: bytes, *, is_replayed: bool) -> None:
        # The body is JSON already and is sent as the journal has it.
        head = {"request": request, "state": protocol.RECORDED, "is_replayed": is_replayed}
        self._send(client, protocol.encode(head)[:-2] + b',"result":' + body + b"}\n")

    def _send(self, client: HostClient, line: bytes) -> None:
        if client.is_open:
            client.writer.write(line)
            if client.writer.waiting_bytes > UNREAD_LIMIT_BYTES:
                self._disconnect(client)

    def _serve(self, client: HostClient, message: dict[str, object]) -> None:
        request = message.get("request")
        try:
            operation = message.get("op")
            if operation == "run":
                self._run(client, request, message)
            elif operation == "status":
                self._status(client, request, action_id_of(message), fingerprint_in(message))
            elif operation == "interrupt":
                action_id = None if message.get("action_id") is None else action_id_of(message)
                self._reply(client, request, {"was_running": self._interrupt(action_id)})
            elif operation == "ping":
                self._reply(client, request, self._ping_reply())
            elif operation == "capture":
                self._capture_shell(client, request)
            elif operation == "retire":
                self._reply(client, request, {"closing": self._retire(may_kill=message.get("may_kill") is True)})
            elif operation == "terminal":
                self._serve_terminal(client, request, message)
            elif operation == "egress":
                self._lend_listener(client, request)
            elif operation == "refused":
                self._egress.note(message)
            elif operation == "close":
                # Waiting clients get an answer now, so that they need not ask another host.
                for execution in self._executions.values():
                    for waiting, asked in execution.waiting:
                        self._reply(waiting, asked, {"state": protocol.UNKNOWN})
                self._reply(client, request, {"closing": True})
                self._loop.stop()
            else:
                text = f"there is no operation {operation!r}"
                raise HostRequestRefused("unknown_operation", text)  # noqa: TRY301  (one way out for all refusals)
        except HostRequestRefused as refusal:
            self._reply(client, request, {"error": refusal.answer})

    def _serve_terminal(self, client: HostClient, request: object, message: dict[str, object]) -> None:
        if self._operators is None:
            from tool_worker.host.shell.operator_terminal import OperatorTerminals

            self._operators = OperatorTerminals(self._loop, self._children, self._configuration)
        directory = self._terminals.main.working_dir
        self._operators.serve(client, message, directory, lambda fields: self._reply(client, request, fields))

    def _ping_reply(self) -> dict[str, object]:
        return {
            "protocol": protocol.PROTOCOL_VERSION,
            "workspace": self._configuration.workspace,
            "running": sorted(self._executions),
            "newest": self._journal.newest,
            "is_shell_busy": self._terminals.main.has_running_command,
            "has_egress": self._egress.proxy is not None,
        }

    def _capture_shell(self, client: HostClient, request: object) -> None:
        """Reply with the state of the shell, or without one while an action is in progress."""

        def finish(script: str | None) -> None:
            newest = self._journal.newest
            state = {
                "script": script,
                "directory": main.working_dir,
                "workspace": self._configuration.workspace,
                "newest": newest[0] if newest is not None else 0,
            }
            self._reply(client, request, {"shell": state if script is not None else None})
            self._next.set(self._loop.now())

        main = self._terminals.main
        if self._executions or not main.is_at_rest:
            self._reply(client, request, {"shell": None})
        else:
            main.capture(finish)

    def _lend_listener(self, client: HostClient, request: object) -> None:
        """Make this client the egress proxy: it gets the listening socket and no longer counts as a tool worker."""
        if not self._egress.lend(client, client.connection, protocol.encode({"request": request})):
            raise HostRequestRefused("no_egress", "this workspace has no way out")
        self._clients.discard(client)
        self._note_activity()

    def _is_other(self, action_id: int, fingerprint: str) -> bool:
        """Return whether the id belongs to another action: the store has lost that action and assigned its id again."""
        execution = self._executions.get(action_id)
        known = execution.fingerprint if execution is not None else self._journal.fingerprint(action_id)
        return bool(fingerprint and known and fingerprint != known)

    def _status(self, client: HostClient, request: object, action_id: int, fingerprint: str) -> None:
        if self._is_other(action_id, fingerprint):
            self._reply(client, request, {"state": protocol.OTHER, "is_certain": True})
            return
        body = self._journal.result(action_id)
        if body is not None:
            self._reply_result(client, request, body, is_replayed=True)
            return
        state = protocol.NEVER_STARTED
        if action_id in self._executions:
            state = protocol.RUNNING
        elif self._journal.has_started(action_id):
            state = protocol.UNKNOWN
        self._reply(client, request, {"state": state, "is_certain": self._journal.is_certain})

    def _run(self, client: HostClient, request: object, message: dict[str, object]) -> None:
        action_id = action_id_of(message)
        body = self._journal.result(action_id)
        if self._is_other(action_id, fingerprint_in(message)):
            self._reply(client, request, {"state": protocol.OTHER})
        elif body is not None:
            self._reply_result(client, request, body, is_replayed=True)
        elif action_id in self._executions:
            self._executions[action_id].waiting.append((client, request))
        elif self._journal.has_started(action_id) and not message.get("may_repeat"):
            self._reply(client, request, {"state": protocol.UNKNOWN})
        else:
            self._start_action(client, request, action_id, message)

    def _start_action(self, client: HostClient, request: object, action_id: int, message: dict[str, object]) -> None:
        tool = message.get("tool")
        arguments = message.get("arguments")
        if not isinstance(arguments, dict):
            raise HostRequestRefused("bad_arguments", "`arguments` is not an object")
        fingerprint = fingerprint_in(message)
        if tool in ("edit", "patch", "read", "write"):
            self._record_start(action_id, fingerprint)
            self._use_files(client, request, action_id, tool, arguments)
        elif isinstance(tool, str) and tool in self._configuration.programs:
            self._ask_program(client, request, Execution(action_id, fingerprint, None), tool, arguments)
        elif tool != "bash":
            raise HostRequestRefused(
                "unknown_tool",
                f"the workspace has no tool {tool!r}: its tool worker does not serve a pool of that name",
            )
        elif len(self._queue) >= QUEUE_LIMIT:
            raise HostRequestRefused("too_many_actions", f"{QUEUE_LIMIT} commands are waiting", is_retryable=True)
        else:
            try:
                default = self._configuration.no_change_timeout_seconds
                call = BashCall(**{"command": None, "no_change_timeout": default, **arguments})
            except (BashCallError, TypeError) as error:
                raise HostRequestRefused("bad_arguments", str(error)) from error
            execution = Execution(action_id, fingerprint, call)
            execution.waiting.append((client, request))
            self._executions[action_id] = execution
            self._queue.append(execution)
            self._start_next()

    def _ask_program(
        self, client: HostClient, request: object, execution: Execution, tool: str, arguments: dict[str, object]
    ) -> None:
        program = self._program(tool)
        if program.is_full:
            raise HostRequestRefused("too_many_actions", f"too many calls wait for {tool}", is_retryable=True)
        execution.waiting.append((client, request))
        self._executions[execution.action_id] = execution
        execution.session = program.ask(
            {**arguments, "cwd": self._terminals.main.working_dir, **self._configuration.fields_for(tool)},
            lambda: self._journal_start(execution),
            lambda result: self._finish(execution, result),
        )

    def _program(self, tool: str) -> SessionProgram:
        if tool not in self._programs:
            from tool_worker.host.session_program import SessionProgram

            self._programs[tool] = SessionProgram(
                self._loop, self._children, self._configuration, name=tool, follows_another=self._follows_another
            )
        return self._programs[tool]

    def _use_files(
        self, client: HostClient, request: object, action_id: int, tool: str, arguments: dict[str, object]
    ) -> None:
        if self._files is None:
            from tool_worker.host.editor.file_tools import FileTools

            self._files = FileTools(self._configuration.workspace, history=HISTORY_FD)
        result = self._files.run(tool, {**arguments, "cwd": self._terminals.main.working_dir})
        paths = self._files.to_check(result)
        # recorded before the check, so that the edit is known however the check ends
        body = self._record_result(action_id, result)
        program = self._program("code") if paths else None
        if program is None or program.is_full:
            self._reply_result(client, request, body, is_replayed=False)
            return
        execution = Execution(action_id, self._journal.fingerprint(action_id), None)
        execution.waiting.append((client, request))
        self._executions[action_id] = execution
        execution.session = program.ask(
            {"question": "check", "arguments": {"paths": paths}, "timeout": CHECK_SECONDS},
            lambda: True,
            lambda found: self._finish(execution, with_problems(result, found)),
        )

    def _start_next(self) -> None:
        """Start waiting commands: one at a time per terminal; a static command has a separate shell."""
        for execution in list(self._queue):
            assert execution.call is not None
            if not self._terminals.is_free(execution.call):
                continue
            self._queue.remove(execution)
            self._launch(execution, execution.call)

    def _launch(self, execution: Execution, call: BashCall) -> None:
        if self._journal_start(execution):
            execution.session = self._terminals.start(call, lambda result: self._finish(execution, result))

    def _journal_start(self, execution: Execution) -> bool:
        """Record the start in the journal; if that fails, reply to the waiting clients that nothing was started."""
        try:
            self._record_start(execution.action_id, execution.fingerprint)
        except HostRequestRefused as refusal:
            self._forget(execution)
            for client, request in execution.waiting:
                self._reply(client, request, {"error": refusal.answer})
            return False
        return True

    def _finish(self, execution: Execution, result: dict[str, object]) -> None:
        body = self._record_result(execution.action_id, result)
        self._forget(execution)
        for client, request in execution.waiting:
            self._reply_result(client, request, body, is_replayed=False)
        self._next.set(self._loop.now())

    def _forget(self, execution: Execution) -> None:
        del self._executions[execution.action_id]
        self._note_activity()

    def _interrupt(self, action_id: int | None) -> bool:
        if action_id is None:
            return self._terminals.main.interrupt()
        execution = self._executions.get(action_id)
        if execution is None:
            return False
        if execution.session is not None:
            return execution.session.interrupt()
        self._queue.remove(execution)
        metadata = {"exit_code": -1, "pid": -1, "prefix": "", "suffix": "\n[The command was cancelled before it ran.]"}
        self._finish(execution, {"content": "", "state": "cancelled", "omitted_bytes": 0, "metadata": metadata})
        return True

    def _record_start(self, action_id: int, fingerprint: str) -> None:
        try:
            self._journal.record_start(action_id, fingerprint)
        except JournalError as error:
            text = f"the action cannot be journalled: {error}"
            raise HostRequestRefused("journal_unavailable", text, is_retryable=True) from error

    def _record_result(self, action_id: int, result: dict[str, object]) -> bytes:
        is_full = self._journal.size_bytes > JOURNAL_LIMIT_BYTES
        refused = self._egress.take_refusals()
        result = {**result, "refused": refused} if refused else result
        body = dumps(truncate_result(result, SHORT_TEXT_CHARS if is_full else LONG_TEXT_CHARS)).encode("ascii")
        self._journal.record_result(action_id, body)
        return body


def with_problems(result: dict[str, object], found: dict[str, object]) -> dict[str, object]:
    """Return the result of an edit with the problems found in its files; a failed check adds none."""
    return result if found.get("is_error") else {**result, "content": f"{result['content']}{found.get('content', '')}"}
