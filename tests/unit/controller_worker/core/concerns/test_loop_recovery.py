"""Responses to a loop: the policy's, and the user's choice."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from broker.contract.actions import CondensationAction, LoopRecoveryAction
from broker.contract.events import AgentSpec, EventSource, LLMSpec, Parent
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation, LoopDetectionObservation
from broker.contract.policies import ConfirmationPolicy, LoopPolicy
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from tests.controller_parts import CID, Core, bash, call, check_replay, started
from tests.scenarios import play

STUCK = "AgentStuckInLoopError: Agent got stuck in a loop"
NOTHING = CondensationAction(forgotten_event_ids=())
BUILD = "sleep 30; tail -1 build.log"


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


def looped(*responses: str, **options: Any) -> Core:
    core = core_with(*responses, **options)
    repeat(core)
    return core


def choose(core: Core, option: int) -> Effect:
    core.put(LoopRecoveryAction(option=option, source=EventSource.USER))
    return core.run()


def play_loop(core: Core, scenario: str) -> Core:
    """Play a scenario in which `loop` and `repeat N` run equal commands, and `choose N` is a user's choice."""
    counted = {f"repeat {n}": lambda core, n=n: repeat(core, n) for n in (1, 2, 3, 10)}
    chosen = {f"choose {n}": lambda core, n=n: choose(core, n) for n in (1, 2, 3, 4)}
    return play(core, scenario, loop=repeat, **counted, **chosen)


def detections(core: Core) -> list[LoopDetectionObservation]:
    return [event for event in core.events if isinstance(event, LoopDetectionObservation)]


def forgotten(core: Core) -> list[tuple[int | None, int | None]]:
    return [
        (event.forgotten_events_start_id, event.forgotten_events_end_id)
        for event in core.events
        if isinstance(event, CondensationAction)
    ]


# The policy


@pytest.mark.parametrize(
    ("response", "scenario"),
    [
        ("fail", "loop -> rest, states running error, iteration 4"),
        # The recall of the message stands between the actions.
        ("fail", "loop, say -> model 5, repeat 3 -> model 8, repeat 1 -> rest"),
        ("fail", "loop, choose 3 -> rest, choose 3 -> rest, states running error stopped"),
        ("nudge", "loop, say, loop -> model 9"),
        ("nudge", "loop, finish -> rest, states running finished"),
        ("nudge", "loop, choose 2 -> model 5, loop -> rest, states running error"),
        ("nudge", "loop, repeat 2, say, repeat 3"),
        ("park", "loop -> rest, states running paused, running -> model 5"),
        ("park", "loop, choose 2 -> model 5, states running paused running"),
        ("park", "loop, choose 3 -> rest, states running paused stopped"),
        ("park", "loop, choose 4 -> rest, states running paused"),
        ("park", "choose 1 -> model 1, choose 2 -> model 1, choose 3 -> model 1, states running"),
    ],
    ids=[
        *("error that consumes nothing", "headless message changes nothing", "stops once"),
        *("message restarts the policy", "finish ends it", "recovered loop counts", "snapshots"),
        *("parked loop waits for a person", "2 continues", "3 stops", "no such option", "choice without a loop"),
    ],
)
def test_response(response: str, scenario: str) -> None:
    core = play_loop(core_with(response), scenario)
    assert core.state.loops.recovery == 0


def test_interactive_message_restarts_detection() -> None:
    play_loop(
        started(headless=False),
        "loop, say, repeat 3, states running error running, repeat 1, states running error running error, iteration 8",
    )


def test_detection_can_be_switched_off() -> None:
    play_loop(started(agent=AgentSpec(enable_stuck_detection=False)), "repeat 10 -> model 11")


def test_nudge_tells_the_model_once_then_errors() -> None:
    core = play_loop(core_with("nudge"), "loop -> model 5")
    (nudge,) = detections(core)
    assert nudge.advice.startswith("You have done the same thing 4 times with the same result.")
    assert nudge.content.startswith(
        "Agent detected in a loop!\nLoop type: repeating_action_observation\nLoop detected at iteration 4\n"
    )
    play_loop(core, "repeat 3 -> model 8, repeat 1 -> rest")
    assert core.state.lifecycle.last_error == STUCK


def test_another_model_goes_on() -> None:
    core = looped("nudge", "switch_model", fallback_model="acme/larger")
    assert core.state.setup.agent.llm == LLMSpec(model="acme/large")
    assert repeat(core) == CallModel(9, 1)
    assert core.state.setup.agent.llm == LLMSpec(model="acme/larger")
    assert core.trace(after=31) == ["32 LoopDetectionObservation(environment)", "33 ModelSwitched(environment)"]


def test_a_policy_that_switches_needs_a_model_to_switch_to() -> None:
    with pytest.raises(ValidationError, match="requires a fallback_model"):
        LoopPolicy(responses=("switch_model",))


def test_restart_hides_the_loop_and_continues() -> None:
    core = play_loop(core_with("restart"), "bash(pwd), ran, loop -> model 6")
    assert forgotten(core) == [(10, 21)]
    (found,) = detections(core)
    assert found.advice.startswith("You were in a loop")
    assert core.trace(after=21) == ["22 CondensationAction(agent)", "23 LoopDetectionObservation(environment)"]
    assert core.state.loops.met == 1


# Polling


def poll(core: Core, *, exit_code: int = -1) -> Effect:
    core.reply(call("execute_bash", '{"command": "", "security_risk": "LOW"}'))
    suffix = "\n[The command has no new output after 30 seconds.]" if exit_code == -1 else ""
    return shows(core, "", "50 %", exit_code, suffix)


def look(core: Core, command: str, shown: str) -> Effect:
    core.reply(bash(command))
    return shows(core, command, shown, 0, "\n[The command completed with exit code 0.]")


def shows(core: Core, command: str, shown: str, exit_code: int, suffix: str) -> Effect:
    metadata = CmdOutputMetadata(exit_code=exit_code, suffix=suffix)
    action_id = core.state.version
    output = CmdOutputObservation(command=command, content=shown, metadata=metadata, cause=action_id)
    return core.observe(action_id, output)


def test_waiting_for_a_long_command_is_no_loop() -> None:
    core = started()
    for _ in range(20):
        poll(core)
    assert core.wants() == CallModel(21, 1)


@pytest.mark.parametrize("command", [BUILD, "cd /srv && sleep 30 && tail -1 build.log"])
def test_waiting_command_with_new_output_is_no_loop(command: str) -> None:
    core = started()
    for percent in range(20):
        look(core, command, f"{percent} %")
    assert core.wants() == CallModel(21, 1)
    for _ in range(3):
        look(core, command, "19 %")
    assert core.state.lifecycle.last_error == STUCK  # nothing has moved since the fourth last look
    check_replay(core)


def test_output_that_moves_slowly_moves() -> None:
    core = started()
    for look_number in range(20):
        look(core, BUILD, f"{look_number // 2} %")
        play(core, "think(not yet)")
    assert core.wants() == CallModel(41, 1)


@pytest.mark.parametrize(
    "step",
    [
        lambda core, n: look(core, "pytest -q", f"1 failed in 0.{n} s"),
        lambda core, _: poll(core, exit_code=0),
        lambda core, _: (poll(core), repeat(core, 1)),
    ],
    ids=["new output without waiting", "asking for output when nothing runs", "commands between polls"],
)
def test_work_that_leads_nowhere_is_a_loop(step: Any) -> None:
    core = started()
    for number in range(4):
        step(core, number)
    assert core.state.lifecycle.last_error == STUCK


@pytest.mark.parametrize(("headless", "is_found"), [(True, True), (False, False)])
def test_message_resets_repetition_only_where_a_person_is_present(headless: bool, is_found: bool) -> None:
    core = started(headless=headless)
    for _ in range(9):
        core.append(NOTHING)
    play(core, "say(continue) -> model 1")
    effect = core.append(NOTHING)
    assert (effect == Rest(), core.states()[-1]) == (is_found, "error" if is_found else "running")


# The user's choice


@pytest.mark.parametrize("response", ["park", "fail"])
def test_1_restarts_before_the_loop_and_waits(response: str) -> None:
    core = looped(response)
    settled = core.state.version
    assert choose(core, 1) == Rest()
    assert forgotten(core) == [(7, settled + 1)]
    assert core.states()[-1] == "awaiting_user_input"
    assert detections(core)[-1].content == "Loop recovery completed: the events from 7 on are out of the agent's sight."
    assert (core.state.loops.found, core.state.loops.recovery, core.state.loops.recent.actions) == (None, 0, ())
    assert not fold_status(core.events).is_in_loop


def test_a_restart_waits_for_what_runs() -> None:
    core = play(looped("nudge"), "bash(true)")
    assert isinstance(choose(core, 2), AwaitTools)
    play(core, "ran")
    assert len(forgotten(core)) == 1


def test_restart_keeps_a_persons_message_within_the_loop() -> None:
    core = core_with("restart")
    for _ in range(9):
        core.append(NOTHING)
    core.say("continue")
    message_id = core.state.version
    core.run()
    core.append(NOTHING)
    assert forgotten(core)[-1] == (message_id + 1, core.state.version - 2)


def test_2_without_a_message_waits_for_one() -> None:
    core = Core(None, agent=AgentSpec(loop_policy=LoopPolicy(responses=("park",))))
    core.run()
    core.put(*[NOTHING] * 10)
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
    core = play(looped("park"), "stopped")
    assert core.state.loops.found is None
    assert not fold_status(core.events).is_in_loop
    stopped = core.state.version
    assert choose(core, option) == Rest()
    assert core.trace(after=stopped) == [f"{stopped + 1} LoopRecoveryAction(user)"]


@pytest.mark.parametrize("response", ["park", "fail", "nudge"])
@pytest.mark.parametrize("option", [1, 2, 3, 4])
def test_log_shows_whether_the_choice_is_still_open(response: str, option: int) -> None:
    core = looped(response)
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
    core = play_loop(started(agent=agent), "loop, bash(sudo reboot)")
    asked = core.state.confirmation.asked_id
    assert asked is not None
    effect = choose(core, option)
    assert (core.state.lifecycle.agent_state, isinstance(effect, CallModel)) == (state, option == 2)
    (result,) = [event.id for event in core.events if event.cause == asked]
    assert [end for _, end in forgotten(core)] == ([] if option == 3 else [result])
    assert (core.state.tools.pending, fold_status(core.events).is_unanswered) == ((), False)
    assert find_violations(core.events, conversation_id=CID, is_strict=True, is_over=False) == []
    check_replay(core)


@pytest.mark.parametrize("response", ["park", "fail", "nudge"])
@pytest.mark.parametrize("option", [1, 2, 3])
def test_loop_has_no_recovery_after_a_message(response: str, option: int) -> None:
    core = play(looped(response), "say")
    assert not fold_status(core.events).is_in_loop
    choose(core, option)
    assert core.trace()[-1] == f"{core.state.version} LoopRecoveryAction(user)"
    assert not fold_status(core.events).is_unanswered


def test_a_message_behind_the_choice_does_not_take_it_back() -> None:
    core = play(looped("nudge"), "bash")
    core.put(LoopRecoveryAction(option=1, source=EventSource.USER))
    play(core, "say(and then this)")
    core.put(LoopRecoveryAction(option=3, source=EventSource.USER))
    assert fold_status(core.events).requested == "stopped"
    assert core.run() == Rest()
    assert (core.state.lifecycle.agent_state, fold_status(core.events).is_unanswered) == ("stopped", False)
