"""The limits of a conversation: no call starts that would exceed its budget, and its time ends it while it waits."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, DelegateEnded, Limits, LLMSpec, ModelReply
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation
from broker.contract.specs import CriticSpec, GoalSpec
from broker.log.status import fold_status
from broker.runtime.clock import SystemClock
from broker.runtime.ids import make_delegate_id
from controller_worker.core.controller import next_effect
from controller_worker.core.effects import CallModel
from controller_worker.loop.services import Services
from controller_worker.model.models import Models
from tests.conversation_hands import BASH, CID, THINK, Hands
from tests.polling import until


def thoughts(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"tool_calls": [{"name": "think", "arguments": {"thought": str(n)}}], **fields} for n in range(count)]


def with_prices(hands: Hands, **settings: str) -> None:
    """Let the models of this worker have a price."""
    env = {"LLM_INPUT_COST_PER_TOKEN": "0.000003", "LLM_OUTPUT_COST_PER_TOKEN": "0.000015"} | settings
    hands.services = Services(hands.store, hands.log, hands.owners, Models(env, SystemClock(), is_open=True))


async def spent(hands: Hands) -> tuple[int, float]:
    replies = [event for event in await hands.events() if isinstance(event, ModelReply)]
    return len(replies), sum(reply.cost_usd or 0.0 for reply in replies)


async def test_call_costing_more_than_the_rest_does_not_start(hands: Hands) -> None:
    await hands.begin(*thoughts(8, cost_usd=1.35), limits=Limits(max_budget_usd=5.0))
    loop = await hands.go()
    assert await spent(hands) == (3, pytest.approx(4.05))
    assert loop.state.lifecycle.agent_state is AgentState.ERROR
    assert loop.state.lifecycle.error_code == "max_budget"
    assert loop.state.lifecycle.last_error == (
        "RuntimeError: Agent reached maximum budget for conversation. Current budget: 4.05, max budget: 5.00; "
        "the next call would cost about 1.35"
    )
    await hands.say("more")
    loop = await hands.go()
    assert await spent(hands) == (6, pytest.approx(8.10))
    assert loop.state.usage.max_budget_usd == pytest.approx(9.05)


@pytest.mark.parametrize("budget", [0.03, 0.1, 0.11, 0.12, 0.5, 1.0])
async def test_known_prices_and_reply_limit_never_exceed_the_budget(hands: Hands, budget: float) -> None:
    with_prices(hands, LLM_MAX_OUTPUT_TOKENS="1000")
    used = {"prompt_tokens": 1_500, "completion_tokens": 1_000}
    await hands.begin(*thoughts(100, usage=used), limits=Limits(max_budget_usd=budget))
    loop = await hands.go()
    replies, cost = await spent(hands)
    assert replies > 0
    assert budget - 0.04 < cost <= budget
    assert loop.state.lifecycle.error_code == "max_budget"


async def test_first_call_with_a_too_expensive_prompt_does_not_start(hands: Hands) -> None:
    with_prices(hands)
    await hands.begin(*thoughts(3), limits=Limits(max_budget_usd=0.001))
    loop = await hands.go()
    assert await spent(hands) == (0, 0)
    assert loop.state.lifecycle.error_code == "max_budget"


async def test_reply_is_estimated_by_the_longest_so_far(hands: Hands) -> None:
    with_prices(hands)
    used = {"prompt_tokens": 1_500, "completion_tokens": 20_000}  # about 0.30
    await hands.begin(*thoughts(3, usage=used), limits=Limits(max_budget_usd=0.5))
    await hands.go()
    assert await spent(hands) == (1, pytest.approx(0.3045))


async def test_cost_of_a_step_does_not_raise_a_critics_estimate(hands: Hands) -> None:
    finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}], "cost_usd": 1.35}
    verdict = {"tool_calls": [{"name": "verdict", "arguments": {"accepted": True, "reason": "Tested."}}]}
    agent = hands.agent(goal=GoalSpec(critic=CriticSpec()))
    await hands.begin(
        *(*thoughts(2, cost_usd=1.35), finish | {"critic": verdict | {"cost_usd": 0.05}}),
        agent=agent,
        limits=Limits(max_budget_usd=4.25),
    )
    loop = await hands.go()
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED
    assert await spent(hands) == (4, pytest.approx(4.10))


CHEAP = {"LLM_OUTPUT_COST_PER_TOKEN": "0", "LLM_INPUT_COST_PER_TOKEN": "0.000001", "LLM_MAX_OUTPUT_TOKENS": "100"}


async def test_provider_s_count_corrects_the_next_estimate(hands: Hands) -> None:
    with_prices(hands, **CHEAP)
    thought = {"name": "think", "arguments": {"thought": "What is to be done next? " * 800}}
    used = {"prompt_tokens": 7_000, "completion_tokens": 10}  # three times the estimate
    later = thoughts(1, usage=used | {"prompt_tokens": 21_000})
    await hands.begin({"tool_calls": [thought], "usage": used}, *later, limits=Limits(max_budget_usd=0.02))
    loop = await hands.go()
    assert await spent(hands) == (1, pytest.approx(0.007))
    assert loop.state.lifecycle.error_code == "max_budget"


async def test_an_absurd_count_spoils_no_estimate_for_long(hands: Hands) -> None:
    with_prices(hands, **CHEAP)
    absurd = {"prompt_tokens": 10**9, "completion_tokens": 10}
    used = {"prompt_tokens": 3_000, "completion_tokens": 10}
    await hands.begin(
        *thoughts(1, usage=absurd, cost_usd=0.003), *thoughts(20, usage=used), limits=Limits(max_budget_usd=0.05)
    )
    await hands.go()
    replies, cost = await spent(hands)
    assert replies == 16
    assert cost == pytest.approx(0.048)


async def test_budget_without_prices_ends_work_by_known_costs(hands: Hands) -> None:
    await hands.begin(*thoughts(3), limits=Limits(max_budget_usd=0.001))
    await hands.go()
    assert fold_status(await hands.events()).state is AgentState.FINISHED


async def test_parent_waits_while_delegates_reserve_its_budget(hands: Hands) -> None:
    call = {"name": "delegate", "arguments": {"agent": "helper", "task": "look", "background": True}}
    agent = hands.agent(
        enable_delegation=True,
        delegates={"helper": AgentSpec(name="ReadOnlyAgent", llm=LLMSpec(model="acme/small"))},
    )
    first = {"tool_calls": [call], "cost_usd": 1.0}
    await hands.begin(first, *thoughts(5, cost_usd=1.0), agent=agent, limits=Limits(max_budget_usd=4.0))
    loop = await hands.go()
    # 1.5 of the 3.0 left were lent.
    await until(lambda: loop.state.usage.iteration == 2, what="the reply for which there is room")
    await hands.at_rest(loop)
    assert loop.state.lifecycle.agent_state is AgentState.RUNNING
    assert isinstance(next_effect(loop.state, SystemClock().now()), CallModel)
    (delegate,) = loop.state.delegation.delegates
    whose = {"delegate_id": delegate.id, "conversation_id": make_delegate_id(CID, delegate.id)}
    ended = DelegateEnded(**whose, agent_state=AgentState.FINISHED, content="done")
    await hands.log.append(CID, [ended], key=f"delegate:{delegate.id}")
    loop.wake(has_new_events=True)
    await until(lambda: loop.state.lifecycle.agent_state is AgentState.ERROR, what="the end of the budget")
    assert await spent(hands) == (4, pytest.approx(4.0))


SHORT = Limits(max_seconds=0.4)


async def ended(found: Hands) -> bool:
    last = (await found.events())[-1]
    return isinstance(last, AgentStateChangedObservation) and last.code == "max_time"


async def test_a_tool_that_outlasts_the_time_is_ended(hands: Hands) -> None:
    await hands.begin(BASH, limits=SHORT)
    await hands.go()
    await until(lambda: ended(hands), what="the end of the time")
    answer = (await hands.events())[-2]
    assert isinstance(answer, ErrorObservation)
    assert answer.error_id == "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_ERROR"


async def test_a_model_that_outlasts_the_time_is_not_waited_for(hands: Hands) -> None:
    await hands.begin(THINK, latency=60.0, limits=SHORT)
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: ended(hands), what="the end of the time")
    await until(lambda: loop.is_idle, what="rest")
    assert "model.reply" not in await hands.kinds()


async def test_released_conversation_is_woken_at_its_time_limit(hands: Hands) -> None:
    await hands.begin(BASH, limits=Limits(max_seconds=20.0))
    loop = await hands.go()
    await loop.release_idle()
    parked = hands.store.known_keys(loop.conversation_id).shard.parked
    _, due = await hands.store.connection.call("ZRANGE", parked, 0, -1, "WITHSCORES")
    assert loop.state.usage.deadline is not None
    assert abs(float(due) / 1000 - loop.state.usage.deadline.timestamp()) < 5.0
