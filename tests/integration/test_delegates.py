"""The delegates of one conversation on a real store: their location and initial state."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction, ChangeAgentStateAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.delegate_control import DelegatesObservation, ManageDelegatesAction
from broker.contract.events import (
    AgentSpec,
    ConversationCreated,
    DelegateEnded,
    Event,
    EventSource,
    Limits,
    LLMSpec,
    Observation,
    Parent,
    Tenancy,
    WorkspaceSpec,
    with_id,
)
from broker.contract.observations import (
    AgentDelegateObservation,
    ErrorObservation,
    EventsLostObservation,
    SurveyObservation,
)
from broker.contract.recall import RecallObservation
from broker.contract.skills import FILE_MARK
from broker.contract.workspace_events import SurveyAction
from broker.log.conversations import Conversations
from broker.log.invariants import find_violations
from broker.log.lost_tails import record_gap
from broker.runtime.errors import EventsLost
from broker.runtime.ids import make_delegate_id
from controller_worker.core.controller import apply, fold
from controller_worker.core.effects import NotifyDelegates
from controller_worker.core.state import State
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.loop.delegates import Delegates, report
from controller_worker.model.models import Models
from deckhands.client.forking import build_fork
from deckhands.client.reading.summary import summarize
from tests.controller_parts import said
from tests.conversation_hands import BASH, CID, Hands
from tests.polling import until

FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
WHERE = WorkspaceSpec(path="/srv/project")
HELPER = AgentSpec(name="ReadOnlyAgent", llm=LLMSpec(model="acme/small"))


def delegating(hands: Hands, **delegates: AgentSpec) -> AgentSpec:
    """An agent that follows the script and may delegate, to a reader unless others are given."""
    return AgentSpec(
        llm=LLMSpec(model=f"scripted/{hands.folder / 'script.json'}"),
        enable_delegation=True,
        delegates=delegates or {"helper": HELPER},
    )


def delegate_calls(count: int = 1, *, agent: str = "helper", task: str = "look", **arguments: Any) -> dict[str, Any]:
    """A turn that delegates so many times."""
    arguments = {"agent": agent, "task": task, **arguments}
    return {"tool_calls": [{"name": "delegate", "arguments": arguments} for _ in range(count)]}


async def told(hands: Hands, delegate_id: str) -> list[AgentState]:
    """Return the states that a delegate was asked for."""
    events = await hands.log.read(delegate_id)
    return [event.agent_state for event in events if isinstance(event, ChangeAgentStateAction)]


async def until_finished(loop: ConversationLoop) -> None:
    await until(lambda: loop.state.lifecycle.agent_state is AgentState.FINISHED, what="the end")


async def delegate_of(hands: Hands, *, node: str = "", **fields: Any) -> tuple[str, list[Event]]:
    """Let a conversation delegate; return the delegate's id and log."""
    await hands.begin(delegate_calls(), agent=delegating(hands), **fields)
    if node:
        await hands.store.connection.call("HSET", hands.store.known_keys(CID).meta, "node", node)
    loop = await hands.go()
    await until(lambda: bool(loop.state.delegation.delegates), what="a delegate")
    delegate_id = make_delegate_id(CID, loop.state.delegation.delegates[0].id)
    return delegate_id, await hands.log.read(delegate_id)


async def test_delegate_starts_with_its_task_share_and_parent(hands: Hands) -> None:
    limits = Limits(max_iterations=11, max_tokens=10_000, max_seconds=3_600.0)
    delegate_id, (created, message) = await delegate_of(hands, workspace=WHERE, limits=limits, headless=False)
    assert isinstance(created, ConversationCreated)
    assert (created.agent.name, created.agent.llm.model) == ("ReadOnlyAgent", "acme/small")
    assert (created.workspace, created.headless) == (WHERE, False)
    assert created.parent is not None
    assert make_delegate_id(CID, created.parent.delegate_id) == delegate_id
    assert (created.parent.conversation_id, created.parent.level) == (CID, 1)
    assert (created.limits.max_iterations, created.limits.max_tokens) == (5, 5_000)
    assert created.limits.max_seconds is not None
    assert 2_500 < created.limits.max_seconds <= 3_240  # nine tenths of its parent's remainder
    assert message.sentence == "TASK: look"


async def test_delegate_gets_its_share_of_the_remaining_time(hands: Hands) -> None:
    delegate_id, _ = await delegate_of(hands, limits=Limits(max_seconds=3_600.0))
    state, keys = hands.loops[0].state, hands.store.known_keys(delegate_id)
    await hands.store.connection.call("DEL", keys.events, keys.meta, keys.once)
    late = replace(state.usage, deadline=hands.store.clock.now() + timedelta(seconds=100))
    await Delegates(hands.log, hands.store, hands.services.models).start(
        replace(state, usage=late), state.delegation.delegates
    )
    (created, _) = await hands.log.read(delegate_id)
    assert isinstance(created, ConversationCreated)
    assert created.limits.max_seconds is not None
    assert 60 < created.limits.max_seconds <= 90


def control(operation: str, *numbers: int, **arguments: Any) -> dict[str, Any]:
    """A turn that controls delegates."""
    arguments = {"operation": operation, "numbers": numbers, **arguments}
    return {"tool_calls": [{"name": "delegates", "arguments": arguments}]}


async def begin_control(hands: Hands, *turns: dict[str, Any]) -> tuple[ConversationLoop, str]:
    """Begin a conversation that delegates in the background and then controls; return its delegate's id."""
    agent = delegating(hands).model_copy(update={"enable_delegate_control": True})
    await hands.begin(delegate_calls(background=True), *turns, agent=agent)
    loop = await hands.go()
    return loop, make_delegate_id(CID, BACKGROUND)


async def results_of_control(hands: Hands) -> list[str]:
    return [event.content for event in await hands.events() if isinstance(event, DelegatesObservation)]


BACKGROUND = 8
"""The number of the first delegate in the background."""


async def test_agent_controls_its_delegates_by_tool_calls(hands: Hands) -> None:
    turns = (
        control("list"),
        control("message", BACKGROUND, text="Hurry."),
        control("pause", BACKGROUND),
        control("wait"),
        control("resume", BACKGROUND),
        control("stop", 99),
        control("wait", BACKGROUND),
        FINISH,
    )
    loop, delegate_id = await begin_control(hands, *turns)
    assert await results_of_control(hands) == [
        "8 helper: loading, 0 steps, $0.0000. TASK: look",
        "Sent to: 8.",
        "Paused: 8.",
        "There is no delegate to wait for.",
        "Resumed: 8.",
        "There is no delegate 99. Those that work in the background: 8 (helper).",
        "Waited for all of: 8.",
    ]
    assert loop.state.lifecycle.agent_state is AgentState.RUNNING
    assert await told(hands, delegate_id) == [AgentState.PAUSED, AgentState.RUNNING]
    messages = [event.content for event in await hands.log.read(delegate_id) if isinstance(event, MessageAction)]
    assert messages == ["TASK: look", "Hurry."]
    ended = DelegateEnded(delegate_id=BACKGROUND, conversation_id=delegate_id, agent_state=AgentState.FINISHED)
    await hands.log.append(CID, [ended])
    await hands.wake(loop)
    await until_finished(loop)


async def test_delegate_that_has_ended_gets_no_more_messages(hands: Hands) -> None:
    """The message would start it again, and its share of the limits is released."""
    script = hands.folder / "short.json"
    script.write_text(json.dumps({"turns": [FINISH]}))
    helper = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"))
    agent = delegating(hands, helper=helper).model_copy(update={"enable_delegate_control": True})
    await hands.begin(delegate_calls(background=True), {"text": "What now?"}, agent=agent)
    loop = await hands.go()
    delegate_id = make_delegate_id(CID, BACKGROUND)
    state = loop.state
    await hands.go(delegate_id)
    length = await hands.log.load_last_id(delegate_id)
    delegates = Delegates(hands.log, hands.store, hands.services.models)
    for operation in ("message", "pause", "resume", "stop"):
        action = ManageDelegatesAction(id=99, operation=operation, numbers=(BACKGROUND,), text="more")  # type: ignore[arg-type]
        done = await delegates.manage(state, action)
        assert (done.content, done.numbers) == ("Already ended: 8. You will get the result.", ())
    assert await hands.log.load_last_id(delegate_id) == length


async def test_control_of_several_does_what_is_possible(hands: Hands) -> None:
    """An end that comes between two tries must not turn what was done into nothing."""
    agent = delegating(hands).model_copy(update={"enable_delegate_control": True})
    await hands.begin(delegate_calls(2, background=True), {"text": "What now?"}, agent=agent)
    loop = await hands.go()
    one, two = (delegate.id for delegate in loop.state.delegation.delegates)
    end = DelegateEnded(delegate_id=one, conversation_id=make_delegate_id(CID, one), agent_state=AgentState.FINISHED)
    state = apply(loop.state, with_id(end, loop.state.version + 1))
    action = ManageDelegatesAction(id=100, operation="pause", numbers=(one, two, 77))
    done = await Delegates(hands.log, hands.store, hands.services.models).manage(state, action)
    assert done.numbers == (two,)
    assert done.content.splitlines() == [
        f"Paused: {two}.",
        f"Already ended: {one}. You will get the result.",
        f"There is no delegate 77. Those that work in the background: {two} (helper).",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_paused": True}, "Paused: 8. Resume them first."),
        ({"is_stopping": True}, "Already ended: 8. You will get the result."),
    ],
)
async def test_message_starts_no_delegate_that_is_paused_or_stopped(
    hands: Hands, changes: dict[str, bool], said: str
) -> None:
    loop, delegate_id = await begin_control(hands, {"text": "What now?"})
    (delegate,) = loop.state.delegation.delegates
    state = replace(loop.state, delegation=replace(loop.state.delegation, delegates=(replace(delegate, **changes),)))
    length = await hands.log.load_last_id(delegate_id)
    action = ManageDelegatesAction(id=99, operation="message", numbers=(BACKGROUND,), text="Hurry.")
    done = await Delegates(hands.log, hands.store, hands.services.models).manage(state, action)
    assert (done.content, done.numbers) == (said, ())
    assert await hands.log.load_last_id(delegate_id) == length


async def test_fork_starts_a_paused_delegate_paused(hands: Hands) -> None:
    loop, delegate_id = await begin_control(hands, {"text": "What now?"})
    (delegate,) = loop.state.delegation.delegates
    keys = hands.store.known_keys(delegate_id)
    await hands.store.connection.call("DEL", keys.events, keys.meta, keys.once)
    paused = replace(delegate, is_paused=True)
    state = replace(loop.state, delegation=replace(loop.state.delegation, delegates=(paused,)))
    await Delegates(hands.log, hands.store, hands.services.models).restart(state, [delegate.id])
    assert await told(hands, delegate_id) == [AgentState.PAUSED]


async def test_damaged_field_of_a_delegate_is_listed_as_nothing(hands: Hands) -> None:
    loop, delegate_id = await begin_control(hands, {"text": "What now?"})
    await hands.store.call("HSET", hands.store.known_keys(delegate_id).meta, "iterations", "many", "cost_usd", "much")
    action = ManageDelegatesAction(id=99, operation="list")
    done = await Delegates(hands.log, hands.store, hands.services.models).manage(loop.state, action)
    assert done.content == "8 helper: loading, 0 steps, $0.0000. TASK: look"


async def test_control_that_is_repeated_has_one_effect(hands: Hands) -> None:
    loop, delegate_id = await begin_control(hands, {"text": "What now?"})
    delegates = Delegates(hands.log, hands.store, hands.services.models)
    action = ManageDelegatesAction(id=99, operation="message", numbers=(BACKGROUND,), text="Hurry.")
    assert await delegates.manage(loop.state, action) == await delegates.manage(loop.state, action)
    messages = [event.content for event in await hands.log.read(delegate_id) if isinstance(event, MessageAction)]
    assert messages == ["TASK: look", "Hurry."]


async def test_user_does_not_resume_what_the_agent_has_paused(hands: Hands) -> None:
    loop, delegate_id = await begin_control(hands, control("pause", BACKGROUND), {"text": "What now?"})
    order = NotifyDelegates(AgentState.RUNNING, 99)
    await Delegates(hands.log, hands.store, hands.services.models).notify(loop.state, order)
    assert await told(hands, delegate_id) == [AgentState.PAUSED]


async def delegate_to_file(
    hands: Hands, head: str, *turns: dict[str, Any], tenant: str = "", **fields: Any
) -> ConversationLoop:
    """Let a conversation whose workspace defines the agent `clerk` delegate to it."""
    agent = delegating(hands).model_copy(update={"enable_workspace_skills": True} | fields)
    await hands.begin(
        *(turns or (delegate_calls(agent="clerk"),)), agent=agent, workspace=WHERE, tenancy=Tenancy(tenant=tenant)
    )
    loop = await hands.go()
    (survey,) = [event for event in await hands.events() if isinstance(event, SurveyAction)]
    path, text = (base64.b64encode(part.encode()).decode() for part in (".claude/agents/clerk.md", head + "Count all."))
    content = f"{FILE_MARK} {path} {text}\n"
    answer = SurveyObservation(content=content, is_complete=True, cause=survey.id, source=EventSource.ENVIRONMENT)
    await hands.log.append_observation(CID, answer, worker_id="tool-1")
    await hands.wake(loop)
    return loop


CLERK = "---\ndescription: Counts things.\ntools: Read\nmodel: acme/large\nmax_iteration_per_run: 3\n---\n"


async def test_agent_of_a_workspace_file_is_shown_and_works(hands: Hands) -> None:
    loop = await delegate_to_file(hands, CLERK)
    (recall,) = [event for event in await hands.events() if isinstance(event, RecallObservation)]
    assert "- clerk: Counts things." in recall.agent_text
    (created, message) = await hands.log.read(make_delegate_id(CID, loop.state.delegation.delegates[0].id))
    assert isinstance(created, ConversationCreated)
    assert created.agent.name == "ReadOnlyAgent"
    assert created.agent.system_prompt_suffix == "Count all."
    assert created.limits.max_iterations == 3
    assert message.sentence == "TASK: look"


async def test_file_cannot_choose_a_model_in_an_open_table(hands: Hands) -> None:
    loop = await delegate_to_file(hands, CLERK)
    (created, _) = await hands.log.read(make_delegate_id(CID, loop.state.delegation.delegates[0].id))
    assert isinstance(created, ConversationCreated)
    assert created.agent.llm == delegating(hands).llm


@pytest.mark.parametrize(("tenant", "model"), [("acme", "acme/large"), ("other", "")])
async def test_file_chooses_a_model_that_its_tenant_is_offered(hands: Hands, tenant: str, model: str) -> None:
    table = hands.folder / "models.toml"
    table.write_text('[llm]\nmodel = "acme/small"\n[llm.large]\nmodel = "acme/large"\ntenants = ["acme"]\n')
    models = Models({"LLM_CONFIG": str(table), "LLM_SCRIPTS_DIR": str(hands.folder)}, hands.store.clock)
    hands.services = replace(hands.services, models=models)
    loop = await delegate_to_file(hands, CLERK, tenant=tenant)
    (created, _) = await hands.log.read(make_delegate_id(CID, loop.state.delegation.delegates[0].id))
    assert isinstance(created, ConversationCreated)
    assert created.agent.llm.model == (model or delegating(hands).llm.model)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"enable_delegation": False}, "Tool delegate is not registered"),
        ({"enable_workspace_skills": True, "delegates": {"clerk": HELPER}}, ""),
    ],
)
async def test_file_neither_permits_delegation_nor_replaces_a_delegate(
    hands: Hands, fields: dict[str, Any], answer: str
) -> None:
    loop = await delegate_to_file(hands, CLERK, delegate_calls(agent="clerk"), FINISH, **fields)
    (recall,) = [event for event in await hands.events() if isinstance(event, RecallObservation)]
    assert recall.available_agents is None
    if answer:
        assert answer in next(event.content for event in await hands.events() if isinstance(event, ErrorObservation))
        return
    (created, _) = await hands.log.read(make_delegate_id(CID, loop.state.delegation.delegates[0].id))
    assert isinstance(created, ConversationCreated)
    assert created.agent == HELPER


async def test_unknown_delegate_error_names_configured_ones_first(hands: Hands) -> None:
    agent = delegating(hands, tester=AgentSpec(), scout=AgentSpec(name="ReadOnlyAgent"))
    await hands.begin(delegate_calls(agent="Nobody"), agent=agent)
    await hands.go()
    (error,) = [event for event in await hands.events() if isinstance(event, ErrorObservation)]
    assert error.content.startswith(
        "There is no agent named 'Nobody'. Known agents: scout, tester, BrowsingAgent, BrowsingAgentSDK, ChaosAgent, CheckAgent, "
    )


@pytest.mark.parametrize("name", ["PlanningAgent", "BrowsingAgent"])
async def test_delegate_with_refused_calls_ends_as_loop_parent_continues(hands: Hands, name: str) -> None:
    refused = {"turns": [{"tool_calls": [{"name": "finish", "arguments": {}}]}] * 100}
    script = hands.folder / "refused.json"
    script.write_text(json.dumps(refused))
    helper = AgentSpec(name=name, llm=LLMSpec(model=f"scripted/{script}"))
    await hands.begin(delegate_calls(), agent=delegating(hands, helper=helper))
    parent = await hands.go()
    await until(lambda: bool(parent.state.delegation.delegates), what="a delegate")
    delegate = await hands.go(make_delegate_id(CID, parent.state.delegation.delegates[0].id))
    assert (delegate.state.lifecycle.error_code, delegate.state.usage.iteration) == ("stuck_in_loop", 3)
    parent.wake(has_new_events=True)
    await until_finished(parent)
    (end,) = [event for event in await hands.events() if isinstance(event, AgentDelegateObservation)]
    assert "AgentStuckInLoopError" in end.content


@pytest.mark.parametrize("name", ["PlanningAgent", "BrowsingAgent"])
async def test_ended_script_ends_a_delegate_without_finish_tool(hands: Hands, name: str) -> None:
    script = hands.folder / "script.json"
    await hands.begin(agent=AgentSpec(name=name, llm=LLMSpec(model=f"scripted/{script}")))
    loop = await hands.go()
    said = [event for event in await hands.events() if isinstance(event, MessageAction)]
    assert (loop.state.usage.iteration, said[-1].content) == (1, "The script has ended.")


async def test_a_delegate_of_a_lost_request_does_not_answer_another(hands: Hands) -> None:
    """The store has lost the request but not the delegate, which was created while the store came back."""
    for action_id in range(3, 12):
        lost = ConversationCreated(conversation_id=make_delegate_id(CID, action_id))
        await hands.log.create(lost, [said("TASK: something else")], key=f"delegate:{action_id}")
    await hands.begin(delegate_calls(), FINISH, agent=delegating(hands))
    loop = await hands.go()
    await until_finished(loop)
    (answer,) = [event for event in await hands.events() if isinstance(event, ErrorObservation)]
    assert "the store has lost the events that created it" in answer.content


async def test_lost_order_does_not_block_another_with_its_number(hands: Hands) -> None:
    delegate_id, _ = await delegate_of(hands)
    delegates, state = Delegates(hands.log, hands.store, hands.services.models), hands.loops[0].state
    for wanted in (AgentState.PAUSED, AgentState.PAUSED, AgentState.STOPPED):
        await delegates.notify(state, NotifyDelegates(wanted, 99))
    assert await told(hands, delegate_id) == [AgentState.PAUSED, AgentState.STOPPED]


async def test_order_concerns_only_the_requested_actions_and_time(hands: Hands) -> None:
    """The next owner forwards the latest order once more, and others may have started since."""
    delegate_id, begun = await delegate_of(hands)
    delegates, state = Delegates(hands.log, hands.store, hands.services.models), hands.loops[0].state
    asked_id = state.delegation.delegates[0].id
    for order in (
        NotifyDelegates(AgentState.STOPPED, asked_id - 1),
        NotifyDelegates(AgentState.STOPPED, asked_id + 9, since=asked_id + 1),
    ):
        await delegates.notify(state, order)
    assert await told(hands, delegate_id) == []
    await delegates.notify(state, NotifyDelegates(AgentState.STOPPED, asked_id + 1, since=asked_id))
    assert await hands.log.load_last_id(delegate_id) > len(begun)


async def test_end_of_a_lost_request_answers_no_other_request(hands: Hands) -> None:
    _, begun = await delegate_of(hands)
    assert isinstance(begun[0], ConversationCreated)
    assert begun[0].parent is not None
    before = await hands.log.load_last_id(CID)
    parent = begun[0].parent.model_copy(update={"delegate_id": 2})  # where the parent has a message now
    await report(hands.log, fold(State(), begun), parent)
    written = [event for event in await hands.log.read(CID) if event.id > before]
    assert [type(event) for event in written if isinstance(event, DelegateEnded | EventsLostObservation)] == [
        EventsLostObservation
    ]


@pytest.mark.parametrize("paused_by", ["the parent", "a person", "nobody"])
async def test_a_delegate_that_a_lost_pause_has_paused_continues(hands: Hands, paused_by: str) -> None:
    """The store came back without the parent's pause, and its owner had passed it on to a log that kept it."""
    delegate_id, _ = await delegate_of(hands)
    loop = hands.loops[0]
    ended_at, pause = loop.state.version, AgentState.PAUSED
    if paused_by == "the parent":
        await Delegates(hands.log, hands.store, hands.services.models).notify(
            loop.state, NotifyDelegates(pause, ended_at + 2)
        )
    elif paused_by == "a person":
        await hands.log.append(delegate_id, [ChangeAgentStateAction(agent_state=pause, source=EventSource.USER)])
    lost = EventsLost(CID, ended_at, ended_at + 2, "somebody")
    gap = await record_gap(hands.log, lost, noticed_by="the owner")
    loop.wake(has_new_events=True)
    order = NotifyDelegates(AgentState.RUNNING, gap, takes_back=True)
    await until(lambda: order in loop._performer.done, what="the order that takes the pause back")
    expected = {"the parent": [pause, AgentState.RUNNING], "a person": [pause], "nobody": []}
    assert await told(hands, delegate_id) == expected[paused_by]


async def test_fork_has_its_own_delegates_for_working_ones(hands: Hands) -> None:
    turn = delegate_calls(20, background=True)
    await hands.begin(turn, {"text": "They are under way."}, agent=delegating(hands), headless=False)
    loop = await hands.go()
    await until(lambda: not loop.state.tools.pending and hands.gone == [CID], what="the turn's end")
    delegates = loop.state.delegation.delegates
    assert len(delegates) == 20
    assert all(delegate.is_answered for delegate in delegates)
    events = await hands.events()

    await hands.log.create_from(build_fork(events, "fork-1"), events[1:], key="fork")
    await hands.go("fork-1")
    for delegate in delegates:
        created, message = await hands.log.read(make_delegate_id("fork-1", delegate.id))
        assert isinstance(created, ConversationCreated)
        assert created.parent == Parent(conversation_id="fork-1", delegate_id=delegate.id)
        assert message.sentence == "TASK: look"
    assert await hands.log.load_last_id("fork-1") == len(events)

    ended = DelegateEnded(
        delegate_id=delegates[0].id, conversation_id="d", agent_state=AgentState.FINISHED, content="Found."
    )
    await hands.log.append("fork-1", [ended])
    await hands.go("fork-1")
    added = [event.kind for event in (await hands.log.read("fork-1"))[len(events) :]]
    assert added == ["conversation.delegate_ended", "observation.delegate"]


@pytest.mark.parametrize(("workspace", "node"), [(WHERE, "node7"), (WorkspaceSpec(), "")])
async def test_delegate_works_in_its_parents_shared_directory(
    hands: Hands, workspace: WorkspaceSpec, node: str
) -> None:
    delegate_id, _ = await delegate_of(hands, workspace=workspace, node="node7")
    assert (await Conversations(hands.store).load_row(delegate_id)).node == node


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_cost_of_a_late_delegate_reaches_the_index(hands: Hands, is_stopped: bool) -> None:
    turn = delegate_calls(background=not is_stopped) | {"cost_usd": 0.25}
    await hands.begin(turn, FINISH | {"cost_usd": 0.5}, agent=delegating(hands))
    await hands.go()
    if is_stopped:
        await hands.ask("stopped")
        hands.loops[-1].wake(has_new_events=True)
    await until(lambda: hands.gone == [CID], what="the end")
    (delegate,) = [event for event in await hands.events() if isinstance(event, AgentDelegateAction)]
    ended = DelegateEnded(
        delegate_id=delegate.id,
        conversation_id="d",
        agent_state=AgentState.STOPPED,
        cost_usd=1.0,
        has_unknown_cost=True,
        prompt_tokens=10,
        completion_tokens=1,
    )
    await hands.log.append(CID, [ended])
    await hands.go()
    await until(lambda: hands.gone == [CID, CID], what="the second end")
    row, summary = await Conversations(hands.store).load_row(CID), summarize(await hands.events())
    assert row.cost_usd == summary.cost_usd == (1.25 if is_stopped else 1.75)
    assert row.fields["has_unknown_cost"] == "1"
    assert int(row.fields["prompt_tokens"]) == summary.prompt_tokens


async def test_cost_of_a_rolled_back_delegate_reaches_the_index(hands: Hands) -> None:
    """The delegate ends while its parent rests, and nothing is said about it."""
    (call,) = delegate_calls(background=True)["tool_calls"]
    turn = {"tool_calls": [call, *BASH["tool_calls"]], "cost_usd": 0.25}
    await hands.begin(turn, FINISH | {"cost_usd": 0.5}, agent=delegating(hands), double_texting="rollback")
    loop = await hands.go()
    await until(lambda: bool(loop.state.delegation.delegates), what="a delegate")
    (delegate,) = loop.state.delegation.delegates
    await hands.say("something else")
    loop.wake(has_new_events=True)
    await until(lambda: hands.gone == [CID], what="the end")
    ended = DelegateEnded(
        delegate_id=delegate.id, conversation_id="d", agent_state=AgentState.STOPPED, cost_usd=1.0, prompt_tokens=10
    )
    await hands.log.append(CID, [ended])
    await hands.go()
    await until(lambda: hands.gone == [CID, CID], what="the second end")
    row, summary = await Conversations(hands.store).load_row(CID), summarize(await hands.events())
    assert row.cost_usd == summary.cost_usd == 1.75
    assert int(row.fields["prompt_tokens"]) == summary.prompt_tokens


async def test_error_of_a_delegate_is_a_sentence_for_its_parent(hands: Hands) -> None:
    script = hands.folder / "refused.json"
    script.write_text(json.dumps({"turns": [{"error": {"code": "authentication", "times": None}}]}))
    helper = AgentSpec(name="ReadOnlyAgent", llm=LLMSpec(model=f"scripted/{script}"))
    await hands.begin(delegate_calls(), agent=delegating(hands, helper=helper))
    parent = await hands.go()
    await until(lambda: bool(parent.state.delegation.delegates), what="a delegate")
    await hands.go(make_delegate_id(CID, parent.state.delegation.delegates[0].id))
    parent.wake(has_new_events=True)
    await until_finished(parent)
    (answer,) = [event for event in await hands.events() if isinstance(event, AgentDelegateObservation)]
    assert answer.content.endswith("error during execution. The model's provider refused the API key.")


# Many at once


async def begin_many(hands: Hands, *turns: dict[str, Any], **limits: Any) -> None:
    """Start a conversation whose delegates are readers."""
    await hands.begin(*turns, agent=delegating(hands), limits=Limits(**{"max_iterations": 10**9} | limits))


async def report_all(hands: Hands, delegate_ids: Iterable[int], *, padding: str = "") -> None:
    """Let delegates end, all at the same time."""
    for delegate_id in delegate_ids:
        ended = DelegateEnded(
            delegate_id=delegate_id,
            conversation_id=make_delegate_id(CID, delegate_id),
            agent_state=AgentState.FINISHED,
            content=f"found {delegate_id}{padding}",
        )
        await hands.log.append(CID, [ended], key=f"delegate:{delegate_id}")


async def test_a_thousand_long_ends_enter_in_bounded_appends(hands: Hands) -> None:
    await begin_many(hands, *[delegate_calls(125, background=True)] * 8, BASH, FINISH, max_iterations=2**62)
    loop = await hands.go()
    await until(lambda: len(loop.state.tools.pending) == 1, what="the command")
    ids = [delegate.id for delegate in loop.state.delegation.delegates]
    assert len(ids) == 1_000
    await report_all(hands, ids, padding="x" * 30_000)
    hands.wire.counts.clear()
    loop.wake()
    await hands.at_rest(loop)
    assert hands.wire.counts["deck_append"] == 30
    entered = [event.delegate_id for event in await hands.events() if isinstance(event, AgentDelegateObservation)]
    assert entered == ids
    await hands.observe(loop.state.tools.pending[0].id)
    loop.wake()
    await until_finished(loop)


async def test_ends_that_come_while_others_are_answered_lose_nothing(hands: Hands) -> None:
    """Each end makes the parent's log grow just before its append, which is then refused."""
    await begin_many(hands, delegate_calls(40, background=True), FINISH)
    loop = await hands.claim()
    ended: list[int] = []

    async def end_one() -> None:
        waiting = [one.id for one in loop.state.delegation.delegates if one.id not in ended and one.end is None]
        if waiting and len(ended) < 30 and await hands.log.load_last_id(CID) == loop.state.version:
            ended.append(waiting[0])
            hands.wire.before.pop("deck_append", None)
            await report_all(hands, waiting[:1])
        hands.wire.before["deck_append"] = end_one

    hands.wire.before["deck_append"] = end_one
    loop.wake()
    await until_finished(loop)
    hands.wire.before.clear()
    assert len(ended) == 30
    events = await hands.events()
    assert find_violations(events, conversation_id=CID, is_strict=True, is_over=False) == []
    entered = [event.delegate_id for event in events if isinstance(event, AgentDelegateObservation)]
    assert sorted(entered, key=ended.index) == ended


async def test_thousand_calls_of_one_reply_need_few_appends(hands: Hands) -> None:
    """Of the first, some are answered at once, some start delegates, and some cannot be understood."""
    calls: list[dict[str, Any]] = []
    for number, call in enumerate(delegate_calls(500, background=True)["tool_calls"]):
        think = {"name": "think", "arguments": {"thought": f"thought {number}"}}
        calls += [call, think] if len(calls) % 3 else [call, {"name": "no_such_tool", "arguments": {}}]
    await begin_many(hands, {"tool_calls": calls}, FINISH)
    loop = await hands.go()
    await until_finished(loop)
    turn = [e for e in await hands.events() if e.tool_call_metadata is not None and e.kind != "action.finish"]
    answers = [e.tool_call_metadata.tool_call_id for e in turn if isinstance(e, Observation) and e.tool_call_metadata]
    assert (len(answers), len(set(answers))) == (1_000, 1_000)
    refused = "Not carried out: a reply may hold 128 tool calls. Call it again."
    assert refused in {event.content for event in turn if isinstance(event, ErrorObservation)}
    assert len({event.timestamp for event in turn}) == 2


async def test_a_delegates_name_of_a_megabyte_is_refused(hands: Hands) -> None:
    await begin_many(hands, delegate_calls(agent="x" * 1_000_000), FINISH)
    loop = await hands.go()
    await until_finished(loop)
    (error,) = [event for event in await hands.events() if isinstance(event, ErrorObservation)]
    assert error.content.startswith(
        "Invalid argument 'agent' in tool call delegate: the name has 1,000,000 characters; the limit is 1,000."
    )
