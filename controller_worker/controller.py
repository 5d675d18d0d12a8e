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
from datetime import datetime
from typing import Any

from broker.actions import (
    AgentDelegateAction,
    AgentFinishAction,
    AgentRejectAction,
    ChangeAgentStateAction,
    CondensationRequestAction,
    LoopRecoveryAction,
    MessageAction,
    RecallAction,
    SystemMessageAction,
    TaskTrackingAction,
)
from broker.agent_state import TERMINAL_STATES, AgentState
from broker.events import (
    Action,
    ConversationCreated,
    DelegateEnded,
    Event,
    EventSource,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    ModelSwitched,
    Observation,
)
from broker.loop_policy import STUCK_CODE
from broker.notes import NoteAction
from broker.observations import (
    AgentStateChangedObservation,
    FinishRefusedObservation,
    FinishVerdictObservation,
    LoopDetectionObservation,
)
from broker.planning import PlanAction
from broker.standing import ANSWERS, REQUESTABLE_STATES
from controller_worker import acceptance, delegation, handing_in, opening, planning
from controller_worker.announcement import announce
from controller_worker.confirmation import after_answer, may_run, rest_of_rejection, to_carry_out, with_runnable
from controller_worker.control_flags import after_start, is_out_of_time, limit_reached, steps_used, with_limits
from controller_worker.effects import (
    Append,
    AwaitDelegates,
    AwaitTools,
    CallModel,
    Effect,
    Greet,
    Recall,
    Rest,
    TakeNote,
)
from controller_worker.failures import failure_of
from controller_worker.gate import after_deferral, at_gate, is_at_gate
from controller_worker.loop_recovery import STOP, after_choice, after_detection, loop_of, recover, respond
from controller_worker.memory import survey
from controller_worker.recalling import recalled
from controller_worker.retrying import after_failure, wait_for_retry
from controller_worker.state import PendingAction, State, UnansweredMessage, replace, without_pending
from controller_worker.stuck_detector import (
    RecentEvents,
    after_wait,
    is_poll,
    trace_of,
    with_action,
    with_observation,
    with_settled,
)


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
    if 0 < state.version == state.forked_at:
        state = replace(state, inherited_usd=state.cost_usd - state.delegated_usd)
    state = replace(state, version=event.id)
    match event:
        case ModelReply():
            return _after_reply(state, event)
        case AgentStateChangedObservation():
            return _after_state_change(state, event)
        case LoopDetectionObservation():
            return after_detection(state)
        case FinishRefusedObservation():
            return acceptance.after_refusal(state, event)
        case FinishVerdictObservation():
            return acceptance.after_verdict(state, event)
        case Observation():
            return _after_observation(state, event)
        case Action():
            return _after_action(state, event)
        case ModelCallFailed():
            return after_failure(state, event)
        case ModelCallDeferred():
            return after_deferral(state, event)
        case ModelCallAdmitted():
            return replace(state, gate=None)
        case DelegateEnded():
            return delegation.after_end(state, event)
        case ModelSwitched(model=model):
            llm = state.agent.llm.model_copy(update={"model": model})
            return replace(state, agent=state.agent.model_copy(update={"llm": llm}))
        case ConversationCreated() if event.id == 1:
            state = replace(
                state,
                conversation_id=event.conversation_id,
                agent=event.agent,
                workspace=event.workspace,
                tenancy=event.tenancy or state.tenancy,
                headless=event.headless,
                parent=event.parent,
                delegate_level=event.parent.level if event.parent else 0,
                forked_at=event.forked_at,
            )
            return with_limits(state, event.limits)
    return state


def next_effect(state: State, now: datetime) -> Effect:
    """Say what is wanted now.

    Args:
        now: aware UTC; only compared with the end of a wait and of the time allowed.
    """
    if not state.has_system_message:
        return Greet() if state.version else Rest()
    if state.note_taking:
        return TakeNote(state.note_taking[0].id)
    if state.recovery and (state.recovery == STOP or not may_run(state)):
        return recover(state, state.recovery)
    if opening.wants_opening(state):
        return opening.opening(state)
    if survey.wants_survey(state):
        return survey.survey(state)
    if state.message is not None:
        needs_reading = state.survey.answer_id or state.agent.memory is not None
        return Recall(state.survey.answer_id) if needs_reading else recalled(state)
    if state.requested in ANSWERS and state.asked_id is not None:
        return to_carry_out(state)
    if state.requested is not None:
        return announce(state, state.requested)
    told = delegation.told(state) if state.delegates else None
    if told is not None:
        return told
    if state.ending is not None and _has_ended(state):
        if acceptance.wants_check(state):
            return acceptance.check(state) if state.agent_state is AgentState.RUNNING else Rest()
        if not acceptance.wants_verdict(state):
            return announce(state, state.ending, state.last_error, code=state.error_code)
    if state.agent_state in (AgentState.RUNNING, AgentState.RATE_LIMITED, AgentState.USER_CONFIRMED):
        out_of_time = is_out_of_time(state, now)
        if out_of_time is not None:
            return announce(state, AgentState.ERROR, out_of_time.text, code=out_of_time.code)
    if is_at_gate(state):
        return at_gate(state)
    waiting = wait_for_retry(state, now)
    if state.agent_state is AgentState.RATE_LIMITED:
        return waiting or announce(state, AgentState.RUNNING)
    if state.agent_state is AgentState.USER_CONFIRMED and state.confirmed_id not in may_run(state):
        return announce(state, AgentState.RUNNING)
    if state.agent_state is AgentState.USER_REJECTED:
        return rest_of_rejection(state)
    if state.agent_state not in (AgentState.RUNNING, AgentState.USER_CONFIRMED):
        return Rest()
    if state.pending:
        ready = planning.up_to_plan(state, may_run(state))
        if state.plan.action_id in ready:
            return planning.accepted(state)
        return AwaitTools(ready[: state.agent.tool_concurrency]) if ready else _ask_for_confirmation(state)
    if delegation.unanswered(state):
        return AwaitDelegates(delegation.unanswered(state))
    if state.last_message_id == 0:
        return Rest()
    if state.acceptance.is_refused:
        return acceptance.refuse(state)
    if handing_in.is_hopeless(state):
        return handing_in.give_up(state)
    if waiting is not None:
        shown = failure_of(waiting.reason).waiting
        return waiting if shown is state.agent_state else announce(state, shown)
    if acceptance.wants_verdict(state):
        return acceptance.ask_critic(state)
    loop = loop_of(state)
    if loop is not None:
        return respond(state, loop)
    refusal = limit_reached(state)
    if refusal is not None:
        return announce(state, AgentState.ERROR, refusal.text, code=refusal.code)
    if state.delegates and steps_used(state) + delegation.steps_reserved(state) >= state.max_iterations:
        return AwaitDelegates(())
    if state.wants_condensation:
        return Append((CondensationRequestAction(),))
    return CallModel(state.iteration + 1, state.attempt + 1)


def _after_action(state: State, action: Action) -> State:
    begun = opening.after_start(state, action) or survey.after_start(state, action)
    begun = begun or acceptance.after_start(state, action)
    if begun is not None:  # no step of the agent's, so none of a loop either
        return begun
    trace = None
    if state.agent.enable_stuck_detection:
        metadata = action.tool_call_metadata
        is_of_reply = action.source is EventSource.AGENT
        trace = trace_of(action, metadata.reply_id if metadata else state.reply_id if is_of_reply else 0)
    if action.runnable:
        state = with_runnable(state, action, trace)
        return planning.with_plan(state, action) if isinstance(action, PlanAction) else state
    if trace is not None:
        state = replace(state, recent=with_action(state.recent, action, trace, state.agent.loop_policy))
    match action:
        case AgentDelegateAction():
            return delegation.with_delegate(state, action)
        case MessageAction(source=EventSource.USER):
            return _after_message(state, action)
        case MessageAction(wait_for_response=True):
            return _end_turn(state, AgentState.AWAITING_USER_INPUT)
        case AgentFinishAction():
            return _end_turn(acceptance.after_finish(state), AgentState.FINISHED)
        case AgentRejectAction():
            return _end_turn(state, AgentState.REJECTED)
        case ChangeAgentStateAction(agent_state=wanted) if wanted in REQUESTABLE_STATES:
            return _request(state, wanted)
        case ChangeAgentStateAction(agent_state=wanted) if wanted in ANSWERS:
            return after_answer(state, action)
        case LoopRecoveryAction(option=option):
            return after_choice(state, option)
        case RecallAction():
            return replace(state, message=None)
        case SystemMessageAction():
            return replace(state, has_system_message=True)
        case CondensationRequestAction():
            return replace(state, wants_condensation=False)
        case NoteAction():
            return replace(state, note_taking=(*state.note_taking, PendingAction(action.id, action.tool_call_metadata)))
        case TaskTrackingAction(command="plan"):
            return replace(state, task_list=action.task_list)
    return state


def _after_observation(state: State, observation: Observation) -> State:
    if state.delegates:
        state = delegation.after_observation(state, observation)
    if state.note_taking:
        left = tuple(asked for asked in state.note_taking if asked.id != observation.cause)
        state = replace(state, note_taking=left)
    settled = next((action for action in state.pending if action.id == observation.cause), None)
    if settled is not None:
        state = without_pending(state, settled.id)
        if settled.id == state.plan.action_id:
            return planning.after_answer(state, observation)
        if settled.id == state.opening.action_id:
            return opening.after_answer(state, observation)
        if settled.id == state.survey.action_id:
            return survey.after_answer(state, observation)
        if settled.id == state.acceptance.check_id:
            return acceptance.after_check(state, observation)
    if not state.agent.enable_stuck_detection or is_poll(observation):
        return state
    policy, recent = state.agent.loop_policy, state.recent
    if settled is not None and settled.trace is not None and not getattr(observation, "hidden", False):
        recent = with_settled(after_wait(recent, settled.trace, observation), settled.trace, policy)
    return replace(state, recent=with_observation(recent, observation, policy))


def _after_reply(state: State, reply: ModelReply) -> State:
    """Count what a reply cost; only one to the agent's own question is a step."""
    changes: dict[str, Any] = {
        "gate": None,
        "attempt": 0,
        "wait": None,
        "cost_usd": state.cost_usd + (reply.cost_usd or 0.0),
        "has_unknown_cost": state.has_unknown_cost or reply.cost_usd is None,
        "prompt_tokens": state.prompt_tokens + reply.usage.prompt_tokens,
        "completion_tokens": state.completion_tokens + reply.usage.completion_tokens,
    }
    if reply.service != "condenser":
        changes["overflows"] = 0
    if reply.service == "agent":
        changes |= {
            "reply_id": reply.id,
            "iteration": state.iteration + 1,
            "last_error": "",
            "error_code": "",
            "is_reply_outdated": state.last_message_id > reply.seen_id,
        }
    return replace(state, **changes)


def _after_message(state: State, message: MessageAction) -> State:
    """Take note of a message: it ends every wait, and the agent may not end its turn before it was answered.

    Differs: messages that arrive together share one recall, the latest's, because they are answered together.
    """
    if not state.headless:
        state = replace(state, recent=RecentEvents())
    if not state.recovery:
        state = replace(state, loop=None, loops_met=0)
    state = acceptance.forgotten(state)
    is_first = state.last_message_id == 0 or (state.message is not None and state.message.is_first)
    unanswered = UnansweredMessage(message.id, message.content, message.timestamp, is_first)
    return _request(replace(state, message=unanswered, last_message_id=message.id, ending=None), AgentState.RUNNING)


def _after_state_change(state: State, change: AgentStateChangedObservation) -> State:
    was, now = state.agent_state, change.agent_state
    state = replace(state, agent_state=now)
    if state.requested is now or (state.requested in ANSWERS and now in ANSWERS):
        state = replace(state, requested=None)
    state = delegation.after_state_change(replace(state, asked_id=change.action_id), was, now)
    if now not in (AgentState.RUNNING, AgentState.RATE_LIMITED):
        state = replace(state, gate=None)
    if now is state.ending or now in TERMINAL_STATES:
        state = replace(state, ending=None)
    if now is AgentState.STOPPED:
        return replace(state, recovery=0, loop=None)
    if now is AgentState.ERROR:
        loop = loop_of(state) if change.code == STUCK_CODE else state.loop
        # What was asked for before is answered by the error: a worker-killer must not go on by an older resume.
        return replace(state, requested=None, last_error=change.reason, error_code=change.code, loop=loop)
    return after_start(state, was, change) if now is AgentState.RUNNING else state


def _request(state: State, wanted: AgentState) -> State:
    """Note that a person wants a state; the same state again only takes back what was asked before."""
    if wanted is AgentState.RUNNING:
        state = opening.begun_anew(replace(state, attempt=0, overflows=0, wait=None))
    return replace(state, requested=None if wanted is state.agent_state else wanted)


def _end_turn(state: State, ending: AgentState) -> State:
    """Note that the agent ends its turn, unless a person has spoken since its prompt was made.

    Differs: the original finishes all the same, and the person's message stays unanswered.
    """
    if state.is_reply_outdated or state.message is not None:
        return state
    return replace(state, ending=ending, result_id=state.version)


def _ask_for_confirmation(state: State) -> Append:
    asked = state.pending[0].id
    return Append((AgentStateChangedObservation(agent_state=AgentState.AWAITING_USER_CONFIRMATION, action_id=asked),))


def _has_ended(state: State) -> bool:
    """Say whether the end of the turn can be announced: unless it is an error, the turn's other calls come first."""
    if state.agent_state not in (AgentState.RUNNING, AgentState.PAUSED):
        return False
    return state.ending is AgentState.ERROR or not (state.pending or delegation.unanswered(state))
