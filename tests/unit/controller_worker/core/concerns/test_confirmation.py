"""Confirmation of an action: the question, the answers, and other events instead of an answer."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, CmdRunAction, RiskyAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConfirmationStatus, EventSource
from broker.contract.interventions import ConfirmationReminder
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation, UserRejectObservation
from broker.contract.policies import ConfirmationPolicy
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.core.controller import next_effect
from controller_worker.core.effects import Append, AwaitTools, CallModel, Effect, Park, Rest
from controller_worker.loop.delegates import is_over
from tests.controller_parts import CID, Core, bash, call, check_snapshots, finish, started, think
from tests.scenarios import play, scenarios

ALWAYS = ConfirmationPolicy(mode="always", analyzer="none")
RISKY = ConfirmationPolicy(mode="risky", analyzer="shell")


def asking(policy: ConfirmationPolicy = ALWAYS, *, concurrency: int = 1) -> Core:
    return started(agent=AgentSpec(confirmation=policy, tool_concurrency=concurrency))


def answer_with(core: Core, state: str, *, action_id: int | None = None, **edited: Any) -> Effect:
    source = EventSource.USER
    core.put(ChangeAgentStateAction(agent_state=AgentState(state), action_id=action_id, edited=edited, source=source))
    return core.run()


def confirmation(core: Core, event_id: int) -> tuple[ConfirmationStatus, int | None]:
    action = core.event(event_id, RiskyAction)
    return action.confirmation_state, action.replaces


@scenarios(
    {
        "the first of two answers counts": (
            "bash, user_rejected & user_confirmed, dispatched , "
            "states running awaiting_user_confirmation user_rejected awaiting_user_input"
        ),
        "a message instead of an answer rejects and is answered": (
            "bash, say -> model 2, trace 9: 10 Message(user); 11 Recall(user) knowledge; 12 SC running; "
            "13 NullObs(environment, cause 11); 14 UserRejectObservation(environment, cause 8)"
        ),
        "a resume is no confirmation": (
            "bash, running -> rest, dispatched , "
            "states running awaiting_user_confirmation running awaiting_user_confirmation"
        ),
        "after a pause it is asked again": (
            "bash, paused, user_confirmed -> rest, running, "
            "states running awaiting_user_confirmation paused running awaiting_user_confirmation, "
            "user_confirmed -> tools 17"
        ),
        "the question survives snapshots": (
            "bash+bash, user_confirmed, ran 12, user_confirmed, ran, bash(pwd), user_rejected -> rest"
        ),
    }
)
def test_asked_action(scenario: str) -> None:
    core = play(asking(), scenario)
    assert find_violations(core.events, conversation_id=CID, is_strict=True, is_over=False) == []


def test_the_conversation_asks_for_the_action_by_its_id() -> None:
    core = play(asking(), "bash -> rest, dispatched ")
    asked = core.event(-1, AgentStateChangedObservation)
    assert (asked.agent_state.value, asked.action_id) == ("awaiting_user_confirmation", 8)
    assert confirmation(core, 8) == (ConfirmationStatus.AWAITING_CONFIRMATION, None)
    assert fold_status(core.events).confirmation_id == 8


def test_a_confirmed_action_is_written_again_and_that_copy_runs() -> None:
    core = asking()
    core.reply(bash("ls"), text="Let me look.")
    assert answer_with(core, "user_confirmed", action_id=8) == AwaitTools((11,))
    copy = core.event(11, CmdRunAction)
    assert (copy.command, copy.thought, copy.replaces) == ("ls", "", 8)
    assert copy.tool_call_metadata == core.event(8).tool_call_metadata
    play(core, "dispatched 11, ran 11 -> model 2, states running awaiting_user_confirmation user_confirmed running")


def test_an_edited_action_runs_as_it_was_edited() -> None:
    core = play(asking(), "bash(rm -rf build)")
    assert answer_with(core, "user_confirmed", command="rm -rf build/tmp") == AwaitTools((11,))
    copy = core.event(11, CmdRunAction)
    assert (copy.command, copy.confirmation_state) == ("rm -rf build/tmp", ConfirmationStatus.CONFIRMED)


@pytest.mark.parametrize(
    "edited",
    [
        {"command": 7},
        {"no_such_field": "x"},
        {"kind": "action.read"},
        {"confirmation_state": "confirmed"},
        {"id": 3},
        {"replaces": 2},
        {"tool_call_metadata": None},
    ],
)
def test_an_edit_that_is_none_rejects(edited: dict[str, Any]) -> None:
    core = play(asking(), "bash")
    assert answer_with(core, "user_confirmed", **edited) == Rest()
    play(core, "dispatched , states running awaiting_user_confirmation user_rejected awaiting_user_input")
    assert fold_status(core.events).is_settled


def test_a_rejected_action_never_runs_and_the_agent_waits() -> None:
    core = play(asking(), "bash")
    before = core.state.loops.recent.actions
    play(
        core,
        "user_rejected -> rest, dispatched , pending , trace 9: 10 ChangeState(user) user_rejected; 11 CmdRun(agent); "
        "12 SC user_rejected; 13 UserRejectObservation(environment, cause 11); 14 SC awaiting_user_input",
    )
    assert confirmation(core, 11) == (ConfirmationStatus.REJECTED, 8)
    assert core.state.loops.recent.actions == before  # it is no step of a loop
    play(core, "say(use ls -a instead) -> model 2")


def test_a_rejection_also_settles_what_stands_behind_it() -> None:
    core = play(asking(), "bash+bash, user_rejected, pending ")
    texts = {e.cause: e.content for e in core.events if isinstance(e, UserRejectObservation)}
    assert texts == {
        12: "Action has been rejected by the user! Waiting for further user input.",
        9: "The action was not executed, because the person rejected an earlier one of the same turn.",
    }


def test_each_action_of_a_turn_is_confirmed_in_turn() -> None:
    play(
        asking(RISKY, concurrency=4),
        "bash+bash(git push)+bash -> tools 8, ran 8 -> rest, asked 9, user_confirmed -> tools 14 10, ran 14, "
        "ran 10 -> model 2, states running awaiting_user_confirmation user_confirmed running",
    )


@pytest.mark.parametrize("state", ["user_confirmed", "user_rejected"])
def test_an_answer_for_another_action_or_no_question_means_nothing(state: str) -> None:
    core = play(asking(), "bash")
    assert answer_with(core, state, action_id=7) == Rest()
    assert core.states()[-1] == "awaiting_user_confirmation"
    assert fold_status(core.events).is_settled
    play(started(), f"bash, {state} -> tools 8, states running")


def test_a_stop_answers_what_waits() -> None:
    answer = play(asking(), "bash, stopped -> rest").event(-2, ErrorObservation)
    assert (answer.cause, answer.error_id) == (8, "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED")


def test_every_runnable_action_is_asked_for() -> None:
    core = asking()
    edit = call("str_replace_editor", '{"command": "create", "path": "/a", "file_text": "x"}', "e")
    view = call("str_replace_editor", '{"command": "view", "path": "/a"}', "v")
    core.reply(edit, view, think("hm"), finish())
    assert [confirmation(core, n)[0] for n in (8, 9)] == [ConfirmationStatus.AWAITING_CONFIRMATION] * 2
    assert core.state.confirmation.asked_id == 8


def test_rejection_starting_a_fork_does_not_affect_earlier_actions() -> None:
    core = play(asking(), "bash(one), user_confirmed, ran, bash(two)")
    asked_id = core.state.confirmation.asked_id
    core.put(ChangeAgentStateAction(agent_state=AgentState.USER_REJECTED, source=EventSource.USER))
    # The fork has the rejected copy, and nothing else of that append.
    rejected = {"confirmation_state": ConfirmationStatus.REJECTED, "replaces": asked_id}
    core.put(CmdRunAction(command="two", source=EventSource.AGENT, **rejected))
    assert core.run() == Rest()
    assert core.states()[-2:] == ["user_rejected", "awaiting_user_input"]


# Deadlines


@pytest.mark.parametrize(
    ("default", "effect", "states"),
    [
        ("reject", CallModel(2, 1), ["user_rejected", "running"]),
        ("confirm", AwaitTools((11,)), ["user_confirmed"]),
        ("stop", Rest(), ["stopped"]),
    ],
)
def test_question_is_answered_by_the_default_at_its_deadline(default: str, effect: Effect, states: list[str]) -> None:
    policy = ALWAYS.model_copy(update={"deadline_seconds": 600.0, "default": default})
    core = asking(policy)
    waiting = core.reply(bash())
    assert waiting == Park(core.now + timedelta(seconds=600), "confirmation")
    core.pass_time(599)
    assert core.run() == waiting
    core.pass_time(1)
    assert core.run() == effect
    assert core.states()[-len(states) :] == states
    answered = next(event for event in core.events if isinstance(event, ChangeAgentStateAction))
    assert answered.source is EventSource.ENVIRONMENT
    assert find_violations(core.events, conversation_id=CID, is_strict=True, is_over=False) == []


@pytest.mark.parametrize(("deadline", "is_end"), [(None, True), (600.0, False)])
def test_headless_delegate_ends_at_a_question_without_deadline(deadline: float | None, is_end: bool) -> None:
    core = asking(ALWAYS.model_copy(update={"deadline_seconds": deadline}))
    core.reply(bash())
    assert is_over(core.state) is is_end


def test_default_never_answers_what_a_server_asks_the_user() -> None:
    policy = ALWAYS.model_copy(update={"deadline_seconds": 600.0, "default": "confirm"})
    core = asking(policy)
    core.reply(bash())
    asked = core.state.confirmation.asked_id
    core.state = replace(core.state, confirmation=replace(core.state.confirmation, question_id=asked))
    effect = next_effect(core.state, core.now + timedelta(seconds=600))
    assert isinstance(effect, Append)
    (answer,) = effect.events
    assert isinstance(answer, ChangeAgentStateAction)
    assert answer.agent_state is AgentState.USER_REJECTED


def test_agent_reads_that_no_answer_came() -> None:
    core = asking(ALWAYS.model_copy(update={"deadline_seconds": 90.0}))
    core.reply(bash())
    core.pass_time(90)
    core.run()
    rejection = next(event for event in core.events if isinstance(event, UserRejectObservation))
    assert "No answer came within 90 seconds." in rejection.content


def test_answer_in_time_ends_the_deadline() -> None:
    core = asking(ALWAYS.model_copy(update={"deadline_seconds": 600.0}))
    core.reply(bash())
    assert answer_with(core, "user_confirmed") == AwaitTools((11,))
    core.pass_time(601)
    assert core.observe(11) == CallModel(2, 1)


def test_user_is_reminded_once_per_question() -> None:
    core = asking(ALWAYS.model_copy(update={"deadline_seconds": 600.0, "reminder_seconds": 300.0}))
    core.reply(bash())
    asked, start = core.state.confirmation.asked_id, core.now
    core.pass_time(300)
    assert core.run() == Park(start + timedelta(seconds=600), "confirmation")
    assert core.run() == Park(start + timedelta(seconds=600), "confirmation")
    (reminder,) = [event for event in core.events if isinstance(event, ConfirmationReminder)]
    assert (reminder.action_id, reminder.deadline) == (asked, start + timedelta(seconds=600))
    check_snapshots(core)
    answer_with(core, "user_confirmed")
    core.observe(12)
    core.reply(bash())
    core.pass_time(300)
    core.run()
    assert len([event for event in core.events if isinstance(event, ConfirmationReminder)]) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"default": "stop"},
        {"default": "confirm", "reminder_seconds": 5},
        {"deadline_seconds": 0},
        {"deadline_seconds": float("inf")},
        {"deadline_seconds": 5, "reminder_seconds": 5},
    ],
)
def test_times_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="deadline"):
        ConfirmationPolicy(mode="always", **fields)
