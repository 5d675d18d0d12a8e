"""The controller: what a log means, and what is wanted next.

`apply` folds an event into the state, `next_effect` says what should happen now. Neither does I/O, draws a random
number or reads a clock (the time is a parameter), so the same log leads to the same decision on every machine.

Order of decisions, after OpenHands section 1.8: greet, recall a person's message, announce a state that a person asked
for, announce how the agent ended its turn; then, while running: wait for tools, wait for a retry, check the limits,
call the model.

Holds: every runnable action is settled by exactly one observation; a refused step consumes nothing; a state is
announced by one `AgentStateChangedObservation`, and whatever a person asked for is announced before anything else.
Does not: know agents, tools or models; the shell (`conversation_loop`) performs what is wanted.
Differs: a message does not abandon the action under way, a resume steps, a wait ends by itself, a stop answers every
pending action, because in the original each of these leaves a conversation standing or an action without an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from broker.actions import (
    AgentFinishAction,
    AgentRejectAction,
    ChangeAgentStateAction,
    MessageAction,
    RecallAction,
    RecallType,
    SystemMessageAction,
)
from broker.agent_state import TERMINAL_STATES, AgentState
from broker.events import (
    ConversationCreated,
    Event,
    EventSource,
    ModelCallFailed,
    ModelReply,
    Observation,
)
from broker.observations import AgentStateChangedObservation, ErrorObservation, NullObservation
from broker.standing import REQUESTABLE_STATES
from controller_worker.memory.recall import recall
from controller_worker.state import PendingAction, State, UnansweredMessage, Wait, replace, without_pending

RATE_LIMIT_CODE = "rate_limit"

NOT_EXECUTED = {
    AgentState.STOPPED: (
        "Stop button pressed. The action has not been executed.",
        "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED",
    ),
    AgentState.ERROR: (
        "The action has not been executed due to a runtime error.",
        "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_ERROR",
    ),
}


@dataclass(frozen=True, slots=True)
class Append:
    """Append events.

    Attributes:
        answers: position in `events` → the runnable action that this observation settles.
        cancels: running actions whose processes are to end.
    """

    events: tuple[Event, ...]
    answers: tuple[tuple[int, int], ...] = ()
    cancels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Greet:
    """Append the agent's system message."""


@dataclass(frozen=True, slots=True)
class AwaitTools:
    """See to it that these actions are with a tool worker, then wait for their observations."""

    action_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model for the step `iteration` (from 1); `attempt` counts its calls, from 1."""

    iteration: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Park:
    """Nothing to do before `until`."""

    until: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do until somebody speaks up."""


Effect = Append | Greet | AwaitTools | CallModel | Park | Rest


def fold(state: State, events: Iterable[Event]) -> State:
    """Apply events in order."""
    for event in events:
        state = apply(state, event)
    return state


def apply(state: State, event: Event) -> State:
    """Return the state after one more event.

    Args:
        event: the event with the id `state.version + 1`.
    """
    assert event.id == state.version + 1, f"event {event.id} after version {state.version}"
    state = replace(state, version=event.id)
    match event:
        case ModelReply():
            return _after_reply(state, event)
        case Observation(cause=int(cause)) if not isinstance(event, AgentStateChangedObservation):
            return without_pending(state, cause)
        case AgentStateChangedObservation():
            return _after_state_change(state, event)
        case ModelCallFailed():
            return _after_failure(state, event)
        case MessageAction(source=EventSource.USER):
            return _after_message(state, event)
        case MessageAction(wait_for_response=True):
            return _end_turn(state, AgentState.AWAITING_USER_INPUT)
        case AgentFinishAction():
            return _end_turn(state, AgentState.FINISHED)
        case AgentRejectAction():
            return _end_turn(state, AgentState.REJECTED)
        case ChangeAgentStateAction(agent_state=wanted) if wanted in REQUESTABLE_STATES:
            return _request(state, wanted)
        case RecallAction():
            return replace(state, message=None)
        case SystemMessageAction():
            return replace(state, has_system_message=True)
        case ConversationCreated() if event.id == 1:
            return replace(
                state,
                conversation_id=event.conversation_id,
                agent=event.agent,
                workspace=event.workspace,
                limits=event.limits,
                headless=event.headless,
                max_iterations=event.limits.max_iterations,
                max_budget_usd=event.limits.max_budget_usd,
            )
    if event.runnable:
        pending = PendingAction(event.id, event.tool_call_metadata)
        return replace(state, pending=(*state.pending, pending))
    return state


def next_effect(state: State, now: datetime) -> Effect:
    """Say what is wanted now.

    Args:
        now: aware UTC; only compared with the end of a wait.
    """
    if state.version == 0:
        return Rest()
    if not state.has_system_message:
        return Greet()
    if state.message is not None:
        return Append(_recall_events(state, state.message))
    if state.requested is not None:
        return _announce(state, state.requested)
    if state.ending is not None and _has_ended(state):
        return _announce(state, state.ending, state.last_error)
    waiting = _wait_for_retry(state, now)
    if state.agent_state is AgentState.RATE_LIMITED:
        return waiting or _announce(state, AgentState.RUNNING)
    if state.agent_state is not AgentState.RUNNING:
        return Rest()
    if state.pending:
        return AwaitTools(tuple(action.id for action in state.pending[: state.agent.tool_concurrency]))
    if state.last_message_id == 0:
        return Rest()
    if waiting is not None:
        return waiting if waiting.reason != RATE_LIMIT_CODE else _announce(state, AgentState.RATE_LIMITED)
    refusal = limit_reached(state)
    if refusal:
        return _announce(state, AgentState.ERROR, refusal)
    return CallModel(state.iteration + 1, state.attempt + 1)


def end_in_error(state: State, reason: str) -> Append:
    """Return what ends the work for now: nothing pending is executed, and the error is announced."""
    return _announce(state, AgentState.ERROR, reason)


def limit_reached(state: State) -> str:
    """Return OpenHands' error text when the next step would pass a limit, else an empty text."""
    if state.iteration >= state.max_iterations:
        return (
            "RuntimeError: Agent reached maximum iteration. "
            f"Current iteration: {state.iteration}, max iteration: {state.max_iterations}"
        )
    if state.max_budget_usd is not None and state.cost_usd >= state.max_budget_usd:
        return (
            "RuntimeError: Agent reached maximum budget for conversation. "
            f"Current budget: {state.cost_usd:.2f}, max budget: {state.max_budget_usd:.2f}"
        )
    return ""


def _after_reply(state: State, reply: ModelReply) -> State:
    return replace(
        state,
        iteration=state.iteration + 1,
        attempt=0,
        wait=None,
        last_error="",
        is_reply_outdated=state.last_message_id > reply.seen_id,
        cost_usd=state.cost_usd + (reply.cost_usd or 0.0),
        has_unknown_cost=state.has_unknown_cost or reply.cost_usd is None,
        prompt_tokens=state.prompt_tokens + reply.usage.prompt_tokens,
        completion_tokens=state.completion_tokens + reply.usage.completion_tokens,
    )


def _after_failure(state: State, failure: ModelCallFailed) -> State:
    state = replace(state, attempt=failure.attempt, last_error=failure.last_error)
    if failure.retry_at is None:
        return replace(state, attempt=0, wait=None, ending=AgentState.ERROR)
    return replace(state, wait=Wait(failure.code, failure.retry_at))


def _after_message(state: State, message: MessageAction) -> State:
    """Take note of a message: it ends every wait, and the agent may not end its turn before it was answered.

    Differs: messages that arrive together share one recall, the latest's, because they are answered together.
    """
    is_first = state.last_message_id == 0 or (state.message is not None and state.message.is_first)
    unanswered = UnansweredMessage(message.id, message.content, message.timestamp, is_first)
    return _request(replace(state, message=unanswered, last_message_id=message.id, ending=None), AgentState.RUNNING)


def _after_state_change(state: State, change: AgentStateChangedObservation) -> State:
    was, now = state.agent_state, change.agent_state
    state = replace(state, agent_state=now)
    if state.requested is now:
        state = replace(state, requested=None)
    if now is state.ending or now in TERMINAL_STATES:
        state = replace(state, ending=None)
    if now is AgentState.ERROR:
        return replace(state, last_error=change.reason)
    if now is AgentState.RUNNING and was is AgentState.ERROR:
        return _extend_limits(state)
    return state


def _extend_limits(state: State) -> State:
    """Grow the limits that were hit when work goes on after an error (OpenHands 4.3, 4.4)."""
    if not state.headless and state.iteration >= state.max_iterations:
        state = replace(state, max_iterations=state.max_iterations + state.limits.max_iterations)
    amount = state.limits.max_budget_usd
    if amount is not None and state.max_budget_usd is not None and state.cost_usd >= state.max_budget_usd:
        state = replace(state, max_budget_usd=state.cost_usd + amount)
    return replace(state, last_error="", attempt=0, wait=None)


def _request(state: State, wanted: AgentState) -> State:
    """Note that a person wants a state; the same state again only takes back what was asked before."""
    if wanted is AgentState.RUNNING:
        state = replace(state, attempt=0, wait=None)
    return replace(state, requested=None if wanted is state.agent_state else wanted)


def _end_turn(state: State, ending: AgentState) -> State:
    """Note that the agent ends its turn, unless a person has spoken since its prompt was made.

    Differs: the original finishes all the same, and the person's message stays unanswered.
    """
    if state.is_reply_outdated or state.message is not None:
        return state
    return replace(state, ending=ending)


def _has_ended(state: State) -> bool:
    """Say whether the end of the turn can be announced: unless it is an error, the turn's other calls come first."""
    if state.agent_state not in (AgentState.RUNNING, AgentState.PAUSED):
        return False
    return state.ending is AgentState.ERROR or not state.pending


def _wait_for_retry(state: State, now: datetime) -> Park | None:
    if state.wait is not None and now < state.wait.until:
        return Park(state.wait.until, state.wait.reason)
    return None


def _recall_events(state: State, message: UnansweredMessage) -> tuple[Event, ...]:
    """The recall of a message, the start of the work, and what the recall found (OpenHands 1.6)."""
    recall_type = RecallType.WORKSPACE_CONTEXT if message.is_first else RecallType.KNOWLEDGE
    events: list[Event] = [RecallAction(recall_type=recall_type, query=message.content)]
    recall_id = state.version + 1
    if state.requested is AgentState.RUNNING:
        events.append(AgentStateChangedObservation(agent_state=AgentState.RUNNING))
    found = recall(state, message, recall_type) or NullObservation()
    events.append(found.model_copy(update={"cause": recall_id}))
    return tuple(events)


def _announce(state: State, wanted: AgentState, reason: str = "") -> Append:
    """Announce a state; a stop or an error first settles what has not been executed (OpenHands 1.10)."""
    events: list[Event] = []
    answers: list[tuple[int, int]] = []
    cancels: tuple[int, ...] = ()
    if wanted in NOT_EXECUTED:
        text, error_id = NOT_EXECUTED[wanted]
        for action in state.pending:
            answers.append((len(events), action.id))
            events.append(
                ErrorObservation(
                    content=text,
                    error_id=error_id,
                    source=EventSource.AGENT,
                    cause=action.id,
                    tool_call_metadata=action.tool_call_metadata,
                )
            )
        cancels = tuple(action.id for action in state.pending)
    reason = reason if wanted is AgentState.ERROR else ""
    events.append(AgentStateChangedObservation(agent_state=wanted, reason=reason))
    return Append(tuple(events), tuple(answers), cancels)
