"""The client side of the Agent Client Protocol: one session of one agent, turn by turn.

Holds: at most one request of each kind is in flight. Unexpected answers, unknown methods and updates of other sessions
change nothing. A tool call is reported once, when it has ended; a permission request is answered once.
Does not: do I/O; `acp_program` passes lines in and out.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable

from tool_worker.host.acp.client_requests import ClientRequests, Unanswerable
from tool_worker.host.acp.reports import (
    AcpReport,
    AgentToolCall,
    Fields,
    block_text,
    count_in,
    fields_in,
    permission_of,
    text_in,
)
from tool_worker.host.acp.running_agent import AgentLost

PROTOCOL_VERSION = 1
CALLS_LIMIT = 256
QUESTIONS_LIMIT = 32
SESSION_ID_CHARS = ID_CHARS = 256
UPDATES_LIMIT = 5000
"""A report is due after this many updates, even an empty one."""
UNREADABLE_LIMIT = 100
"""Maximum number of lines outside the protocol; some agents log to standard output."""
METHOD_NOT_FOUND = -32601
INVALID = -32600
AUTHENTICATION_NEEDED = -32000


class AcpSession:
    """One session.

    Args:
        send: Writes a message to the agent.
        wanted: The id of the session to load; empty to create a session.

    Attributes:
        session_id: Empty until the session exists.
        outcome: Empty while the report is incomplete; then `working`, `permission`, `ended`, `failed` or `lost`.
        is_cancelled: Whether the current turn was cancelled and the agent has not ended it yet.
    """

    def __init__(self, send: Callable[[Fields], None], requests: ClientRequests, directory: str, wanted: str) -> None:
        self.session_id = ""
        self.outcome = ""
        self.is_cancelled = False
        self.report = AcpReport()
        self._send = send
        self._requests = requests
        self._directory = directory
        self._session_to_load = wanted
        self._waiting: dict[int, Callable[[Fields], None]] = {}
        self._next_id = 0
        self._prompts: deque[str] = deque()
        self._turn = 0
        self._calls: dict[str, AgentToolCall] = {}
        self._ended_calls: deque[str] = deque(maxlen=CALLS_LIMIT)
        self._questions: dict[int, object] = {}
        self._question_count = 0
        self._unreadable = 0
        self._updates = 0
        self._ignored = 0
        self._cost: float | None = None
        self._agent = ""
        capabilities = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}
        self._ask(
            "initialize",
            {
                "protocolVersion": PROTOCOL_VERSION,
                "clientCapabilities": capabilities,
                "clientInfo": {"name": "deckhands", "version": "1"},
            },
            self._on_initialized,
        )

    @property
    def is_turn_open(self) -> bool:
        """Whether a turn runs, or a prompt waits until the agent is ready."""
        return bool(self._turn or self._prompts)

    def prompt(self, text: str) -> None:
        """Send the agent a prompt; a running turn is cancelled first."""
        self._prompts.append(text)
        if self._turn:
            self.cancel()
        elif self.session_id:
            self._start_turn()

    def cancel(self) -> None:
        """Ask the agent to end its turn; a turn that has not started ends at once."""
        if self._turn:
            self.is_cancelled = True
            self._send({"method": "session/cancel", "params": {"sessionId": self.session_id}})
        else:
            self._prompts.clear()
            self._end_turn("cancelled")
        for number in list(self._questions):
            self.answer(number, "")

    def answer(self, number: int, option_id: str) -> None:
        """Answer a permission request; a second answer changes nothing.

        Args:
            option_id: The chosen option; empty to cancel the request.
        """
        if number in self._questions:
            chosen: Fields = {"outcome": "selected", "optionId": option_id} if option_id else {"outcome": "cancelled"}
            self._send({"id": self._questions.pop(number), "result": {"outcome": chosen}})

    def start_report(self) -> None:
        """Start the next report."""
        self.report = AcpReport()
        self.outcome = ""
        self._updates = 0
        self._ignored = 0

    def render_report(self) -> Fields:
        """Return the report so far."""
        fields = self.report.fields()
        return {
            **fields,
            "session_id": fields.get("session_id", self.session_id),
            "agent": self._agent,
            "cost_usd": self._cost,
            "ignored": self._ignored,
        }

    def process_line(self, line: bytes) -> None:
        """Process one line from the agent.

        Raises:
            AgentLost: the agent does not speak the protocol, or refuses to work.
        """
        if not line.strip():
            return
        try:
            message = json.loads(line, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._ignored += 1
            self._unreadable += 1
            if self._unreadable > UNREADABLE_LIMIT:
                raise AgentLost("malformed_reply", "The agent does not write the Agent Client Protocol.")
            return
        method = message.get("method")
        params = fields_in(message.get("params"))
        if not isinstance(method, str):
            self._handle_answer(message)
        elif message.get("id") is None:
            if method == "session/update" and params.get("sessionId") == self.session_id and self.session_id:
                self._handle_update(fields_in(params.get("update")))
        elif isinstance(message["id"], int | str) and len(str(message["id"])) <= ID_CHARS:
            self._handle_request(message["id"], method, params)
        else:
            self._ignored += 1

    def _ask(self, method: str, params: Fields, then: Callable[[Fields], None]) -> int:
        self._next_id += 1
        self._waiting[self._next_id] = then
        self._send({"id": self._next_id, "method": method, "params": params})
        return self._next_id

    def _handle_answer(self, message: Fields) -> None:
        number = message.get("id")
        is_number = isinstance(number, int) and not isinstance(number, bool)
        then = self._waiting.pop(number, None) if is_number and isinstance(number, int) else None
        if then is None:
            self._ignored += 1
        else:
            then(message)

    def _on_initialized(self, message: Fields) -> None:
        result = _result(message, "initialize")
        version = result.get("protocolVersion")
        if version != PROTOCOL_VERSION:
            raise AgentLost("bad_request", f"The agent speaks version {str(version)[:20]} of the protocol, not 1.")
        about = fields_in(result.get("agentInfo"))
        self._agent = " ".join(filter(None, (text_in(about.get("name"), 100), text_in(about.get("version"), 40))))
        where: Fields = {"cwd": self._directory, "mcpServers": []}
        if not self._session_to_load:
            self._ask("session/new", where, self._on_session_created)
        elif fields_in(result.get("agentCapabilities")).get("loadSession") is True:
            self._ask("session/load", {**where, "sessionId": self._session_to_load}, self._on_session_loaded)
        else:
            self._mark_lost("The session has ended with its program, and the agent cannot load it again.")

    def _on_session_created(self, message: Fields) -> None:
        session_id = _result(message, "session/new").get("sessionId")
        if not isinstance(session_id, str) or not 0 < len(session_id) <= SESSION_ID_CHARS:
            raise AgentLost("malformed_reply", "The agent has opened a session without a usable id.")
        self._set_ready(session_id)

    def _on_session_loaded(self, message: Fields) -> None:
        if "error" in message:
            self._mark_lost(f"The agent cannot load its session again: {_error_text(message)}")
        else:
            # updates that replay the session's history are ignored: they are in the log already
            self._set_ready(self._session_to_load)

    def _set_ready(self, session_id: str) -> None:
        self.session_id = session_id
        if self._prompts:
            self._start_turn()

    def _mark_lost(self, reason: str) -> None:
        self._prompts.clear()
        self.report.set(reason=reason)
        self.outcome = "lost"

    def _start_turn(self) -> None:
        blocks = [{"type": "text", "text": self._prompts.popleft()}]
        self._turn = self._ask("session/prompt", {"sessionId": self.session_id, "prompt": blocks}, self._on_turn_ended)

    def _on_turn_ended(self, message: Fields) -> None:
        self._turn = 0
        self.is_cancelled = False
        for number in list(self._questions):
            self.answer(number, "")
        if self._prompts:
            self._start_turn()
            return
        try:
            result = _result(message, "session/prompt")
        except AgentLost as refused:  # the agent is still alive and may accept the next prompt
            self.report.set(code=refused.code, reason=str(refused))
            self.outcome = "failed"
            return
        self._count(fields_in(result.get("usage")))
        self._end_turn(text_in(result.get("stopReason"), 40) or "end_turn")

    def _end_turn(self, reason: str) -> None:
        self.report.set(stop_reason=reason)
        self.outcome = "ended"

    def _count(self, usage: Fields) -> None:
        """Report the tokens of the turn; the protocol counts cache reads and writes separately."""
        cached = count_in(usage.get("cachedReadTokens"))
        written = count_in(usage.get("cachedWriteTokens"))
        self.report.set(
            usage={
                "prompt_tokens": count_in(usage.get("inputTokens")) + cached + written,
                "completion_tokens": count_in(usage.get("outputTokens")),
                "cache_read_tokens": cached,
                "cache_write_tokens": written,
            }
        )

    def _handle_update(self, update: Fields) -> None:
        kind = update.get("sessionUpdate")
        self._updates += 1
        if kind == "agent_message_chunk":
            self.report.add_text("content", block_text(update.get("content")))
        elif kind == "agent_thought_chunk":
            self.report.add_text("thoughts", block_text(update.get("content")))
        elif kind == "plan":
            self.report.set_plan(update.get("entries"))
        elif kind in ("tool_call", "tool_call_update"):
            self._handle_call(update)
        elif kind == "usage_update":
            cost = fields_in(update.get("cost"))
            amount = cost.get("amount")
            if cost.get("currency") == "USD" and isinstance(amount, int | float) and 0 <= amount < float("inf"):
                self._cost = float(amount)
        if not self.outcome and (self.report.is_full or self._updates >= UPDATES_LIMIT):
            self.outcome = "working"

    def _handle_call(self, told: Fields) -> None:
        call_id = told.get("toolCallId")
        if not isinstance(call_id, str) or call_id in self._ended_calls:
            self._ignored += 1
            return
        is_new = call_id not in self._calls
        call = self._call(call_id)
        call.add(told)
        if is_new and self.report.has_text:
            self.outcome = "working"  # text before a call must reach the log before the call's outcome
        if call.has_ended:
            del self._calls[call_id]
            self._ended_calls.append(call_id)
            self.report.set(call=call.to_fields(self._requests.collect_output(call.terminal_ids)))
            self.outcome = "working"

    def _call(self, call_id: str) -> AgentToolCall:
        if call_id not in self._calls and len(self._calls) >= CALLS_LIMIT:
            del self._calls[next(iter(self._calls))]  # drop the oldest call, which never ended
        return self._calls.setdefault(call_id, AgentToolCall())

    def _handle_request(self, number: int | str, method: str, params: Fields) -> None:
        if method == "session/request_permission":
            self._handle_question(number, params)
            return

        def answer(result: Fields | None) -> None:
            self._send({"id": number, "result": result})

        try:
            self._requests.serve(method, params, answer)
        except Unanswerable as error:
            code = METHOD_NOT_FOUND if str(error).startswith("There is no method") else INVALID
            self._send({"id": number, "error": {"code": code, "message": str(error)}})

    def _handle_question(self, number: int | str, params: Fields) -> None:
        is_ours = params.get("sessionId") == self.session_id and self._turn
        if not is_ours or len(self._questions) >= QUESTIONS_LIMIT or number in self._questions.values():
            self._ignored += 1
            self._send({"id": number, "error": {"code": INVALID, "message": "This cannot be asked now."}})
            return
        reported = fields_in(params.get("toolCall"))
        call_id = reported.get("toolCallId")
        call = self._call(call_id) if isinstance(call_id, str) and call_id not in self._ended_calls else AgentToolCall()
        call.add(reported)
        self._question_count += 1
        self._questions[self._question_count] = number
        self.report.set(permission=permission_of(self._question_count, call.to_fields(), params.get("options")))
        self.outcome = "permission"


def _result(message: Fields, method: str) -> Fields:
    """Return the result of a request.

    Raises:
        AgentLost: the request has failed.
    """
    if "error" in message:
        code = fields_in(message["error"]).get("code")
        kind = "authentication" if code == AUTHENTICATION_NEEDED else "internal"
        raise AgentLost(kind, f"The agent refuses {method}: {_error_text(message)}")
    return fields_in(message.get("result"))


def _error_text(message: Fields) -> str:
    error = fields_in(message.get("error"))
    more = json.dumps(error["data"]) if error.get("data") is not None else ""
    return text_in(" ".join(filter(None, (text_in(error.get("message")), more)))) or "it does not say why."


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large")
    return number
