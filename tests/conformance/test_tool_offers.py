"""Offers of tools: published, chosen by key or pattern, refused where they are unclear; and tools that cannot be offered."""

from __future__ import annotations

import asyncio
import json

import pytest

from broker.contract.tool_specs import ToolOffer
from broker.coordination.membership import Membership
from broker.coordination.quarantine import Quarantine
from broker.runtime.errors import UsageError
from broker.store.store import Store
from broker.tools.tool_offers import MAX_FAILURES, MAX_REASON_CHARS, SANDBOX, ToolFailure, ToolFailures, ToolOffers

EMPTY = {"type": "object", "properties": {}}


def offer(key: str, description: str = "") -> ToolOffer:
    return ToolOffer(key=key, name=key.rpartition("/")[2], description=description, parameters=EMPTY)


async def test_the_latest_offer_under_a_key_counts(store: Store) -> None:
    offers = ToolOffers(store)
    await offers.publish([offer("b"), offer("a", "old")])
    await offers.publish([offer("a", "new")])
    await offers.publish([])
    assert await offers.load_all() == {"a": offer("a", "new"), "b": offer("b")}


async def test_unreadable_value_is_no_offer(store: Store) -> None:
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
    assert await call("GET", "{deck:tools}:unreadable") == b"a string again"
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


MISSING = ToolFailure(
    source="shop.tools:stock", reason="ModuleNotFoundError: No module named 'shop'", remedy="Install."
)
DEAD = ToolFailure(source="the MCP server time", server="time", reason="Connection closed", remedy="Correct it.")
LIMIT_SECONDS = 600.0
"""Far more than the test may take: what is known is not waited for."""


async def worker(store: Store, name: str, *failures: ToolFailure) -> Membership:
    membership = Membership(store, name, "tool", about={"node": f"node-of-{name}"})
    await membership.register()
    await ToolFailures(store).report(name, failures)
    return membership


async def refusal(store: Store, *patterns: str) -> str:
    with pytest.raises(UsageError) as refused:
        await ToolOffers(store).choose(patterns, limit_seconds=LIMIT_SECONDS)
    return str(refused.value)


async def test_missing_tools_reason_is_read_at_once(store: Store) -> None:
    await worker(store, "t1", MISSING)
    assert await refusal(store, "stock") == (
        "No tool worker offers the tool 'stock'. The tool worker t1 (node node-of-t1) cannot load tools from "
        "shop.tools:stock: ModuleNotFoundError: No module named 'shop'. Install. Offered: none."
    )


async def test_a_failure_that_is_reported_while_somebody_waits(store: Store) -> None:
    asking = asyncio.create_task(refusal(store, "time/*"))
    await asyncio.sleep(0)
    await worker(store, "t1", DEAD)
    async with asyncio.timeout(20):
        assert "cannot load tools from the MCP server time: Connection closed. Correct it." in await asking


@pytest.mark.parametrize(
    ("failure", "pattern", "explains"),
    [
        (MISSING, "stock", True),
        (MISSING, "st*", True),
        (MISSING, "time/now", False),
        (DEAD, "time/now", True),
        (DEAD, "ti*/now", True),
        (DEAD, "*", True),
        (DEAD, "time", False),
        (DEAD, "issues/list", False),
        (ToolFailure(source=SANDBOX, reason="x"), "stock", False),
    ],
)
def test_what_a_failure_may_explain(failure: ToolFailure, pattern: str, explains: bool) -> None:
    assert failure.may_explain(pattern) is explains


async def test_only_what_running_workers_report_now_counts(store: Store) -> None:
    await worker(store, "t1", MISSING)
    second = await worker(store, "t2", DEAD)
    assert [(one.worker_id, one.failure) for one in await ToolFailures(store).load_all()] == [
        ("t1", MISSING),
        ("t2", DEAD),
    ]
    await ToolFailures(store).report("t1", ())
    await second.leave()
    assert await ToolFailures(store).load_all() == []
    await worker(store, "t3", MISSING)
    assert (await store.connection.call("HGETALL", "deck:tools:failed"))[::2] == [b"t3"]


async def test_a_report_is_shown_as_bounded_lines_of_plain_text(store: Store) -> None:
    await worker(store, "t1", *[MISSING] * (2 * MAX_FAILURES))
    assert len(await ToolFailures(store).load_all()) == MAX_FAILURES
    forged = {"source": "x\x1b[2J\ny", "reason": "r\u202e" * 100_000, "remedy": "\x9b1m", "server": ""}
    for text in ("[", "{}", "7", json.dumps([7]), "[" * 100_000, json.dumps([{"source": 3}])):
        await store.connection.call("HSET", "deck:tools:failed", "t1", text)
        assert await ToolFailures(store).load_all() == []
    await store.connection.call("HSET", "deck:tools:failed", "t1", json.dumps([{**forged, "reason": "r\u202e" * 900}]))
    (shown,) = await ToolFailures(store).load_all()
    assert str(shown).isprintable()
    assert (shown.failure.source, shown.failure.remedy) == ("x [2J y", "1m")
    assert len(shown.failure.reason) == MAX_REASON_CHARS
    await store.connection.call("HSET", "deck:tools:failed", "t1", json.dumps([forged]))
    assert await ToolFailures(store).load_all() == []


async def test_a_key_of_another_type_stops_nobody(store: Store) -> None:
    await store.connection.call("SET", "deck:tools:failed", "no hash")
    await worker(store, "t1", MISSING)
    assert await ToolFailures(store).load_all() == []
