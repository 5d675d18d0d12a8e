"""The response to a loop: the policy's next response, or the user's choice (OpenHands 2.8).

Holds: pure. Every response logs the loop and the response to it. A restart hides events from the model and keeps them
in the log. A restart never hides a user's message.
Differs: the policy acts by itself, because on a cluster no user may be present; the original only stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    STUCK_CODE,
    Action,
    AgentState,
    AgentStateChangedObservation,
    CondensationAction,
    ErrorObservation,
    Event,
    EventsLostObservation,
    FeatureListObservation,
    FinishRefusedObservation,
    FinishVerdictObservation,
    InterruptedObservation,
    LoopDetectionObservation,
    LoopRecoveryAction,
    LoopResponse,
    MessageAction,
    ModelReply,
    ModelSwitched,
    Observation,
)
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns.confirmation import reject_for_message
from controller_worker.core.concerns.progress import find_no_progress
from controller_worker.core.concerns.tools import is_own_action, trace_action
from controller_worker.core.effects import Append, Effect
from controller_worker.core.pending import find_runnable, find_settled, is_user_message
from controller_worker.core.stuck_detector import (
    DetectedLoop,
    RecentEvents,
    Trace,
    add_action,
    add_observation,
    add_poll,
    add_settled,
    find_loop,
    forget_repeats,
    has_equal_call,
    is_poll,
    make_call_name,
    trace_calls,
)

if TYPE_CHECKING:
    from controller_worker.core.state import State

STUCK = "AgentStuckInLoopError: Agent got stuck in a loop"
RESTART, RESTART_WITH_MESSAGE, STOP = 1, 2, 3
"""Options of a `LoopRecoveryAction`."""

NUDGE = (
    "You have done the same thing {times} times with the same result. Doing it again will not help. Say what you have "
    "learned, then try another way, or finish and report what is in the way."
)
NO_PROGRESS = "AgentStuckInLoopError: No progress: {reason}"
NO_PROGRESS_NUDGE = (
    "You make no progress: {reason}. More of the same will not help. Say what you have learned and what is in the way, "
    "then try another way, or finish and report."
)
REMOVED = (
    "You were in a loop. Your last steps have been removed from this conversation, but what they did in the workspace "
    "is still there. Do not try the same thing again; find another way."
)


@dataclass(frozen=True)
class Loops:
    """The known repetitions.

    Attributes:
        recent: summaries of the latest events, for the detector.
        found: the latest loop, until a user sends a message or the agent recovers from it.
        met: number of loops that the policy has answered since the user's last message.
        recovery: the recovery option that a user chose; 0 for none.
        calls: the calls of the latest reply. A refused call leads to no action.
    """

    recent: RecentEvents = field(default_factory=RecentEvents)
    found: DetectedLoop | None = None
    met: int = 0
    recovery: int = 0
    calls: tuple[tuple[str, Trace], ...] = ()


def _after_state_change(loops: Loops, change: AgentStateChangedObservation, state: State) -> Loops:
    if change.agent_state is AgentState.STOPPED:
        return evolve(loops, recovery=0, found=None)
    is_stuck = change.agent_state is AgentState.ERROR and change.code == STUCK_CODE
    return evolve(loops, found=find_current_loop(state)) if is_stuck else loops


def _after_detection(loops: Loops, event: LoopDetectionObservation, state: State) -> Loops:
    """Forget the repetitions: they no longer count."""
    return Loops(met=loops.met) if loops.recovery else Loops(found=find_current_loop(state), met=loops.met + 1)


def _after_choice(loops: Loops, choice: LoopRecoveryAction, state: State) -> Loops:
    loop = find_chosen_loop(state, choice)
    return loops if loop is None else evolve(loops, found=loop, recovery=choice.option)


def _after_message(loops: Loops, message: MessageAction, state: State) -> Loops:
    if not is_user_message(message):
        return _after_action(loops, message, state)
    recent = loops.recent if state.setup.headless else RecentEvents()
    return evolve(loops, recent=recent) if loops.recovery else Loops(recent)


def _after_reply(loops: Loops, reply: ModelReply, state: State) -> Loops:
    if reply.service != "agent" or not state.setup.agent.enable_stuck_detection:
        return loops
    calls = trace_calls(reply)
    return evolve(loops, calls=calls) if calls or loops.calls else loops


def _after_action(loops: Loops, action: Action, state: State) -> Loops:
    if action.runnable or is_own_action(state, action):  # a runnable action counts when its observation arrives
        return loops
    trace = trace_action(state, action)
    if trace is None:
        return loops
    return evolve(loops, recent=add_action(loops.recent, action, trace, state.setup.agent.loop_policy))


def _after_observation(loops: Loops, observation: Observation, state: State) -> Loops:
    settled = find_settled(state, observation)
    is_own = settled is not None and settled.id in (
        state.plan.action_id,
        state.opening.action_id,
        state.survey.action_id,
        state.acceptance.check_id,
        state.work.action_id,
        state.progress.action_id,
    )
    if is_own or not state.setup.agent.enable_stuck_detection:
        return loops
    policy = state.setup.agent.loop_policy
    recent = loops.recent
    if is_poll(observation):
        return evolve(loops, recent=add_poll(recent))
    refused = _find_refused_call(loops, observation)
    if refused is not None:
        if has_equal_call(recent, refused):
            return loops  # the model writes it twice before it reads the first error
        recent = add_settled(recent, refused, policy)
    action = settled.trace if settled is not None else None
    if action is not None:
        recent = forget_repeats(recent, action, observation)
    return evolve(loops, recent=add_observation(recent, observation, policy, action))


def _find_refused_call(loops: Loops, observation: Observation) -> Trace | None:
    """Return the call that an error answers in place of an action; None for any other observation."""
    metadata = observation.tool_call_metadata
    if metadata is None or observation.cause is not None or not isinstance(observation, ErrorObservation):
        return None
    name = make_call_name(observation)
    calls = (trace for called, trace in loops.calls if called == name and trace.turn_id == metadata.reply_id)
    return next(calls, None)


def _after_features(loops: Loops, features: FeatureListObservation, state: State) -> Loops:
    """Count the answer to a call. A refused finish has a separate limit."""
    return loops if features.cause is None else _after_observation(loops, features, state)


def _after_refusal(loops: Loops, refusal: FinishRefusedObservation, state: State) -> Loops:
    """Count a hook's refusal. Other refusals have their own limits."""
    return _after_observation(loops, refusal, state) if refusal.reason == "hook" else loops


def find_current_loop(state: State) -> DetectedLoop | None:
    """Return the agent's current loop, or None."""
    if not state.setup.agent.enable_stuck_detection:
        return None
    return find_loop(state.loops.recent, state.setup.agent.loop_policy) or find_no_progress(state)


def respond(state: State, now: datetime) -> Effect | None:
    """Apply the policy's response to a newly found loop."""
    loop = find_current_loop(state)
    if loop is None:
        return None
    policy = state.setup.agent.loop_policy
    step = state.loops.met
    response = policy.responses[step] if step < len(policy.responses) else LoopResponse.FAIL
    if response is LoopResponse.PARK and state.setup.parent is not None and state.setup.headless:
        response = LoopResponse.FAIL  # an unattended delegate would keep its parent waiting
    if response is LoopResponse.FAIL:
        reason = NO_PROGRESS.format(reason=loop.reason) if loop.reason else STUCK
        return announce(state, AgentState.ERROR, reason, code=STUCK_CODE)
    found = _make_detection(state, loop)
    if response is LoopResponse.PARK:
        return announce(state, AgentState.PAUSED, after=(found,))
    if response is LoopResponse.RESTART:
        return Append((*_hide_loop(state, loop, until=state.version), found.model_copy(update={"advice": REMOVED})))
    advice = NO_PROGRESS_NUDGE.format(reason=loop.reason) if loop.reason else NUDGE.format(times=loop.repeat_times)
    events: tuple[Event, ...] = (found.model_copy(update={"advice": advice}),)
    if response is LoopResponse.SWITCH_MODEL:
        assert policy.fallback_model is not None
        events = (*events, ModelSwitched(model=policy.fallback_model, reason="the agent was in a loop"))
    return Append(events)


def recover(state: State, now: datetime) -> Effect | None:
    """Apply the user's recovery option: restart and wait, or restart and resume, once nothing runs; or stop at once."""
    option = state.loops.recovery
    loop = state.loops.found
    if not option or (option != STOP and find_runnable(state)):
        return None
    assert loop is not None
    if option == STOP:
        return announce(state, AgentState.STOPPED)
    rejected = reject_for_message(state, first_position=0)
    wanted = find_recovered_state(state)
    done = LoopDetectionObservation(
        content=f"Loop recovery completed: the events from {loop.start_id} on are out of the agent's sight.",
        advice=REMOVED,
        is_over=True,
    )
    events = (*rejected.events, *_hide_loop(state, loop, until=state.version + len(rejected.events)), done)
    if state.lifecycle.agent_state is not wanted:
        events = announce(state, wanted, after=events).events
    return Append(events, rejected.answers)


def find_recovered_state(state: State) -> AgentState:
    """Return the state after the user's recovery option."""
    # Without a message there is nothing to continue with, as in the original.
    continues = state.loops.recovery == RESTART_WITH_MESSAGE and state.inbox.last_message_id > 0
    return AgentState.RUNNING if continues else AgentState.AWAITING_USER_INPUT


def find_chosen_loop(state: State, choice: LoopRecoveryAction) -> DetectedLoop | None:
    """Return the loop that the user's recovery option applies to; None if there is no loop or no such option."""
    if choice.option == STOP and state.lifecycle.agent_state is AgentState.STOPPED:
        return None
    return (
        state.loops.found or find_current_loop(state)
        if choice.option in (RESTART, RESTART_WITH_MESSAGE, STOP)
        else None
    )


def _make_detection(state: State, loop: DetectedLoop) -> LoopDetectionObservation:
    kept = max(loop.start_id - 1, 0)
    found = f"No progress: {loop.reason}." if loop.reason else "Agent detected in a loop!"
    return LoopDetectionObservation(
        content=f"{found}\nLoop type: {loop.loop_type}\n"
        f"Loop detected at iteration {state.usage.iteration}\n"
        f"The {kept} events before it can be kept. Ways out: 1 restart before the loop and wait for a message, "
        "2 restart before the loop and continue, 3 stop."
    )


def _hide_loop(state: State, loop: DetectedLoop, *, until: int) -> tuple[Event, ...]:
    """Hide the events of the loop from the model, except those up to the user's latest message."""
    start = max(loop.start_id, state.inbox.last_message_id + 1)
    if start > until:
        return ()
    return (CondensationAction(forgotten_events_start_id=start, forgotten_events_end_id=until),)


LOOPS = Concern(
    "loops",
    {
        AgentStateChangedObservation: _after_state_change,
        LoopDetectionObservation: _after_detection,
        ModelReply: _after_reply,
        FinishRefusedObservation: _after_refusal,
        FeatureListObservation: _after_features,
        FinishVerdictObservation: None,
        EventsLostObservation: None,
        InterruptedObservation: None,
        LoopRecoveryAction: _after_choice,
        MessageAction: _after_message,
        Action: _after_action,
        Observation: _after_observation,
    },
)
