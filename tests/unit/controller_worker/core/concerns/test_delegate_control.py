"""Control of delegates in the core: awaits, pauses, and limits that are reserved for paused delegates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.delegate_control import DelegatesObservation, ManageDelegatesAction
from broker.contract.double_texting import RolledBackObservation
from broker.contract.events import AgentSpec, EventSource, Limits
from broker.contract.observations import ErrorObservation
from broker.contract.tool_arguments import ToolCallError
from broker.log.invariants import find_violations
from controller_worker.core.concerns.delegation import has_room, roll_back
from controller_worker.core.effects import AwaitDelegates, CallModel, Effect, ManageDelegates, Rest
from tests.controller_parts import CID, Core, call, check_snapshots, finish, started
from tests.unit.controller_worker.core.concerns.test_delegation import ended, in_background_at_work

MANAGING = AgentSpec(enable_delegation=True, enable_delegate_control=True)
WAITS = AwaitDelegates(())


def working(count: int, **limits: float) -> tuple[Core, list[int]]:
    """Let the model start delegates in the background; return their numbers."""
    core = started(agent=MANAGING, limits=Limits(**limits))
    for number in range(count):
        in_background_at_work(core, call_id=f"d{number}")
    return core, [delegate.id for delegate in core.state.delegation.delegates]


def manage(core: Core, operation: str, *numbers: int, done: tuple[int, ...] | None = None, **arguments: Any) -> Effect:
    """Let the model control delegates, and the loop report what it has done: all of it unless `done` says less."""
    core.reply(call("delegates", json.dumps({"operation": operation, "numbers": numbers, **arguments}), "m"))
    action = core.event(-1, ManageDelegatesAction)
    answer = DelegatesObservation(content="ok", numbers=numbers if done is None else done, cause=action.id)
    return core.append(answer.model_copy(update={"tool_call_metadata": action.tool_call_metadata}))


def test_action_is_carried_out_before_the_next_step() -> None:
    core, _ = working(1)
    effect = core.reply(call("delegates", '{"operation": "list"}', "m"))
    assert effect == ManageDelegates(core.event(-1, ManageDelegatesAction).id)


def test_next_step_waits_for_all_chosen_delegates() -> None:
    core, (one, two, three) = working(3)
    assert manage(core, "wait", one, two) == WAITS
    assert ended(core, three) == WAITS
    assert ended(core, one) == WAITS
    assert isinstance(ended(core, two), CallModel)
    core.reply(finish())
    assert not find_violations(core.events, conversation_id=CID)


def test_next_step_waits_for_any_chosen_delegate() -> None:
    core, (one, two) = working(2)
    assert manage(core, "wait", one, two, join="any") == WAITS
    assert isinstance(ended(core, two), CallModel)
    assert not any(delegate.awaited for delegate in core.state.delegation.delegates)


def test_paused_delegate_is_not_waited_for() -> None:
    core, (one, two) = working(2)
    assert isinstance(manage(core, "pause", one), CallModel)
    assert manage(core, "wait", two) == WAITS
    assert isinstance(ended(core, two), CallModel)
    assert [delegate.is_paused for delegate in core.state.delegation.delegates] == [True]
    manage(core, "resume", one)
    assert [delegate.is_paused for delegate in core.state.delegation.delegates] == [False]


@pytest.mark.parametrize("operation", ["wait", "pause"])
def test_action_that_was_not_carried_out_changes_nothing(operation: str) -> None:
    core, (one,) = working(1)
    before = core.state.delegation.delegates
    assert isinstance(manage(core, operation, one, done=()), CallModel)
    assert core.state.delegation.delegates == before
    assert core.state.delegation.managing == ()


def test_agent_does_not_wait_for_room_that_paused_delegates_hold() -> None:
    core, (one,) = working(1, max_iterations=3)
    assert manage(core, "message", one, text="Hurry.") == WAITS  # two steps are used and two reserved
    core, (one,) = working(1, max_iterations=5)
    assert isinstance(manage(core, "pause", one), CallModel)
    core.reply(call("think", '{"thought": "x"}', "t"))
    assert has_room(core.state)
    core.reply(call("think", '{"thought": "y"}', "t"))
    assert not has_room(core.state)  # it cannot be resumed


def test_snapshots_hold_what_was_managed() -> None:
    core, (one, two) = working(2)
    manage(core, "pause", one)
    manage(core, "wait", two, join="any")
    check_snapshots(core)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "Invalid argument 'operation'"),
        ({"operation": "kill"}, "Use one of list, message, wait, pause, resume, stop."),
        ({"operation": "wait", "join": "some"}, "Invalid argument 'join'"),
        ({"operation": "stop"}, "Missing required argument 'numbers' for stop"),
        ({"operation": "stop", "numbers": ["1"]}, "use a list of numbers"),
        ({"operation": "stop", "numbers": [True]}, "use a list of numbers"),
        ({"operation": "stop", "numbers": [0]}, "numbers above 0"),
        ({"operation": "stop", "numbers": [*range(1, 300)]}, "at most 200 numbers"),
        ({"operation": "message", "numbers": [1]}, "A message has 1 to 100,000 characters, not 0."),
        ({"operation": "message", "numbers": [1], "text": "x" * 100_001}, "not 100,001"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolCallError) as refused:
        ManageDelegatesAction.from_call(arguments)
    assert said in str(refused.value)


def test_tool_is_offered_only_where_it_is_enabled() -> None:
    assert ManageDelegatesAction.is_offered(MANAGING)
    assert not ManageDelegatesAction.is_offered(AgentSpec(enable_delegation=True))


def test_message_waits_while_the_user_has_paused_the_agent() -> None:
    core, (one,) = working(1)
    core.ask("paused")
    core.run()
    effect = core.reply(call("delegates", json.dumps({"operation": "message", "numbers": [one], "text": "x"}), "m"))
    assert effect == Rest()
    core.ask("running")
    assert isinstance(core.run(), ManageDelegates)


def test_interruption_settles_what_was_to_be_done_with_delegates() -> None:
    core, (one,) = working(1)
    core.put(ChangeAgentStateAction(agent_state=AgentState.PAUSED, is_interrupt=True, source=EventSource.USER))
    core.reply(call("delegates", json.dumps({"operation": "resume", "numbers": [one]}), "m"))
    assert core.state.delegation.managing == ()
    asked = core.event(
        -1 - next(n for n, event in enumerate(reversed(core.events)) if event.kind.endswith("delegates"))
    )
    (answer,) = [event for event in core.events if event.cause == asked.id]
    assert isinstance(answer, ErrorObservation)


def test_rollback_takes_a_wait_back() -> None:
    core, (one,) = working(1)
    manage(core, "wait", one)
    event = RolledBackObservation(content="x", start_id=core.state.version, kept=())
    assert [delegate.awaited for delegate in core.state.delegation.delegates] == ["all"]
    assert [delegate.awaited for delegate in roll_back(core.state.delegation, event).delegates] == [""]
