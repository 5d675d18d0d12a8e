"""The core: what each event means, and what is wanted next."""

from __future__ import annotations

from datetime import timedelta

import pytest

from broker.contract.actions import AgentFinishAction, AgentRejectAction, CmdRunAction, MessageAction, NullAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConversationCreated, EventSource, Limits, ModelReply, with_id
from broker.contract.observations import AgentStateChangedObservation, CmdOutputObservation, ErrorObservation
from broker.contract.recall import RecallAction, RecallObservation
from controller_worker.core.announcement import end_in_error
from controller_worker.core.concerns.model_calls import RetryWait
from controller_worker.core.controller import apply, next_effect
from controller_worker.core.effects import Append, AwaitTools, CallModel, Greet, Rest
from controller_worker.core.pending import PendingAction
from controller_worker.core.state import State
from tests.controller_parts import START, Core, answer, bash, finish, said, started, system_message, think

STOPPED_TEXT = "Stop button pressed. The action has not been executed."
ERROR_TEXT = "The action has not been executed due to a runtime error."


# The beginning


def test_an_empty_log_wants_nothing() -> None:
    assert next_effect(State(), START) == Rest()


def test_events_are_applied_in_order_and_once() -> None:
    with pytest.raises(AssertionError, match="event 2 after version 0"):
        apply(State(), with_id(said("hi"), 2))


def test_a_conversation_begins_with_its_system_message() -> None:
    core = Core(task=None)
    assert core.wants() == Greet()
    core.put(system_message())
    assert core.wants() == Rest()


def test_the_creation_sets_agent_workspace_and_limits() -> None:
    limits = Limits(max_iterations=7, max_budget_usd=1.5)
    state = Core(agent=AgentSpec(tool_concurrency=3), limits=limits, headless=False).state
    assert (state.setup.conversation_id, state.setup.agent.tool_concurrency, state.setup.workspace.path) == (
        "conversation-1",
        3,
        "/srv/project",
    )
    assert (state.setup.limits, state.usage.max_iterations, state.usage.max_budget_usd, state.setup.headless) == (
        limits,
        7,
        1.5,
        False,
    )
    assert state.lifecycle.agent_state is AgentState.LOADING


def test_a_second_creation_changes_nothing() -> None:
    core = started(limits=Limits(max_iterations=7))
    before = core.state
    core.put(ConversationCreated(conversation_id="another-one", limits=Limits(max_iterations=1_000)))
    assert (core.state.setup.conversation_id, core.state.usage.max_iterations) == (before.setup.conversation_id, 7)


def test_first_message_is_recalled_before_work_starts() -> None:
    core = started()
    assert core.trace() == [
        "1 Created(environment)",
        "2 Message(user)",
        "3 SystemMessage(agent)",
        "4 Recall(user) workspace_context",
        "5 SC running",
        "6 RecallObs(environment, cause 4)",
    ]
    recall = core.event(6)
    assert isinstance(recall, RecallObservation)
    assert (recall.date, recall.working_dir) == ("2026-03-01", "/srv/project")


def test_two_messages_awaiting_a_worker_are_recalled_once() -> None:
    core = Core()
    core.say("and quickly")
    assert core.run() == CallModel(1, 1)
    assert core.trace(after=3) == [
        "4 SystemMessage(agent)",
        "5 Recall(user) workspace_context",
        "6 SC running",
        "7 RecallObs(environment, cause 5)",
    ]


def test_a_later_message_is_recalled_for_knowledge() -> None:
    core = started()
    core.reply(finish())
    core.say()
    core.run()
    assert core.trace(after=9) == [
        "10 Message(user)",
        "11 Recall(user) knowledge",
        "12 SC running",
        "13 NullObs(environment, cause 11)",
    ]


def test_a_recall_stands_in_the_log_with_its_answer() -> None:
    """B15: in the original another component answers, and when it fails the agent waits for ever."""
    core = started()
    core.say()
    core.run()
    recalls = [(commit, event) for commit in core.commits for event in commit.events if isinstance(event, RecallAction)]
    assert len(recalls) == 2
    for commit, recall in recalls:
        assert [event.cause for event in commit.events if event.cause] == [recall.id]


def test_running_without_a_task_waits_for_one() -> None:
    core = Core(task=None)
    core.ask("running")
    assert core.run() == Rest()
    assert core.states() == ["running"]
    core.say("task")
    assert core.run() == CallModel(1, 1)
    assert core.trace(after=4)[1] == "6 Recall(user) workspace_context"


# Ends of a turn


def test_finishing() -> None:
    core = started()
    assert core.reply(finish("all done")) == Rest()
    assert core.trace(after=6) == ["7 ModelReply(agent)", "8 Finish(agent)", "9 SC finished"]
    assert (core.state.lifecycle.agent_state, core.state.usage.iteration, core.state.lifecycle.ending) == (
        AgentState.FINISHED,
        1,
        None,
    )


def test_rejecting() -> None:
    core = started()
    reply = ModelReply(seen_id=6)
    assert core.append(reply, AgentRejectAction(outputs={"reason": "no"})) == Rest()
    assert core.trace(after=6) == ["7 ModelReply(agent)", "8 Reject(agent)", "9 SC rejected"]


def test_a_question_waits_for_a_person() -> None:
    core = started()
    assert core.reply(text="Which one?") == Rest()
    assert core.trace(after=6) == ["7 ModelReply(agent)", "8 Message(agent) wait", "9 SC awaiting_user_input"]
    core.say("the red one")
    assert core.run() == CallModel(2, 1)


def test_agent_message_without_wait_is_followed_by_next_step() -> None:
    core = started()
    message = MessageAction(content="working on it", source=EventSource.AGENT)
    assert core.append(ModelReply(seen_id=6), message) == CallModel(2, 1)
    assert core.state.lifecycle.agent_state is AgentState.RUNNING


def test_a_thought_and_an_error_lead_to_the_next_step() -> None:
    core = started()
    assert core.reply(think()) == CallModel(2, 1)
    assert core.append(ModelReply(seen_id=9), ErrorObservation(content="Tool x is not registered.")) == CallModel(3, 1)


def test_message_during_the_model_call_is_answered_before_the_end() -> None:
    core = started()
    core.say("one more thing")
    core.run()
    assert core.reply(finish(), seen_id=6) == CallModel(2, 1)
    assert core.states() == ["running"]
    assert core.reply(finish()) == Rest()
    assert core.states() == ["running", "finished"]


def test_message_during_a_model_question_is_not_its_answer() -> None:
    core = started()
    core.say("one more thing")
    core.run()
    assert core.reply(text="Which one?", seen_id=6) == CallModel(2, 1)


def test_an_outdated_reply_still_acts() -> None:
    core = started()
    core.say("one more thing")
    core.run()
    assert core.reply(bash(), seen_id=6) == AwaitTools((11,))


@pytest.mark.parametrize("seen_id", [6, 7])
def test_an_unread_message_keeps_a_finish_from_ending(seen_id: int) -> None:
    core = started()
    core.say("one more thing")
    assert core.reply(finish(), seen_id=seen_id) == CallModel(2, 1)
    assert core.state.inbox.is_reply_outdated is (seen_id < 7)


# Tools


def test_a_command_waits_for_its_observation() -> None:
    core = started()
    assert core.reply(bash()) == AwaitTools((8,))
    assert core.state.tools.pending[0].id == 8
    assert core.commits[-1].dispatch == [1]
    assert core.observe(8) == CallModel(2, 1)
    assert core.state.tools.pending == ()


def test_calls_of_one_turn_run_one_at_a_time() -> None:
    core = started()
    assert core.reply(bash(call_id="a"), bash(call_id="b"), bash(call_id="c")) == AwaitTools((8,))
    assert core.commits[-1].dispatch == [1]
    assert core.observe(8) == AwaitTools((9,))
    assert core.observe(9) == AwaitTools((10,))
    assert core.observe(10) == CallModel(2, 1)
    assert core.dispatched == [8, 9, 10]


def test_two_calls_at_once_with_a_concurrency_of_two() -> None:
    core = started(agent=AgentSpec(tool_concurrency=2))
    assert core.reply(bash(call_id="a"), bash(call_id="b"), bash(call_id="c")) == AwaitTools((8, 9))
    assert core.commits[-1].dispatch == [1, 2]
    assert core.observe(9) == AwaitTools((8, 10))
    assert core.observe(8) == AwaitTools((10,))
    assert core.observe(10) == CallModel(2, 1)


def test_a_second_observation_of_an_action_changes_nothing() -> None:
    core = started()
    core.reply(bash())
    core.observe(8)
    before = core.state
    core.put(answer(core.event(8)))
    assert core.state == State(**vars(before) | {"version": 10, "loops": core.state.loops})


def test_a_finish_beside_other_calls_waits_for_them() -> None:
    core = started()
    assert core.reply(finish(), bash()) == AwaitTools((9,))
    assert core.observe(9) == Rest()
    assert core.states() == ["running", "finished"]


def test_a_message_while_a_command_runs_abandons_nothing() -> None:
    core = started()
    core.reply(bash())
    core.say("hurry")
    assert core.run() == AwaitTools((8,))
    assert core.trace(after=8) == [
        "9 Message(user)",
        "10 Recall(user) knowledge",
        "11 NullObs(environment, cause 10)",
    ]
    assert core.observe(8) == CallModel(2, 1)


def test_message_reverts_the_end_of_a_waiting_turn() -> None:
    core = started()
    core.reply(finish(), bash())
    core.say("no, continue")
    assert core.run() == AwaitTools((9,))
    assert core.observe(9) == CallModel(2, 1)


def test_a_persons_own_command_is_waited_for() -> None:
    core = started()
    core.put(CmdRunAction(command="ls", source=EventSource.USER))
    assert core.run() == AwaitTools((7,))


def test_what_is_not_runnable_is_not_waited_for() -> None:
    core = started()
    core.put(NullAction())
    assert core.run() == CallModel(1, 1)


# Errors that nobody foresaw


def test_ending_in_error_settles_what_is_pending() -> None:
    core = started()
    core.reply(bash())
    wanted = end_in_error(core.state, "RuntimeError: oops")
    assert isinstance(wanted, Append)
    assert (wanted.answers, wanted.cancels) == (((0, 8),), (8,))
    error, change = wanted.events
    assert isinstance(error, ErrorObservation)
    assert (error.content, error.error_id, error.cause) == (
        ERROR_TEXT,
        "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_ERROR",
        8,
    )
    assert isinstance(change, AgentStateChangedObservation)
    assert (change.agent_state, change.reason) == (AgentState.ERROR, "RuntimeError: oops")


def test_an_error_ends_what_was_asked_for_before_it() -> None:
    core = started()
    core.ask("paused")
    assert core.run() == Rest()
    core.ask("running")
    core.put(AgentStateChangedObservation(agent_state=AgentState.ERROR, reason="It crashed its worker 3 times."))
    assert core.run() == Rest()
    assert core.state.lifecycle.agent_state is AgentState.ERROR
    core.ask("running")
    assert core.run() == CallModel(1, 1)


def test_message_left_unread_by_an_error_is_read_on_resume() -> None:
    core = Core()
    core.put(AgentStateChangedObservation(agent_state=AgentState.ERROR, reason="UsageError: no such agent"))
    core.ask("running")
    assert core.run() == CallModel(1, 1)
    assert core.trace(after=4) == [
        "5 SystemMessage(agent)",
        "6 Recall(user) workspace_context",
        "7 SC running",
        "8 RecallObs(environment, cause 6)",
    ]


def test_a_finish_nobody_asked_the_model_for_counts_as_well() -> None:
    core = started()
    core.put(AgentFinishAction(source=EventSource.USER))
    assert core.run() == Rest()
    assert core.states() == ["running", "finished"]


def test_a_state_says_what_it_holds() -> None:
    core = started()
    core.reply(bash())
    metadata = core.event(8).tool_call_metadata
    assert core.state.tools.pending == (PendingAction(8, metadata, core.state.tools.pending[0].trace),)
    core.observe(8)
    core.fail("internal", retry_in=8)
    assert core.state.calls.wait == RetryWait("internal", START + timedelta(seconds=8))


def test_the_observation_of_another_conversations_action_settles_nothing() -> None:
    core = started()
    core.reply(bash())
    core.put(CmdOutputObservation(content="x", command="ls", cause=99))
    assert core.run() == AwaitTools((8,))
