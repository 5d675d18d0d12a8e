"""The original's golden traces (OpenHands appendix A), from the real core.

Each scenario has the trace's number. Deliberate differences throughout (docs/parity.md): ids start with 1; the
conversation's creation is the first event and the task comes before the system message; a model's reply is a separate
event before the actions it led to. Observations carry the source of their action, as in the original. Of delegation (5
to 10): the delegate's own events are in its own log; the parent's holds the report of its end, and an observation that
has the action as its cause.
"""

import json
from typing import Any

import pytest

from broker.contract.actions import MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, DelegateEnded, EventSource, Limits, ModelReply
from broker.contract.observations import AgentDelegateObservation, ErrorObservation
from broker.contract.policies import ConfirmationPolicy
from controller_worker.core.effects import AwaitDelegates, AwaitTools, CallModel, Effect, Rest
from tests.controller_parts import Core, bash, call, finish, started
from tests.scenarios import play, scenarios

GREETING = (
    "trace 0: 1 Created(environment); 2 Message(user); 3 SystemMessage(agent); 4 Recall(user) workspace_context; "
    "5 SC running; 6 RecallObs(environment, cause 4)"
)
"""The prefix S of every trace."""
CONFIRM = ConfirmationPolicy(mode="risky", analyzer="none")
"""OpenHands' confirmation mode without an analyzer: every risk is unknown, and what is unknown is asked for."""
STUCK = "AgentStuckInLoopError: Agent got stuck in a loop"


def play_trace(core: Core, scenario: str) -> Core:
    return play(play(core, GREETING), scenario)


@scenarios(
    {
        "1 a command then finish": (
            "bash -> tools 8, ran 8 -> model 2, finish -> rest, iteration 2, trace 6: 7 ModelReply(agent); "
            "8 CmdRun(agent); 9 CmdOutput(agent, cause 8); 10 ModelReply(agent); 11 Finish(agent); 12 SC finished"
        ),
        "2 a thought then finish": (
            "think, finish, trace 6: 7 ModelReply(agent); 8 Think(agent); 9 ThinkObs(agent, cause 8); "
            "10 ModelReply(agent); 11 Finish(agent); 12 SC finished"
        ),
        "3 a question and its answer": (
            "text(Which one?), say(the red one) -> model 2, finish, iteration 2, trace 6: 7 ModelReply(agent); "
            "8 Message(agent) wait; 9 SC awaiting_user_input; 10 Message(user); 11 Recall(user) knowledge; "
            "12 SC running; 13 NullObs(environment, cause 11); 14 ModelReply(agent); 15 Finish(agent); 16 SC finished"
        ),
        # Differs (B2): in the original nothing follows the resume.
        "16 pause, late observation, and resume that steps": (
            "bash, paused, ran 8, running -> model 2, trace 6: 7 ModelReply(agent); 8 CmdRun(agent); "
            "9 ChangeState(user) paused; 10 SC paused; 11 CmdOutput(agent, cause 8); 12 ChangeState(user) running; "
            "13 SC running"
        ),
        # Differs: the original steps at once and forgets the command; here the command is waited for.
        "17 a message while a command is pending": (
            "bash, say -> tools 8, ran 8 -> model 2, trace 6: 7 ModelReply(agent); 8 CmdRun(agent); 9 Message(user); "
            "10 Recall(user) knowledge; 11 NullObs(environment, cause 10); 12 CmdOutput(agent, cause 8)"
        ),
        "18 a message after the finish": (
            "finish, say -> model 2, trace 6: 7 ModelReply(agent); 8 Finish(agent); 9 SC finished; 10 Message(user); "
            "11 Recall(user) knowledge; 12 SC running; 13 NullObs(environment, cause 11)"
        ),
        # Differs (B3): the wait ends by itself too, and its last attempt ends in an error.
        "24 a rate limit and a message": (
            "fail rate_limit in 8 -> park rate_limit 8, say -> model 1, trace 6: 7 ModelCallFailed(environment); "
            "8 SC rate_limited; 9 Message(user); 10 Recall(user) knowledge; 11 SC running; "
            "12 NullObs(environment, cause 10)"
        ),
        "24 a rate limit to completion": (
            "fail rate_limit in 8, wait 8 -> model 1 try 2, fail rate_limit -> rest, trace 6: "
            "7 ModelCallFailed(environment); 8 SC rate_limited; 9 SC running; 10 ModelCallFailed(environment); 11 SC error"
        ),
        # Differs: the original keeps the second call in memory until the first is answered.
        "several calls of one reply are appended together": (
            "bash+bash, ran 8, ran 9, trace 6: 7 ModelReply(agent); 8 CmdRun(agent); 9 CmdRun(agent); "
            "10 CmdOutput(agent, cause 8); 11 CmdOutput(agent, cause 9)"
        ),
    }
)
def test_trace(scenario: str) -> None:
    play_trace(started(), scenario)


@scenarios(
    {
        # Differs: the action stands before the question, because it is appended with the reply that led to it.
        "11 a confirmation without an analyzer": (
            "bash, user_confirmed -> tools 11, ran 11, finish, trace 6: 7 ModelReply(agent); 8 CmdRun(agent); "
            "9 SC awaiting_user_confirmation; 10 ChangeState(user) user_confirmed; 11 CmdRun(agent); "
            "12 SC user_confirmed; 13 CmdOutput(agent, cause 11); 14 SC running; 15 ModelReply(agent); "
            "16 Finish(agent); 17 SC finished"
        ),
        "12 a rejection": (
            "bash, user_rejected -> rest, trace 6: 7 ModelReply(agent); 8 CmdRun(agent); "
            "9 SC awaiting_user_confirmation; 10 ChangeState(user) user_rejected; 11 CmdRun(agent); "
            "12 SC user_rejected; 13 UserRejectObservation(environment, cause 11); 14 SC awaiting_user_input"
        ),
        # Differs: the action that is never run has a result that says so.
        "14 a message while a confirmation is awaited": (
            "bash, say -> model 2, trace 9: 10 Message(user); 11 Recall(user) knowledge; 12 SC running; "
            "13 NullObs(environment, cause 11); 14 UserRejectObservation(environment, cause 8)"
        ),
    }
)
def test_trace_of_a_confirmation(scenario: str) -> None:
    play_trace(started(agent=AgentSpec(confirmation=CONFIRM)), scenario)


def test_4_messages_that_do_not_wait() -> None:
    core = started()
    for _ in range(2):
        message = MessageAction(content="still at it", source=EventSource.AGENT)
        assert isinstance(core.append(ModelReply(seen_id=core.state.version), message), CallModel)
    play(
        core,
        "finish, iteration 3, trace 6: 7 ModelReply(agent); 8 Message(agent); 9 ModelReply(agent); 10 Message(agent); "
        "11 ModelReply(agent); 12 Finish(agent); 13 SC finished",
    )


def test_13_low_risk_runs_and_high_risk_is_confirmed() -> None:
    by_model = ConfirmationPolicy(mode="risky", analyzer="llm", confirm_unknown=False)
    core = started(agent=AgentSpec(confirmation=by_model))
    assert core.reply(bash()) == AwaitTools((8,))
    core.observe(8)
    assert core.reply(call("execute_bash", '{"command": "ls"}', "unknown")) == AwaitTools((11,))
    core.observe(11)
    core.reply(call("execute_bash", '{"command": "ls", "security_risk": "HIGH"}', "high"))
    assert core.trace(after=13) == ["14 CmdRun(agent)", "15 SC awaiting_user_confirmation"]


def test_26_confirmed_file_edit_runs_once_after_confirmation() -> None:
    """Differs (B1): the original runs it before the confirmation, and again after it."""
    core = started(agent=AgentSpec(confirmation=CONFIRM))
    core.reply(call("str_replace_editor", '{"command": "create", "path": "/a", "file_text": "x"}', "e"))
    play(
        core,
        "dispatched , user_confirmed, dispatched 11, trace 6: 7 ModelReply(agent); 8 FileEditAction(agent); "
        "9 SC awaiting_user_confirmation; 10 ChangeState(user) user_confirmed; 11 FileEditAction(agent); "
        "12 SC user_confirmed",
    )


def test_15_a_stop_while_a_tool_call_is_pending() -> None:
    core = play_trace(
        started(),
        "bash, stopped -> rest, trace 6: 7 ModelReply(agent); 8 CmdRun(agent); 9 ChangeState(user) stopped; "
        "10 ErrorObs(agent, cause 8); 11 SC stopped",
    )
    error = core.event(10, ErrorObservation)
    assert error.error_id == "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED"
    assert error.tool_call_metadata == core.event(8).tool_call_metadata is not None


def test_19_malformed_calls_twice_then_an_unexpected_exception() -> None:
    """Differs: the failed call is an event, and consumes no iteration."""
    core = started()
    core.reply(call("execute_bash", "{"))
    core.reply(call("no_such_tool"))
    text = "RuntimeError: There was an unexpected error while running the agent: ValueError."
    assert core.fail("unexpected", retry_in=None, last_error=text) == Rest()
    play(
        core,
        "iteration 2, trace 6: 7 ModelReply(agent); 8 ErrorObs(agent); 9 ModelReply(agent); 10 ErrorObs(agent); "
        "11 ModelCallFailed(environment); 12 SC error",
    )
    assert core.state.lifecycle.last_error == text


def test_22_the_iteration_limit() -> None:
    play_trace(
        started(limits=Limits(max_iterations=2)),
        "bash, ran 8, bash, ran 11 -> rest, say -> rest, trace 6: 7 ModelReply(agent); 8 CmdRun(agent); "
        "9 CmdOutput(agent, cause 8); 10 ModelReply(agent); 11 CmdRun(agent); 12 CmdOutput(agent, cause 11); "
        "13 SC error; 14 Message(user); 15 Recall(user) knowledge; 16 SC running; "
        "17 NullObs(environment, cause 15); 18 SC error",
    )
    core = started(limits=Limits(max_iterations=2), headless=False)
    play_trace(core, "think, think, say -> model 3, think, think, states running error running error")
    assert core.state.usage.max_iterations == 4


FOUR_COMMANDS = "bash, ran, bash, ran, bash, ran, bash, ran"


def test_23_four_identical_commands() -> None:
    core = play_trace(started(), f"{FOUR_COMMANDS}, iteration 4")
    assert [line for line in core.trace(after=6) if "ModelReply" not in line] == [
        *("8 CmdRun(agent)", "9 CmdOutput(agent, cause 8)", "11 CmdRun(agent)", "12 CmdOutput(agent, cause 11)"),
        *("14 CmdRun(agent)", "15 CmdOutput(agent, cause 14)", "17 CmdRun(agent)", "18 CmdOutput(agent, cause 17)"),
        "19 SC error",
    ]
    assert core.state.lifecycle.last_error == STUCK
    interactive = f"{FOUR_COMMANDS}, say, {FOUR_COMMANDS}, iteration 8, states running error running error"
    play_trace(started(headless=False), interactive)


# Delegation


def delegating(task: str = "look", **limits: float) -> tuple[Core, Effect]:
    core = started(agent=AgentSpec(enable_delegation=True), limits=Limits(**limits))
    return core, core.reply(call("delegate", json.dumps({"agent": "Child", "task": task}), "d1"))


def end(core: Core, state: str, content: str, outputs: dict[str, Any] | None = None, **used: Any) -> Effect:
    core.put(
        DelegateEnded(
            delegate_id=8,
            conversation_id="child",
            agent_state=AgentState(state),
            content=content,
            outputs=outputs or {},
            source=EventSource.AGENT,
            **used,
        )
    )
    return core.run()


def test_5_a_delegate_that_finishes() -> None:
    core, effect = delegating()
    assert effect == AwaitDelegates((8,))
    assert end(core, "finished", "Child finishes task with a: 1", {"a": 1}, iterations=2) == CallModel(2, 1)
    assert core.reply(finish()) == Rest()
    play(
        core,
        "trace 7: 8 AgentDelegateAction(agent); 9 DelegateEnded(agent); 10 AgentDelegateObservation(agent, cause 8); "
        "11 ModelReply(agent); 12 Finish(agent); 13 SC finished",
    )
    assert core.state.usage.iteration + core.state.delegation.iterations == 4


@pytest.mark.parametrize(
    ("state", "content", "outputs"),
    [
        ("finished", "Child finishes task with a: 1", {"a": 1}),
        ("rejected", "Child finishes task with reason: no", {"reason": "no"}),
        ("error", "Child encountered an error during execution. RuntimeError: oops", {}),
    ],
    ids=["5 finishes", "6 rejects", "7 fails"],
)
def test_end_of_a_delegate_is_observed(state: str, content: str, outputs: dict[str, Any]) -> None:
    core, _ = delegating()
    assert end(core, state, content, outputs) == CallModel(2, 1)
    (found,) = [event for event in core.events if isinstance(event, AgentDelegateObservation)]
    assert found.content == f"Delegated agent finished with result:\n\n{content}"
    assert found.outputs == outputs


def test_8_a_delegate_without_a_task() -> None:
    """Differs (B7): the original stops."""
    core, effect = delegating(task="")
    assert effect == CallModel(2, 1)
    assert core.trace(after=7) == ["8 AgentDelegateAction(agent)", "9 ErrorObs(agent, cause 8)"]


def test_9_a_delegate_at_its_iteration_limit() -> None:
    """Differs (B5): the original's parent waits for ever. A parent keeps a share of the limits for itself."""
    core, _ = delegating(max_iterations=4)
    assert core.state.delegation.delegates[0].iterations == 1
    text = "Child encountered an error during execution. RuntimeError: Agent reached maximum iteration."
    assert end(core, "error", text, iterations=1) == CallModel(2, 1)
    assert core.states() == ["running"]
    (found,) = [event for event in core.events if isinstance(event, AgentDelegateObservation)]
    assert found.content == f"Delegated agent finished with result:\n\n{text}"


def test_10_a_delegate_that_exceeds_the_budget() -> None:
    core, _ = delegating(max_budget_usd=1.0)
    text = "Child encountered an error during execution. RuntimeError: Agent reached maximum budget for conversation."
    assert end(core, "error", text, cost_usd=0.8) == Rest()
    play(
        core,
        "code max_budget, trace 7: 8 AgentDelegateAction(agent); 9 DelegateEnded(agent); "
        "10 AgentDelegateObservation(agent, cause 8); 11 SC error",
    )
