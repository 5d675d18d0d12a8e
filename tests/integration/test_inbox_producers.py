"""Producers with an inbox stream of their own: none delays, trims, exhausts or answers for another one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from broker.coordination.producers import MAX_PRODUCERS, RESERVED, Producers, make_moved_key, make_moved_prefix
from broker.coordination.quarantine import Quarantine
from broker.runtime.errors import DeckhandsError, UsageError
from broker.store import keys
from broker.store.connection import MultiplexedConnection
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.ingress.callers import STREAM, Caller
from deckhands.ingress.context import Answer, IngressContext
from deckhands.ingress.inbox import LAST_ID, InboxReaders
from deckhands.ingress.outcome_watcher import answer_stream, send_outcome
from deckhands.ingress.replies import Replies
from deckhands.operations.monitoring.queues import read_depths
from tests.broker_parts import CID
from tests.inbox_parts import put, replies
from tests.integration.command_line import deckhands, environment
from tests.integration.test_inbox_edges import NoResults, serving
from tests.polling import until
from tests.served_stores import Server, allowed_of, refusals
from tests.served_stores import serving as store_serving

BEYOND_A_PRODUCER = (
    *("XADD deck:inbox * v 1", "XADD deck:inbox MAXLEN 0 * v 1", "XADD deck:inbox:mill * v 1", "XLEN deck:inbox:mill"),
    *(
        "XTRIM deck:inbox:shop MAXLEN 0",
        "XDEL deck:inbox:shop 1-1",
        "XRANGE deck:inbox:shop - +",
        "DEL deck:inbox:shop",
    ),
    *("XADD deck:inbox:shop:moved * v 1", "XRANGE deck:replies:mill - +", "XADD deck:replies:shop * v 1"),
    *("HGETALL deck:producers", "HSET deck:producers shop {}", "XINFO STREAM deck:inbox:shop", "KEYS *", "ACL LIST"),
    *("XSETID deck:inbox:shop 1-1", "EVAL return{} 0", "GET other", "XREAD STREAMS deck:inbox:mill 0"),
)


@dataclass
class World:
    """A store with two producers, and one ingress with the rights of its user."""

    log: Server
    store: Store
    desk: IngressContext
    shop: MultiplexedConnection
    mill: MultiplexedConnection

    async def tenant_of(self, conversation_id: str) -> str:
        return (await self.desk.meta(conversation_id)).get("tenant", "")

    async def until_replies(self, name: str, *events: str) -> None:
        async def are_there() -> bool:
            return [reply.event for reply in await replies(self.store, name)] == list(events)

        await until(are_there, limit=60.0, what=f"{events} to {name}")

    async def until_empty(self, name: str) -> None:
        async def is_empty() -> bool:
            return not await self.store.call("XLEN", keys.inbox_key(name))

        await until(is_empty, limit=60.0, what=f"an empty inbox of {name}")


async def add(
    producer: MultiplexedConnection, name: str, request: dict[str, Any], *, at: str = "*", **fields: str
) -> str:
    """Add an entry to the stream of a producer."""
    flat = [part for field in ({"v": "1", "request": json.dumps(request)} | fields).items() for part in field]
    entry: bytes = await producer.call("XADD", keys.inbox_key(name), at, *flat)
    return entry.decode()


@pytest.fixture
async def world(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[World]:
    async with store_serving("log", tmp_path / "log", programs) as log:
        await (await open_store(log.admin)).aclose()
        async with contextlib.AsyncExitStack() as stack:
            store, ingress = await open_store(log.operator), await open_store(log.ingress)
            shop, mill = MultiplexedConnection(log.shop), MultiplexedConnection(log.mill)
            for each in (store, ingress, shop, mill):
                stack.push_async_callback(each.aclose)
            await Producers(store).add("shop", "acme")
            await Producers(store).add("mill", "*")
            yield World(log, store, IngressContext(ingress, NoResults()), shop, mill)  # type: ignore[arg-type]


async def test_producer_is_answered_and_bound_to_its_tenant(world: World) -> None:
    async with serving(InboxReaders(world.desk, "d1").run()):
        await add(world.shop, "shop", {"id": "a", "task": "x"}, reply_to="shop")
        await world.until_replies("shop", "accepted")
        await add(world.shop, "shop", {"id": "b", "task": "x", "tenant": "acme"}, reply_to="shop")
        await world.until_replies("shop", "accepted", "accepted")
        await add(world.shop, "shop", {"id": "c", "task": "x", "tenant": "other"}, reply_to="shop")
        await world.until_replies("shop", "accepted", "accepted", "rejected")
        found = await replies(world.store)
        assert [await world.tenant_of(reply.conversation_id) for reply in found[:2]] == ["acme", "acme"]
        assert "tenant acme only" in found[2].content["message"]
        assert len(await Client(world.store).recent()) == 2
        await add(world.mill, "mill", {"id": "a", "task": "x", "tenant": "other"}, reply_to="mill")
        await world.until_replies("mill", "accepted")
        (free,) = await replies(world.store, "mill")
        assert await world.tenant_of(free.conversation_id) == "other"
        assert free.conversation_id not in {reply.conversation_id for reply in found}
    assert [each for each in await refusals(world.log) if b"ingress" in each] == []


async def test_no_producer_answers_or_begins_for_another(world: World) -> None:
    async with serving(InboxReaders(world.desk, "d1").run()):
        await add(world.mill, "mill", {"id": "a", "task": "forged"}, reply_to="shop")
        await world.until_replies("mill", "rejected")
        await put(world.store, {"id": "a", "task": "forged"}, reply_to="shop")  # the shared inbox
        await put(world.store, {"id": "a", "task": "x"}, reply_to="free")
        await world.until_replies("free", "accepted")
        await add(world.shop, "shop", {"id": "a", "task": "mine"}, reply_to="shop")
        await world.until_replies("shop", "accepted")
    (mine,) = await replies(world.store)
    assert (await Client(world.store).row(mine.conversation_id)).title == "mine"
    assert len(await Client(world.store).recent()) == 2
    aside = [entry.key for entry in await Quarantine(world.store).list_items()]
    assert sorted(aside) == ["deck:inbox", "deck:inbox:mill"]


async def test_rights_of_a_producer_end_at_its_own_stream(world: World) -> None:
    assert await allowed_of(BEYOND_A_PRODUCER, world.log.shop) == []
    await put(world.store, {"task": "x"})
    await add(world.mill, "mill", {"task": "x"})
    await world.shop.call("XADD", keys.inbox_key("shop"), "MAXLEN", 0, LAST_ID, "v", "1")
    for command in ("MAXLEN", 0, "*"), (LAST_ID,):
        with pytest.raises(DeckhandsError):
            await world.shop.call("XADD", keys.INBOX, *command, "v", "1")
    assert await world.store.call_many([("XLEN", keys.INBOX), ("XLEN", keys.inbox_key("mill"))]) == [1, 1]
    await world.mill.call("XADD", keys.inbox_key("mill"), "*", "v", "1")


async def test_flood_of_one_producer_does_not_delay_another(world: World) -> None:
    """Each entry of the flood waits two seconds for a tool that no worker offers."""
    flood = {"task": "x", "tools": ["nowhere/none"]}
    fields = ("v", "1", "request", json.dumps(flood))
    for connection, stream in ((world.mill, keys.inbox_key("mill")), (world.store.connection, keys.INBOX)):
        await connection.call_many([("XADD", stream, "*", *fields) for _ in range(2_000)])
    async with serving(InboxReaders(world.desk, "d1").run()):
        for number in range(5):
            await add(world.shop, "shop", {"id": str(number), "task": "x"}, reply_to="shop")
            await world.until_replies("shop", *["accepted"] * (number + 1))
        assert await world.store.call("XLEN", keys.inbox_key("mill")) > 1_000
        assert await world.store.call("XLEN", keys.INBOX) > 1_000
        waiting = await read_depths(world.store, ())
    assert waiting["inbox:mill"].waiting > 1_000
    assert waiting["inbox:shop"].waiting == 0
    assert waiting["inbox"].waiting > 1_000


@pytest.mark.parametrize("name", ["shop", ""], ids=["own", "shared"])
async def test_exhausted_ids_are_recovered_and_nothing_is_lost(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = keys.inbox_key(name) if name else keys.INBOX
    reply_to = name or "free"
    connection = world.shop if name else world.store.connection

    def entry(number: int) -> tuple[str, ...]:
        return ("v", "1", "request", json.dumps({"id": str(number), "task": "x"}), "reply_to", reply_to)

    for number in range(20):
        await connection.call("XADD", stream, "*", *entry(number))
    await connection.call("XADD", stream, LAST_ID, *entry(20))
    with pytest.raises(DeckhandsError, match="exhausted"):
        await connection.call("XADD", stream, "*", *entry(21))
    async with serving(InboxReaders(world.desk, "d1").run(), InboxReaders(world.desk, "d2").run()):

        async def is_added() -> bool:
            with contextlib.suppress(DeckhandsError):
                await connection.call("XADD", stream, "*", *entry(21))
                return True
            return False

        await until(is_added, limit=60.0, what="a stream that takes entries again")

        async def are_answered() -> bool:
            found = await replies(world.store, reply_to)
            return {reply.request_id for reply in found if reply.event == "accepted"} == {str(n) for n in range(22)}

        await until(are_answered, limit=60.0, what="answers to all entries")
        await connection.call("XADD", stream, LAST_ID, *entry(22))  # once more

        async def is_gone() -> bool:
            with contextlib.suppress(DeckhandsError):  # it was just moved
                found = await world.store.call("XINFO", "STREAM", stream)
                return LAST_ID.encode() not in found and not await are_kept()
            return False

        async def are_kept() -> bool:
            names = [make_moved_key(stream), *await world.store.call("HKEYS", make_moved_key(stream))]
            return bool(await world.store.call("EXISTS", *names))

        await until(is_gone, limit=60.0, what="no stream that was moved")
    assert len(await Client(world.store).recent(limit=100)) == 23
    assert "highest id" in caplog.text
    assert [each for each in await refusals(world.log) if b"ingress" in each] == []


async def test_damaged_record_serves_nobody_and_ends_no_ingress(world: World) -> None:
    await world.store.call("HSET", keys.PRODUCERS, "bad", "{", "other", '{"name": "shop", "tenant": "*"}')
    await world.store.call("XADD", keys.inbox_key("bad"), "*", "v", "1", "request", '{"task": "x"}', "reply_to", "bad")
    async with serving(InboxReaders(world.desk, "d1").run()):
        await add(world.shop, "shop", {"task": "x"}, reply_to="shop")
        await world.until_replies("shop", "accepted")
        assert await world.store.call("XLEN", keys.inbox_key("bad")) == 1


async def test_stream_is_served_when_added_and_left_when_removed(world: World) -> None:
    producers = Producers(world.store)
    async with serving(InboxReaders(world.desk, "d1").run()):
        late = await producers.add("late", "acme")
        await world.store.call("XADD", late.stream, "*", "v", "1", "request", '{"task": "x"}', "reply_to", "late")
        await world.until_replies("late", "accepted")
        await world.until_empty("late")
        await producers.remove("late")
        await add(world.shop, "shop", {"task": "x"}, reply_to="shop")
        await world.until_replies("shop", "accepted")
    with pytest.raises(UsageError, match="no producer late"):
        await producers.remove("late")
    await add(world.shop, "shop", {"task": "x"})
    with pytest.raises(UsageError, match="1 entries of shop are not done"):
        await producers.remove("shop")
    await producers.remove("shop", discard=True)
    assert not await world.store.call("EXISTS", keys.inbox_key("shop"))


async def test_name_that_is_used_again_shows_nothing_of_before(world: World) -> None:
    """The answers of the shared inbox, of the removed producer, and of its conversations."""
    producers, late = Producers(world.store), keys.inbox_key("late")
    entry = ("v", "1", "request", json.dumps({"id": "1", "task": "x"}), "reply_to", "late")
    async with serving(InboxReaders(world.desk, "d1").run()):
        await put(world.store, {"id": "1", "task": "x"}, reply_to="late")
        await world.until_replies("late", "accepted")
        await producers.add("late", "acme")
        assert await replies(world.store, "late") == []
        await producers.add("late", "acme")
        await world.store.call("XADD", late, "*", *entry)
        await world.until_replies("late", "accepted")
        await world.until_empty("late")
        (before,) = await replies(world.store, "late")
        await producers.add("late", "acme")
        assert len(await replies(world.store, "late")) == 1
        await producers.remove("late")
        assert not await world.store.call("EXISTS", keys.replies_key("late"))
        await producers.add("late", "other")
        await world.store.call(
            "HSET", world.store.known_keys(before.conversation_id).caller, "outcome", '{"summary": {}}'
        )
        caller = await world.desk.callers.of(before.conversation_id)
        assert caller is not None
        meta = await world.desk.meta(before.conversation_id)
        await send_outcome(world.desk, Replies(world.store), caller, caller.outcome, meta)
        await world.store.call("XADD", late, "*", *entry)
        await world.until_replies("late", "accepted")
    (after,) = await replies(world.store, "late")
    assert after.conversation_id != before.conversation_id
    assert await world.tenant_of(after.conversation_id) == "other"


async def test_simultaneous_checks_of_one_conversation_send_one_answer(world: World) -> None:
    await Producers(world.store).add("late", "acme")
    caller = Caller(CID, STREAM, "late", "1")
    await world.desk.callers.add(caller)
    answer, sender = Answer(caller, '{"status": "SUCCESS", "summary": {}}', 0), Replies(world.store)
    checks = (answer_stream(world.desk, sender, answer, {"tenant": "acme"}) for _ in range(3))
    await asyncio.gather(*checks)
    assert [reply.event for reply in await replies(world.store, "late")] == ["settled"]


async def test_unreadable_time_of_a_moved_stream_ends_no_ingress(world: World) -> None:
    bad = (
        "HSET",
        make_moved_key(keys.inbox_key("mill")),
        f"{make_moved_prefix(keys.inbox_key('mill'))}x",
        "no number",
        b"\xff",
        "1",
    )
    await world.store.call(*bad)
    async with serving(InboxReaders(world.desk, "d1").run()):
        await add(world.shop, "shop", {"task": "x"}, reply_to="shop")
        await world.until_replies("shop", "accepted")
        await add(world.mill, "mill", {"task": "x"}, reply_to="mill")
        await world.until_replies("mill", "accepted")
        await Producers(world.store).add("late", "acme")
        await world.store.call(
            "XADD", keys.inbox_key("late"), "*", "v", "1", "request", '{"task": "x"}', "reply_to", "late"
        )
        await world.until_replies("late", "accepted")


def test_reserved_names_are_those_of_the_store() -> None:
    """`serve-valkey` makes users of these names itself, so no producer takes one over."""
    script = (Path(__file__).parents[2] / "deploy" / "serve-valkey").read_text()
    (names,) = re.findall(r"(?m)^ +(admin \|.*)\)$", script)
    assert set(names.split(" | ")) == RESERVED


async def test_producers_are_added_listed_and_removed_by_command(world: World, tmp_path: Path) -> None:
    env = environment(tmp_path / "home", DECKHANDS_URL=world.log.operator)

    async def call(*arguments: str) -> Any:
        return await asyncio.to_thread(deckhands, "inbox", *arguments, env=env)

    added = await call("add", "press", "--tenant", "acme")
    rights = added.out.strip()
    assert rights.startswith("ACL SETUSER press reset on >A-LONG-PASSWORD %W~deck:inbox:press %R~deck:replies:press ")
    admin = MultiplexedConnection(world.log.admin)
    await admin.call(*rights.split())
    press = MultiplexedConnection(world.log.url("press:A-LONG-PASSWORD"))
    await add(press, "press", {"task": "x"})
    with pytest.raises(DeckhandsError, match="NOPERM"):
        await add(press, "shop", {"task": "x"})
    await press.aclose()
    await admin.aclose()
    listed = (await call("ls", "--json")).json
    assert [(each["name"], each["tenant"], each["waiting"]) for each in listed] == [
        ("mill", "*", 0),
        ("press", "acme", 1),
        ("shop", "acme", 0),
    ]
    assert "deck:inbox:press" in (await call("ls")).out
    for name, tenant, why in (
        *((name, "acme", "reserved") for name in sorted(RESERVED)),
        ("a:b", "acme", "name 'a:b' cannot be used"),
        ("shop", "other", "bound to the tenant acme"),
        ("new", "a b", "tenant 'a b' cannot be used"),
    ):
        refused = await call("add", name, "--tenant", tenant)
        assert (refused.code, why in refused.err) == (2, True), refused.err
    assert (await call("rm", "press")).code == 2
    assert (await call("rm", "press", "--discard")).code == 0
    full = {f"p{number}": "{}" for number in range(MAX_PRODUCERS)}
    await world.store.call("HSET", keys.PRODUCERS, *[part for item in full.items() for part in item])
    assert "There are 200 producers" in (await call("add", "more", "--tenant", "acme")).err
