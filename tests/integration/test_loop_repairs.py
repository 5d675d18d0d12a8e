"""The shell of a conversation where the store has more or fewer events than it, or events of a newer version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest

from broker.contract import codec
from broker.contract.agent_state import AgentState
from broker.contract.codec import UnknownEvent
from broker.contract.events import AgentSpec, Event
from broker.contract.specs import PlanSpec
from broker.coordination.action_streams import ControlDelivery
from broker.log.conversations import Conversations
from broker.log.selection import WaitReason
from broker.log.status import fold_status
from broker.runtime.ids import make_delegate_id
from controller_worker.core.controller import fold
from controller_worker.core.state import State, to_snapshot
from deckhands.client.client import Client
from deckhands.client.reading.rendering import Renderer
from tests.broker_parts import enter, queue, take
from tests.controller_parts import said
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
    await hands.store.connection.call("SET", hands.store.known_keys(CID).snapshot, to_snapshot(lost))
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


FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}


class Tomorrow(Event):
    """An event of a kind that this version does not know."""

    kind: Literal["test.tomorrow"] = "test.tomorrow"
    weather: str = "rain"


del Event.KINDS["test.tomorrow"]


@pytest.fixture
def tomorrow() -> Iterator[Event]:
    yield Tomorrow()
    Event.KINDS.pop("test.tomorrow", None)


async def parked(hands: Hands) -> list[str]:
    names = await hands.store.connection.call("ZRANGE", hands.store.all_shards[0].parked, 0, -1)
    return [name.decode() for name in names]


async def append_newer(hands: Hands, event_id: int) -> None:
    """Let a newer version have appended an entry of its schema."""
    entry = codec.encode(said("hello").wire(), schema_version=codec.SCHEMA_VERSION + 1)
    await hands.store.connection.call("XADD", hands.store.known_keys(CID).events, f"{event_id}-0", "e", entry)


async def test_conversation_with_a_newer_kind_waits_for_newer_worker(hands: Hands, tomorrow: Event) -> None:
    await hands.begin(FINISH)
    await hands.log.append(CID, [tomorrow])
    for _ in range(2):  # the next owner releases it again
        await hands.go()
        row = await Conversations(hands.store).load_row(CID)
        assert (row.owner, row.wait_reason, row.last_event_id) == ("", WaitReason.NEWER_WORKER, 3)
        assert await parked(hands) == [CID]
    Event.KINDS["test.tomorrow"] = Tomorrow  # now by a newer worker
    await hands.go()
    assert (await hands.events())[-1].kind == "observation.agent_state_changed"
    row = await Conversations(hands.store).load_row(CID)
    assert (row.state, row.wait_reason) == ("finished", "")


async def test_a_newer_kind_that_comes_while_it_runs(hands: Hands, tomorrow: Event) -> None:
    await hands.begin(FINISH)
    loop = await hands.claim()
    await hands.log.append(CID, [tomorrow, said("and this")])
    await hands.wake(loop)
    assert (await Conversations(hands.store).load_row(CID)).wait_reason == WaitReason.NEWER_WORKER


async def test_an_entry_of_a_newer_schema_is_left_too(hands: Hands) -> None:
    await hands.begin(FINISH)
    await append_newer(hands, 3)
    await hands.store.connection.call("HSET", hands.store.known_keys(CID).meta, "last_id", 3)
    await hands.go()
    row = await Conversations(hands.store).load_row(CID)
    assert (row.owner, row.wait_reason, row.last_event_id) == ("", WaitReason.NEWER_WORKER, 3)


async def test_readers_show_what_they_can(hands: Hands, tomorrow: Event) -> None:
    await hands.begin(FINISH)
    await hands.log.append(CID, [tomorrow])
    await append_newer(hands, 4)
    *_, unknown, newer = await Client(hands.store).events(CID, is_whole=True, is_lenient=True)
    assert isinstance(unknown, UnknownEvent)
    assert (unknown.id, unknown.kind, unknown.export()["weather"]) == (3, "test.tomorrow", "rain")
    assert isinstance(newer, UnknownEvent)
    assert (newer.id, newer.export()["content"]) == (4, "hello")
    lines = Renderer(is_coloured=False).lines(unknown)
    assert lines == ["[3] An event of the kind test.tomorrow, which this version of Deckhands does not know."]
