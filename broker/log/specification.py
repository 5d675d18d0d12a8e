"""The specification of a log, as a program: which events may follow which.

`check_log` reads a log from its first event to its last and returns a sentence for everything that no correct cluster
writes. It shares no code with the product: it imports only the standard library and reads plain JSON objects, as
`deckhands export` writes them. It defines kinds of events, then a conversation with a method for each group of them.

The rules, by the name that a violation has:
    append        ids are 1, 2, 3 …; the first event creates this conversation; nothing else does
    kind, time    kinds and sources are known ones; no event is a day older than one before it
    observation   an observation answers an earlier action, and each action at most once
    answer        it has a kind that fits its action, and names the same tool call
    settled       when a conversation ends, each action that needs an observation has it
    claim         a reply is based on everything that an earlier owner has written, so a former owner's reply is refused
    turn          an action belongs to the reply that asked for it, a message to a user or a reply, a segment to a reply
    state         the agent's state changes for a reason that the log names
    confirmation  what waits for a confirmation runs only after it, once, and as it was shown
    budget        no model is called when a limit has been reached; costs are amounts of money and add up
    delegation    a delegate ends once, under its own name, and its end is reported once
    stop          a call or an action that was stopped ends once, after it was stopped
    end, index    after its end a conversation rests until something is asked of it; the store's index agrees

Holds: `check_log` raises nothing, whatever the JSON values are. It reports about `MAX_VIOLATIONS`.
Does not: repeat the agent's decisions, as `deckhands replay` does. Of events that were imported from OpenHands, only
the ids, the kinds and the causes of observations are checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

JsonEvent = Mapping[str, Any]

MAX_VIOLATIONS, SHOWN_CHARS = 100, 60
CLOCK_TOLERANCE_SECONDS, USD_TOLERANCE = 86_400.0, 1e-6  # clocks of writers differ, by an hour perhaps

# --- The kinds of events ---------------------------------------------------------------------------------------------


def _kinds(family: str, names: str) -> frozenset[str]:
    return frozenset(f"{family}.{name}" for name in names.split())


def _answers(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in text.split())
    return {action: observations.replace("+", " ") or action for action, _, observations in pairs}


# The actions that the next step waits for; what reports their success has the same name unless another is given.
TOOLS = _answers(
    "run read write edit apply_patch=edit search_code browse=browse+download browse_interactive=browse+download "
    "run_ipython call_tool call_tool_mcp=mcp+mcp_question acp_turn=acp acp_permission=acp plan=plan_accepted "
    "feature_list feature_check save_progress survey open_workspace=workspace_opened+workspace_failed "
    "digest_workspace=workspace_digest"
)
# The other actions with an observation: answered at once, or beside the agent's turn.
ANSWERED = _answers("delegate=delegate+success think task_tracking recall=recall+null note execute manage_delegates")
FAILURES = "error outcome_unknown user_rejected"  # of any action
RUN_BY_WORKERS = _kinds("action", " ".join(TOOLS))
ANSWERS = {
    f"action.{action}": _kinds("observation", f"{names} {FAILURES}") for action, names in (TOOLS | ANSWERED).items()
}
BESIDE_THE_TURN = _kinds("action", "execute note")
# Actions without an observation.
UNANSWERED = _kinds(
    "action", "message system finish reject null change_agent_state condensation condensation_request loop_recovery"
)
NOT_OF_A_TURN = _kinds("action", "system condensation condensation_request recall")  # these need no reply
# Observations that may answer no action: reports of the controller, and the error of a call that led to no action.
REPORTS = _kinds(
    "observation",
    "agent_state_changed loop_detection finish_refused finish_verdict events_lost interrupted rolled_back delegate "
    "error feature_list",
)
MODEL_CALLS = _kinds("model", "reply failed deferred admitted")
OTHERS = _kinds("conversation", "created begun changed operator_acted delegate_ended confirmation_reminder")
OTHERS |= {"conversation.party_stopped", "model.switched", "model.segment_started"}
KINDS = frozenset(ANSWERS) | UNANSWERED | REPORTS | MODEL_CALLS | OTHERS | frozenset().union(*ANSWERS.values())
SOURCES = frozenset({"agent", "user", "environment"})

# --- The agent's states ----------------------------------------------------------------------------------------------
AT_REST = {"action.system", "action.condensation"}  # asked for by a user
TERMINAL = frozenset({"finished", "rejected", "error", "stopped"})
WAITING = frozenset({"awaiting_user_input", "awaiting_user_confirmation", "paused"})
REQUESTABLE, CONFIRMATIONS = {"running", "paused", "stopped"}, frozenset({"user_confirmed", "user_rejected"})
KEEPS_ACTIONS = frozenset({"paused", "awaiting_user_confirmation"})  # settled, but the actions of a turn wait
UNREAD = re.compile(r"crashed its worker (?:[4-9]|\d\d+) times", re.ASCII)
UNREAD_CODES = frozenset({"secrets_locked", "corrupt_entry", "events_lost"})  # no owner can read it to settle actions
# Fields in which a confirmed action differs from the one that was shown.
FREE_IN_A_COPY = {"id", "timestamp", "thought", "confirmation_state", "replaces", "traceparent", "cause_id", "blobs"}
NOT_STARTED, IMPORTED_FROM = "AGENT_ERROR$DELEGATE_NOT_STARTED", ("openhands", "openhands-sdk")


@dataclass(frozen=True, slots=True)
class LogViolation:
    """A rule that is broken, the event that shows it (0 for the log as a whole), and a sentence about it."""

    rule: str
    event_id: int
    text: str


class Conversation:
    """A conversation, reconstructed from its log. `read` takes the next event."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.found: list[LogViolation] = []
        self.events: list[JsonEvent] = []
        self.number = self.asked = self.confirmed = self.recovery = 0  # number: of the latest event
        self.latest: datetime | None = None
        self.forked_at, self.is_imported, self.is_headless = 0, False, True
        self.state, self.reason, self.error_code = "loading", "", ""
        self.requested: str | None = None
        self.ending: str | None = None  # how the agent's turn ends
        self.has_system_message = self.is_waiting_for_call = self.has_deferral = False
        self.unread = self.last_message = self.turn = self.cancelled_at = self.changed_at = 0
        self.is_turn_open = self.is_at_rest = self.are_limits_changed = False
        self.calls: dict[str, list[str]] = {}  # of the latest reply, without those that led to something
        self.answered, self.stopped, self.segments = dict[int, int](), set[tuple[str, int]](), set[int]()
        self.open_tools, self.open_others = dict[int, JsonEvent](), dict[int, JsonEvent]()  # the next step waits
        self.answer: JsonEvent = {}
        self.delegates: dict[int, tuple[str, str]] = {}  # asked, refused, ended or reported; and its conversation
        self.steps, self.delegated_steps, self.usd, self.tokens = 0, 0.0, 0.0, 0.0
        self.limits, self.given = dict[str, float](), dict[str, float]()  # given at first, or by the latest change
        # after each event, what forbids a model call: the state, an action without an observation, limits
        self.moments: list[tuple[str, int, list[str]]] = [("loading", 0, [])]

    # --- Append: what holds for every event --------------------------------------------------------------------------
    def read(self, event: JsonEvent) -> None:
        """Check the next event, and apply its effect."""
        self.events.append(event)
        self.number += 1
        self.is_at_rest = self.state in TERMINAL and self.requested is None and not self.unread
        kind, source = _text(event, "kind"), _text(event, "source")
        if kind not in KINDS:
            self.refuse("kind", "is of an unknown kind")
        elif source not in SOURCES:
            self.refuse("kind", f"has the unknown source {source[:SHOWN_CHARS]!r}")
        written = _time(event)
        if written is not None and self.number > max(1, self.forked_at):  # a fork is younger than what it copies
            if self.latest is not None and (self.latest - written).total_seconds() > CLOCK_TOLERANCE_SECONDS:
                self.refuse("time", f"is of {written}, and an earlier event of {self.latest}")
            self.latest = written if self.latest is None else max(self.latest, written)
        if kind.startswith("observation."):
            self._read_observation(event, kind)
        elif kind.startswith("action."):
            self._read_action(event, kind, source)
        elif kind in MODEL_CALLS:
            self._read_call(event, kind)
        elif kind == "conversation.party_stopped":
            self._read_stop(event)
        elif kind == "model.segment_started":
            self._read_segment(event)
        else:
            self._read_change(event, kind)
        if self.number == self.forked_at:  # what was to follow in the same append stays in the origin
            self.open_others = {one: action for one, action in self.open_others.items() if one in self.delegates}
        open_action = next(iter(self.open_tools), 0) or next(iter(self.open_others), 0)
        self.moments.append((self.state, open_action, self._find_reached_limits()))

    def refuse(self, rule: str, text: str, event_id: int | None = None) -> None:
        """Note a violation; without an `event_id`, the latest event is the subject of the text."""
        is_foreign = self.is_imported and self.number <= self.forked_at
        if len(self.found) < MAX_VIOLATIONS and (not is_foreign or rule in ("append", "kind", "observation")):
            if event_id is None:
                text = f"event {self.number} ({_text(self.events[-1], 'kind')[:SHOWN_CHARS]}) {text}"
            self.found.append(LogViolation(rule, self.number if event_id is None else event_id, text))

    # --- The conversation itself -------------------------------------------------------------------------------------
    def _read_change(self, event: JsonEvent, kind: str) -> None:
        self.is_turn_open = False
        if kind == "conversation.created" and self.number == 1:
            if _text(event, "conversation_id") != self.conversation_id:
                self.refuse("append", f"the log does not begin with the creation of {self.conversation_id}", 1)
            origin, _, copied = _text(event, "forked_from").rpartition("@")
            self.forked_at = int(copied) if re.fullmatch(r"\d{1,9}", copied, re.ASCII) else 0
            self.is_imported, self.is_headless = origin in IMPORTED_FROM, event.get("headless") is not False
            self._take_limits(event)
        elif kind == "conversation.created":
            self.refuse("append", "the conversation is created a second time", self.number)
        elif kind == "conversation.changed":
            self.has_system_message = self.has_system_message and not (event.get("agent") or event.get("loop"))
            if event.get("limits"):
                self._take_limits(event)
                self.are_limits_changed = self.state == "error"
        elif kind == "conversation.delegate_ended":
            self._read_delegate_end(event)

    def _read_stop(self, event: JsonEvent) -> None:
        """Read the end of a model call or an action that a request or the controller has stopped."""
        party, action = _text(event, "party"), _integer(event, "action_id")
        answer = self.events[self.answered[action] - 1] if action in self.answered else {}
        is_stopped = self.cancelled_at if party == "model" else _text(answer, "kind") == "observation.error"
        one = (party, action or self.cancelled_at)
        if not is_stopped or one in self.stopped:
            self.refuse("stop", "says that something has ended which nothing has stopped, or which had ended before")
        self.stopped.add(one)

    def _read_segment(self, segment: JsonEvent) -> None:
        reply = _integer(segment, "reply_id")
        if reply in self.segments or _text(self._earlier(segment, "reply_id"), "kind") != "model.reply":
            self.refuse("turn", f"starts a segment with event {reply}, which is no earlier reply, or has started one")
        self.segments.add(reply)

    # --- Model calls: claim, takeover and budget ---------------------------------------------------------------------
    def _read_call(self, event: JsonEvent, kind: str) -> None:
        if self.is_at_rest:
            self.refuse("end", f"follows the end of the conversation ({self.state})")
        if kind == "model.reply":
            self._read_reply(event)
        elif kind == "model.failed":
            has_retry, is_overflow = event.get("retry_at") is not None, event.get("code") == "context_window"
            self.ending = self.ending if has_retry or is_overflow else "error"
            self.is_waiting_for_call, self.has_deferral, self.is_turn_open = has_retry, False, False
        elif kind == "model.deferred":
            self.is_waiting_for_call = self.has_deferral = True
        elif self.has_deferral:
            self.has_deferral = False
        else:
            self.refuse("budget", "admits a model call that no event has deferred")

    def _read_reply(self, reply: JsonEvent) -> None:
        is_step, iteration = _text(reply, "service", "agent") == "agent", _integer(reply, "iteration")
        seen = _integer(reply, "seen_id")
        if iteration != self.steps + 1 and (is_step or iteration != self.steps):
            self.refuse("claim", f"is a reply of step {iteration}, and the one before it was of step {self.steps}")
        if 0 < seen < self.number:
            self._check_basis(seen, is_step=is_step)
        else:
            self.refuse("claim", f"claims that its prompt holds event {seen}, which is not before it")
        self._count(0 if reply.get("cost_usd") is None else reply["cost_usd"], _map(reply, "usage"))
        self.is_waiting_for_call = self.has_deferral = False
        if is_step:
            self.steps, self.turn, self.is_turn_open, self.error_code = self.steps + 1, self.number, True, ""
            self.calls = {}
            for call in _maps(reply, "tool_calls"):
                self.calls.setdefault(_text(call, "id"), []).append(_text(call, "name"))

    def _check_basis(self, seen: int, *, is_step: bool) -> None:
        """Check that a model call was allowed when its prompt was made, and that the owner is still the same."""
        state, open_action, reached = self.moments[seen]
        for is_wrong, rule, text in (
            (is_step and seen < self.turn, "claim", f"a prompt without event {self.turn}, the reply before it"),
            (seen < self.cancelled_at, "claim", f"a call that event {self.cancelled_at} has cancelled"),
            (open_action, "turn", f"a prompt made when action {open_action} had no observation"),
            (state not in ("running", "rate_limited"), "state", f"a prompt made when the agent was {state}"),
            (reached, "budget", f"a prompt made when {', '.join(reached)} had been reached"),
        ):
            if is_wrong:
                self.refuse(rule, f"replies to {text}")

    def _count(self, usd: Any, tokens: JsonEvent) -> None:
        """Count the usage of a reply or of a delegate."""
        amounts = [_amount(usd), *(_amount(tokens.get(name, 0)) for name in ("prompt_tokens", "completion_tokens"))]
        if None in amounts:
            self.refuse("budget", "counts a cost or tokens that are not numbers from 0 on")
        self.usd += amounts[0] or 0.0
        self.tokens += sum(amount or 0.0 for amount in amounts[1:])

    @property
    def used(self) -> dict[str, float]:
        """The amount used of each limit."""
        steps = self.steps + self.delegated_steps
        return {"max_iterations": steps, "max_budget_usd": self.usd, "max_tokens": self.tokens}

    def _take_limits(self, event: JsonEvent) -> None:
        self.given = {each: one for each in self.used if (one := _amount(_map(event, "limits").get(each))) is not None}
        self.limits = dict(self.given)

    def _find_reached_limits(self) -> list[str]:
        return [name for name, used in self.used.items() if name in self.limits and used >= self.limits[name]]

    def _grow_limits(self) -> None:
        """Grow the limits that were reached by their first values: a user continues after an error."""
        for name in {*self._find_reached_limits(), self.error_code + "_usd"} & self.limits.keys():
            if name != "max_iterations":
                self.limits[name] = self.used[name] + self.given[name]
            elif not self.is_headless:
                self.limits[name] += self.given[name]

    # --- Actions -----------------------------------------------------------------------------------------------------
    def _read_action(self, action: JsonEvent, kind: str, source: str) -> None:
        is_copy, is_request = action.get("replaces") is not None, kind == "action.change_agent_state"
        if self.is_at_rest and source != "user" and not is_request and kind not in AT_REST:
            self.refuse("end", f"follows the end of the conversation ({self.state})")
        if is_copy:
            self._read_copy(action)
        elif source == "agent" and kind not in NOT_OF_A_TURN:
            self._check_turn(action)
        if kind in RUN_BY_WORKERS and not is_copy:
            self.open_tools[self.number] = action
            if action.get("confirmation_state") == "rejected":
                self.refuse("confirmation", "was rejected before it was shown to a user")
        elif kind in ANSWERS and kind not in BESIDE_THE_TURN and not is_copy:
            self.open_others[self.number] = action
        match kind:
            case "action.message" if source == "user":
                self.unread = self.last_message = self.number
                self.ending, self.is_turn_open = None, False
                self.requested = None if self.state == "running" else "running"
            case "action.message" if source == "agent" and action.get("wait_for_response") is True:
                self._end_turn("awaiting_user_input")
            case "action.message" if source != "agent":
                self.refuse("turn", f"has the source {source}, and only users and agents write messages")
            case "action.recall" if source != "environment":  # the environment recalls rules of a used file
                if not self.unread:
                    self.refuse("turn", "recalls knowledge for no new message")
                self.unread, self.is_turn_open = 0, False
            case "action.system":
                if self.has_system_message:
                    self.refuse("turn", "is a second system message for the same agent")
                self.has_system_message, self.is_turn_open = True, False
            case "action.finish" | "action.reject":
                self._end_turn({"action.finish": "finished", "action.reject": "rejected"}[kind])
            case "action.delegate":
                self.delegates[self.number] = ("asked", "")
            case "action.loop_recovery":
                self.recovery = _integer(action, "option")
            case "action.change_agent_state":
                self._read_request(action, source)

    def _check_turn(self, event: JsonEvent) -> None:
        """Check that an event belongs to the latest reply, and to one of its calls if it names one."""
        call = _map(event, "tool_call_metadata")
        reply = _integer(call, "reply_id") if call else self.turn
        if not 0 < reply < self.number or _text(self.events[reply - 1], "kind") != "model.reply":
            self.refuse("turn", f"belongs to reply {reply}, and there is no such reply before it")
        elif reply != self.turn or not self.is_turn_open:
            self.refuse("turn", f"comes when the turn of reply {reply} is over")
        elif call:
            call_id, name = _text(call, "tool_call_id"), _text(call, "function_name")
            if name in self.calls.get(call_id, ()):
                self.calls[call_id].remove(name)
            else:
                self.refuse("turn", f"has a call of {name[:SHOWN_CHARS]!r}, which reply {reply} has not, or no more")

    def _read_request(self, request: JsonEvent, source: str) -> None:
        wanted, named = _text(request, "agent_state"), request.get("action_id")
        if source == "agent":
            self.refuse("state", "is the agent's own request to change its state")
        is_asked = self.state == "awaiting_user_confirmation" and self.requested is None
        if wanted in REQUESTABLE:
            self.requested = None if wanted == self.state else wanted
        elif wanted in CONFIRMATIONS and is_asked and named in (None, self.asked):
            self.requested, self.answer = wanted, request

    def _end_turn(self, ending: str) -> None:
        """End the agent's turn, unless a message has arrived that its prompt did not include."""
        seen = _integer(self.events[self.turn - 1], "seen_id") if self.turn else 0
        if not self.unread and self.last_message <= seen:
            self.ending = ending

    # --- Confirmation ------------------------------------------------------------------------------------------------
    def _read_copy(self, copy: JsonEvent) -> None:
        """Read the copy of an action that a user has confirmed or rejected; it takes the place of the action."""
        replaced, status = _integer(copy, "replaces"), _text(copy, "confirmation_state")
        shown = self.open_tools.get(replaced)
        if shown is None or shown.get("confirmation_state") != "awaiting_confirmation":
            self.refuse("confirmation", f"replaces action {replaced}, which waits for no confirmation")
            self.open_tools[self.number] = copy
        else:
            if replaced != self.asked or self.requested not in CONFIRMATIONS:
                self.refuse("confirmation", f"replaces action {replaced}, which no user has answered")
            elif status != "rejected" and (status != "confirmed" or self.requested != "user_confirmed"):
                self.refuse("confirmation", f"runs action {replaced}, which a user has rejected")
            edited = _map(self.answer, "edited").keys() if status == "confirmed" else ()
            for name in sorted((copy.keys() | shown.keys()) - FREE_IN_A_COPY - set(edited)):
                if copy.get(name) != shown.get(name):
                    self.refuse("confirmation", f"has another {name[:SHOWN_CHARS]} than action {replaced}, as shown")
                    break
            both = ((self.number, copy) if one == replaced else (one, it) for one, it in self.open_tools.items())
            self.open_tools = dict(both)
        self.confirmed = self.number if status == "confirmed" else self.confirmed
        self.answered[replaced] = self.number

    # --- Observations ------------------------------------------------------------------------------------------------
    def _read_observation(self, observation: JsonEvent, kind: str) -> None:
        cause = observation.get("cause_id")
        if kind == "observation.agent_state_changed":
            self._read_state(observation)
        elif cause is None:
            self._read_report(observation, kind)
        else:
            self._read_answer(observation, kind, cause)
        if kind == "observation.delegate" and observation.get("delegate_id") is not None:
            asked = _integer(observation, "delegate_id")
            status, name = self.delegates.get(asked, ("", ""))
            if status != "ended":
                self.refuse("delegation", "reports the end of a delegate that has no new end")
            elif _text(observation, "conversation_id") != name:
                self.refuse("delegation", f"reports another delegate than {name[:SHOWN_CHARS]!r}, which has ended")
            self.delegates[asked] = ("reported", name)

    def _read_answer(self, observation: JsonEvent, kind: str, cause: Any) -> None:
        action = self._earlier(observation, "cause_id")
        asked = _text(action, "kind")
        if not asked.startswith("action."):
            self.refuse("observation", f"answers {str(cause)[:SHOWN_CHARS]}, not an earlier action")
            return
        if cause in self.answered:
            self.refuse("observation", f"answers action {cause}, which event {self.answered[cause]} has answered")
            return
        self.answered[cause] = self.number
        self.open_tools.pop(cause, None)
        self.open_others.pop(cause, None)
        if kind not in ANSWERS.get(asked, ()):
            self.refuse("answer", f"is no answer to action {cause} ({asked[:SHOWN_CHARS]})")
        elif _map(observation, "tool_call_metadata") != _map(action, "tool_call_metadata"):
            self.refuse("answer", f"names another tool call than action {cause}, which it answers")
        is_confirmed = action.get("confirmation_state") not in ("awaiting_confirmation", "rejected")
        if not is_confirmed and kind not in ("observation.user_rejected", "observation.error"):
            self.refuse("confirmation", f"is the result of action {cause}, which no user has confirmed")
        self.has_system_message = self.has_system_message and kind != "observation.plan_accepted"
        if cause in self.delegates and _text(observation, "error_id") == NOT_STARTED:
            self.delegates[cause] = ("refused", "")

    def _read_report(self, report: JsonEvent, kind: str) -> None:
        """Read an observation that answers no action."""
        if kind not in REPORTS:
            self.refuse("observation", "is an observation of no action")
        is_refusal = kind == "observation.finish_verdict" and report.get("is_accepted") is not True
        if self.ending == "finished" and (kind == "observation.finish_refused" or is_refusal):
            self.ending = None
        match kind:
            case "observation.error":  # of a call that led to no action
                self._check_turn(report)
            case "observation.interrupted" | "observation.rolled_back":
                is_rollback = kind == "observation.rolled_back"
                cause = self._earlier(report, "start_id" if is_rollback else "message_id")
                if _text(cause, "source") not in ("user", "environment"):
                    self.refuse("turn", "takes place for no message or request before it")
                self.cancelled_at, self.is_waiting_for_call, self.has_deferral = self.number, False, False
                if is_rollback:
                    self.ending, self.has_system_message, self.is_turn_open = None, False, False
                    self.asked = self.confirmed = 0
            case "observation.loop_detection" if self.recovery in (1, 2):
                wanted = "running" if self.recovery == 2 and self.last_message else "awaiting_user_input"
                wanted = self.requested or wanted
                self.requested, self.recovery = None if wanted == self.state else wanted, 0
            case "observation.events_lost" if not self._earlier(report, "last_id"):
                self.refuse("append", "says that the log ended at an event that is not before it")

    def _earlier(self, event: JsonEvent, name: str) -> JsonEvent:
        """Return the earlier event that a field names; an empty one if there is none."""
        number = _integer(event, name)
        return self.events[number - 1] if 0 < number < self.number else {}

    # --- The agent's state -------------------------------------------------------------------------------------------
    def _read_state(self, change: JsonEvent) -> None:
        now, was = _text(change, "agent_state"), self.state
        self.is_turn_open, self.changed_at = False, self.number
        if not self._may_become(now, change):
            wanted = f", and was asked to be {self.requested}" if self.requested else ""
            self.refuse("state", f"says {now[:SHOWN_CHARS]}, which does not follow: the agent was {was}{wanted}")
        is_granted = now in (self.requested, "error") or {self.requested, now} <= CONFIRMATIONS
        self.requested = None if is_granted else self.requested
        self.ending = None if now == self.ending or now in TERMINAL else self.ending
        self.recovery = 0 if now in ("stopped", "running") else self.recovery
        self.asked = _integer(change, "action_id") if now == "awaiting_user_confirmation" else 0
        self.state, self.reason = now, _text(change, "reason")
        self.cancelled_at = self.number if now == "stopped" else self.cancelled_at
        self.has_deferral = self.has_deferral and now in ("running", "rate_limited")
        if now == "running" and was == "error" and not self.are_limits_changed:
            self._grow_limits()
        self.are_limits_changed = self.are_limits_changed and now != "running"
        self.error_code = _text(change, "code") if now == "error" else self.error_code
        if now in TERMINAL:
            self.check_settled()

    def _may_become(self, now: str, change: JsonEvent) -> bool:
        """Return whether the log has a reason for a state."""
        was, is_asked_for, is_answered = self.state, self.requested == now, self.requested in CONFIRMATIONS
        first, shown = next(iter(self.open_tools.items()), (0, {}))
        is_due = shown.get("confirmation_state") == "awaiting_confirmation" and change.get("action_id") == first
        has_run = was == "user_confirmed" and self.confirmed not in self.open_tools
        reasons = {
            "error": True,  # a worker may fail at any time
            "running": is_asked_for or has_run or was in ("rate_limited", "user_rejected"),
            "paused": is_asked_for or _text(self.events[-2:][0], "kind") == "observation.loop_detection",
            "stopped": is_asked_for or self.recovery == 3,
            "finished": self.ending == now and was in ("running", "paused"),
            "rejected": self.ending == now and was in ("running", "paused"),
            "awaiting_user_input": is_asked_for or self.ending == now or was == "user_rejected",
            "awaiting_user_confirmation": is_due and was in ("running", "user_confirmed"),
            "user_confirmed": is_answered and self.confirmed in self.open_tools,
            "user_rejected": is_answered,
            "rate_limited": self.is_waiting_for_call,
        }
        return reasons.get(now, False) and (now != was or now == "error")

    def check_settled(self) -> None:
        """Check that every action that needs an observation has it."""
        if self.error_code in UNREAD_CODES or UNREAD.search(self.reason):
            return
        for number, action in sorted([*self.open_tools.items(), *self.open_others.items()], key=lambda item: item[0]):
            self.refuse("settled", f"action {number} ({_text(action, 'kind')}) has no observation", number)

    # --- Delegation --------------------------------------------------------------------------------------------------
    def _read_delegate_end(self, ended: JsonEvent) -> None:
        asked, name = _integer(ended, "delegate_id"), _text(ended, "conversation_id")
        own = "d" + sha256(f"{self.conversation_id}:{asked}".encode(errors="surrogatepass")).hexdigest()[:24]
        status, _ = self.delegates.get(asked, ("", ""))
        if status in ("", "refused"):
            self.refuse("delegation", f"ends a delegate that no action {asked} has started")
        elif status != "asked":
            self.refuse("delegation", f"ends the delegate of action {asked} a second time")
        elif self.number > self.forked_at and name != own:
            self.refuse("delegation", f"is the end of {name[:SHOWN_CHARS]!r}, not of the delegate of action {asked}")
        if _text(ended, "agent_state") not in TERMINAL | WAITING:
            self.refuse("delegation", "ends a delegate in a state that is no end")
        models = [_amount(model.get("cost_usd")) for model in _maps(ended, "models")]
        usd, steps = _amount(ended.get("cost_usd", 0)), _amount(ended.get("iterations", 0))
        if models and abs(sum(cost or 0.0 for cost in models) - (usd or 0.0)) > USD_TOLERANCE:
            self.refuse("budget", f"costs {usd} USD, which is not the sum of its models' costs")
        self._count(ended.get("cost_usd", 0), ended)
        self.delegated_steps += steps or 0.0
        self.delegates[asked] = ("ended", name)

    # --- The end of the log ------------------------------------------------------------------------------------------
    def check_end(self, index: Mapping[str, Any], *, must_be_over: bool) -> None:
        """Check the end of the log, and that the index agrees with it."""
        is_unanswered = self.unread > self.changed_at or self.requested is not None
        is_settled = self.state in TERMINAL | WAITING and not is_unanswered
        if self.state not in TERMINAL | KEEPS_ACTIONS and (is_settled or must_be_over):
            self.check_settled()
        if must_be_over and not is_settled and (is_unanswered or self.state != "rate_limited"):
            unanswered = f"a message or request got no answer (the agent is {self.state})"
            self.refuse("end", unanswered if is_unanswered else f"the conversation ended in the state {self.state}", 0)
        usd = round(self.usd, 8)
        says = {"last_event_id": self.number, "state": self.state, "iterations": self.steps, "cost_usd": usd}
        for name, value in index.items():
            is_same = abs(value - usd) <= USD_TOLERANCE if name == "cost_usd" else value in (None, says[name])
            if not is_same:
                rule = "append" if name == "last_event_id" else "index"
                self.refuse(rule, f"the index says {name} {str(value)[:SHOWN_CHARS]}, the log {says[name]}", 0)


def check_log(
    events: Sequence[Any],
    *,
    conversation_id: str | None = None,
    index: JsonEvent | None = None,
    must_be_over: bool = False,
) -> list[LogViolation]:
    """Check a log, and return its violations; none for a correct log.

    Args:
        events: all its events in order, JSON objects: `id`, `kind`, `source`, `cause_id`, `timestamp`, and others.
        conversation_id: None for the id in the first event.
        index: the fields of the index at the same moment: any of `last_event_id`, `state`, `iterations` and `cost_usd`.
    """
    first = events[0] if events and isinstance(events[0], Mapping) else {}
    log = Conversation(_text(first, "conversation_id") if conversation_id is None else conversation_id)
    if _text(first, "kind") != "conversation.created":
        log.refuse("append", f"the log does not begin with the creation of {log.conversation_id}", 1)
    for expected, event in enumerate(events, 1):
        number = event.get("id") if isinstance(event, Mapping) else None
        if type(number) is not int or number != expected:
            text = f"event {str(number)[:SHOWN_CHARS]} is where event {expected} belongs"
            log.refuse("append", text, number if type(number) is int else expected)
            return log.found  # nothing after this can be understood
        log.read(event)
    log.check_end(index or {}, must_be_over=must_be_over)
    return log.found


def _text(event: JsonEvent, name: str, default: str = "") -> str:
    value = event.get(name, default)
    return value if isinstance(value, str) else ""


def _integer(event: JsonEvent, name: str) -> int:
    return value if type(value := event.get(name)) is int else 0


def _amount(value: Any) -> float | None:
    """Return the value if it is a finite number of at least 0; else None."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e300 else None


def _map(event: JsonEvent, name: str) -> Mapping[str, Any]:
    return value if isinstance(value := event.get(name), Mapping) else {}


def _maps(event: JsonEvent, name: str) -> list[Mapping[str, Any]]:
    values = event.get(name)
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list | tuple) else []


def _time(event: JsonEvent) -> datetime | None:
    try:
        found = datetime.fromisoformat(_text(event, "timestamp"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
