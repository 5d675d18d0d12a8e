"""The original's golden traces (OpenHands appendix A), from the real core.

Each test has the trace's number. What differs throughout, on purpose (docs/parity.md): ids begin with 1; the
conversation's creation is the first event and the task stands before the system message; a model's reply is a
separate event before the actions it led to. Observations carry the source of their action, as in the original.
"""

from __future__ import annotations

from broker.contract.actions import MessageAction
from broker.contract.events import AgentSpec, EventSource, Limits, ModelReply
from broker.contract.observations import ErrorObservation
from broker.contract.policies import ConfirmationPolicy
from controller_worker.core.effects import AwaitTools, CallModel, Park, Rest
from tests.controller_parts import Core, bash, call, finish, started, think

GREETING = [
    "1 Created(environment)",
    "2 Message(user)",
    "3 SystemMessage(agent)",
    "4 Recall(user) workspace_context",
    "5 SC running",
    "6 RecallObs(environment, cause 4)",
]
"""The prefix S of every trace."""


def trace(core: Core) -> list[str]:
    assert core.trace()[:6] == GREETING
    return core.trace(after=6)


def test_1_a_command_then_finish() -> None:
    core = started()
    assert core.reply(bash()) == AwaitTools((8,))
    assert core.observe(8) == CallModel(2, 1)
    assert core.reply(finish()) == Rest()
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 CmdOutput(agent, cause 8)",
        "10 ModelReply(agent)",
        "11 Finish(agent)",
        "12 SC finished",
    ]
    assert core.state.usage.iteration == 2


def test_2_a_thought_then_finish() -> None:
    core = started()
    core.reply(think())
    core.reply(finish())
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 Think(agent)",
        "9 ThinkObs(agent, cause 8)",
        "10 ModelReply(agent)",
        "11 Finish(agent)",
        "12 SC finished",
    ]


def test_3_a_question_and_its_answer() -> None:
    core = started()
    core.reply(text="Which one?")
    core.say("the red one")
    assert core.run() == CallModel(2, 1)
    core.reply(finish())
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 Message(agent) wait",
        "9 SC awaiting_user_input",
        "10 Message(user)",
        "11 Recall(user) knowledge",
        "12 SC running",
        "13 NullObs(environment, cause 11)",
        "14 ModelReply(agent)",
        "15 Finish(agent)",
        "16 SC finished",
    ]
    assert core.state.usage.iteration == 2


def test_4_messages_that_do_not_wait() -> None:
    core = started()
    for _ in range(2):
        message = MessageAction(content="still at it", source=EventSource.AGENT)
        assert isinstance(core.append(ModelReply(seen_id=core.state.version), message), CallModel)
    core.reply(finish())
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 Message(agent)",
        "9 ModelReply(agent)",
        "10 Message(agent)",
        "11 ModelReply(agent)",
        "12 Finish(agent)",
        "13 SC finished",
    ]
    assert core.state.usage.iteration == 3


CONFIRM = ConfirmationPolicy(mode="risky", analyzer="none")
"""OpenHands' confirmation mode without an analyzer: every risk is unknown, and what is unknown is asked for."""


def test_11_a_confirmation_without_an_analyzer() -> None:
    """Differs: the action stands before the question, because it is appended with the reply that led to it."""
    core = started(agent=AgentSpec(confirmation=CONFIRM))
    core.reply(bash())
    core.ask("user_confirmed")
    assert core.run() == AwaitTools((11,))
    core.observe(11)
    core.reply(finish())
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 SC awaiting_user_confirmation",
        "10 ChangeState(user) user_confirmed",
        "11 CmdRun(agent)",
        "12 SC user_confirmed",
        "13 CmdOutput(agent, cause 11)",
        "14 SC running",
        "15 ModelReply(agent)",
        "16 Finish(agent)",
        "17 SC finished",
    ]


def test_12_a_rejection() -> None:
    core = started(agent=AgentSpec(confirmation=CONFIRM))
    core.reply(bash())
    core.ask("user_rejected")
    assert core.run() == Rest()
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 SC awaiting_user_confirmation",
        "10 ChangeState(user) user_rejected",
        "11 CmdRun(agent)",
        "12 SC user_rejected",
        "13 UserRejectObservation(environment, cause 11)",
        "14 SC awaiting_user_input",
    ]


def test_13_low_risk_runs_and_high_risk_is_confirmed() -> None:
    by_model = ConfirmationPolicy(mode="risky", analyzer="llm", confirm_unknown=False)
    core = started(agent=AgentSpec(confirmation=by_model))
    assert core.reply(bash()) == AwaitTools((8,))
    core.observe(8)
    assert core.reply(call("execute_bash", '{"command": "ls"}', "unknown")) == AwaitTools((11,))
    core.observe(11)
    core.reply(call("execute_bash", '{"command": "ls", "security_risk": "HIGH"}', "high"))
    assert trace(core)[-2:] == ["14 CmdRun(agent)", "15 SC awaiting_user_confirmation"]


def test_14_a_message_while_a_confirmation_is_awaited() -> None:
    """Differs: the action that is never run has a result that says so."""
    core = started(agent=AgentSpec(confirmation=CONFIRM))
    core.reply(bash())
    core.say()
    assert core.run() == CallModel(2, 1)
    assert trace(core)[3:] == [
        "10 Message(user)",
        "11 Recall(user) knowledge",
        "12 SC running",
        "13 NullObs(environment, cause 11)",
        "14 UserRejectObservation(environment, cause 8)",
    ]


def test_26_confirmed_file_edit_runs_once_after_confirmation() -> None:
    """Differs (B1): the original runs it before the confirmation, and again after it."""
    core = started(agent=AgentSpec(confirmation=CONFIRM))
    core.reply(call("str_replace_editor", '{"command": "create", "path": "/a", "file_text": "x"}', "e"))
    assert core.dispatched == []
    core.ask("user_confirmed")
    core.run()
    assert core.dispatched == [11]
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 FileEditAction(agent)",
        "9 SC awaiting_user_confirmation",
        "10 ChangeState(user) user_confirmed",
        "11 FileEditAction(agent)",
        "12 SC user_confirmed",
    ]


def test_15_a_stop_while_a_tool_call_is_pending() -> None:
    core = started()
    core.reply(bash())
    core.ask("stopped")
    assert core.run() == Rest()
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 ChangeState(user) stopped",
        "10 ErrorObs(agent, cause 8)",
        "11 SC stopped",
    ]
    error = core.event(10)
    assert isinstance(error, ErrorObservation)
    assert error.error_id == "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED"
    assert error.tool_call_metadata == core.event(8).tool_call_metadata is not None


def test_16_pause_late_observation_and_resume_that_steps() -> None:
    """Differs (B2): in the original nothing follows the resume."""
    core = started()
    core.reply(bash())
    core.ask("paused")
    core.run()
    core.observe(8)
    core.ask("running")
    assert core.run() == CallModel(2, 1)
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 ChangeState(user) paused",
        "10 SC paused",
        "11 CmdOutput(agent, cause 8)",
        "12 ChangeState(user) running",
        "13 SC running",
    ]


def test_17_a_message_while_a_command_is_pending() -> None:
    """Differs: the original steps at once and forgets the command; here the command is waited for."""
    core = started()
    core.reply(bash())
    core.say()
    assert core.run() == AwaitTools((8,))
    assert core.observe(8) == CallModel(2, 1)
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 Message(user)",
        "10 Recall(user) knowledge",
        "11 NullObs(environment, cause 10)",
        "12 CmdOutput(agent, cause 8)",
    ]


def test_18_a_message_after_the_finish() -> None:
    core = started()
    core.reply(finish())
    core.say()
    assert core.run() == CallModel(2, 1)
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 Finish(agent)",
        "9 SC finished",
        "10 Message(user)",
        "11 Recall(user) knowledge",
        "12 SC running",
        "13 NullObs(environment, cause 11)",
    ]


def test_19_malformed_calls_twice_then_an_unexpected_exception() -> None:
    """Differs: the failed call is an event, and consumes no iteration."""
    core = started()
    core.reply(call("execute_bash", "{"))
    core.reply(call("no_such_tool"))
    text = "RuntimeError: There was an unexpected error while running the agent: ValueError."
    assert core.fail("unexpected", retry_in=None, last_error=text) == Rest()
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 ErrorObs(agent)",
        "9 ModelReply(agent)",
        "10 ErrorObs(agent)",
        "11 ModelCallFailed(environment)",
        "12 SC error",
    ]
    assert (core.state.usage.iteration, core.state.lifecycle.last_error) == (2, text)


def test_22_the_iteration_limit_headless() -> None:
    core = started(limits=Limits(max_iterations=2))
    core.reply(bash())
    core.observe(8)
    core.reply(bash())
    assert core.observe(11) == Rest()
    core.say()
    assert core.run() == Rest()
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 CmdOutput(agent, cause 8)",
        "10 ModelReply(agent)",
        "11 CmdRun(agent)",
        "12 CmdOutput(agent, cause 11)",
        "13 SC error",
        "14 Message(user)",
        "15 Recall(user) knowledge",
        "16 SC running",
        "17 NullObs(environment, cause 15)",
        "18 SC error",
    ]


def test_22_the_iteration_limit_interactive() -> None:
    core = started(limits=Limits(max_iterations=2), headless=False)
    core.reply(think())
    core.reply(think())
    core.say()
    assert core.run() == CallModel(3, 1)
    core.reply(think())
    core.reply(think())
    assert (core.state.usage.max_iterations, core.states()) == (4, ["running", "error", "running", "error"])


def repeat_four_times(core: Core) -> None:
    for _ in range(4):
        core.reply(bash())
        core.observe(core.state.version)


def test_23_four_identical_commands() -> None:
    core = started()
    repeat_four_times(core)
    assert [line for line in trace(core) if "ModelReply" not in line] == [
        "8 CmdRun(agent)",
        "9 CmdOutput(agent, cause 8)",
        "11 CmdRun(agent)",
        "12 CmdOutput(agent, cause 11)",
        "14 CmdRun(agent)",
        "15 CmdOutput(agent, cause 14)",
        "17 CmdRun(agent)",
        "18 CmdOutput(agent, cause 17)",
        "19 SC error",
    ]
    assert (core.state.usage.iteration, core.state.lifecycle.last_error) == (
        4,
        "AgentStuckInLoopError: Agent got stuck in a loop",
    )


def test_23_four_identical_commands_interactive() -> None:
    core = started(headless=False)
    repeat_four_times(core)
    core.say()
    core.run()
    repeat_four_times(core)
    assert (core.states(), core.state.usage.iteration) == (["running", "error", "running", "error"], 8)


def test_24_a_rate_limit_and_a_message() -> None:
    """Differs (B3): the wait ends by itself too, and its last attempt ends in an error."""
    core = started()
    assert isinstance(core.fail("rate_limit", retry_in=8), Park)
    core.say()
    assert core.run() == CallModel(1, 1)
    assert trace(core) == [
        "7 ModelCallFailed(environment)",
        "8 SC rate_limited",
        "9 Message(user)",
        "10 Recall(user) knowledge",
        "11 SC running",
        "12 NullObs(environment, cause 10)",
    ]


def test_24_a_rate_limit_to_completion() -> None:
    core = started()
    core.fail("rate_limit", retry_in=8)
    core.pass_time(8)
    assert core.run() == CallModel(1, 2)
    assert core.fail("rate_limit", retry_in=None) == Rest()
    assert trace(core) == [
        "7 ModelCallFailed(environment)",
        "8 SC rate_limited",
        "9 SC running",
        "10 ModelCallFailed(environment)",
        "11 SC error",
    ]


def test_several_calls_of_one_reply_are_appended_together() -> None:
    """Differs: the original keeps the second call in memory until the first is answered."""
    core = started(agent=AgentSpec(tool_concurrency=1))
    core.reply(bash(call_id="a"), bash(call_id="b"))
    core.observe(8)
    core.observe(9)
    assert trace(core) == [
        "7 ModelReply(agent)",
        "8 CmdRun(agent)",
        "9 CmdRun(agent)",
        "10 CmdOutput(agent, cause 8)",
        "11 CmdOutput(agent, cause 9)",
    ]
