"""Delegation between the two kinds of agents: outputs come back, and limits and costs add up in all four directions."""

from __future__ import annotations

import json

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Limits, LLMSpec
from broker.contract.observations import AgentDelegateObservation
from broker.log.delegates import make_delegate_id
from controller_worker.core.concerns.limits import count_steps
from controller_worker.loop.conversation_loop import ConversationLoop
from tests.conversation_hands import CID, Hands
from tests.polling import until
from tests.sdk_parts import stand_in, taken_up, with_sdk

LEGACY, SDK = "CodeActAgent", "CodeActAgentSDK"


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
