"""What is done about a loop: the policy's responses, and what a person chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from broker.contract.actions import CondensationAction, LoopRecoveryAction
from broker.contract.events import AgentSpec, EventSource, Limits, LLMSpec, Parent
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation, LoopDetectionObservation
from broker.contract.policies import ConfirmationPolicy, LoopPolicy
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from controller_worker.loop.replay import replay
from tests.controller_parts import CID, Core, bash, call, check_snapshots, finish, started, think

STUCK = "AgentStuckInLoopError: Agent got stuck in a loop"


def core_with(*responses: str, headless: bool = True, **options: Any) -> Core:
    agent = AgentSpec(llm=LLMSpec(model="acme/large"), loop_policy=LoopPolicy(responses=responses, **options))
    return started(agent=agent, headless=headless)


def repeat(core: Core, times: int = 4) -> Effect:
    """Run the same command so many times; the events of one are 3."""
    effect: Effect = Rest()
    for _ in range(times):
        core.reply(bash())
        effect = core.observe(core.state.version)
    return effect


def detections(core: Core) -> list[LoopDetectionObservation]:
    return [event for event in core.events if isinstance(event, LoopDetectionObservation)]


def choose(core: Core, option: int) -> Effect:
    core.put(LoopRecoveryAction(option=option, source=EventSource.USER))
    return core.run()


def forgotten(core: Core) -> list[tuple[int | None, int | None]]:
    return [
        (event.forgotten_events_start_id, event.forgotten_events_end_id)
        for event in core.events
        if isinstance(event, CondensationAction)
    ]


def test_a_conversation_stops_once_however_often_a_person_chooses_it() -> None:
    core = started()
    repeat(core)
    for _ in range(2):
        assert choose(core, 3) == Rest()
    assert core.states() == ["running", "error", "stopped"]


# The policy


def test_loop_without_policy_is_an_error_that_consumes_nothing() -> None:
    core = started()
    assert repeat(core) == Rest()
    assert core.states() == ["running", "error"]
    assert (core.state.lifecycle.last_error, core.state.usage.iteration) == (STUCK, 4)


def test_detection_can_be_switched_off() -> None:
    core = started(agent=AgentSpec(enable_stuck_detection=False))
    assert repeat(core, 10) == CallModel(11, 1)


def test_a_loop_is_found_before_a_limit() -> None:
    core = started(limits=Limits(max_iterations=4))
    repeat(core)
    assert core.state.lifecycle.last_error == STUCK


def test_nudge_tells_the_model_once_then_errors() -> None:
    core = core_with("nudge")
    assert repeat(core) == CallModel(5, 1)
    (nudge,) = detections(core)
    assert nudge.advice.startswith("You have done the same thing 4 times with the same result.")
    assert nudge.content.startswith(
        "Agent detected in a loop!\nLoop type: repeating_action_observation\nLoop detected at iteration 4\n"
    )
    assert repeat(core, 3) == CallModel(8, 1)
    assert repeat(core, 1) == Rest()
    assert core.state.lifecycle.last_error == STUCK


def test_another_model_goes_on() -> None:
    core = core_with("nudge", "switch_model", fallback_model="acme/larger")
    repeat(core)
    assert core.state.setup.agent.llm == LLMSpec(model="acme/large")
    assert repeat(core) == CallModel(9, 1)
    assert core.state.setup.agent.llm == LLMSpec(model="acme/larger")
    assert core.trace(after=len(core.events) - 2) == [
        "32 LoopDetectionObservation(environment)",
        "33 ModelSwitched(environment)",
    ]


def test_a_policy_that_switches_needs_a_model_to_switch_to() -> None:
    with pytest.raises(ValidationError, match="requires a fallback_model"):
        LoopPolicy(responses=("switch_model",))


def test_restart_hides_the_loop_and_continues() -> None:
    core = core_with("restart")
    core.reply(bash("pwd"))
    core.observe(8)
    assert repeat(core) == CallModel(6, 1)
    assert forgotten(core) == [(10, 21)]
    (found,) = detections(core)
    assert found.advice.startswith("You were in a loop")
    assert core.trace(after=21) == [
        "22 CondensationAction(agent)",
        "23 LoopDetectionObservation(environment)",
    ]
    assert core.state.loops.met == 1


def test_a_parked_loop_waits_for_a_person() -> None:
    core = core_with("park")
    assert repeat(core) == Rest()
    assert core.states() == ["running", "paused"]
    assert core.state.loops.found is not None
    core.ask("running")
    assert core.run() == CallModel(5, 1)


def test_a_message_begins_the_policy_anew() -> None:
    core = core_with("nudge")
    repeat(core)
    core.say("try again")
    core.run()
    assert (core.state.loops.met, core.state.loops.found) == (0, None)
    assert repeat(core) == CallModel(9, 1)


# When detection starts again


def test_headless_a_message_after_the_error_changes_nothing() -> None:
    core = started()
    repeat(core)
    core.say()
    assert core.run() == CallModel(5, 1)  # the recall stands between the actions
    assert repeat(core, 3) == CallModel(8, 1)
    assert repeat(core, 1) == Rest()


def test_interactive_a_message_begins_anew() -> None:
    core = started(headless=False)
    repeat(core)
    core.say()
    core.run()
    repeat(core, 3)
    assert core.states() == ["running", "error", "running"]
    repeat(core, 1)
    assert core.states() == ["running", "error", "running", "error"]
    assert core.state.usage.iteration == 8


# Polling


def poll(core: Core, *, exit_code: int = -1) -> Effect:
    core.reply(call("execute_bash", '{"command": "", "security_risk": "LOW"}'))
    action = core.event(core.state.version)
    suffix = "\n[The command has no new output after 30 seconds.]" if exit_code == -1 else ""
    metadata = CmdOutputMetadata(exit_code=exit_code, suffix=suffix)
    return core.observe(action.id, CmdOutputObservation(command="", content="50 %", metadata=metadata, cause=action.id))


def test_waiting_for_a_long_command_is_no_loop() -> None:
    core = started()
    for _ in range(20):
        poll(core)
    assert core.wants() == CallModel(21, 1)


def look(core: Core, command: str, shown: str) -> Effect:
    core.reply(bash(command))
    action = core.event(core.state.version)
    metadata = CmdOutputMetadata(exit_code=0, suffix="\n[The command completed with exit code 0.]")
    found = CmdOutputObservation(command=command, content=shown, metadata=metadata, cause=action.id)
    return core.observe(action.id, found)


@pytest.mark.parametrize("command", ["sleep 30; tail -1 build.log", "cd /srv && sleep 30 && tail -1 build.log"])
def test_waiting_command_with_new_output_is_no_loop(command: str) -> None:
    core = started()
    for percent in range(20):
        look(core, command, f"{percent} %")
    assert core.wants() == CallModel(21, 1)
    check_snapshots(core)
    for _ in range(3):
        look(core, command, "19 %")
    assert core.state.lifecycle.last_error == STUCK  # nothing has moved since the fourth last look
    assert replay(core.events).divergence is None


def test_command_with_new_output_without_waiting_is_a_loop() -> None:
    core = started()
    for percent in range(4):
        look(core, "pytest -q", f"1 failed in 0.{percent} s")
    assert core.state.lifecycle.last_error == STUCK


def test_what_waits_is_not_taken_for_an_error() -> None:
    core = started()
    for _ in range(3):
        look(core, "sleep 30; tail -1 build.log", "10 %")
    assert core.wants() == CallModel(4, 1)


def test_whatever_moves_slowly_moves() -> None:
    core = started()
    for look_number in range(20):
        look(core, "sleep 30; tail -1 build.log", f"{look_number // 2} %")
        core.reply(think("not yet"))
    assert core.wants() == CallModel(41, 1)


def test_asking_for_output_when_nothing_runs_is_a_loop() -> None:
    core = started()
    for _ in range(4):
        poll(core, exit_code=0)
    assert core.state.lifecycle.last_error == STUCK


def test_commands_between_polls_still_count() -> None:
    core = started()
    for _ in range(4):
        poll(core)
        repeat(core, 1)
    assert core.state.lifecycle.last_error == STUCK


@pytest.mark.parametrize(("headless", "is_found"), [(True, True), (False, False)])
def test_message_resets_repetition_only_where_a_person_is_present(headless: bool, is_found: bool) -> None:
    core = started(headless=headless)
    for _ in range(9):
        core.append(CondensationAction(forgotten_event_ids=()))
    core.say("continue")
    assert core.run() == CallModel(1, 1)
    effect = core.append(CondensationAction(forgotten_event_ids=()))
    assert (effect == Rest(), core.states()[-1]) == (is_found, "error" if is_found else "running")


# A person's choice


@pytest.mark.parametrize("responses", [("park",), ("fail",)])
def test_1_restarts_before_the_loop_and_waits(responses: tuple[str, ...]) -> None:
    core = core_with(*responses)
    repeat(core)
    settled = core.state.version
    assert choose(core, 1) == Rest()
    assert forgotten(core) == [(7, settled + 1)]
    assert core.states()[-1] == "awaiting_user_input"
    assert detections(core)[-1].content == "Loop recovery completed: the events from 7 on are out of the agent's sight."
    assert (core.state.loops.found, core.state.loops.recovery, core.state.loops.recent.actions) == (None, 0, ())
    assert not fold_status(core.events).is_in_loop


def test_2_restarts_before_the_loop_and_goes_on() -> None:
    core = core_with("park")
    repeat(core)
    assert choose(core, 2) == CallModel(5, 1)
    assert core.states() == ["running", "paused", "running"]


def test_2_while_it_runs_announces_nothing() -> None:
    core = core_with("nudge")
    repeat(core)
    assert choose(core, 2) == CallModel(5, 1)
    assert core.states() == ["running"]
    assert forgotten(core) == [(7, 20)]


def test_3_stops() -> None:
    core = core_with("park")
    repeat(core)
    assert choose(core, 3) == Rest()
    assert core.states() == ["running", "paused", "stopped"]
    assert core.state.loops.recovery == 0


def test_a_restart_waits_for_what_runs() -> None:
    core = core_with("nudge")
    repeat(core)
    core.reply(bash("true"))
    assert isinstance(choose(core, 2), AwaitTools)
    core.observe(core.state.tools.pending[0].id)
    assert len(forgotten(core)) == 1


def test_what_a_person_said_is_never_taken_out() -> None:
    core = core_with("park")
    repeat(core, 2)
    core.say("continue")
    core.run()
    repeat(core, 4)
    message_id = core.state.inbox.last_message_id
    choose(core, 1)
    assert forgotten(core)[0][0] is not None
    assert forgotten(core)[0][0] > message_id


def test_restart_keeps_a_persons_message_within_the_loop() -> None:
    core = core_with("restart")
    for _ in range(9):
        core.append(CondensationAction(forgotten_event_ids=()))
    core.say("continue")
    message_id = core.state.version
    core.run()
    core.append(CondensationAction(forgotten_event_ids=()))
    last_condensation = core.state.version - 2
    assert forgotten(core)[-1] == (message_id + 1, last_condensation)


def test_a_loop_that_was_recovered_from_counts_for_the_policy() -> None:
    core = core_with("nudge")
    repeat(core)
    assert choose(core, 2) == CallModel(5, 1)
    assert repeat(core) == Rest()
    assert core.states() == ["running", "error"]


def test_2_without_a_message_waits_for_one() -> None:
    core = Core(None, agent=AgentSpec(loop_policy=LoopPolicy(responses=("park",))))
    core.run()
    core.put(*(CondensationAction(forgotten_event_ids=()) for _ in range(10)))
    assert choose(core, 2) == Rest()
    assert core.states() == ["awaiting_user_input"]


@pytest.mark.parametrize(("headless", "state"), [(True, "error"), (False, "paused")])
def test_delegate_parks_only_where_a_person_may_look(headless: bool, state: str) -> None:
    core = core_with("park", headless=headless)
    setup = replace(core.state.setup, parent=Parent(conversation_id="parent", delegate_id=8))
    core.state = replace(core.state, setup=setup)
    assert repeat(core) == Rest()
    assert core.states() == ["running", state]


@pytest.mark.parametrize("option", [1, 2, 3])
def test_a_stop_ends_the_loop_too(option: int) -> None:
    core = core_with("park")
    repeat(core)
    core.ask("stopped")
    core.run()
    assert core.state.loops.found is None
    assert not fold_status(core.events).is_in_loop
    stopped = core.state.version
    assert choose(core, option) == Rest()
    assert core.trace(after=stopped) == [f"{stopped + 1} LoopRecoveryAction(user)"]


@pytest.mark.parametrize("option", [1, 2, 3])
def test_without_a_loop_the_choice_means_nothing(option: int) -> None:
    core = started()
    assert choose(core, option) == CallModel(1, 1)
    assert core.states() == ["running"]


def test_an_option_that_does_not_exist_means_nothing() -> None:
    core = core_with("park")
    repeat(core)
    assert choose(core, 4) == Rest()
    assert core.states() == ["running", "paused"]


@pytest.mark.parametrize("responses", [("park",), ("fail",), ("nudge",)])
@pytest.mark.parametrize("option", [1, 2, 3, 4])
def test_log_shows_whether_the_choice_is_still_open(responses: tuple[str, ...], option: int) -> None:
    core = core_with(*responses)
    repeat(core)
    assert fold_status(core.events).is_in_loop
    core.put(LoopRecoveryAction(option=option, source=EventSource.USER))
    asked = {1: "awaiting_user_input", 2: "running", 3: "stopped"}.get(option)
    assert fold_status(core.events).requested == (asked if asked != core.state.lifecycle.agent_state else None)
    core.run()
    assert fold_status(core.events).requested is None
    core.put(LoopRecoveryAction(option=option, source=EventSource.USER))
    assert fold_status(core.events).requested is None or option == 4


@pytest.mark.parametrize(("option", "state"), [(1, "awaiting_user_input"), (2, "running"), (3, "stopped")])
def test_action_waiting_for_confirmation_is_not_awaited(option: int, state: str) -> None:
    agent = AgentSpec(loop_policy=LoopPolicy(responses=("nudge",)), confirmation=ConfirmationPolicy(mode="risky"))
    core = started(agent=agent)
    repeat(core)
    core.reply(bash("sudo reboot"))
    asked = core.state.confirmation.asked_id
    assert asked is not None
    effect = choose(core, option)
    assert (core.state.lifecycle.agent_state, isinstance(effect, CallModel)) == (state, option == 2)
    (result,) = [event.id for event in core.events if event.cause == asked]
    assert [end for _, end in forgotten(core)] == ([] if option == 3 else [result])
    assert (core.state.tools.pending, fold_status(core.events).is_unanswered) == ((), False)
    assert find_violations(core.events, conversation_id=CID, is_over=False) == []
    assert replay(core.events).divergence is None


@pytest.mark.parametrize("responses", [("park",), ("fail",), ("nudge",)])
@pytest.mark.parametrize("option", [1, 2, 3])
def test_loop_has_no_recovery_after_a_message(responses: tuple[str, ...], option: int) -> None:
    core = core_with(*responses)
    repeat(core)
    core.say()
    core.run()
    assert not fold_status(core.events).is_in_loop
    choose(core, option)
    assert core.trace()[-1] == f"{core.state.version} LoopRecoveryAction(user)"
    assert not fold_status(core.events).is_unanswered


def test_a_message_behind_the_choice_does_not_take_it_back() -> None:
    core = core_with("nudge")
    repeat(core)
    core.reply(bash())
    core.put(LoopRecoveryAction(option=1, source=EventSource.USER))
    core.say("and then this")
    core.run()
    core.put(LoopRecoveryAction(option=3, source=EventSource.USER))
    assert fold_status(core.events).requested == "stopped"
    assert core.run() == Rest()
    assert (core.state.lifecycle.agent_state, fold_status(core.events).is_unanswered) == ("stopped", False)


# Snapshots


def test_a_loop_is_found_across_a_snapshot() -> None:
    core = core_with("nudge")
    repeat(core, 6)
    core.say()
    core.run()
    repeat(core, 3)
    check_snapshots(core)


def test_a_finish_ends_it_all() -> None:
    core = core_with("nudge")
    repeat(core)
    assert core.reply(finish()) == Rest()
    assert core.states() == ["running", "finished"]
