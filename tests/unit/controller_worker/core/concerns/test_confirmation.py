"""Asking a person before an action runs: the question, the answers, and what else may come instead of one."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, CmdRunAction, RiskyAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConfirmationStatus, EventSource
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation, UserRejectObservation
from broker.contract.policies import ConfirmationPolicy
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from tests.controller_parts import CID, Core, bash, call, check_snapshots, finish, started, think

ALWAYS = ConfirmationPolicy(mode="always", analyzer="none")
RISKY = ConfirmationPolicy(mode="risky", analyzer="shell")


def asking(policy: ConfirmationPolicy = ALWAYS, *, concurrency: int = 1) -> Core:
    return started(agent=AgentSpec(confirmation=policy, tool_concurrency=concurrency))


def answer_with(core: Core, state: str, *, action_id: int | None = None, **edited: Any) -> Effect:
    core.put(
        ChangeAgentStateAction(
            agent_state=AgentState(state), action_id=action_id, edited=edited, source=EventSource.USER
        )
    )
    return core.run()


def confirmation(core: Core, event_id: int) -> tuple[ConfirmationStatus, int | None]:
    action = core.event(event_id)
    assert isinstance(action, RiskyAction)
    return action.confirmation_state, action.replaces


def test_nothing_is_asked_without_a_policy() -> None:
    core = started()
    assert core.reply(bash("rm -rf /")) == AwaitTools((8,))


def test_the_conversation_asks_for_the_action_by_its_id() -> None:
    core = asking()
    assert core.reply(bash()) == Rest()
    asked = core.events[-1]
    assert isinstance(asked, AgentStateChangedObservation)
    assert (asked.agent_state.value, asked.action_id) == ("awaiting_user_confirmation", 8)
    assert confirmation(core, 8) == (ConfirmationStatus.AWAITING_CONFIRMATION, None)
    assert core.dispatched == []
    assert fold_status(core.events).confirmation_id == 8


def test_a_confirmed_action_is_written_again_and_that_copy_runs() -> None:
    core = asking()
    core.reply(bash("ls"), text="Let me look.")
    assert answer_with(core, "user_confirmed", action_id=8) == AwaitTools((11,))
    copy = core.event(11)
    assert isinstance(copy, CmdRunAction)
    assert (copy.command, copy.thought, copy.replaces) == ("ls", "", 8)
    assert copy.tool_call_metadata == core.event(8).tool_call_metadata
    assert core.dispatched == [11]
    assert core.observe(11) == CallModel(2, 1)
    assert core.states() == ["running", "awaiting_user_confirmation", "user_confirmed", "running"]


def test_an_edited_action_runs_as_it_was_edited() -> None:
    core = asking()
    core.reply(bash("rm -rf build"))
    assert answer_with(core, "user_confirmed", command="rm -rf build/tmp") == AwaitTools((11,))
    copy = core.event(11)
    assert isinstance(copy, CmdRunAction)
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
    core = asking()
    core.reply(bash())
    assert answer_with(core, "user_confirmed", **edited) == Rest()
    assert core.states()[-2:] == ["user_rejected", "awaiting_user_input"]
    assert core.dispatched == []
    assert fold_status(core.events).is_settled


def test_a_rejected_action_never_runs_and_the_agent_waits() -> None:
    core = asking()
    core.reply(bash())
    assert answer_with(core, "user_rejected") == Rest()
    assert core.trace(after=9) == [
        "10 ChangeState(user) user_rejected",
        "11 CmdRun(agent)",
        "12 SC user_rejected",
        "13 UserRejectObservation(environment, cause 11)",
        "14 SC awaiting_user_input",
    ]
    assert confirmation(core, 11) == (ConfirmationStatus.REJECTED, 8)
    assert (core.dispatched, core.state.tools.pending) == ([], ())
    core.say("use ls -a instead")
    assert core.run() == CallModel(2, 1)


def test_a_rejection_also_settles_what_stands_behind_it() -> None:
    core = asking()
    core.reply(bash(call_id="a"), bash(call_id="b"))
    answer_with(core, "user_rejected")
    texts = {e.cause: e.content for e in core.events if isinstance(e, UserRejectObservation)}
    assert texts == {
        12: "Action has been rejected by the user! Waiting for further user input.",
        9: "The action was not executed, because the person rejected an earlier one of the same turn.",
    }
    assert core.state.tools.pending == ()


def test_each_action_of_a_turn_is_confirmed_in_turn() -> None:
    core = asking(RISKY, concurrency=4)
    risky = bash("git push", call_id="b")
    assert core.reply(bash(call_id="a"), risky, bash(call_id="c")) == AwaitTools((8,))
    assert core.observe(8) == Rest()
    assert core.state.confirmation.asked_id == 9
    assert answer_with(core, "user_confirmed") == AwaitTools((14, 10))
    core.observe(14)
    assert core.observe(10) == CallModel(2, 1)
    assert core.states() == ["running", "awaiting_user_confirmation", "user_confirmed", "running"]


@pytest.mark.parametrize("state", ["user_confirmed", "user_rejected"])
def test_an_answer_for_another_action_means_nothing(state: str) -> None:
    core = asking()
    core.reply(bash())
    assert answer_with(core, state, action_id=7) == Rest()
    assert core.states()[-1] == "awaiting_user_confirmation"
    assert fold_status(core.events).is_settled


@pytest.mark.parametrize("state", ["user_confirmed", "user_rejected"])
def test_an_answer_to_no_question_means_nothing(state: str) -> None:
    core = started()
    core.reply(bash())
    assert answer_with(core, state) == AwaitTools((8,))
    assert core.states() == ["running"]


def test_the_first_of_two_answers_counts() -> None:
    core = asking()
    core.reply(bash())
    for state in ("user_rejected", "user_confirmed"):
        core.put(ChangeAgentStateAction(agent_state=AgentState(state), source=EventSource.USER))
    core.run()
    assert core.states()[-1] == "awaiting_user_input"
    assert core.dispatched == []


def test_a_message_instead_of_an_answer_rejects_and_is_answered() -> None:
    core = asking()
    core.reply(bash())
    core.say("what is it for?")
    assert core.run() == CallModel(2, 1)
    assert core.trace(after=9) == [
        "10 Message(user)",
        "11 Recall(user) knowledge",
        "12 SC running",
        "13 NullObs(environment, cause 11)",
        "14 UserRejectObservation(environment, cause 8)",
    ]


def test_a_resume_is_no_confirmation() -> None:
    core = asking()
    core.reply(bash())
    core.ask("running")
    assert core.run() == Rest()
    assert core.states()[-2:] == ["running", "awaiting_user_confirmation"]
    assert core.dispatched == []


def test_after_a_pause_it_is_asked_again() -> None:
    core = asking()
    core.reply(bash())
    core.ask("paused")
    core.run()
    assert answer_with(core, "user_confirmed") == Rest()
    core.ask("running")
    core.run()
    assert core.states()[-3:] == ["paused", "running", "awaiting_user_confirmation"]
    assert isinstance(answer_with(core, "user_confirmed", action_id=8), AwaitTools)


def test_a_stop_answers_what_waits() -> None:
    core = asking()
    core.reply(bash())
    core.ask("stopped")
    assert core.run() == Rest()
    answer = core.events[-2]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.error_id) == (8, "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED")


def test_every_runnable_action_is_asked_for() -> None:
    core = asking()
    edit = call("str_replace_editor", '{"command": "create", "path": "/a", "file_text": "x"}', "e")
    view = call("str_replace_editor", '{"command": "view", "path": "/a"}', "v")
    core.reply(edit, view, think("hm"), finish())
    assert [confirmation(core, n)[0] for n in (8, 9)] == [ConfirmationStatus.AWAITING_CONFIRMATION] * 2
    assert core.state.confirmation.asked_id == 8


def test_the_question_survives_snapshots_and_the_log_is_whole() -> None:
    core = asking()
    core.reply(bash(call_id="a"), bash(call_id="b"))
    answer_with(core, "user_confirmed")
    core.observe(12)
    answer_with(core, "user_confirmed")
    core.observe(core.state.tools.pending[0].id)
    core.reply(bash("pwd"))
    answer_with(core, "user_rejected")
    check_snapshots(core)
    assert find_violations(core.events, conversation_id=CID) == []


def test_rejection_starting_a_fork_does_not_affect_earlier_actions() -> None:
    core = asking()
    core.reply(bash("one", "a"))
    answer_with(core, "user_confirmed")
    core.observe(core.dispatched[-1])
    core.reply(bash("two", "b"))
    asked_id = core.state.confirmation.asked_id
    core.put(ChangeAgentStateAction(agent_state=AgentState.USER_REJECTED, source=EventSource.USER))
    # The fork has the rejected copy, and nothing of what was written with it.
    rejected = {"confirmation_state": ConfirmationStatus.REJECTED, "replaces": asked_id}
    core.put(CmdRunAction(command="two", source=EventSource.AGENT, **rejected))
    assert core.run() == Rest()
    assert core.states()[-2:] == ["user_rejected", "awaiting_user_input"]


def test_rejected_action_is_no_step_of_a_loop() -> None:
    core = asking()
    core.reply(bash())
    before = core.state.loops.recent.actions
    answer_with(core, "user_rejected")
    assert core.state.loops.recent.actions == before
