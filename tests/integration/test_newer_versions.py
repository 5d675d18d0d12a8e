"""An older version meets what a newer one has written: it leaves the conversation to a newer worker (F49)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from broker.contract import codec
from broker.contract.codec import UnknownEvent
from broker.contract.events import Event
from broker.log.conversations import Conversations
from controller_worker.loop.failed_conversation import NEWER_WORKER
from deckhands.client.client import Client
from deckhands.client.reading.rendering import Renderer
from tests.controller_parts import said
from tests.conversation_hands import CID, Hands

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
    await hands.store.connection.call("XADD", hands.store.keys(CID).events, f"{event_id}-0", "e", entry)


async def test_conversation_with_a_newer_kind_waits_for_newer_worker(hands: Hands, tomorrow: Event) -> None:
    await hands.begin(FINISH)
    await hands.log.append(CID, [tomorrow])
    for _ in range(2):  # who takes it up again leaves it again
        await hands.go()
        row = await Conversations(hands.store).load_row(CID)
        assert (row.owner, row.wait_reason, row.last_event_id) == ("", NEWER_WORKER, 3)
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
    assert (await Conversations(hands.store).load_row(CID)).wait_reason == NEWER_WORKER


async def test_an_entry_of_a_newer_schema_is_left_too(hands: Hands) -> None:
    await hands.begin(FINISH)
    await append_newer(hands, 3)
    await hands.store.connection.call("HSET", hands.store.keys(CID).meta, "last_id", 3)
    await hands.go()
    row = await Conversations(hands.store).load_row(CID)
    assert (row.owner, row.wait_reason, row.last_event_id) == ("", NEWER_WORKER, 3)


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
