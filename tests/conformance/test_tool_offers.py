"""Offers of tools: published, chosen by key or pattern, refused where they are unclear."""

from __future__ import annotations

import asyncio

import pytest

from broker.contract.tool_specs import ToolOffer
from broker.coordination.quarantine import Quarantine
from broker.runtime.errors import UsageError
from broker.store.store import Store
from broker.tools.tool_offers import ToolOffers

EMPTY = {"type": "object", "properties": {}}


def offer(key: str, description: str = "") -> ToolOffer:
    return ToolOffer(key=key, name=key.rpartition("/")[2], description=description, parameters=EMPTY)


async def test_the_latest_offer_under_a_key_counts(store: Store) -> None:
    offers = ToolOffers(store)
    await offers.publish([offer("b"), offer("a", "old")])
    await offers.publish([offer("a", "new")])
    await offers.publish([])
    assert await offers.load_all() == {"a": offer("a", "new"), "b": offer("b")}


async def test_what_cannot_be_read_is_no_offer(store: Store) -> None:
    offers = ToolOffers(store)
    await offers.publish([offer("a")])
    await store.connection.call("HSET", "deck:tools", "b", '{"key": "b", "name": "b", "from": "the future"}')
    assert list(await offers.load_all()) == ["a"]


async def test_key_of_another_type_is_moved_aside(store: Store) -> None:
    offers, call = ToolOffers(store), store.connection.call
    await call("SET", "deck:tools", "a string")
    assert await offers.load_all() == {}
    await offers.publish([offer("a")])
    await call("SET", "deck:tools", "a string again")
    choosing = asyncio.create_task(offers.choose(["a"], limit_seconds=20))
    await asyncio.sleep(0)
    await offers.restore([offer("a")])
    assert await choosing == (offer("a"),)
    assert await call("GET", "deck:tools:unreadable") == b"a string again"
    assert [entry.key for entry in await Quarantine(store).list_items()] == ["deck:tools"] * 2


async def test_an_offer_that_somebody_else_has_overwritten_is_repeated(store: Store) -> None:
    offers, mine = ToolOffers(store), [offer("a"), offer("b"), offer("c")]
    await offers.publish([*mine, offer("theirs")])
    await store.connection.call("HSET", "deck:tools", "a", "nothing", "b", offer("b", "forged").model_dump_json())
    await store.connection.call("HDEL", "deck:tools", "c")
    await offers.restore(mine)
    assert await offers.load_all() == {one.key: one for one in [*mine, offer("theirs")]}
    await offers.restore([])


async def test_offers_are_chosen_by_key_or_pattern_and_each_once(store: Store) -> None:
    offers = ToolOffers(store)
    await offers.publish([offer("weather"), offer("git/log"), offer("git/blame")])
    assert await offers.choose(["weather", "git/*", "*"]) == (offer("weather"), offer("git/blame"), offer("git/log"))
    with pytest.raises(UsageError, match=r"No tool worker offers the tool 'wether'.*Offered: git/blame, git/log, wea"):
        await offers.choose(["weather", "wether"])


async def test_tools_too_long_for_one_event_are_refused(store: Store) -> None:
    offers = ToolOffers(store)
    await offers.publish([offer(f"git/t{n}", "d" * 8_000) for n in range(120)])
    with pytest.raises(UsageError, match=r"The 120 chosen tools have 9\d\d,\d{3} characters together"):
        await offers.choose(["git/*"])
    assert len(await offers.choose(["git/t1*"])) == 31


async def test_two_tools_of_one_name_can_be_chosen_together(store: Store) -> None:
    offers = ToolOffers(store)
    await offers.publish([offer("git/log"), offer("svn/log")])
    assert await offers.choose(["*/log"]) == (offer("git/log"), offer("svn/log"))


async def test_a_worker_that_is_still_starting_is_waited_for(store: Store) -> None:
    offers = ToolOffers(store)
    choosing = asyncio.create_task(offers.choose(["late"], limit_seconds=20))
    await asyncio.sleep(0)
    await offers.publish([offer("late")])
    assert await choosing == (offer("late"),)
