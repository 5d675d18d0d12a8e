"""Double texting: a message that arrives while the agent works, handled by the conversation's policy.

`enqueue`: the next step reads it. `reject`: the store refuses it, so it is in no log. `interrupt`: running actions are
stopped and answered as not executed, then the message is read. `rollback`: as `interrupt`, and the current stretch of
work is undone, from its first message on. The parts of the state return to their earlier values, and the View leaves
the events out; the log keeps them. A user can also stop running actions without a message: the agent then pauses.

Holds: pure. The position of a message in the log decides whether it arrived during work. Every action is answered
before its turn is undone. Not undone: money and steps, the opened workspace and its files, answers to earlier
questions, and the user's changes to the conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    ROLLED_BACK,
    TERMINAL_STATES,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConversationCreated,
    Event,
    InterruptedObservation,
    MessageAction,
    RolledBackObservation,
    is_settled,
)
from controller_worker.core.announcement import make_not_executed
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns import start
from controller_worker.core.concerns.acceptance import Acceptance
from controller_worker.core.concerns.confirmation import ConfirmationProgress
from controller_worker.core.concerns.delegation import roll_back as delegation_before
from controller_worker.core.concerns.greeting import Greeting
from controller_worker.core.concerns.model_calls import ModelCalls
from controller_worker.core.concerns.planning import ProposedPlan
from controller_worker.core.effects import Append, Effect
from controller_worker.core.pending import PendingAction, Tools, is_user_message

if TYPE_CHECKING:
    from controller_worker.core.concerns.delegation import Delegate, ManagingAction
    from controller_worker.core.state import State

INTERRUPTED = (
    "The action was stopped, because the person sent another message.",
    "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_INTERRUPTED",
)


STOPPED_BY_USER = ("The action was stopped by the person.", INTERRUPTED[1])


@dataclass(frozen=True)
class DoubleTexting:
    """The policy, and the requests of the latest messages.

    Attributes:
        policy: the conversation's policy.
        begun_id: with `rollback`, the message that started the current stretch of work; `State.before` is the state
            before it.
        wanted: `interrupt` or `rollback` until it is carried out; else empty.
        message_ids: the messages since the first that requested it.
        pause_id: the pause that requested it instead of a message; 0 for none.
    """

    policy: str = ""
    begun_id: int = 0
    wanted: str = ""
    message_ids: tuple[int, ...] = ()
    pause_id: int = 0


def is_at_rest(state: State) -> bool:
    """Return whether the agent is idle, so that a message starts new work."""
    if state.inbox.last_message_id == 0 or start.is_waiting(state.start):
        return True
    lifecycle = state.lifecycle
    return is_settled(lifecycle.agent_state) and lifecycle.requested is None and state.inbox.message is None


def should_remember(state: State, event: Event) -> bool:
    """Return whether to keep the state before this event, because a message may roll back to it."""
    if state.double_texting.policy != "rollback" or not is_user_message(event):
        return False
    return is_at_rest(state) and state.inbox.message is None  # another message of the same task, before work starts


def _after_creation(texting: DoubleTexting, created: ConversationCreated, state: State) -> DoubleTexting:
    return evolve(texting, policy=created.double_texting or "") if created.id == 1 else texting


def _after_message(texting: DoubleTexting, message: MessageAction, state: State) -> DoubleTexting:
    if not is_user_message(message):
        return texting
    if texting.wanted:
        return evolve(texting, message_ids=(*texting.message_ids, message.id))
    if is_at_rest(state):
        return evolve(texting, begun_id=message.id) if should_remember(state, message) else texting
    policy = message.double_texting or texting.policy
    if policy == "rollback" and not state.before:
        policy = "interrupt"
    return evolve(texting, wanted=policy, message_ids=(message.id,)) if policy in _ENDS_TURN else texting


def _after_request(texting: DoubleTexting, request: ChangeAgentStateAction, state: State) -> DoubleTexting:
    is_interrupt = request.agent_state is AgentState.PAUSED and request.is_interrupt
    if not is_interrupt or is_at_rest(state):
        return texting
    return evolve(texting, wanted=texting.wanted or "interrupt", pause_id=request.id)


def _after_change(texting: DoubleTexting, change: AgentStateChangedObservation, state: State) -> DoubleTexting:
    """Drop the request if the work has ended in another way."""
    is_over = texting.wanted and change.agent_state in TERMINAL_STATES
    return evolve(texting, wanted="", message_ids=(), pause_id=0) if is_over else texting


def _after_interruption(texting: DoubleTexting, event: InterruptedObservation, state: State) -> DoubleTexting:
    return evolve(texting, wanted="", message_ids=(), pause_id=0)


def end_turn(state: State, now: datetime) -> Effect | None:
    """Stop running actions, and roll back if the latest messages ask for it."""
    texting = state.double_texting
    requested = state.lifecycle.requested
    if not texting.wanted or requested is AgentState.STOPPED:
        return None
    if requested is AgentState.PAUSED and not texting.pause_id:
        return None
    is_rollback = texting.wanted == "rollback"
    since = texting.begun_id if is_rollback else 0
    answered = _find_unanswered(state, since)
    text, error_id = STOPPED_BY_USER if texting.pause_id else INTERRUPTED
    events: list[Event] = [make_not_executed(action, text, error_id) for action in answered]
    cancels = tuple(action.id for action in answered if isinstance(action, PendingAction))
    if is_rollback:
        events.append(RolledBackObservation(content=ROLLED_BACK, start_id=since, kept=texting.message_ids))
    else:
        events.append(InterruptedObservation(message_id=texting.pause_id or texting.message_ids[0]))
    return Append(tuple(events), tuple((n, action.id) for n, action in enumerate(answered)), cancels)


def is_call_ending(event: Event) -> bool:
    """Return whether this event makes the reply to the current model call useless."""
    return isinstance(event, InterruptedObservation | RolledBackObservation)


def roll_back(state: State, event: RolledBackObservation) -> State:
    """Return the state after an event that undoes a stretch of work."""
    before = state.before
    if before is None or state.double_texting.begun_id != event.start_id:  # written by another version of the core
        return evolve(state, version=event.id, double_texting=evolve(state.double_texting, wanted="", message_ids=()))
    pending = {action.id: action for action in state.tools.pending}
    own = (state.opening.action_id, state.survey.action_id)
    left = tuple(pending[one.id] for one in before.tools.pending if one.id in pending)
    left += tuple(one for one in state.tools.pending if one.id in own and one not in left)
    now = state.setup
    is_chosen = state.setup.chosen_id > event.start_id
    chosen_by = now if is_chosen else before.setup
    agent = chosen_by.agent
    if agent.name == now.agent.name:  # the current model, policy and tools stay
        chosen = {"llm": now.agent.llm, "confirmation": now.agent.confirmation, "tools": now.agent.tools}
        agent = agent.model_copy(update=chosen)
    message = state.inbox.message
    if message is not None:
        message = replace(message, is_first=before.inbox.last_message_id == 0)
    return evolve(
        state,
        version=event.id,
        setup=evolve(before.setup, agent=agent, limits=now.limits, chosen_id=chosen_by.chosen_id),
        lifecycle=evolve(
            state.lifecycle, ending=None, last_error="", error_code="", result_id=before.lifecycle.result_id
        ),
        greeting=Greeting() if is_chosen else before.greeting,  # its system message was taken back, too
        inbox=evolve(state.inbox, message=message, is_reply_outdated=True),
        tools=Tools(left),
        confirmation=ConfirmationProgress(),
        calls=ModelCalls(reply_id=before.calls.reply_id),
        plan=before.plan if any(one.id == before.plan.action_id for one in left) else ProposedPlan(),
        acceptance=Acceptance(),
        loops=before.loops,
        delegation=delegation_before(state.delegation, event),
        tasks=before.tasks,
        rules=before.rules,  # what a rule said was taken back, too
        double_texting=DoubleTexting(before.double_texting.policy, begun_id=min(event.kept, default=event.id)),
    )


def _find_unanswered(state: State, since: int) -> list[PendingAction | Delegate | ManagingAction]:
    """Return the actions that the turn waits for. Opening and survey of the workspace are not among them."""
    own = (state.opening.action_id, state.survey.action_id)
    pending = [one for one in state.tools.pending if one.id not in own]
    found: list[PendingAction | Delegate | ManagingAction] = [one for one in pending if one.id >= since]
    found += [one for one in state.delegation.delegates if not one.is_answered and one.id >= since]
    found += [one for one in state.delegation.managing if one.id >= since]
    return found


_ENDS_TURN = ("interrupt", "rollback")

DOUBLE_TEXTING = Concern(
    "double_texting",
    {
        ConversationCreated: _after_creation,
        MessageAction: _after_message,
        ChangeAgentStateAction: _after_request,
        AgentStateChangedObservation: _after_change,
        InterruptedObservation: _after_interruption,
    },
)
