"""The core: what a person may ask for at any time: pause, resume, stop."""

from __future__ import annotations

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.agent_state import AgentState
from broker.contract.events import EventSource
from broker.contract.observations import ErrorObservation
from controller_worker.core.effects import AwaitTools, CallModel, Rest
from tests.controller_parts import bash, finish, started

STOPPED_TEXT = "Stop button pressed. The action has not been executed."


def test_a_pause_lets_the_running_action_end_and_begins_nothing() -> None:
    core = started()
    core.reply(bash())
    core.ask("paused")
    assert core.run() == Rest()
    assert core.observe(8) == Rest()
    assert core.states() == ["running", "paused"]


def test_a_resume_waits_for_an_action_that_still_runs() -> None:
    core = started()
    core.reply(bash())
    core.ask("paused")
    core.run()
    core.ask("running")
    assert core.run() == AwaitTools((8,))


def test_answer_during_a_pause_is_kept_and_actions_wait() -> None:
    core = started()
    core.ask("paused")
    core.run()
    assert core.reply(bash(), seen_id=6) == Rest()
    assert core.commits[-1].dispatch == []
    core.ask("running")
    assert core.run() == AwaitTools((10,))


def test_a_finish_that_comes_during_a_pause_ends_the_conversation() -> None:
    core = started()
    core.ask("paused")
    core.run()
    assert core.reply(finish(), seen_id=6) == Rest()
    assert core.states() == ["running", "paused", "finished"]


def test_finish_during_a_pause_waits_for_its_turns_calls() -> None:
    core = started()
    core.ask("paused")
    core.run()
    assert core.reply(bash(), finish(), seen_id=6) == Rest()
    assert core.states() == ["running", "paused"]
    core.ask("running")
    assert core.run() == AwaitTools((10,))
    assert core.observe(10) == Rest()
    assert core.states() == ["running", "paused", "running", "finished"]


def test_a_message_resumes() -> None:
    core = started()
    core.ask("paused")
    core.run()
    core.say()
    assert core.run() == CallModel(1, 1)
    assert core.states() == ["running", "paused", "running"]


def test_asking_for_the_state_it_is_in_changes_nothing() -> None:
    core = started()
    core.ask("running")
    assert core.run() == CallModel(1, 1)
    assert core.states() == ["running"]


def test_a_resume_right_after_a_pause_takes_it_back() -> None:
    core = started()
    core.ask("paused")
    core.ask("running")
    assert core.run() == CallModel(1, 1)
    assert core.states() == ["running"]


@pytest.mark.parametrize(
    "state", ["loading", "finished", "rejected", "error", "awaiting_user_input", "rate_limited", "user_confirmed"]
)
def test_states_nobody_may_ask_for_are_ignored(state: str) -> None:
    core = started()
    core.ask(state)
    assert core.state.lifecycle.requested is None
    assert core.run() == CallModel(1, 1)


def test_a_stop_settles_every_pending_action_and_cancels_it() -> None:
    core = started()
    core.reply(bash(call_id="a"), bash(call_id="b"))
    core.ask("stopped")
    assert core.run() == Rest()
    assert core.trace(after=9) == [
        "10 ChangeState(user) stopped",
        "11 ErrorObs(agent, cause 8)",
        "12 ErrorObs(agent, cause 9)",
        "13 SC stopped",
    ]
    first, second = core.event(11), core.event(12)
    assert isinstance(first, ErrorObservation)
    assert (first.content, first.error_id) == (STOPPED_TEXT, "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED")
    assert first.tool_call_metadata == core.event(8).tool_call_metadata
    assert second.tool_call_metadata == core.event(9).tool_call_metadata
    assert (core.commits[-1].answers, core.commits[-1].cancels) == ({0: 8, 1: 9}, [8, 9, 0])
    assert core.state.tools.pending == ()


def test_a_stop_settles_a_persons_own_command_too() -> None:
    core = started()
    core.put(CmdRunAction(command="ls", source=EventSource.USER))
    core.ask("stopped")
    core.run()
    assert core.trace(after=7)[1] == "9 ErrorObs(agent, cause 7)"


def test_an_observation_that_comes_after_the_stop_changes_nothing() -> None:
    core = started()
    core.reply(bash())
    core.ask("stopped")
    core.run()
    assert core.observe(8) == Rest()
    assert core.state.lifecycle.agent_state is AgentState.STOPPED


def test_stopped_conversation_continues_with_message_or_resume() -> None:
    for go_on in ("message", "resume"):
        core = started()
        core.ask("stopped")
        core.run()
        core.say() if go_on == "message" else core.ask("running")
        assert core.run() == CallModel(1, 1)


def test_a_stop_forgets_how_the_turn_was_to_end() -> None:
    core = started()
    core.reply(bash(), finish())
    core.ask("stopped")
    core.run()
    core.ask("running")
    assert core.run() == CallModel(2, 1)
