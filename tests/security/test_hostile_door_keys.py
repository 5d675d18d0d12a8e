"""Whatever stands under the keys that doors read, others get their turn, and no door ends."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from broker.coordination.membership import Membership
from broker.coordination.unreadable import Unreadable
from broker.log.expiry import expire
from broker.store import keys
from broker.store.store import Store
from deckhands.door.desk import Desk, conversation_of_task
from deckhands.door.inbox import Inbox
from deckhands.door.lookout import BATCH, Lookout
from deckhands.door.runs import RunMessage, Runs
from deckhands.tasks.requests import TaskRequest
from tests.inbox_parts import put
from tests.integration.test_inbox_edges import serving, until_replies
from tests.polling import until

OPTIONS = {"task": "x", "model": "scripted/nowhere"}
LOOKED_AT_ONCE = 64


class NoResults:
    """A result backend that takes whatever it is given."""

    def send_second_half(self, task_id: str, kept: Mapping[str, Any]) -> None:
        return

    def report_progress(self, task_id: str, progress: Mapping[str, Any]) -> None:
        return


@pytest.fixture
def desk(valkey_store: Store) -> Desk:
    return Desk(valkey_store, NoResults())  # type: ignore[arg-type]


async def test_what_cannot_be_ended_keeps_nothing_else_from_expiring(desk: Desk) -> None:
    names, call = desk.store.all_shards[0], desk.store.connection.call
    for number in range(LOOKED_AT_ONCE):
        damaged = f"../{number}"
        await call("HSET", f"{names.root}:c:{damaged}:meta", "planned", "waiting", "last_id", "x")
        await call("ZADD", f"{names.root}:expiring", 0, damaged)
        await call("ZADD", f"{names.root}:expiring", 0, b"\xff%d" % number)
    request = TaskRequest.parse(OPTIONS | {"expires": 0.05})
    await desk.begin(request, "victim", "victim")
    door = Membership(desk.store, "d1", "door")
    await door.register()

    async def is_over() -> bool:
        found = await door.tick(1)
        assert found is not None
        await expire(desk.log, found.expired)
        return (await desk.meta("victim"))["state"] == "error"

    await until(is_over, what="an end of the one that has expired")


async def test_awaited_conversations_that_nobody_can_name_are_looked_at_once(desk: Desk) -> None:
    names, call = desk.store.all_shards[0], desk.store.connection.call
    for number in range(BATCH):
        await call("ZADD", names.awaited, "-inf", b"\xff%d" % number)
        await call("ZADD", names.awaited, "-inf", f"../{number}")

    async def are_gone() -> bool:
        return not await call("ZCARD", names.awaited)

    async with serving(Lookout(desk, Runs(desk), "d1").keep_up()):
        await until(are_gone, what="an empty set")


@pytest.mark.parametrize("name", ["expiring", "parked", "revoked"])
async def test_a_key_of_another_type_is_moved_out_of_the_way_of_tasks(desk: Desk, name: str) -> None:
    key = f"{desk.store.all_shards[0].root}:{name}"
    await desk.store.connection.call("SET", key, "a string")
    door = Membership(desk.store, "d1", "door")
    await door.register()
    assert await door.tick(1) is not None
    runs = Runs(desk)
    due = desk.store.clock.now() + timedelta(hours=1)
    await runs.take(RunMessage("later", (), OPTIONS, {}, eta=due, expires=due + timedelta(hours=1)))
    await runs.take(RunMessage("now", (), OPTIONS, {}))
    for task_id in ("later", "now"):
        assert await desk.meta(conversation_of_task(task_id))


async def test_an_inbox_of_another_type_is_moved_out_of_the_way(desk: Desk) -> None:
    call = desk.store.connection.call
    await call("SET", keys.INBOX, "a string")
    inbox = Inbox(desk, "d1")
    async with serving(inbox.read(), inbox.keep_up()):

        async def is_there() -> bool:
            return bool(await call("TYPE", keys.INBOX) == b"stream")

        await until(is_there, what="an inbox")
        await put(desk.store, {"task": "x"})
        await until_replies(desk.store, "shop", "accepted")
        await call("SET", keys.INBOX, "a string again")
        await until(is_there, what="an inbox")
        await put(desk.store, {"task": "x"}, reply_to="later")
        await until_replies(desk.store, "later", "accepted")
    assert [kept.key for kept in await Unreadable(desk.store).all()] == [keys.INBOX] * 2


async def test_notices_that_are_overwritten_while_they_are_read_end_no_door(desk: Desk) -> None:
    names = desk.store.all_shards[0]
    lookout = Lookout(desk, Runs(desk), "d1")
    await desk.store.connection.call("SET", names.notices, "a string")
    await lookout._look_at_entries(names, [(b"1-1", [b"c", conversation_of_task("a").encode()]), (b"1-2", [b"x", b""])])
    assert lookout.looks == 1
