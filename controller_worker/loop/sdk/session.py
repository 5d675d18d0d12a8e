"""One conversation in the loop of the Claude Agent SDK: the SDK asks for a call, the core decides whether it may.

A model call of such an agent has two conditions: the core decides it, as for every agent, and the SDK requests it. Then
it is made like every call, and the SDK gets the reply from the log. The SDK also gets the results of tool calls from
the log, where any worker may have appended them as observations.

Holds: no output of the SDK is appended or run. A program that dies, hangs or sends invalid output is replaced by one
that gets the current turn. After `MAX_STARTS` starts in a row without progress, the legacy agent continues, or the
call fails like any other.
Does not: outlive the worker's ownership of the conversation; see `restore_turn` for the input of the next program.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import timedelta

from broker.contract import (
    ConversationChanged,
    Event,
    EventSource,
    MessageAction,
    ModelCallFailed,
    ModelReply,
    Observation,
    RolledBackObservation,
    SdkSpec,
    find_rolled_back,
    replace_surrogates,
)
from broker.log import EventLog
from broker.runtime import DeckhandsError, failpoint, new_token
from controller_worker.agents import Agent
from controller_worker.core import Append, CallModel, State, render_last_error
from controller_worker.loop.sdk.restored_turn import (
    BEGIN,
    drop_rolled_back,
    find_call,
    is_agent_change,
    is_agent_reply,
    make_call_id,
    restore_turn,
    to_query,
    to_reply,
    to_result,
)
from controller_worker.loop.sdk.runner import Line, SdkRunner
from controller_worker.loop.sdk.sdk_errors import to_model_error
from controller_worker.loop.sdk.sessions import SdkSessions

MODEL = "claude-sonnet-4-5"
"""The model name given to the CLI; the core decides which model is called."""
MAX_STARTS = 3
RETRY_SECONDS = (8.0, 16.0, 32.0)
"""Delays after failures of one step without a fallback; then the conversation ends in an error."""
CHANGED_BY = "deckhands"
SHOWN_CHARS = 1_000

_log = logging.getLogger(__name__)


class SdkSession:
    """The SDK of one conversation while a worker owns it.

    Args:
        on_news: called when the loop must continue.
    """

    def __init__(self, sessions: SdkSessions, log: EventLog, conversation_id: str, on_news: Callable[[], None]) -> None:
        self._sessions = sessions
        self._log = log
        self._conversation_id = conversation_id
        self._notify = on_news
        self._runner: SdkRunner | None = None
        self._is_awaited = False
        self._has_news = False
        self._has_ended = False
        self._replies_sent = 0
        self._asks_received = 0
        self._starts = 0
        self._queries = 0
        self._limit_seconds = 0.0
        self._open: dict[tuple[int, str], str] = {}
        self._query = BEGIN
        self._failure: DeckhandsError | None = None
        self._limit: asyncio.TimerHandle | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the conversation waits for the SDK's next call."""
        return self._is_awaited

    @property
    def pid(self) -> int | None:
        """The process id of its program; None if there is none."""
        return self._runner.pid if self._runner is not None else None

    def take_news(self) -> bool:
        """Return whether the loop must continue, and reset the flag."""
        has_news, self._has_news = self._has_news, False
        return has_news

    async def check_ask(self, wanted: CallModel, state: State, agent: Agent) -> Append | bool:
        """Return whether the SDK requests the call that the core has decided; if not, bring the SDK to that point.

        Returns:
            True if the call may be made, False to wait. Otherwise the events to append, because the SDK cannot run.

        Raises:
            CorruptEntry: an entry of the log is damaged or missing.
        """
        spec = state.setup.agent.sdk or SdkSpec()
        if self._failure is not None:
            return self._handle_failure(wanted, spec)
        self._is_awaited = True
        if not self._sessions.take_slot(self, self._notify_loop):
            return False
        if self._runner is None:
            await self._start(state, agent)
            if self._failure is not None:
                return self._failed(wanted, spec)
        self._settle()
        if self._asks_received > self._replies_sent:
            failpoint("controller.sdk_asks")
            self._starts = 0
            self._queries = 0
            self._rest()
            return True
        if self._has_ended:
            self._begin_turn()
        self._set_limit(spec.timeout_seconds)
        return False

    def process(self, events: Iterable[Event]) -> None:
        """Process the next events of the log, and send the SDK those that it needs."""
        for event in events:
            if isinstance(event, MessageAction) and event.source is EventSource.USER:
                self._query = to_query(event)
            elif isinstance(event, RolledBackObservation) or is_agent_change(event):
                self.give_up()
            elif self._runner is not None:
                if is_agent_reply(event):
                    assert isinstance(event, ModelReply)
                    self._send_reply(event)
                elif isinstance(event, Observation):
                    self._send_result(event)

    def give_up(self) -> None:
        """End the program; at the next use, a fresh one gets the current turn. Idempotent."""
        if self._runner is not None:
            self._runner.stop()
            self._runner = None
        self._sessions.give_slot(self)

    def close(self) -> None:
        """End the program and every wait: the conversation has left this worker. Idempotent."""
        self._rest()
        self.give_up()

    async def _start(self, state: State, agent: Agent) -> None:
        """Start a program and send it the current turn."""
        self._starts += 1
        events = await self._log.read(self._conversation_id, until=state.version)
        turn = restore_turn(drop_rolled_back(events, find_rolled_back(events)))
        is_sandboxed = await asyncio.to_thread(lambda: self._sessions.is_sandboxed)
        runner = SdkRunner(
            on_line=lambda line: self._handle_line(line) if self._runner is runner else None,
            on_end=lambda said: self._stop_program("ProcessError", said) if self._runner is runner else None,
            endings=self._sessions.endings,
        )
        self._runner = runner
        self._asks_received = 0
        self._replies_sent = 0
        self._has_ended = False
        self._open.clear()
        try:
            await runner.start(self._sessions.program, is_sandboxed=is_sandboxed)
        except OSError as error:
            self._stop_program("ProcessError", str(error))
            return
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in agent.tools
        ]
        runner.send(begin={"token": new_token(), "tools": tools, "model": MODEL})
        runner.send(query=turn.query)
        for reply in turn.replies:
            self._send_reply(reply)
        for observation in turn.observations:
            self._send_result(observation)
        _log.info("conversation %s: the SDK starts with %d replies", self._conversation_id, len(turn.replies))

    def _send_reply(self, reply: ModelReply) -> None:
        assert self._runner is not None
        self._replies_sent += 1
        self._open |= {
            (reply.id, call.id): make_call_id(reply.id, place) for place, call in enumerate(reply.tool_calls)
        }
        self._runner.send(reply=to_reply(reply, MODEL))

    def _send_result(self, observation: Observation) -> None:
        key = find_call(observation)
        number = self._open.pop(key, None) if key is not None else None
        if number is not None and self._runner is not None:
            self._runner.send(result=to_result(number, observation))

    def _settle(self) -> None:
        """Answer all open calls. The core has decided the next model call, so no further result will arrive."""
        while self._open and self._runner is not None:
            self._runner.send(result=to_result(self._open.popitem()[1], None))

    def _begin_turn(self) -> None:
        assert self._runner is not None
        self._has_ended = False
        self._queries += 1
        if self._queries > MAX_STARTS:
            self._stop_program("MessageParseError", "The SDK ends its turns without asking.")
            return
        self._runner.send(query=self._query)

    def _handle_line(self, line: Line) -> None:
        """Handle a message from the program."""
        if isinstance(asked := line.get("asks"), int):
            self._asks_received = asked
        elif "ended" in line:
            self._has_ended = True
        elif isinstance(failed := line.get("failed"), dict):
            text = "\n".join(filter(None, (str(failed.get("text", "")), str(failed.get("stderr", "")))))
            self._stop_program(str(failed.get("error")), text)
            return
        if self._is_awaited:
            if self._asks_received > self._replies_sent or self._has_ended:
                self._notify_loop()
            elif self._limit is not None:
                self._set_limit(self._limit_seconds)  # any message shows progress

    def _stop_program(self, name: str, text: str) -> None:
        """Stop a program that is no longer usable."""
        error = to_model_error(name, text)
        _log.warning("conversation %s: %s", self._conversation_id, error)
        self.give_up()
        self._end_limit()
        if not error.retryable or self._starts >= MAX_STARTS:
            self._failure = error
        if self._is_awaited:
            self._notify_loop()

    def _handle_failure(self, wanted: CallModel, spec: SdkSpec) -> Append:
        """Return the events after a failure: the legacy agent continues, or the call fails like any other."""
        error = self._failure
        assert error is not None
        self._failure = None
        self._starts = 0
        self._queries = 0
        self.close()
        if spec.fallback_to_legacy:
            change = ConversationChanged(
                loop="legacy", by=CHANGED_BY, reason=str(error)[:SHOWN_CHARS], source=EventSource.ENVIRONMENT
            )
            return Append((change,))
        retry_at = None
        if error.retryable and wanted.attempt <= len(RETRY_SECONDS):
            retry_at = self._log.store.clock.now() + timedelta(seconds=RETRY_SECONDS[wanted.attempt - 1])
        failure = ModelCallFailed(
            code=error.code,
            content=replace_surrogates(str(error)[:SHOWN_CHARS]),
            last_error=replace_surrogates(render_last_error(error)[:SHOWN_CHARS]),
            attempt=wanted.attempt,
            retry_at=retry_at,
        )
        return Append((failure,))

    def _notify_loop(self) -> None:
        self._has_news = True
        self._notify()

    def _rest(self) -> None:
        """Note that the conversation no longer waits for the SDK."""
        self._is_awaited = False
        self._end_limit()
        self._sessions.note_use(self)

    def _set_limit(self, seconds: float) -> None:
        self._end_limit()
        if self._runner is not None:
            text = f"The SDK did not ask within {seconds:g} s."
            self._limit_seconds = seconds
            self._limit = asyncio.get_running_loop().call_later(seconds, self._stop_program, "TimeoutError", text)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
