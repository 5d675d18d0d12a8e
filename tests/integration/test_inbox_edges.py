"""Entries of the inbox are answered, handled once and never dropped; failing ones are quarantined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from broker.coordination.membership import Membership
from broker.coordination.quarantine import Quarantine
from broker.log.event_log import EventLog
from broker.store import keys
from broker.store.store import Store
from deckhands.client.tasks.tasks import derive_conversation_id
from deckhands.ingress import inbox
from deckhands.ingress.callers import STREAM, Caller
from deckhands.ingress.context import OFFERS_LIMIT_SECONDS, REVOKED, IngressContext
from deckhands.ingress.inbox import FORSAKEN_AFTER_SECONDS, GROUP, MAX_DELIVERIES, MAX_ENTRY_BYTES, InboxReader
from deckhands.ingress.outcome_watcher import OutcomeWatcher
from deckhands.ingress.runs import Runs
from tests.conversation_hands import WatchedConnection
from tests.inbox_parts import put, replies
from tests.ingress_parts import Producer, saying
from tests.polling import until

LONG_SECONDS = 3_600.0


class NoResults:
    """A result backend that is never used."""

    def settle(self, task_id: str, *_: Any, **__: Any) -> None:
        raise AssertionError(task_id)

    def queue_event(self, *_: Any, **__: Any) -> None:
        return

    def send_queued_events(self) -> None:
        return

    def report_progress(self, task_id: str, progress: Mapping[str, Any]) -> None:
        raise AssertionError(task_id)


@asynccontextmanager
async def serving(*loops: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run loops of an ingress, of which none may end."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield tasks
        for task in tasks:
            assert not task.done(), task
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def until_replies(store: Store, name: str, *events: str) -> None:
    async def are_there() -> bool:
        return [reply.event for reply in await replies(store, name)] == list(events)

    await until(are_there, limit=60.0, what=f"{events} to {name}")


async def until_empty(store: Store) -> None:
    async def is_empty() -> bool:
        return not await store.connection.call("XLEN", keys.INBOX)

    await until(is_empty, limit=60.0, what="an empty inbox")


@pytest.fixture
def desk(valkey_store: Store) -> IngressContext:
    return IngressContext(valkey_store, NoResults())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "request_text",
    [
        r'{"id": "\ud800", "task": "x"}',
        r'{"id": "a", "task": "x", "output": {"title": "\udc00", "type": "object"}}',
        r'{"id": "a", "task": "x", "output": {"type": "object", "default": NaN}}',
    ],
)
async def test_a_text_that_is_no_utf_8_is_rejected(desk: IngressContext, request_text: str) -> None:
    async with serving(InboxReader(desk, "d1").read()):
        await put(desk.store, request_text)
        await until_empty(desk.store)
        (reply,) = await replies(desk.store)
        assert reply.event == "rejected"
        assert "surrogate" in reply.content["message"]
        await put(desk.store, {"task": "x"}, reply_to="good")
        await until_replies(desk.store, "good", "accepted")


async def test_entry_failing_in_the_ingress_is_answered_and_quarantined(desk: IngressContext) -> None:
    names = desk.store.known_keys(derive_conversation_id("inbox:shop:mine"))
    await desk.store.connection.call("SET", names.masked, "no set")
    async with serving(InboxReader(desk, "d1").read()):
        entry = await put(desk.store, {"id": "mine", "task": "x"})
        await until_empty(desk.store)
    (reply,) = await replies(desk.store)
    assert (reply.event, reply.content["code"]) == ("rejected", "internal")
    assert [kept.entry_id for kept in await Quarantine(desk.store).list_items()] == [entry]


async def test_no_entry_waits_for_one_that_waits_for_a_tool(valkey_store: Store) -> None:
    desk = IngressContext(valkey_store, NoResults(), offers_limit_seconds=LONG_SECONDS)  # type: ignore[arg-type]
    for number in range(5):
        await put(valkey_store, {"id": f"{number}", "task": "x", "tools": ["nosuch/x"]}, reply_to="slow")
    async with serving(InboxReader(desk, "d1").read()):
        await put(valkey_store, {"task": "x"}, reply_to="quick")
        await until_replies(valkey_store, "quick", "accepted")
        await put(valkey_store, {"task": "x"}, reply_to="next")
        await until_replies(valkey_store, "next", "accepted")
        assert await replies(valkey_store, "slow") == []


async def test_missing_tool_is_awaited_shorter_than_an_entry_may_last(desk: IngressContext) -> None:
    assert desk.offers_limit_seconds == OFFERS_LIMIT_SECONDS < FORSAKEN_AFTER_SECONDS / 2
    async with serving(InboxReader(desk, "d1").read()):
        await put(desk.store, {"task": "x", "tools": ["nosuch/x"]})
        await until_replies(desk.store, "shop", "rejected")


@pytest.mark.parametrize("command", [("SET", "x"), ("SADD", "x"), ("HSET", "x", "y")])
async def test_reply_stream_of_another_type_is_moved_aside(desk: IngressContext, command: tuple[str, ...]) -> None:
    key = keys.replies_key("shop")
    await desk.store.connection.call(command[0], key, *command[1:])
    async with serving(InboxReader(desk, "d1").read()):
        await put(desk.store, {"id": "a", "task": "x"})
        await until_empty(desk.store)
    assert [reply.event for reply in await replies(desk.store)] == ["accepted"]
    assert await desk.store.connection.call("EXISTS", f"{{{key}}}:unreadable") == 1
    assert [kept.key for kept in await Quarantine(desk.store).list_items()] == [key]


async def test_a_notice_of_a_deleted_conversation_leaves_nothing(desk: IngressContext) -> None:
    store = desk.store
    names = store.known_keys(derive_conversation_id("inbox:shop:a"))
    await EventLog(store).store.connection.call("XGROUP", "CREATE", names.shard.notices, "ingresses", "0", "MKSTREAM")
    await store.connection.call("XADD", names.shard.notices, "*", "c", names.conversation_id)
    watcher = OutcomeWatcher(desk, Runs(desk), "d1")

    async def is_read() -> bool:
        return not await store.connection.call("XLEN", names.shard.notices)

    async with serving(watcher.read_notices(names.shard), InboxReader(desk, "d1").read()):
        await until(is_read, limit=60.0, what="a notice that was read")
        assert await store.connection.call("EXISTS", names.caller) == 0
        await put(store, {"id": "a", "task": "x"})
        await until_replies(store, "shop", "accepted")


async def test_a_caller_without_an_outcome_is_not_answered(desk: IngressContext) -> None:
    caller = desk.store.known_keys(derive_conversation_id("inbox:shop:a")).caller
    await desk.store.connection.call("HSET", caller, "answered", 1)
    async with serving(InboxReader(desk, "d1").read()):
        await put(desk.store, {"id": "a", "task": "x"})
        await until_empty(desk.store)
    assert [reply.event for reply in await replies(desk.store)] == ["accepted"]


async def test_a_delay_counts_from_when_the_entry_was_added(desk: IngressContext) -> None:
    seconds = int((await desk.store.connection.call("TIME"))[0])
    left = []
    for name, added in (("now", seconds), ("an hour ago", seconds - 3_600)):
        request = b'{"id": "%s", "task": "x", "delay": 4000}' % name.encode()
        await InboxReader(desk, "d1")._take(f"{added}000-1", [b"v", b"1", b"request", request])
        conversation_id = derive_conversation_id(f"inbox::{name}")
        due_ms = await desk.store.connection.call("ZSCORE", desk.store.all_shards[0].parked, conversation_id)
        left.append(float(due_ms) / 1_000 - seconds)
    assert left == pytest.approx([4_000, 400], abs=60)


async def test_an_outcome_is_decided_once(desk: IngressContext) -> None:
    name = derive_conversation_id("inbox:shop:a")
    await desk.callers.add(Caller(name, STREAM, "shop", "a"))
    decided = await desk.callers.decide(name, {"status": "SUCCESS"})
    assert await desk.callers.decide(name, REVOKED) == decided  # another ingress has read less, or more, of its log
    caller = await desk.callers.of(name)
    assert caller is not None
    assert caller.outcome == decided


async def forsake(store: Store, entry: str, deliveries: int) -> None:
    """Leave an entry with an ingress that has died."""
    idle = int(FORSAKEN_AFTER_SECONDS * 1000) + 1
    command = ("XCLAIM", keys.INBOX, GROUP, "dead", 0, entry, "IDLE", idle, "RETRYCOUNT", deliveries, "FORCE", "JUSTID")
    await store.connection.call(*command)


async def test_unreadable_entry_is_quarantined_unread(desk: IngressContext) -> None:
    store = desk.store
    await store.connection.call("XGROUP", "CREATE", keys.INBOX, GROUP, "0", "MKSTREAM")
    bomb, good = await put(store, {"task": "x"}, reply_to="bomb"), await put(store, {"task": "x"})
    await forsake(store, bomb, MAX_DELIVERIES)
    await forsake(store, good, MAX_DELIVERIES - 1)
    async with serving(InboxReader(desk, "d1").run_maintenance()):
        await until_empty(store)
    assert [reply.event for reply in await replies(store)] == ["accepted"]
    assert await replies(store, "bomb") == []
    (kept,) = await Quarantine(store).list_items()
    assert (kept.entry_id, kept.held) == (bomb, "")


async def test_an_entry_that_was_read_is_never_counted_as_unread(valkey_store: Store) -> None:
    desk = IngressContext(valkey_store, NoResults(), offers_limit_seconds=LONG_SECONDS)  # type: ignore[arg-type]
    await valkey_store.connection.call("XGROUP", "CREATE", keys.INBOX, GROUP, "0", "MKSTREAM")
    await put(valkey_store, {"id": "a", "task": "x", "tools": ["nosuch/x"]})

    async def deliveries() -> list[int]:
        found = await valkey_store.connection.call("XPENDING", keys.INBOX, GROUP, "-", "+", 10)
        return [count for *_, count in found]

    async def is_read() -> bool:
        return await deliveries() == [0]

    first = InboxReader(desk, "d1")
    async with serving(first.read()):
        await until(is_read, limit=60.0, what="an entry that was read")


async def test_entries_that_stay_do_not_hide_the_others(valkey_store: Store) -> None:
    desk = IngressContext(valkey_store, NoResults(), offers_limit_seconds=LONG_SECONDS)  # type: ignore[arg-type]
    await valkey_store.connection.call("XGROUP", "CREATE", keys.INBOX, GROUP, "0", "MKSTREAM")
    busy = InboxReader(desk, "d1")
    for number in range(inbox.FORSAKEN_AT_ONCE):
        entry = await put(valkey_store, {"id": f"{number}", "task": "x"}, reply_to="stays")
        await forsake(valkey_store, entry, 1)
        busy._in_flight.add(entry)  # as if each were waiting for something
    await forsake(valkey_store, await put(valkey_store, {"task": "x"}), 1)
    async with serving(busy.run_maintenance()):
        await until_replies(valkey_store, "shop", "accepted")
    assert await replies(valkey_store, "stays") == []


async def test_repeated_entry_is_accepted_again_after_deletions(desk: IngressContext) -> None:
    """An ingress died before it acknowledged the entry, and the controller worker with the agent has ended."""
    knowing, other = (
        Membership(desk.store, name, "controller", about={"agents": f"CodeActAgent,{name}"}, ttl_seconds=LONG_SECONDS)
        for name in ("Knowing", "Other")
    )
    await knowing.register()
    async with serving(InboxReader(desk, "d1").read()):
        await put(desk.store, {"id": "a", "task": "x", "agent": "Knowing"})
        await until_replies(desk.store, "shop", "accepted")
        await other.register()
        await knowing.leave()
        await put(desk.store, {"id": "a", "task": "x", "agent": "Knowing"})
        await put(desk.store, {"id": "b", "task": "x", "agent": "Knowing"}, reply_to="late")
        await until_replies(desk.store, "late", "rejected")
        await until_replies(desk.store, "shop", "accepted", "accepted")


@pytest.mark.parametrize("between", [("DEL", "deck_forget_caller"), ("deck_append",)])
async def test_a_refused_entry_forgets_nobody_whose_conversation_begins(
    desk: IngressContext, between: tuple[str, ...]
) -> None:
    """The same id was sent twice to two ingresses: one refuses its entry while the other one starts."""
    name = derive_conversation_id("inbox:shop:mine")
    about = [b"v", b"1", b"reply_to", b"shop", b"request"]
    entries = {"1-1": [*about, b'{"id": "mine", "task": "x"}'], "1-2": [*about, b'{"id": "mine", "task": ""}']}
    slow, quick = ("1-1", "1-2") if between == ("deck_append",) else ("1-2", "1-1")
    watched = WatchedConnection(desk.store.connection)
    for command in between:
        watched.before[command] = lambda: InboxReader(desk, "d2")._take(quick, entries[quick])
    slow_desk = IngressContext(replace(desk.store, connection=watched), NoResults())  # type: ignore[arg-type]
    await InboxReader(slow_desk, "d1")._take(slow, entries[slow])
    assert (await desk.meta(name))["awaited"] == "stream:shop"
    caller = await desk.callers.of(name)
    assert caller is not None
    assert (caller.kind, caller.name, caller.request_id) == ("stream", "shop", "mine")


MALFORMED = {
    "no-JSON": ("{", "The field request is not JSON."),
    "no-object": ("[]", "The request cannot be used"),
    "an-unknown-field": ('{"task": "x", "colour": "red"}', "colour"),
    "too-deep": ('{"task": "x", "output": ' + '{"a":' * 200 + "1" + "}" * 200 + "}", "nested"),
    "no-task": ('{"id": "mine"}', "task: it is missing"),
    "an-unknown-agent": ('{"task": "x", "agent": "NobodyAgent"}', "NobodyAgent"),
    "a-key": ('{"task": "x", "idempotency_key": "k"}', "Use the field id"),
    "too-large": ('{"task": "' + "x" * MAX_ENTRY_BYTES + '"}', "larger than"),
    "far-too-many": ("[" * 100_000, "not JSON"),
}


@pytest.mark.asyncio(loop_scope="module")
async def test_each_entry_of_the_inbox_is_settled_or_kept(own_producer: Producer) -> None:
    client, store = own_producer.cluster.client, own_producer.cluster.client.store
    entries = {what: await put(store, text, reply_to=what) for what, (text, _) in MALFORMED.items()}
    await until_empty(store)
    for what, (_, reason) in MALFORMED.items():
        (reply,) = await replies(store, what)
        assert reply.event == "rejected"
        assert reply.request_id == ("mine" if what == "no-task" else entries[what])
        assert reply.content.keys() == {"code", "message", "remedy"}
        assert reason in reply.content["message"] + reply.content["remedy"], what
    kept = {item.entry_id: item.key for item in await Quarantine(store).list_items()}
    assert kept == dict.fromkeys(entries.values(), keys.INBOX)
    # No name leads to another key.
    names = ("", "..:x", "a b", "x" * 65, "deck:inbox\n", "é")
    for name in names:
        await put(store, {"task": "x"}, reply_to=name)
    await put(store, {"task": "x"}, reply_to="v2", v="2")
    await store.connection.call("XADD", keys.INBOX, "*", "odd", b"\xff\xfe")
    await until_empty(store)
    assert len(await Quarantine(store).list_items()) == len(MALFORMED) + len(names) + 2
    _, found = await store.connection.call("SCAN", "0", "MATCH", "deck:replies:*", "COUNT", "100000")
    assert set(found) == {keys.replies_key(name).encode() for name in (*MALFORMED, "v2")}
    assert await client.recent() == []
    # No producer waits for an answer.
    plain = f'{{"task": "do it", "model": "{own_producer.options(saying("done"))["model"]}"}}'
    await store.connection.call("XADD", keys.INBOX, "*", "v", "1", "request", plain)
    await until_empty(store)
    (row,) = await client.recent()
    await own_producer.cluster.settle([row.conversation_id])
    at = store.known_keys(row.conversation_id)
    assert await store.connection.call("EXISTS", at.caller) == 0
    assert await store.connection.call("ZCARD", at.shard.awaited) == 0
    # The answers come again when a producer that lost them sends its entry again.
    request = {"id": "order-7", "task": "do it", **own_producer.options(saying("done"))}
    await put(store, request)
    await until_replies(store, "shop", "accepted", "settled")
    accepted, settled = await replies(store)
    assert accepted.request_id == settled.request_id == "order-7"
    assert (accepted.n, settled.n) == ("1", "2")
    assert settled.content == (await client.summary(accepted.conversation_id)).as_json()
    await put(store, request)
    await until_empty(store)
    assert [reply.event for reply in await replies(store)] == ["accepted", "settled"] * 2
    assert len(await client.recent()) == 2
    assert 0 < await store.connection.call("TTL", keys.replies_key("shop")) <= 7 * 24 * 3600
