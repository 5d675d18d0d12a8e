"""The shell of a conversation where the store knows more than it does, or less: dispatches, snapshots, failures."""

from __future__ import annotations

from dataclasses import replace

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec
from broker.contract.specs import PlanSpec
from broker.coordination.action_streams import ControlDelivery
from broker.log.delegates import make_delegate_id
from broker.log.status import fold_status
from controller_worker.core.controller import fold
from controller_worker.core.state import State, to_snapshot
from tests.broker_parts import enter, queue, take
from tests.conversation_hands import BASH, CID, THINK, Hands

DELEGATE = {"tool_calls": [{"name": "delegate", "arguments": {"agent": "helper", "task": "look"}}]}
IN_BACKGROUND = {"agent": "helper", "task": "look", "background": True}
BACKGROUND = {"tool_calls": [{"name": "delegate", "arguments": IN_BACKGROUND}]}


def delegating(hands: Hands) -> AgentSpec:
    return hands.agent(enable_delegation=True, delegates={"helper": AgentSpec(name="ReadOnlyAgent")})


async def test_an_action_that_was_answered_meanwhile_is_not_waited_for(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    action = loop.state.tools.pending[0].id
    hands.wire.before["deck_dispatch"] = lambda: hands.observe(action)
    loop.check_dispatch()
    await hands.at_rest(loop)
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED


async def test_snapshot_ahead_of_its_log_is_ignored_and_gap_named(hands: Hands) -> None:
    await hands.begin(THINK)
    lost = replace(fold(State(), await hands.events()), version=99)
    await hands.store.connection.call("SET", hands.store.keys(CID).snapshot, to_snapshot(lost))
    await hands.go()
    events = await hands.events()
    assert "observation.events_lost" in [event.kind for event in events]
    assert fold_status(events).state is AgentState.FINISHED


async def test_an_error_ends_what_runs_and_no_later_answer_counts(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    action = loop.state.tools.pending[0].id
    await enter(hands.store, "tool-1", node="n1")
    reader = queue(hands.store, "tool-1", node="n1")
    await reader.claim(await take(reader))

    async def fail() -> None:
        raise ZeroDivisionError

    hands.wire.before["deck_dispatch"] = fail
    loop.check_dispatch()
    await hands.at_rest(loop)
    assert fold_status(await hands.events()).state is AgentState.ERROR
    orders = [order for order in await reader.read(limit=5) if isinstance(order, ControlDelivery)]
    assert [(order.action_id, order.order) for order in orders] == [(action, "cancel")]
    assert await hands.log.is_answered(CID, action)
    await reader.aclose()


async def test_a_delegate_that_the_store_has_lost_is_begun_again(hands: Hands) -> None:
    await hands.begin(DELEGATE, agent=delegating(hands))
    loop = await hands.go()
    delegate_id = make_delegate_id(CID, loop.state.delegation.delegates[0].id)
    call = hands.store.connection.call
    for key in await call("KEYS", f"*{delegate_id}*"):
        await call("DEL", key)
    loop.check_dispatch()
    await hands.at_rest(loop)
    assert [event.kind for event in await hands.log.read(delegate_id)] == ["conversation.created", "action.message"]


async def test_delegate_hears_nothing_from_before_it_started(hands: Hands) -> None:
    await hands.begin(BACKGROUND, BASH, BACKGROUND, BASH, agent=delegating(hands))
    loop = await hands.go()
    await hands.ask("paused")
    await hands.wake(loop)
    await hands.ask("running")
    loop = await hands.go()
    await hands.observe(loop.state.tools.pending[0].id)
    await hands.wake(loop)
    first, second = (make_delegate_id(CID, one.id) for one in loop.state.delegation.delegates)
    await loop.release_idle()
    await hands.go()
    assert [event.kind for event in await hands.log.read(first)][2:] == ["action.change_agent_state"] * 2
    assert len(await hands.log.read(second)) == 2


async def test_agent_that_takes_over_a_plan_reads_the_next_reply(hands: Hands) -> None:
    agent = hands.agent(name="PlanningAgent", plan=PlanSpec(needs_approval=False))
    await hands.begin({"tool_calls": [{"name": "propose_plan", "arguments": {"plan": "1. Look."}}]}, BASH, agent=agent)
    loop = await hands.go()
    assert [action.id for action in loop.state.tools.pending] == [len(await hands.events())]
    assert (await hands.kinds())[-1] == "action.run"
