"""What is done about a loop: the policy's next response, or what a person chose (OpenHands 2.8).

Holds: pure; every response says in the log what was found and what is done; what a restart takes out of the model's
sight stays in the log; a restart never takes out what a person said.
Differs: the policy acts by itself, because on a cluster nobody may be there to choose; the original only stops.
"""

from __future__ import annotations

from broker.actions import CondensationAction
from broker.agent_state import AgentState
from broker.events import Event, ModelSwitched
from broker.loop_policy import STUCK_CODE, LoopResponse
from broker.observations import LoopDetectionObservation
from controller_worker.announcement import announce
from controller_worker.confirmation import answered_otherwise
from controller_worker.effects import Append
from controller_worker.state import State, replace
from controller_worker.stuck_detector import Loop, RecentEvents, find_loop

STUCK = "AgentStuckInLoopError: Agent got stuck in a loop"
RESTART, RESTART_WITH_MESSAGE, STOP = 1, 2, 3
"""Options of a `LoopRecoveryAction`."""

NUDGE = (
    "You have done the same thing {times} times and it led to the same result. Doing it again will not help. "
    "Say what you have learned from it, then go at the task another way, or finish and report what stands in the way."
)
TAKEN_OUT = (
    "You were in a loop, and your last steps have been taken out of this conversation; what they did in the workspace "
    "is still there. Do not try the same thing again: find another way."
)


def loop_of(state: State) -> Loop | None:
    """Return the loop the agent is in now."""
    return find_loop(state.recent, state.agent.loop_policy) if state.agent.enable_stuck_detection else None


def respond(state: State, loop: Loop) -> Append:
    """Return the policy's answer to a loop that was just found."""
    policy = state.agent.loop_policy
    step = state.loops_met
    response = policy.responses[step] if step < len(policy.responses) else LoopResponse.FAIL
    if response is LoopResponse.PARK and state.parent is not None and state.headless:
        response = LoopResponse.FAIL  # a delegate that nobody looks after would keep its parent waiting
    if response is LoopResponse.FAIL:
        return announce(state, AgentState.ERROR, STUCK, code=STUCK_CODE)
    found = _found(state, loop)
    if response is LoopResponse.PARK:
        return announce(state, AgentState.PAUSED, after=(found,))
    if response is LoopResponse.RESTART:
        return Append((*_forgotten(state, loop, until=state.version), found.model_copy(update={"advice": TAKEN_OUT})))
    advice = NUDGE.format(times=loop.repeat_times)
    events: tuple[Event, ...] = (found.model_copy(update={"advice": advice}),)
    if response is LoopResponse.SWITCH_MODEL:
        assert policy.fallback_model is not None
        events = (*events, ModelSwitched(model=policy.fallback_model, reason="the agent was in a loop"))
    return Append(events)


def recover(state: State, option: int) -> Append:
    """Return what carries out a person's choice: 1 restart and wait, 2 restart and go on, 3 stop."""
    loop = state.loop
    assert loop is not None
    if option == STOP:
        return announce(state, AgentState.STOPPED)
    rejected = answered_otherwise(state, first_position=0)
    wanted = _recovered_to(state, option)
    done = LoopDetectionObservation(
        content=f"Loop recovery completed: the events from {loop.start_id} on are out of the agent's sight.",
        advice=TAKEN_OUT,
        is_over=True,
    )
    events = (*rejected.events, *_forgotten(state, loop, until=state.version + len(rejected.events)), done)
    if state.agent_state is not wanted:
        events = announce(state, wanted, after=events).events
    return Append(events, rejected.answers)


def _recovered_to(state: State, option: int) -> AgentState:
    # Without a message there is nothing to go on with, as in the original.
    goes_on = option == RESTART_WITH_MESSAGE and state.last_message_id > 0
    return AgentState.RUNNING if goes_on else AgentState.AWAITING_USER_INPUT


def after_detection(state: State) -> State:
    """Return the state after a loop was noted in the log: what was repeated no longer counts."""
    if state.recovery:  # it notes that the recovery is complete; the state that it leads to is announced with it
        wanted = state.requested or _recovered_to(state, state.recovery)
        requested = None if wanted is state.agent_state else wanted
        return replace(state, recovery=0, loop=None, recent=RecentEvents(), requested=requested)
    loop = loop_of(state)
    return replace(state, loop=loop, loops_met=state.loops_met + 1, recent=RecentEvents())


def after_choice(state: State, option: int) -> State:
    """Return the state after a person chose how to get out of a loop; without a loop, the choice means nothing."""
    loop = state.loop or loop_of(state)
    if loop is None or option not in (RESTART, RESTART_WITH_MESSAGE, STOP):
        return state
    return replace(state, loop=loop, recovery=option, attempt=0, wait=None)


def _found(state: State, loop: Loop) -> LoopDetectionObservation:
    kept = max(loop.start_id - 1, 0)
    return LoopDetectionObservation(
        content=f"Agent detected in a loop!\nLoop type: {loop.loop_type}\n"
        f"Loop detected at iteration {state.iteration}\n"
        f"The {kept} events before it can be kept. Ways out: 1 restart before the loop and wait for a message, "
        "2 restart before the loop and go on, 3 stop."
    )


def _forgotten(state: State, loop: Loop, *, until: int) -> tuple[Event, ...]:
    """Take the loop out of the model's sight, from its beginning or from behind the latest message on."""
    start = max(loop.start_id, state.last_message_id + 1)
    if start > until:
        return ()
    return (CondensationAction(forgotten_events_start_id=start, forgotten_events_end_id=until),)
