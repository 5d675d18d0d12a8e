"""Delegation: what a conversation knows of those it has begun for parts of its work (OpenHands 5).

A delegate is a conversation of its own, on any worker. Its parent's log holds the action that asks for it, the event in
which the delegate reports its end, and one observation of that. A parent waits for its delegates like for tools; one in
the background is answered at once ("started"), and its end comes as an observation of its own.

Holds: pure; every delegate action gets exactly one observation with its cause, and every end that is reported exactly
one `AgentDelegateObservation`; what delegates may use up is taken out of what their parent may.
Differs: the counters are divided when a delegate begins and added up when it ends, because it runs elsewhere; an action
that cannot be carried out (no task, no such agent, too deep, nothing left) is answered by an error (B5 to B7).
"""

from __future__ import annotations

from typing import Any

from broker.actions import AgentDelegateAction
from broker.agent_state import AgentState
from broker.events import DelegateEnded, EventSource, Observation
from broker.observations import AgentDelegateObservation, ErrorObservation, SuccessObservation
from controller_worker.control_flags import steps_used, tokens_used
from controller_worker.effects import Append
from controller_worker.state import Delegate, DelegateEnd, Order, State, replace

NOT_STARTED = "AGENT_ERROR$DELEGATE_NOT_STARTED"
RESULT = "Delegated agent finished with result:\n\n"
STARTED = (
    "The delegate {agent} works in the background under the number {id}. Its result will be told when it is there."
)
GOES_ON = "The delegate {agent} (number {id}) goes on in the background. Its result will be told when it is there."
NO_TASK = "The delegate was not started: its inputs hold no task."
TOO_DEEP = "The delegate was not started: delegates may go {levels} levels deep, and this one would be deeper."
NOTHING_LEFT = "The delegate was not started: there is nothing left of the {what} for it."
NOTHING: dict[str, Any] = {"iterations": 0, "budget_usd": None, "tokens": None}
ORDERS = {
    AgentState.PAUSED: AgentState.PAUSED,
    AgentState.STOPPED: AgentState.STOPPED,
    AgentState.ERROR: AgentState.STOPPED,
    AgentState.FINISHED: AgentState.STOPPED,
    AgentState.REJECTED: AgentState.STOPPED,
}
"""What a parent's state means for its delegates."""


def with_delegate(state: State, action: AgentDelegateAction) -> State:
    """Take in the wish for a delegate, with its share of what is left."""
    metadata = action.tool_call_metadata
    turn_id = metadata.reply_id if metadata else action.id
    # What runs beside the parent leaves it a share of its own.
    shares = (metadata.total_calls_in_response if metadata else 1) + (action.background or action.join == "any")
    before = [delegate for delegate in state.delegates if delegate.turn_id != turn_id]
    left = state.max_iterations - steps_used(state) - sum(delegate.iterations for delegate in before)
    budget = tokens = None
    if state.max_budget_usd is not None:
        reserved = sum(delegate.budget_usd or 0.0 for delegate in before)
        budget = (state.max_budget_usd - state.cost_usd - reserved) / shares
    if state.max_tokens is not None:
        tokens = (state.max_tokens - tokens_used(state) - sum(delegate.tokens or 0 for delegate in before)) // shares
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
    return replace(state, delegates=(*state.delegates, _examined(state, delegate, action)))


def _examined(state: State, delegate: Delegate, action: AgentDelegateAction) -> Delegate:
    """Return the delegate with the reason why it cannot be started, if there is one."""
    refusal = ""
    if not str(action.inputs.get("task") or "").strip():
        refusal = NO_TASK
    elif state.delegate_level >= state.limits.max_delegate_level:
        refusal = TOO_DEEP.format(levels=state.limits.max_delegate_level)
    elif delegate.iterations < 1:
        refusal = NOTHING_LEFT.format(what="iterations")
    elif delegate.budget_usd is not None and delegate.budget_usd <= 0:
        refusal = NOTHING_LEFT.format(what="budget")
    elif delegate.tokens is not None and delegate.tokens < 1:
        refusal = NOTHING_LEFT.format(what="tokens")
    return delegate.but(refusal=refusal)


def steps_reserved(state: State) -> int:
    """Return the iterations that delegates may still use up."""
    return sum(delegate.iterations for delegate in state.delegates if not delegate.refusal)


def after_end(state: State, event: DelegateEnded) -> State:
    """Take in what a delegate reports at its end: its result is to be told, and what it used up counts."""
    if not any(delegate.id == event.delegate_id for delegate in state.delegates):
        return state
    end = DelegateEnd(event.conversation_id, event.content, event.outputs)
    state = replace(
        state,
        delegated_iterations=state.delegated_iterations + event.iterations,
        delegated_usd=state.delegated_usd + event.cost_usd,
        cost_usd=state.cost_usd + event.cost_usd,
        has_unknown_cost=state.has_unknown_cost or event.has_unknown_cost,
        prompt_tokens=state.prompt_tokens + event.prompt_tokens,
        completion_tokens=state.completion_tokens + event.completion_tokens,
    )
    return _with(state, event.delegate_id, end=end, **NOTHING)


def after_observation(state: State, observation: Observation) -> State:
    """Take in an observation that answers a delegate action, or tells the end of a delegate."""
    if isinstance(observation, AgentDelegateObservation) and observation.delegate_id is not None:
        left = tuple(delegate for delegate in state.delegates if delegate.id != observation.delegate_id)
        return replace(state, delegates=left)
    answered = next((delegate for delegate in state.delegates if delegate.id == observation.cause), None)
    if answered is None:
        return state
    # What was refused never was, whoever has answered it: a stop may come before the refusal is told.
    if answered.refusal or (isinstance(observation, ErrorObservation) and observation.error_id == NOT_STARTED):
        return replace(state, delegates=tuple(other for other in state.delegates if other is not answered))
    return _with(state, answered.id, is_answered=True)


def after_state_change(state: State, was: AgentState, now: AgentState) -> State:
    """Note what a change of state means for the delegates."""
    if not state.delegates:
        return state
    if now in ORDERS:
        order = Order(ORDERS[now], state.version)
        if order.state is AgentState.STOPPED:  # they use up nothing more
            state = replace(state, delegates=tuple(one.but(**NOTHING) for one in state.delegates))
        return replace(state, order=order)
    if now is AgentState.RUNNING and was is AgentState.PAUSED:
        return replace(state, order=Order(AgentState.RUNNING, state.version))
    return state


def told(state: State) -> Append | None:
    """Return the observations that are due now: of refusals, and of delegates that have ended; None for none."""
    for delegate in state.delegates:
        if delegate.refusal:
            observation: Observation = ErrorObservation(content=delegate.refusal, error_id=NOT_STARTED)
            return Append((answering(delegate, observation),), ((0, delegate.id),))
        if delegate.end is not None:
            return _end_of(state, delegate, delegate.end)
    return None


def unanswered(state: State) -> tuple[int, ...]:
    """Return the delegates that the next step waits for, and those that are to be started."""
    return tuple(delegate.id for delegate in state.delegates if not delegate.is_answered)


def answering(delegate: Delegate, observation: Observation) -> Observation:
    """Return the observation as the answer to a delegate action."""
    return observation.model_copy(
        update={
            "source": EventSource.AGENT,
            "cause": delegate.id,
            "tool_call_metadata": delegate.tool_call_metadata,
        }
    )


def _end_of(state: State, delegate: Delegate, end: DelegateEnd) -> Append:
    """Tell the end of a delegate; where any of several was waited for, the others go on in the background."""
    observation = AgentDelegateObservation(
        content=RESULT + end.content,
        outputs=end.outputs,
        source=EventSource.AGENT,
        delegate_id=delegate.id,
        conversation_id=end.conversation_id,
    )
    if delegate.is_answered:
        return Append((observation,))
    others = [
        other
        for other in state.delegates
        if delegate.is_any and other.is_any and other.turn_id == delegate.turn_id and other.id != delegate.id
    ]
    left = [other for other in others if not other.is_answered and not other.refusal and other.end is None]
    goes_on = [
        answering(other, SuccessObservation(content=GOES_ON.format(agent=other.agent, id=other.id))) for other in left
    ]
    answers = tuple((n, one.id) for n, one in enumerate((delegate, *left)))
    return Append((answering(delegate, observation), *goes_on), answers)


def _with(state: State, delegate_id: int, **changes: Any) -> State:
    delegates = tuple(one.but(**changes) if one.id == delegate_id else one for one in state.delegates)
    return replace(state, delegates=delegates)
