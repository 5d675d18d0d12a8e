"""Delegation: the delegates that a conversation has started for parts of its work (OpenHands 5).

A delegate is a separate conversation, on any worker. Its parent's log holds the action that asks for it, the event that
reports its end, and one observation of that end. A parent waits for delegates as for tools. A delegate in the
background is answered at once ("started"), and another observation reports its end later.

Holds: pure. Every delegate action gets exactly one observation with its cause, and every reported end exactly one
`AgentDelegateObservation`. The limits of delegates are shares of their parent's limits.
Differs: the remaining limits are divided when delegates start, with one share for the parent, and the usage is added up
when a delegate ends. A delegate runs elsewhere and must leave the parent enough to handle the result. An action that
cannot be carried out (no task, unknown agent, too deep, nothing left) is answered with an error (B5 to B7).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from broker.contract import (
    AgentDelegateAction,
    AgentDelegateObservation,
    AgentState,
    AgentStateChangedObservation,
    DelegateEnded,
    DelegateOperation,
    DelegatesObservation,
    ErrorObservation,
    EventsLostObservation,
    EventSource,
    InterruptedObservation,
    ManageDelegatesAction,
    Observation,
    RolledBackObservation,
    SuccessObservation,
    ToolCallMetadata,
    codec,
)
from controller_worker.core.announcement import to_answer
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns.limits import count_steps, count_tokens
from controller_worker.core.effects import (
    Append,
    AwaitDelegates,
    Effect,
    ManageDelegates,
    NotifyDelegates,
    SideEffect,
    StartDelegate,
)

if TYPE_CHECKING:
    from controller_worker.core.state import State

NOT_STARTED = "AGENT_ERROR$DELEGATE_NOT_STARTED"
RESULT = "Delegated agent finished with result:\n\n"
STARTED = (
    "The delegate {agent} (number {id}) is working in the background. You will get its result as soon as it has "
    "finished."
)
STILL_RUNNING = (
    "The delegate {agent} (number {id}) keeps working in the background. You will get its result as soon as it has "
    "finished."
)
NO_TASK = "The delegate was not started: its inputs hold no task."
TOO_DEEP = "The delegate was not started: delegates may go {levels} levels deep, and this one would be deeper."
NOTHING_LEFT = "The delegate was not started: its parent has no {what} left to give it."
REPORTED_BYTES = 2**20
"""Approximate limit on the reports in one append; a longer report gets its own append."""
NOTHING: dict[str, Any] = {"iterations": 0, "budget_usd": None, "tokens": None}
ORDERED_STATES = {
    AgentState.PAUSED: AgentState.PAUSED,
    AgentState.STOPPED: AgentState.STOPPED,
    AgentState.ERROR: AgentState.STOPPED,
    AgentState.FINISHED: AgentState.STOPPED,
    AgentState.REJECTED: AgentState.STOPPED,
}
"""The delegates' state for each state of the parent."""


@dataclass(frozen=True, slots=True)
class DelegateEnd:
    """The result of a delegate, kept until the model has seen it."""

    conversation_id: str
    content: str
    outputs: dict[str, Any]


@dataclass(frozen=True)
class Delegate:
    """A conversation started for a part of this one's work, kept until the model knows its end.

    Attributes:
        id: the action that asks for it.
        turn_id: the reply that holds that action.
        is_any: the step waits for any one of the turn's delegates.
        is_answered: the action has its observation; no step waits for it.
        refusal: why it cannot be started; empty if it can.
        iterations, budget_usd, tokens: its limits.
        awaited: `all` if the next step waits for all delegates marked so, `any` if one of them suffices; else empty.
        is_paused: its parent's agent has paused it. Its share stays reserved.
        is_stopping: its parent's agent has stopped it.
        is_forgotten: the action that asks for it was rolled back. Its end counts for the limits and is hidden from the
            model.
    """

    id: int
    agent: str
    tool_call_metadata: ToolCallMetadata | None
    turn_id: int
    is_background: bool = False
    is_any: bool = False
    is_answered: bool = False
    refusal: str = ""
    iterations: int = 0
    budget_usd: float | None = None
    tokens: int | None = None
    end: DelegateEnd | None = None
    awaited: str = ""
    is_paused: bool = False
    is_stopping: bool = False
    is_forgotten: bool = False

    @property
    def is_in_background(self) -> bool:
        """Whether the agent can see and control it: it has started, and its end is not known."""
        return self.is_answered and self.end is None and not self.is_forgotten


@dataclass(frozen=True, slots=True)
class DelegateOrder:
    """A state change for the delegates, and the event in the parent's log that requests it.

    Attributes:
        since: applies to delegates that this event or a later one asked for.
        takes_back: applies only to delegates paused by an earlier order that this log has lost.
    """

    state: AgentState
    id: int
    since: int = 0
    takes_back: bool = False


@dataclass(frozen=True, slots=True)
class ManagingAction:
    """An action that controls delegates, until it has its observation."""

    id: int
    tool_call_metadata: ToolCallMetadata | None
    operation: DelegateOperation
    join: Literal["all", "any"]


@dataclass(frozen=True)
class Delegation:
    """The delegates of a conversation.

    Attributes:
        delegates: delegates with an end that the model does not know yet.
        iterations: steps of ended delegates.
        spent_usd: cost of ended delegates, included in the conversation's `cost_usd`.
        order: the latest order to the delegates.
        managing: the agent's actions that control delegates, without an observation.
    """

    delegates: tuple[Delegate, ...] = ()
    iterations: int = 0
    spent_usd: float = 0.0
    order: DelegateOrder | None = None
    managing: tuple[ManagingAction, ...] = ()


def _after_action(delegation: Delegation, action: AgentDelegateAction, state: State) -> Delegation:
    return evolve(delegation, delegates=(*delegation.delegates, _make_delegate(state, action)))


def _make_delegate(state: State, action: AgentDelegateAction) -> Delegate:
    """Return the delegate that an action asks for, with its share of the remaining limits."""
    metadata = action.tool_call_metadata
    turn_id = metadata.reply_id if metadata else action.id
    # the parent keeps one share for the rest of its work
    shares = (metadata.total_calls_in_response if metadata else 1) + 1
    before = [delegate for delegate in state.delegation.delegates if delegate.turn_id != turn_id]
    left = state.usage.max_iterations - count_steps(state) - sum(delegate.iterations for delegate in before)
    budget = None
    tokens = None
    if state.usage.max_budget_usd is not None:
        reserved = sum(delegate.budget_usd or 0.0 for delegate in before)
        budget = (state.usage.max_budget_usd - state.usage.cost_usd - reserved) / shares
    if state.usage.max_tokens is not None:
        tokens = (
            state.usage.max_tokens - count_tokens(state) - sum(delegate.tokens or 0 for delegate in before)
        ) // shares
    delegate = Delegate(
        id=action.id,
        agent=action.agent,
        tool_call_metadata=metadata,
        turn_id=turn_id,
        is_background=action.background,
        is_any=action.join == "any",
        iterations=left // shares,
        budget_usd=budget,
        tokens=tokens,
    )
    return _check_delegate(state, delegate, action)


def _check_delegate(state: State, delegate: Delegate, action: AgentDelegateAction) -> Delegate:
    """Return the delegate, with a refusal if it cannot be started."""
    refusal = ""
    if not str(action.inputs.get("task") or "").strip():
        refusal = NO_TASK
    elif state.setup.delegate_level >= state.setup.limits.max_delegate_level:
        refusal = TOO_DEEP.format(levels=state.setup.limits.max_delegate_level)
    elif delegate.iterations < 1:
        refusal = NOTHING_LEFT.format(what="iterations")
    elif delegate.budget_usd is not None and delegate.budget_usd <= 0:
        refusal = NOTHING_LEFT.format(what="budget")
    elif delegate.tokens is not None and delegate.tokens < 1:
        refusal = NOTHING_LEFT.format(what="tokens")
    return evolve(delegate, refusal=refusal)


def count_reserved_steps(state: State) -> int:
    """Return the iterations that delegates may still use."""
    return sum(delegate.iterations for delegate in state.delegation.delegates if not delegate.refusal)


def sum_reserved_usd(state: State) -> float:
    """Return the USD that delegates may still spend."""
    return sum(delegate.budget_usd or 0.0 for delegate in state.delegation.delegates if not delegate.refusal)


def count_reserved_tokens(state: State) -> int:
    """Return the tokens that delegates may still use."""
    return sum(delegate.tokens or 0 for delegate in state.delegation.delegates if not delegate.refusal)


def _after_end(delegation: Delegation, event: DelegateEnded, state: State) -> Delegation:
    """Record the end of a delegate: keep its result for the model and count its usage."""
    ended = _find(delegation, event.delegate_id)
    if ended is None:
        return delegation
    if ended.awaited == "any":
        delegation = _update_all(
            delegation, [one.id for one in delegation.delegates if one.awaited == "any"], awaited=""
        )
    if not ended.is_forgotten:
        end = DelegateEnd(event.conversation_id, event.content, event.outputs)
        delegation = _update_delegate(delegation, ended.id, end=end, **NOTHING)
    else:
        delegation = _remove_delegate(delegation, ended.id)
    return evolve(
        delegation,
        iterations=delegation.iterations + event.iterations,
        spent_usd=delegation.spent_usd + event.cost_usd,
    )


def _after_observation(delegation: Delegation, observation: Observation, state: State) -> Delegation:
    """Record an observation that answers a delegate action or reports the end of a delegate."""
    if delegation.managing and any(action.id == observation.cause for action in delegation.managing):
        return _after_management(delegation, observation)
    if not delegation.delegates:
        return delegation
    if isinstance(observation, AgentDelegateObservation) and observation.delegate_id is not None:
        return _remove_delegate(delegation, observation.delegate_id)
    answered = _find(delegation, observation.cause)
    if answered is None:
        return delegation
    # A refused delegate was never started. A stop may answer its action before the refusal does.
    if answered.refusal or (isinstance(observation, ErrorObservation) and observation.error_id == NOT_STARTED):
        return _remove_delegate(delegation, answered.id)
    return _update_delegate(delegation, answered.id, is_answered=True)


def _after_managing_action(delegation: Delegation, action: ManageDelegatesAction, state: State) -> Delegation:
    asked = ManagingAction(action.id, action.tool_call_metadata, action.operation, action.join)
    return evolve(delegation, managing=(*delegation.managing, asked))


def _after_management(delegation: Delegation, observation: Observation) -> Delegation:
    """Record the effects of an action that controls delegates."""
    done = next(action for action in delegation.managing if action.id == observation.cause)
    delegation = evolve(delegation, managing=tuple(action for action in delegation.managing if action is not done))
    if not isinstance(observation, DelegatesObservation):  # it was not carried out
        return delegation
    changes: dict[str, Any] = {}
    match done.operation:
        case "wait":
            changes = {"awaited": done.join}
        case "pause":
            changes = {"is_paused": True}
        case "resume":
            changes = {"is_paused": False}
        case "stop":
            changes = {"is_paused": False, "is_stopping": True}
    found = [number for number in observation.numbers if _find(delegation, number) is not None]
    return _update_all(delegation, found, **changes) if changes else delegation


def _after_state_change(delegation: Delegation, change: AgentStateChangedObservation, state: State) -> Delegation:
    """Note the order to the delegates that follows from a change of state."""
    if not delegation.delegates:
        return delegation
    was = state.lifecycle.agent_state
    now = change.agent_state
    if now in ORDERED_STATES:
        if ORDERED_STATES[now] is AgentState.STOPPED:  # they use nothing more
            delegation = evolve(delegation, delegates=tuple(evolve(one, **NOTHING) for one in delegation.delegates))
        return evolve(delegation, order=DelegateOrder(ORDERED_STATES[now], change.id))
    if now is AgentState.RUNNING and was is AgentState.PAUSED:
        return evolve(delegation, order=DelegateOrder(AgentState.RUNNING, change.id))
    return delegation


def _after_loss(delegation: Delegation, event: EventsLostObservation, state: State) -> Delegation:
    """Resume the delegates paused by lost events, unless the log still has a reason for the pause."""
    if not delegation.delegates or state.lifecycle.agent_state in ORDERED_STATES:
        return delegation
    return evolve(delegation, order=DelegateOrder(AgentState.RUNNING, event.id, takes_back=True))


def _after_interruption(delegation: Delegation, event: InterruptedObservation, state: State) -> Delegation:
    """Stop all delegates."""
    if not delegation.delegates:
        return delegation
    delegates = tuple(evolve(one, **NOTHING) for one in delegation.delegates)
    return evolve(delegation, delegates=delegates, order=DelegateOrder(AgentState.STOPPED, event.id))


def roll_back(delegation: Delegation, event: RolledBackObservation) -> Delegation:
    """Return the part after a rollback: the delegates of the rolled-back work stop and are not reported."""
    kept = tuple(evolve(one, awaited="") for one in delegation.delegates if one.id < event.start_id)
    left = [one for one in delegation.delegates if one.id >= event.start_id and one.end is None and not one.refusal]
    if not left:
        return evolve(delegation, delegates=kept)
    forgotten = tuple(evolve(one, is_answered=True, is_forgotten=True, **NOTHING) for one in left)
    order = DelegateOrder(AgentState.STOPPED, event.id, since=event.start_id)
    return evolve(delegation, delegates=(*kept, *forgotten), order=order)


def report_ends(state: State, now: datetime) -> Effect | None:
    """Report refusals and ended delegates to the model, as many as fit into one append."""
    events: list[Observation] = []
    answers: list[tuple[int, int]] = []
    size_bytes = 0
    is_partial = False

    def answer(delegate: Delegate, observation: Observation) -> None:
        answers.append((len(events), delegate.id))
        events.append(to_answer(delegate, observation))

    goes_on: set[int] = set()  # turns that waited for any one delegate; the others continue in the background
    for delegate in state.delegation.delegates:
        if delegate.refusal:
            report: Observation = ErrorObservation(content=delegate.refusal, error_id=NOT_STARTED)
        elif delegate.end is not None:
            report = _make_end_report(delegate, delegate.end)
        else:
            continue
        size_bytes += len(codec.pack(report.wire()))
        if events and size_bytes > REPORTED_BYTES:
            is_partial = True
            break
        if delegate.end is not None and delegate.is_answered:
            events.append(report)
        else:
            answer(delegate, report)
            # In the same append: later events cannot show that the turn does not wait for the others.
            if delegate.end is not None and delegate.is_any and delegate.turn_id not in goes_on:
                goes_on.add(delegate.turn_id)
                for other in _find_running_siblings(state, delegate):
                    text = STILL_RUNNING.format(agent=other.agent, id=other.id)
                    answer(other, SuccessObservation(content=text))
    return Append(tuple(events), tuple(answers), is_partial=is_partial) if events else None


def manage_delegates(state: State, now: datetime) -> Effect | None:
    """Carry out the oldest action that controls delegates.

    While a user has paused the agent, its delegates are paused too, so actions that would let them work wait.
    """
    if not state.delegation.managing:
        return None
    asked = state.delegation.managing[0]
    is_paused = AgentState.PAUSED in (state.lifecycle.agent_state, state.lifecycle.requested)
    return None if is_paused and asked.operation in ("message", "resume") else ManageDelegates(asked.id)


def has_room(state: State) -> bool:
    """Return whether the limits still hold everything that is reserved for delegates."""
    return all(claimed <= limit for claimed, limit in _find_claims(state))


def _find_claims(state: State) -> Iterator[tuple[float, float]]:
    """Yield, for each limit, the used and reserved amount, and the limit."""
    usage = state.usage
    yield count_steps(state) + count_reserved_steps(state), usage.max_iterations
    if usage.max_budget_usd is not None:
        yield usage.cost_usd + sum_reserved_usd(state), usage.max_budget_usd
    if usage.max_tokens is not None:
        yield count_tokens(state) + count_reserved_tokens(state), usage.max_tokens


def find_side_effects(state: State) -> Iterator[SideEffect]:
    """Yield the delegates to start again, and the order to pass on. Neither depends on the next decision."""
    for delegate in state.delegation.delegates:
        if delegate.is_answered and delegate.end is None and delegate.iterations > 0:
            yield StartDelegate(delegate.id)
    order = state.delegation.order
    if order is not None:
        yield NotifyDelegates(order.state, order.id, order.since, order.takes_back)


def await_delegates(state: State, now: datetime) -> Effect | None:
    """Start the delegates of the turn and wait for those that the step needs."""
    waiting = find_unanswered(state)
    is_awaited = any(one.awaited and one.is_in_background and not one.is_paused for one in state.delegation.delegates)
    return AwaitDelegates(waiting) if waiting or is_awaited else None


def leave_room(state: State, now: datetime) -> Effect | None:
    """Wait while the running delegates may use up the rest of a limit.

    If all are paused, there is nothing to wait for. They are resumed only while there is room, see `has_room`.
    """
    if all(one.is_paused for one in state.delegation.delegates):
        return None
    is_reserved = any(claimed >= limit for claimed, limit in _find_claims(state))
    return AwaitDelegates(()) if is_reserved else None


def find_unanswered(state: State) -> tuple[int, ...]:
    """Return the ids of the delegates that the next step starts and waits for."""
    return tuple(delegate.id for delegate in state.delegation.delegates if not delegate.is_answered)


def _make_end_report(delegate: Delegate, end: DelegateEnd) -> AgentDelegateObservation:
    return AgentDelegateObservation(
        content=RESULT + end.content,
        outputs=end.outputs,
        source=EventSource.AGENT,
        delegate_id=delegate.id,
        conversation_id=end.conversation_id,
    )


def _find_running_siblings(state: State, delegate: Delegate) -> list[Delegate]:
    """Return the other delegates of a turn that waits for any one delegate and now no longer waits."""
    return [
        other
        for other in state.delegation.delegates
        if other.is_any
        and other.turn_id == delegate.turn_id
        and not (other.is_answered or other.refusal or other.end is not None)
    ]


def _find_index(delegation: Delegation, delegate_id: int) -> int:
    """Return the index of a delegate, or its insertion point: delegates are in the order of the log."""
    return bisect_left(delegation.delegates, delegate_id, key=attrgetter("id"))


def _find(delegation: Delegation, delegate_id: int | None) -> Delegate | None:
    if delegate_id is None:
        return None
    place = _find_index(delegation, delegate_id)
    found = delegation.delegates[place : place + 1]
    return found[0] if found and found[0].id == delegate_id else None


def _update_all(delegation: Delegation, delegate_ids: Iterable[int], **changes: Any) -> Delegation:
    for delegate_id in delegate_ids:
        delegation = _update_delegate(delegation, delegate_id, **changes)
    return delegation


def _update_delegate(delegation: Delegation, delegate_id: int, **changes: Any) -> Delegation:
    place = _find_index(delegation, delegate_id)
    delegates = list(delegation.delegates)
    delegates[place] = evolve(delegates[place], **changes)
    return evolve(delegation, delegates=tuple(delegates))


def _remove_delegate(delegation: Delegation, delegate_id: int) -> Delegation:
    place = _find_index(delegation, delegate_id)
    delegates = delegation.delegates
    if _find(delegation, delegate_id) is None:
        return delegation
    return evolve(delegation, delegates=(*delegates[:place], *delegates[place + 1 :]))


DELEGATION = Concern(
    "delegation",
    {
        AgentDelegateAction: _after_action,
        DelegateEnded: _after_end,
        AgentStateChangedObservation: _after_state_change,
        ManageDelegatesAction: _after_managing_action,
        InterruptedObservation: _after_interruption,
        EventsLostObservation: _after_loss,
        Observation: _after_observation,
    },
)
