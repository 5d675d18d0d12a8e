"""Decides the next action of an ACP agent and converts its latest report into a reply. A pure function of the View.

The first turn of a session is prompted with the task. Each report leads to one action: continue the agent, answer its
permission request, or end the turn. A message that arrives during a turn becomes the next prompt after the turn ends.
A session lost with its process, host or node is resumed by its id if the agent can load it. Otherwise a new session
gets the history as text.

Holds: nothing in the log is requested twice. A prompt is sent once. After a crash, the agent's next prompt says that it
was interrupted. After `FAILURES` failures in a row, the call fails and the conversation ends in an error.
Does not: know whether the agent's work between its last report and a crash took effect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.contract import (
    AcpObservation,
    AcpPermission,
    AcpPermissionAction,
    AcpSpec,
    AcpTurnAction,
    AgentFinishAction,
    Event,
    EventsLostObservation,
    EventSource,
    FinishRefusedObservation,
    FinishVerdictObservation,
    LoopDetectionObservation,
    MessageAction,
    ModelCallFailed,
    ModelReply,
    Observation,
    RolledBackObservation,
    UserRejectObservation,
)
from controller_worker.agents import PERMISSION, PLAN, REJECT, TURN, WAIT
from controller_worker.providers import (
    AuthenticationError,
    BadRequestError,
    CallUsage,
    Completion,
    InternalServerError,
    MalformedReplyError,
    ModelError,
    ModelTimeoutError,
    ServiceUnavailableError,
    ToolCall,
)

FAILURES = 3
CONTINUE = "Continue."
INTERRUPTED = (
    "You were interrupted. What you were doing may have been done in part: look before you do it again. "
    "Then continue with the task."
)
NEW_SESSION = (
    "An earlier session worked on this task and has ended. Below is what happened in it. What was done is done: do not "
    "repeat it, and look at the files to see how far it came. Then continue."
)
HISTORY_CHARS = 24_000
ENTRY_CHARS = 2_000
FEEDBACK = (
    EventsLostObservation,
    FinishRefusedObservation,
    FinishVerdictObservation,
    LoopDetectionObservation,
    UserRejectObservation,
)
"""Observations that the agent must read, besides user messages."""
ERRORS: Mapping[str, type[ModelError]] = {
    found.code: found
    for found in (
        AuthenticationError,
        BadRequestError,
        InternalServerError,
        MalformedReplyError,
        ModelTimeoutError,
        ServiceUnavailableError,
    )
}
PERMANENT = (AuthenticationError.code, BadRequestError.code)
INCOMPLETE = ("cancelled", "max_tokens", "max_turn_requests")
INTERRUPTED_BY_USER = "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_INTERRUPTED"
USER_PREFIX = "The person: "
SHOWN_CHARS = 500
MODEL = "acp"
"""The model name in replies; the reports name the agent itself."""

AcpAction = AcpTurnAction | AcpPermissionAction
Calls = dict[str, dict[str, Any]]


@dataclass
class AcpProgress:
    """The agent's progress, read from the View.

    Attributes:
        action: the agent's latest action; None before the first one.
        outcome: the observation that answers `action`.
        session_id: the latest session that can be resumed.
        unread: texts not yet sent to the agent as a prompt.
        failures: failure reports in a row, including actions without a result.
        is_taken_back: a rollback made the session's memory differ from the conversation.
        cost_usd: the session's cost since its previous report; None if the agent does not report it.
    """

    action: AcpAction | None = None
    outcome: Observation | None = None
    session_id: str = ""
    unread: list[str] = field(default_factory=list)
    failures: int = 0
    is_taken_back: bool = False
    cost_usd: float | None = None
    _total_usd: float = 0.0

    def add(self, event: Event) -> None:
        """Apply the next event."""
        if isinstance(event, AcpTurnAction | AcpPermissionAction):
            self.action = event
            self.outcome = None
            if isinstance(event, AcpTurnAction) and event.prompt:
                self.unread.clear()
                self.is_taken_back = False
        elif isinstance(event, MessageAction) and event.source is EventSource.USER:
            self.unread.append(event.content)
            self.failures = 0  # the user wants another attempt
        elif isinstance(event, RolledBackObservation):
            self.is_taken_back = True
        elif isinstance(event, Observation):
            self._add_observation(event)

    def _add_observation(self, event: Observation) -> None:
        if self.action is not None and event.cause == self.action.id:
            self.outcome = event
            if isinstance(event, AcpObservation):
                if event.state != "lost":  # a lost session says nothing about whether the agent works
                    self.failures = self.failures + 1 if event.state == "failed" else 0
                self._count(event)
            elif not isinstance(event, UserRejectObservation):
                self.failures += 1
        if isinstance(event, FEEDBACK) and event.agent_text:
            self.unread.append(event.agent_text)

    def _count(self, report: AcpObservation) -> None:
        if report.session_id != self.session_id:
            self.session_id = report.session_id
            self._total_usd = 0.0
        self.cost_usd = None
        total = report.cost_usd
        if total is not None and math.isfinite(total) and total >= 0:  # a total is never negative
            # A restarted agent may count from zero.
            before = self._total_usd if total >= self._total_usd else 0.0
            self._total_usd = total
            self.cost_usd = total - before


def decide_reply(spec: AcpSpec, events: Sequence[Event], later: Iterable[Event]) -> Completion | ModelError:
    """Convert the agent's latest report to a reply, or return the error that ends the work.

    Args:
        events: the View.
        later: the events of the log after the latest answer, including those that no View contains.
    """
    course = read_progress(events)
    report = course.outcome if isinstance(course.outcome, AcpObservation) else None
    later = list(later)
    error = _find_error(course, report)
    if error is not None and not any(isinstance(event, ModelCallFailed) for event in later):
        return error
    is_told = any(isinstance(event, ModelReply) for event in later)
    calls = _decide_calls(spec, course, events, is_told=is_told)
    if report is None or is_told:
        return _make_completion("", calls, CallUsage(), 0.0)
    if report.plan is not None:
        calls = {PLAN: {"task_list": [item.model_dump(mode="json") for item in report.plan]}, **calls}
    # The cost of a turn is unknown if the agent does not report it.
    cost_usd = course.cost_usd if course.cost_usd is not None or report.state == "ended" else 0.0
    text = report.content.strip()
    usage = CallUsage(**{name: max(count, 0) for name, count in report.usage.model_dump().items()})
    return _make_completion(text, calls, usage, cost_usd, report)


def read_progress(events: Iterable[Event]) -> AcpProgress:
    """Return the progress of the agent."""
    course = AcpProgress()
    for event in events:
        course.add(event)
    return course


def _make_completion(
    text: str, calls: Calls, usage: CallUsage, cost_usd: float | None, report: AcpObservation | None = None
) -> Completion:
    return Completion(
        text=text,
        tool_calls=tuple(ToolCall(id="", name=name, arguments=json.dumps(given)) for name, given in calls.items()),
        thinking_blocks=(),
        model=MODEL,
        response_id="",
        stop_reason=report.stop_reason if report is not None else "",
        usage=usage,
        cost_usd=cost_usd,
        latency_seconds=0.0,
    )


def _find_error(course: AcpProgress, report: AcpObservation | None) -> ModelError | None:
    """Return the error that ends the work: too many failures in a row, or a permanent one."""
    is_permanent = report is not None and report.state == "failed" and report.code in PERMANENT
    if course.failures < FAILURES and not is_permanent:
        return None
    code = report.code if report is not None else ServiceUnavailableError.code
    text = report.reason if report is not None else getattr(course.outcome, "content", "")
    error = ERRORS.get(code, InternalServerError)(f"The ACP agent failed: {text}", provider_text=text)
    error.retryable = False  # it was retried already
    return error


def _decide_calls(spec: AcpSpec, course: AcpProgress, events: Sequence[Event], *, is_told: bool) -> Calls:
    """Return the next action as a tool call; empty if the agent is done."""
    outcome = course.outcome
    unread = "\n\n".join(course.unread)
    fields = {"command": spec.command, "timeout": spec.timeout_seconds, "session_id": course.session_id}
    if course.action is None and not course.is_taken_back:
        return {TURN: {**fields, "prompt": unread or CONTINUE}}
    if course.is_taken_back:
        return {TURN: {**fields, "session_id": "", "prompt": _render_history(events)}}
    if isinstance(outcome, AcpObservation):
        if outcome.state == "working":
            return {TURN: fields}
        if outcome.state == "permission" and outcome.permission is not None:
            return {PERMISSION: {**fields, **_choose_option(outcome.permission)}}
        if outcome.state == "ended":
            if unread or is_told:
                return {TURN: {**fields, "prompt": unread or CONTINUE}}
            return _decide_end(outcome.stop_reason)
    if isinstance(outcome, UserRejectObservation) and isinstance(course.action, AcpPermissionAction):
        asked = course.action
        return {TURN: {**fields, "permission": asked.permission, "option_id": asked.refusal_id}}
    if not course.session_id:
        return {TURN: {**fields, "prompt": _render_history(events, INTERRUPTED)}}
    if getattr(outcome, "error_id", "") == INTERRUPTED_BY_USER:
        return {TURN: {**fields, "prompt": unread or CONTINUE}}
    why = outcome.content if outcome is not None and not isinstance(outcome, AcpObservation) else ""
    return {TURN: {**fields, "prompt": "\n\n".join(filter(None, (INTERRUPTED, why, unread)))}}


def _choose_option(permission: AcpPermission) -> dict[str, Any]:
    others = [option.id for option in permission.options if not option.option_kind.startswith("reject")]
    return {
        "permission": permission.number,
        "option_id": permission.option("allow_once", "allow_always") or next(iter(others), ""),
        "refusal_id": permission.option("reject_once", "reject_always"),
        "call": permission.call.model_dump(mode="json", exclude_none=True),
    }


def _decide_end(stop_reason: str) -> Calls:
    if stop_reason == "refusal":
        return {REJECT: {"reason": "The agent refuses the task."}}
    if stop_reason in INCOMPLETE:
        return {WAIT: {"reason": f"The agent has stopped before its end ({stop_reason})."}}
    return {}


def _render_history(events: Iterable[Event], why: str = "") -> str:
    """Return the history as the prompt of a new session; if there is only the task, `why` and the task."""
    entries = [entry for event in events if (entry := _render_entry(event))]
    if len(entries) <= 1:
        return "\n\n".join(filter(None, (why, *(entry.removeprefix(USER_PREFIX) for entry in entries)))) or CONTINUE
    entries = [entries[0], *(entry[:ENTRY_CHARS] for entry in entries[1:])]
    first = entries[0]
    rest = list[str]()
    left = HISTORY_CHARS
    for entry in reversed(entries[1:]):
        left -= len(entry)
        if left < 0:
            rest.append("[Earlier events are left out.]")
            break
        rest.append(entry)
    return "\n\n".join((NEW_SESSION, first, *reversed(rest)))


def _render_entry(event: Event) -> str:
    if isinstance(event, MessageAction):
        return f"{USER_PREFIX if event.source is EventSource.USER else 'You: '}{event.content}"
    if isinstance(event, AcpObservation) and event.call is not None:
        return f"You ran ({event.call.status}): {event.call.shown}\n{event.call.text[:SHOWN_CHARS]}"
    if isinstance(event, AgentFinishAction):
        return f"You finished: {event.final_thought}"
    return f"Note: {event.agent_text}" if isinstance(event, FEEDBACK) and event.agent_text else ""
