"""Replay: repeat the decisions of a log offline, and compare them byte by byte.

The input of users, tools and models is taken from the log as it is: messages, requests, observations of actions,
replies, failed calls, condensations. All other events were decided by the controller, and are decided again: by the
core's next effect, by an agent's translation of a reply, by the answer to a confirmation. The time of a decision is
that of the event it led to.

Holds: no model, store or clock is used. The first event that would be different today is reported, with both versions.
Does not: compare the text of a system message, which is not a decision; repeat the decisions of a fork's origin;
predict errors of the loop's environment (they are taken as recorded, and only their consequences are checked).
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from broker.contract import (
    NO_SKILLS,
    Action,
    AgentFinishAction,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConversationCreated,
    ErrorObservation,
    Event,
    EventSource,
    FinishRefusedObservation,
    LoopRecoveryAction,
    MCPQuestionObservation,
    MessageAction,
    ModelReply,
    Note,
    NullObservation,
    Observation,
    PlanAcceptedObservation,
    RecallObservation,
    RiskyAction,
    SuccessObservation,
    SystemMessageAction,
)
from broker.log import parse_lines
from broker.runtime import DeckhandsError, UsageError
from controller_worker.agents import Agent, create_agent, to_turn_events
from controller_worker.core import (
    NOT_STARTED,
    STARTED,
    Append,
    AwaitDelegates,
    CallModel,
    CarryOut,
    Effect,
    Greet,
    ManageDelegates,
    Recall,
    State,
    TakeNote,
    apply,
    apply_answer,
    check_outputs,
    end_in_error,
    find_unanswered,
    make_recall,
    next_effect,
    parse_survey_skills,
)
from controller_worker.loop.answers import make_greeting
from controller_worker.model import parse_verdict
from controller_worker.security import assess

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first event that would be different today.

    Attributes:
        recorded: the event in the log; None if the log ends before it.
        decided: the event decided in its place; None if there is none.
        wanted: the effect that the core decides on at this place.
    """

    event_id: int
    recorded: Event | None
    decided: Event | None
    wanted: str

    def to_diff(self) -> list[str]:
        """Return the difference as a unified diff of both events."""
        recorded = _to_lines(self.recorded)
        decided = _to_lines(self.decided)
        diff = difflib.unified_diff(recorded, decided, "recorded", "decided now", lineterm="", n=2)
        return [f"event {self.event_id}: {self.wanted}", *diff]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        events: number of replayed events.
        decided: number of events that were decided again with the same bytes.
        is_waiting: the log ends at a point where the controller would continue at once: it was cut off, or had no
            owner.
    """

    events: int
    decided: int
    is_waiting: bool
    state: State
    divergence: Divergence | None = None

    def to_report(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        divergence = self.divergence
        return {
            "replay": True,
            "conversation_id": self.state.setup.conversation_id,
            "events": self.events,
            "decided": self.decided,
            "is_waiting": self.is_waiting,
            "state": self.state.lifecycle.agent_state.value,
            "is_same": divergence is None,
            "divergence": None
            if divergence is None
            else {"event_id": divergence.event_id, "diff": divergence.to_diff()},
        }


class Replay:
    """A replay in progress."""

    def __init__(self, events: Sequence[Event]) -> None:
        created = events[0] if events else None
        if not isinstance(created, ConversationCreated):
            raise UsageError(
                "The log does not start with the creation of its conversation.", remedy="Export the whole log."
            )
        self._events = events
        self._state = State()
        self._agent: Agent = create_agent(created.agent)
        self._expected: list[Event] = []
        self._decided = 0
        self._given_until = created.forked_at or 1  # the creation event itself

    def run(self) -> ReplayResult:
        """Replay the log up to its end or to the first divergence."""
        for event in self._events:
            now = event.timestamp or EPOCH
            if event.id > self._given_until and not self._is_accounted_for(event, now):
                decided = self._expected[0] if self._expected else None
                wanted = _render_effect(next_effect(self._state, now))
                return self._make_result(False, Divergence(event.id, event, _fill_from_record(decided, event), wanted))
            before = self._state.setup.agent
            self._state = apply(self._state, event)
            if event.id > 1 and self._state.setup.agent is not before:
                self._agent = create_agent(self._state.setup.agent)
        last = self._events[-1]
        if self._expected:
            divergence = Divergence(last.id + 1, None, self._expected[0], "the log ends within an append")
            return self._make_result(False, divergence)
        effect = next_effect(self._state, last.timestamp or EPOCH)
        return self._make_result(isinstance(effect, Append | Greet | Recall | CarryOut | TakeNote | ManageDelegates))

    def _make_result(self, is_waiting: bool, divergence: Divergence | None = None) -> ReplayResult:
        return ReplayResult(self._state.version, self._decided, is_waiting, self._state, divergence)

    def _is_accounted_for(self, event: Event, now: datetime) -> bool:
        """Return whether an event is the decided one, or may come from another process at any time."""
        if self._expected:  # an append is written whole: nothing comes between its events
            return self._take_decided(event)
        effect = next_effect(self._state, now)
        self._expected = self._find_due_events(effect)
        if self._expected and self._take_decided(event):
            return True
        if self._is_input(event, effect):
            self._expected = self._find_consequences(event)
            return True
        failed = self._expected
        self._expected = self._find_loop_error(event)
        if self._expected and self._take_decided(event):
            return True
        self._expected = failed
        return False

    def _take_decided(self, event: Event) -> bool:
        decided = _fill_from_record(self._expected[0], event)
        if decided is None or decided.export() != event.export():
            return False
        del self._expected[0]
        self._decided += 1
        return True

    def _find_due_events(self, effect: Effect) -> list[Event]:
        """Return the events that the core appends now; none if the next effect is something else."""
        if isinstance(effect, Greet):
            effect = make_greeting(self._agent, self._state)
        elif isinstance(effect, Recall):
            survey = self._events[effect.survey_id - 1] if effect.survey_id else None
            skills = parse_survey_skills(survey) if isinstance(survey, Observation) else NO_SKILLS
            effect = make_recall(self._state, skills, self._find_recalled_notes())
        elif isinstance(effect, CarryOut):
            action = self._events[effect.action_id - 1]
            answer = self._events[effect.answer_id - 1]
            assert isinstance(action, RiskyAction)
            assert isinstance(answer, ChangeAgentStateAction | MCPQuestionObservation)
            effect = apply_answer(self._state, action, answer)
        return list(effect.events) if isinstance(effect, Append) else []

    def _find_recalled_notes(self) -> Sequence[Note]:
        """Return the notes of the notebook, as far as the next recall shows them."""
        follows = self._events[self._state.version :]
        recall = next((event for event in follows if isinstance(event, RecallObservation | NullObservation)), None)
        return (recall.notes or ()) if isinstance(recall, RecallObservation) else ()

    def _is_input(self, event: Event, effect: Effect) -> bool:
        """Return whether another process than the controller may have written an event."""
        if isinstance(effect, AwaitDelegates) and event.cause in effect.delegate_ids:
            return self._is_start_of_delegate(event)
        if isinstance(event, ModelReply) and event.service == "agent":
            return event.iteration == self._state.usage.iteration + 1
        if isinstance(event, FinishRefusedObservation) and event.reason == "hook":
            turn = self._events[self._state.calls.reply_id : event.id - 1]
            return any(isinstance(decided, AgentFinishAction) for decided in turn)
        is_answer = isinstance(event, Observation) and not isinstance(event, PlanAcceptedObservation)
        if is_answer and event.cause and self._events[event.cause - 1].runnable:
            return any(pending.id == event.cause for pending in self._state.tools.pending)
        if isinstance(event, MessageAction | ChangeAgentStateAction | LoopRecoveryAction):
            return event.source is not EventSource.AGENT
        return not event.is_decided

    def _is_start_of_delegate(self, event: Event) -> bool:
        """Return whether an event records the start of a delegate, or its failure: an input from the loop."""
        delegate = next(delegate for delegate in self._state.delegation.delegates if delegate.id == event.cause)
        if isinstance(event, ErrorObservation):
            return event.error_id == NOT_STARTED
        begun = STARTED.format(agent=delegate.agent, id=delegate.id)
        return delegate.is_background and isinstance(event, SuccessObservation) and event.content == begun

    def _find_consequences(self, event: Event) -> list[Event]:
        """Return the events that the controller appends together with an input event."""
        if isinstance(event, ModelReply) and event.service == "critic":
            return [parse_verdict(event, finish_id=self._state.lifecycle.result_id)]
        if not isinstance(event, ModelReply) or event.service != "agent":
            return []
        output = self._state.setup.agent.output
        led_to = check_outputs(to_turn_events(self._agent, event, self._state.tasks.items, output), output)
        return list(assess(led_to, self._state.setup.agent.confirmation, self._state.setup.workspace))

    def _find_loop_error(self, event: Event) -> list[Event]:
        """Return the end of work after an error that the log does not explain, if the next event is that end."""
        unsettled = len(self._state.tools.pending) + len(find_unanswered(self._state))
        follows = self._events[event.id - 1 : event.id + unsettled]
        for announced in follows:
            if isinstance(announced, AgentStateChangedObservation) and announced.agent_state is AgentState.ERROR:
                if announced is event:
                    return [announced]
                return list(end_in_error(self._state, announced.reason, code=announced.code).events)
        return []


def replay(events: Sequence[Event]) -> ReplayResult:
    """Repeat the decisions of a log.

    Args:
        events: whole events from the first on, without gaps.

    Raises:
        UsageError: it does not start with the conversation's creation, or names an agent that this version lacks.
    """
    return Replay(events).run()


def _fill_from_record(decided: Event | None, event: Event) -> Event | None:
    """Return a decided event with the fields that the append or the agent's text adds; None if the kinds differ."""
    if decided is None or type(decided) is not type(event):
        return decided
    update: dict[str, Any] = {"id": event.id, "timestamp": event.timestamp}
    if isinstance(event, SystemMessageAction):
        update |= {"content": event.content, "tools": event.tools}
    if isinstance(event, Action):
        update["traceparent"] = event.traceparent
    return decided.model_copy(update=update)


def _render_effect(effect: Effect) -> str:
    if isinstance(effect, CallModel):
        return f"the controller decides to ask the model for step {effect.iteration}"
    return f"the controller decides: {type(effect).__name__}"


def _to_lines(event: Event | None) -> list[str]:
    return json.dumps(event.export(), indent=1, ensure_ascii=False).splitlines() if event is not None else []


def main() -> None:
    """Replay the log on standard input, one event per line, and print the report as JSON."""
    try:
        report = replay(parse_lines(sys.stdin, source="the log")).to_report()
    except DeckhandsError as error:
        report = {"replay": True, "error": error.message, "remedy": error.remedy, "code": error.code}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
