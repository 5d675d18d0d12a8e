"""The loop of an SDK agent, and delegates of both kinds, with a stand-in; `tests/end_to_end` has the SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction, CmdRunAction, SystemMessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Event, Limits, LLMSpec, ModelCallFailed, ModelReply
from broker.contract.interventions import ConversationChanged
from broker.contract.observations import AgentDelegateObservation
from broker.contract.specs import SdkSpec
from broker.runtime.ids import make_delegate_id
from controller_worker.core.concerns.limits import count_steps
from controller_worker.core.concerns.setup import apply_agent_change
from controller_worker.loop.conversation_loop import ConversationLoop
from tests.controller_parts import said
from tests.conversation_hands import BASH, CID, THINK, Hands
from tests.polling import until
from tests.sdk_parts import stand_in, taken_up, with_sdk

LEGACY, SDK = "CodeActAgent", "CodeActAgentSDK"
NO_FALLBACK = SdkSpec(fallback_to_legacy=False)
SAYS = {"text": "What now?"}


def of(kind: type[Event], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


async def ended(hands: Hands, *, times: int = 1) -> list[Event]:
    await until(lambda: hands.gone.count(CID) == times, what="the end")
    return await hands.events()


async def test_sdk_calls_become_actions_and_results_observations(hands: Hands) -> None:
    await with_sdk(hands, stand_in()).begin(THINK, BASH, BASH, name=SDK)
    loop = await taken_up(hands)
    for number in (1, 2):
        await until(
            lambda number=number: loop.state.tools.pending and loop.state.usage.iteration == number + 1, what="command"
        )
        assert not loop._call.is_running  # it is the result that the SDK waits for
        await hands.observe(loop.state.tools.pending[0].id)
        loop.wake()
    events = await ended(hands)
    assert [type(event) for event in events if isinstance(event, CmdRunAction | AgentFinishAction)] == [
        *(CmdRunAction, CmdRunAction, AgentFinishAction)
    ]
    assert len(of(ModelReply, events)) == 4
    assert hands.services.sdk_sessions.count == 0


async def test_answered_question_gets_a_fresh_program_with_the_answer(hands: Hands) -> None:
    await with_sdk(hands, stand_in()).begin(SAYS, THINK, name=SDK, headless=False)
    await taken_up(hands)
    await ended(hands)  # a question is no reason to keep a program
    assert hands.services.sdk_sessions.count == 0
    await hands.say("this way")
    await taken_up(hands)
    events = await ended(hands, times=2)
    assert len(of(ModelReply, events)) == 3
    assert isinstance(events[-2], AgentFinishAction)


@pytest.mark.parametrize(
    "habit",
    ["missing", "dying", *(pytest.param(one, marks=pytest.mark.soak) for one in ("nonsense", "idle", "refused"))],
)
async def test_the_legacy_agent_continues_where_the_sdk_cannot_run(hands: Hands, habit: str) -> None:
    await with_sdk(hands, stand_in(habit)).begin(THINK, name=SDK)
    loop = await taken_up(hands)
    events = await ended(hands)
    (change,) = of(ConversationChanged, events)
    assert (change.loop, change.by) == ("legacy", "deckhands")
    assert loop.state.setup.agent.name == "CodeActAgent"
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED
    assert hands.services.sdk_sessions.count == 0


@pytest.mark.parametrize(
    ("habit", "code"), [("missing", "llm_config"), ("refused", "authentication"), ("dying", "service_unavailable")]
)
async def test_without_a_fallback_the_failure_is_one_of_the_table(hands: Hands, habit: str, code: str) -> None:
    await with_sdk(hands, stand_in(habit)).begin(THINK, name=SDK, sdk=NO_FALLBACK)
    loop = await taken_up(hands)
    lifecycle = lambda: loop.state.lifecycle.agent_state  # noqa: E731
    await until(lambda: loop.state.calls.wait is not None or lifecycle() is AgentState.ERROR, what="the failure")
    failure = of(ModelCallFailed, await hands.events())[0]
    assert failure.code == code
    assert (failure.retry_at is not None) is (code == "service_unavailable")


async def test_silent_program_is_abandoned_after_its_timeout(hands: Hands) -> None:
    sdk = SdkSpec(timeout_seconds=0.2)
    await with_sdk(hands, stand_in("silent")).begin(THINK, name=SDK, sdk=sdk)
    await taken_up(hands)
    (change,) = of(ConversationChanged, await ended(hands))
    assert "did not ask within 0.2 s" in change.reason


async def test_conversation_switches_to_the_other_loop_and_back(hands: Hands) -> None:
    await with_sdk(hands, stand_in()).begin(SAYS, SAYS, SAYS, THINK, name=SDK, headless=False)
    names = []
    for number, loop in enumerate((None, "legacy", "sdk", None), 1):
        if number > 1:
            changes = [ConversationChanged(loop=loop)] if loop else []
            await hands.log.append(CID, [*changes, said("and now?")])
        held = await taken_up(hands)
        events = await ended(hands, times=number)
        names.append(held.state.setup.agent.name)
    assert names == [SDK, "CodeActAgent", SDK, SDK]
    assert held.state.setup.agent.llm.model.startswith("scripted/")  # all but the loop is as it was
    assert [event.agent_class for event in of(SystemMessageAction, events)] == [SDK, "CodeActAgent", SDK]
    assert len(of(ModelReply, events)) == 5


async def test_no_worker_holds_more_programs_than_it_may(hands: Hands) -> None:
    with_sdk(hands, stand_in(), limit=1)
    await hands.begin(BASH, name=SDK)
    first = await taken_up(hands)
    await until(lambda: first.state.tools.pending, what="a command")
    assert first._sdk.pid is not None
    (created, task), other = (await hands.events())[:2], "conversation-2"
    await hands.log.create(created.model_copy(update={"conversation_id": other}), [task], key="begin")
    second = await taken_up(hands, other)
    await until(lambda: second.state.tools.pending, what="the other's command")
    assert (first._sdk.pid, hands.services.sdk_sessions.count) == (None, 1)
    await hands.observe(first.state.tools.pending[0].id)
    first.wake()
    await ended(hands)  # it got a place again
    assert second._sdk.pid is None


def test_loop_change_leaves_agents_without_counterpart_alone() -> None:
    agent = AgentSpec(name="LocAgent", llm=LLMSpec(model="m"))
    assert apply_agent_change(ConversationChanged(loop="sdk"), agent) == agent
    assert json.loads(ConversationChanged(loop="sdk").model_dump_json())["loop"] == "sdk"


def turn(name: str, cost_usd: float, **arguments: str) -> dict[str, object]:
    return {"tool_calls": [{"name": name, "arguments": arguments}], "cost_usd": cost_usd}


async def delegated(
    hands: Hands, parent: str, helper: str, script: list[dict[str, object]], *own: dict[str, object], limits: Limits
) -> tuple[ConversationLoop, ConversationLoop]:
    """Let a conversation delegate at once to a helper with a script; return the loops of both when the helper ended."""
    with_sdk(hands, stand_in())
    path = hands.folder / "helper.json"
    path.write_text(json.dumps({"turns": script}))
    delegates = {"helper": AgentSpec(name=helper, llm=LLMSpec(model=f"scripted/{path}"))}
    await hands.begin(*own, agent=hands.agent(name=parent, enable_delegation=True, delegates=delegates), limits=limits)
    first = await taken_up(hands)
    await until(lambda: first.state.delegation.delegates and first.is_idle, what="a delegate")
    delegate_id = make_delegate_id(CID, first.state.delegation.delegates[0].id)
    second = await taken_up(hands, delegate_id)
    await until(lambda: delegate_id in hands.gone, what="the delegate's end")
    return first, second


@pytest.mark.parametrize(
    ("parent", "helper"),
    [pytest.param(LEGACY, LEGACY, marks=pytest.mark.soak), (LEGACY, SDK), (SDK, LEGACY), (SDK, SDK)],
    ids=lambda name: name[12:] or "legacy",
)
async def test_outputs_and_metrics_of_a_delegate(hands: Hands, parent: str, helper: str) -> None:
    looks = [turn("think", 0.25, thought="hm"), turn("finish", 0.5, message="it is in a.py")]
    own = turn("delegate", 1.0, agent="helper", task="look"), turn("finish", 2.0, message="done")
    limits = Limits(max_iterations=10, max_budget_usd=20.0)
    first, second = await delegated(hands, parent, helper, looks, *own, limits=limits)
    first.wake()
    await until(lambda: CID in hands.gone, what="the parent's end")
    (told,) = [event for event in await hands.events() if isinstance(event, AgentDelegateObservation)]
    assert "it is in a.py" in told.content
    assert (first.state.setup.agent.name, second.state.setup.agent.name) == (parent, helper)
    assert first.state.lifecycle.agent_state is second.state.lifecycle.agent_state is AgentState.FINISHED
    assert (count_steps(first.state), count_steps(second.state)) == (4, 2)
    assert (first.state.usage.cost_usd, second.state.usage.cost_usd) == (3.75, 0.75)
    assert first.state.delegation.spent_usd == 0.75
    assert hands.services.sdk_sessions.count == 0


@pytest.mark.parametrize("helper", [pytest.param(LEGACY, marks=pytest.mark.soak), SDK])
async def test_a_delegate_spends_no_more_than_its_share(hands: Hands, helper: str) -> None:
    thoughts = [turn("think", 0.0, thought=f"hm {n}") for n in range(20)]
    asks = turn("delegate", 0.0, agent="helper", task="look")
    first, second = await delegated(hands, SDK, helper, thoughts, asks, limits=Limits(max_iterations=7))
    assert second.state.usage.iteration == first.state.delegation.delegates[0].iterations == 3
    assert second.state.lifecycle.agent_state is AgentState.ERROR
