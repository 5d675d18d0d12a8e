"""Questions of MCP servers among the other calls of a turn."""

import pytest

from broker.contract.actions import AgentFinishAction, ChangeAgentStateAction, CmdRunAction, MCPAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Event, EventSource, ModelReply
from broker.contract.observations import MCPQuestionObservation, ServerQuestion, UserRejectObservation
from controller_worker.core.effects import AwaitTools, Effect, Rest
from tests.controller_parts import Core, check_snapshots, started


def calling(*others: Event, concurrency: int = 1) -> Core:
    """A conversation whose turn has a call of an MCP server's tool, the event 8, before other actions."""
    core = started(agent=AgentSpec(tool_concurrency=concurrency))
    core.append(ModelReply(seen_id=7), MCPAction(key="remote/ask", name="ask"), *others)
    return core


def ask(core: Core, action_id: int = 8) -> Effect:
    questions = (ServerQuestion(key="q", message="Which size?", fields={}),)
    return core.observe(action_id, MCPQuestionObservation(name="ask", questions=questions, cause=action_id))


def answer(core: Core, state: AgentState) -> Effect:
    asked = core.state.confirmation.asked_id
    core.put(ChangeAgentStateAction(agent_state=state, action_id=asked, source=EventSource.USER))
    return core.run()


def test_finish_in_the_same_reply_waits_for_the_question() -> None:
    core = calling(AgentFinishAction())
    assert ask(core) == Rest()
    assert core.states()[-1] == "awaiting_user_confirmation"
    answer(core, AgentState.USER_CONFIRMED)
    core.observe(core.state.confirmation.confirmed_id)
    assert core.states()[-1] == "finished"
    check_snapshots(core)


@pytest.mark.parametrize("answered", [AgentState.USER_REJECTED, AgentState.USER_CONFIRMED])
def test_question_waits_for_calls_in_flight(answered: AgentState) -> None:
    core = calling(CmdRunAction(command="one"), CmdRunAction(command="two"), concurrency=2)
    assert core.dispatched == [8, 9]
    assert ask(core) == AwaitTools((9, 10))
    core.observe(9)
    assert core.observe(10) == Rest()
    assert core.states()[-1] == "awaiting_user_confirmation"
    answer(core, answered)
    refused = [event.cause for event in core.events if isinstance(event, UserRejectObservation)]
    assert not {9, 10} & set(refused)
    check_snapshots(core)


def test_question_comes_before_later_calls_in_order() -> None:
    core = calling(CmdRunAction(command="one"))
    assert ask(core) == Rest()
    assert core.dispatched == [8]
    answer(core, AgentState.USER_CONFIRMED)
    assert core.dispatched == [8, core.state.confirmation.confirmed_id]
