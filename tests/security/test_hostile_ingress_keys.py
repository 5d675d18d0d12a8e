"""With any content of the ingresses' keys, others get their turn, and no ingress ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from broker.coordination.membership import Membership
from broker.coordination.quarantine import Quarantine
from broker.log.deletion import expire
from broker.log.status import EXPIRED_CODE
from broker.store import keys
from broker.store.store import Store
from deckhands.client.tasks.spec import TaskSpec
from deckhands.ingress.context import IngressContext, derive_task_conversation_id
from deckhands.ingress.inbox import InboxReader
from deckhands.ingress.outcome_watcher import BATCH, OutcomeWatcher
from deckhands.ingress.runs import RunMessage, Runs
from tests.inbox_parts import put
from tests.integration.test_inbox_edges import serving, until_replies
from tests.polling import until

OPTIONS = {"task": "x", "model": "scripted/nowhere"}
MANY = 300
"""More than a beat looks at."""


class NoResults:
    """A result backend that takes whatever it is given."""

    def settle(self, *_: Any, **__: Any) -> None:
        return

    def queue_event(self, *_: Any, **__: Any) -> None:
        return

    def send_queued_events(self) -> None:
        return

    def report_progress(self, task_id: str, progress: Mapping[str, Any]) -> None:
        return


@pytest.fixture
def desk(valkey_store: Store) -> IngressContext:
    return IngressContext(valkey_store, NoResults())  # type: ignore[arg-type]


async def begin_soon(desk: IngressContext, task_id: str, *, expires: bool = False) -> str:
    """Create a run that is due, or expired, in a moment; return its conversation."""
    soon = desk.store.clock.now() + timedelta(milliseconds=50)
    later = soon + timedelta(hours=1)
    timing = {"eta": later, "expires": soon} if expires else {"eta": soon}
    await Runs(desk).take(RunMessage(task_id, (), OPTIONS, {}, **timing))
    return derive_task_conversation_id(task_id)


async def an_ingress(desk: IngressContext) -> Membership:
    ingress = Membership(desk.store, "d1", "ingress")
    await ingress.register()
    return ingress


async def until_woken(desk: IngressContext, ingress: Membership, conversation_id: str) -> None:
    async def is_woken() -> bool:
        assert await ingress.beat(1) is not None
        entries = await desk.store.connection.call("XRANGE", desk.store.all_shards[0].ready, "-", "+")
        return [b"c", conversation_id.encode()] in [fields for _, fields in entries]

    await until(is_woken, what=f"the beginning of {conversation_id}")


@pytest.mark.parametrize("key", ["caller", "meta", "events"])
async def test_run_key_of_another_type_delays_no_other(desk: IngressContext, key: str) -> None:
    ingress, call = await an_ingress(desk), desk.store.connection.call
    spoilt, victim = await begin_soon(desk, "spoilt"), await begin_soon(desk, "victim")
    await call("DEL", names := getattr(desk.store.known_keys(spoilt), key))
    await call("SET", names, "a string")
    await until_woken(desk, ingress, victim)


async def test_unnameable_runs_delay_no_other(desk: IngressContext) -> None:
    ingress, parked = await an_ingress(desk), desk.store.all_shards[0].parked
    for number in range(MANY):
        await desk.store.connection.call("ZADD", parked, "-inf", b"\xff%d" % number)
    await until_woken(desk, ingress, await begin_soon(desk, "victim"))
    assert await desk.store.connection.call("ZCARD", parked) == 0


async def test_unnameable_deadlines_delay_no_other(desk: IngressContext) -> None:
    ingress, names, call = await an_ingress(desk), desk.store.all_shards[0], desk.store.connection.call
    for number in range(MANY):
        await call("ZADD", f"{names.root}:expiring", "-inf", b"\xff%d" % number)
    for member in (b"\xfe", b"../x", b"nobody"):
        await call("ZADD", f"{names.root}:expiring", "-inf", member)
        await call("HSET", names.root.encode() + b":c:" + member + b":meta", "planned", "waiting")
    victim = await begin_soon(desk, "victim", expires=True)

    async def has_ended() -> bool:
        tick = await ingress.beat(1)
        await expire(desk.log, tick.expired)
        return (await desk.meta(victim)).get("error_code") == EXPIRED_CODE

    await until(has_ended, what="the end of a run that is too late")


async def test_unendable_conversation_does_not_block_expiry_of_others(desk: IngressContext) -> None:
    names, call = desk.store.all_shards[0], desk.store.connection.call
    for number in range(MANY):
        damaged = f"../{number}"
        await call("HSET", f"{names.root}:c:{damaged}:meta", "planned", "waiting", "last_id", "x")
        await call("ZADD", f"{names.root}:expiring", 0, damaged)
        await call("ZADD", f"{names.root}:expiring", 0, b"\xff%d" % number)
    request = TaskSpec.parse(OPTIONS | {"expires": 0.05})
    await desk.start_conversation(request, "victim", "victim")
    ingress = await an_ingress(desk)

    async def is_over() -> bool:
        found = await ingress.beat(1)
        await expire(desk.log, found.expired)
        return (await desk.meta("victim"))["state"] == "error"

    await until(is_over, what="an end of the one that has expired")


async def test_awaited_conversations_that_nobody_can_name_are_looked_at_once(desk: IngressContext) -> None:
    names, call = desk.store.all_shards[0], desk.store.connection.call
    for number in range(BATCH):
        await call("ZADD", names.awaited, "-inf", b"\xff%d" % number)
        await call("ZADD", names.awaited, "-inf", f"../{number}")

    async def are_gone() -> bool:
        return not await call("ZCARD", names.awaited)

    async with serving(OutcomeWatcher(desk, Runs(desk), "d1").run_maintenance()):
        await until(are_gone, what="an empty set")


async def test_tasks_key_of_another_type_is_moved_aside(desk: IngressContext) -> None:
    await desk.store.connection.call("SET", desk.store.all_shards[0].revoked, "a string")
    ingress = await an_ingress(desk)
    assert await ingress.beat(1) is not None
    await Runs(desk).take(RunMessage("now", (), OPTIONS, {}))
    assert await desk.meta(derive_task_conversation_id("now"))


async def test_inbox_of_another_type_is_moved_aside(desk: IngressContext) -> None:
    call = desk.store.connection.call
    await call("SET", keys.INBOX, "a string")
    inbox = InboxReader(desk, "d1")
    async with serving(inbox.read(), inbox.run_maintenance()):

        async def is_there() -> bool:
            return bool(await call("TYPE", keys.INBOX) == b"stream")

        await until(is_there, what="an inbox")
        await put(desk.store, {"task": "x"})
        await until_replies(desk.store, "shop", "accepted")
        await call("SET", keys.INBOX, "a string again")
        await until(is_there, what="an inbox")
        await put(desk.store, {"task": "x"}, reply_to="later")
        await until_replies(desk.store, "later", "accepted")
    assert [kept.key for kept in await Quarantine(desk.store).list_items()] == [keys.INBOX] * 2


@pytest.mark.parametrize(("task", "aside"), [({"task": "x"}, 0), ({"task": 1}, 1)], ids=["good", "bad"])
async def test_overwritten_inbox_is_not_blamed_on_its_entry(
    desk: IngressContext, task: dict[str, Any], aside: int
) -> None:
    fields = [b"v", b"1", b"request", json.dumps(task).encode(), b"reply_to", b"shop"]
    await desk.store.connection.call("SET", keys.INBOX, "a string")
    await InboxReader(desk, "d1")._take("1-1", fields)
    await until_replies(desk.store, "shop", "rejected" if aside else "accepted")
    assert len(await Quarantine(desk.store).list_items()) == aside


async def test_notices_overwritten_during_reading_end_no_ingress(desk: IngressContext) -> None:
    names = desk.store.all_shards[0]
    watcher = OutcomeWatcher(desk, Runs(desk), "d1")
    await desk.store.connection.call("SET", names.notices, "a string")
    await watcher._check_entries(
        names, [(b"1-1", [b"c", derive_task_conversation_id("a").encode()]), (b"1-2", [b"x", b""])]
    )
    assert watcher.looks == 1
