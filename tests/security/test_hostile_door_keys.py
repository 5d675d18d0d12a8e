"""Whatever stands under the keys that doors read, others get their turn, and no door ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from broker.coordination.membership import Membership
from broker.coordination.unreadable import Unreadable
from broker.log.expiry import EXPIRED_CODE, expire
from broker.store import keys
from broker.store.store import Store
from deckhands.client.tasks.spec import TaskSpec
from deckhands.ingress.desk import Desk, conversation_of_task
from deckhands.ingress.inbox import Inbox
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

    def announce(self, *_: Any, **__: Any) -> None:
        return

    def report_progress(self, task_id: str, progress: Mapping[str, Any]) -> None:
        return


@pytest.fixture
def desk(valkey_store: Store) -> Desk:
    return Desk(valkey_store, NoResults())  # type: ignore[arg-type]


async def begin_soon(desk: Desk, task_id: str, *, expires: bool = False) -> str:
    """Begin a run that is due, or too late, in a moment; return its conversation."""
    soon = desk.store.clock.now() + timedelta(milliseconds=50)
    later = soon + timedelta(hours=1)
    timing = {"eta": later, "expires": soon} if expires else {"eta": soon}
    await Runs(desk).take(RunMessage(task_id, (), OPTIONS, {}, **timing))
    return conversation_of_task(task_id)


async def a_door(desk: Desk) -> Membership:
    door = Membership(desk.store, "d1", "door")
    await door.register()
    return door


async def until_woken(desk: Desk, door: Membership, conversation_id: str) -> None:
    async def is_woken() -> bool:
        assert await door.tick(1) is not None
        entries = await desk.store.connection.call("XRANGE", desk.store.all_shards[0].ready, "-", "+")
        return [b"c", conversation_id.encode()] in [fields for _, fields in entries]

    await until(is_woken, what=f"the beginning of {conversation_id}")


@pytest.mark.parametrize("key", ["caller", "meta", "events"])
async def test_run_key_of_another_type_delays_no_other(desk: Desk, key: str) -> None:
    door, call = await a_door(desk), desk.store.connection.call
    spoilt, victim = await begin_soon(desk, "spoilt"), await begin_soon(desk, "victim")
    await call("DEL", names := getattr(desk.store.keys(spoilt), key))
    await call("SET", names, "a string")
    await until_woken(desk, door, victim)


async def test_unnameable_runs_delay_no_other(desk: Desk) -> None:
    door, parked = await a_door(desk), desk.store.all_shards[0].parked
    for number in range(MANY):
        await desk.store.connection.call("ZADD", parked, "-inf", b"\xff%d" % number)
    await until_woken(desk, door, await begin_soon(desk, "victim"))
    assert await desk.store.connection.call("ZCARD", parked) == 0


async def test_unnameable_deadlines_delay_no_other(desk: Desk) -> None:
    door, names, call = await a_door(desk), desk.store.all_shards[0], desk.store.connection.call
    for number in range(MANY):
        await call("ZADD", f"{names.root}:expiring", "-inf", b"\xff%d" % number)
    for member in (b"\xfe", b"../x", b"nobody"):
        await call("ZADD", f"{names.root}:expiring", "-inf", member)
        await call("HSET", names.root.encode() + b":c:" + member + b":meta", "planned", "waiting")
    victim = await begin_soon(desk, "victim", expires=True)

    async def has_ended() -> bool:
        tick = await door.tick(1)
        assert tick is not None
        await expire(desk.log, tick.expired)
        return (await desk.meta(victim)).get("error_code") == EXPIRED_CODE

    await until(has_ended, what="the end of a run that is too late")


async def test_what_cannot_be_ended_keeps_nothing_else_from_expiring(desk: Desk) -> None:
    names, call = desk.store.all_shards[0], desk.store.connection.call
    for number in range(MANY):
        damaged = f"../{number}"
        await call("HSET", f"{names.root}:c:{damaged}:meta", "planned", "waiting", "last_id", "x")
        await call("ZADD", f"{names.root}:expiring", 0, damaged)
        await call("ZADD", f"{names.root}:expiring", 0, b"\xff%d" % number)
    request = TaskSpec.parse(OPTIONS | {"expires": 0.05})
    await desk.begin(request, "victim", "victim")
    door = await a_door(desk)

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

    async with serving(OutcomeWatcher(desk, Runs(desk), "d1").keep_up()):
        await until(are_gone, what="an empty set")


async def test_tasks_key_of_another_type_is_moved_aside(desk: Desk) -> None:
    await desk.store.connection.call("SET", desk.store.all_shards[0].revoked, "a string")
    door = await a_door(desk)
    assert await door.tick(1) is not None
    await Runs(desk).take(RunMessage("now", (), OPTIONS, {}))
    assert await desk.meta(conversation_of_task("now"))


async def test_inbox_of_another_type_is_moved_aside(desk: Desk) -> None:
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


@pytest.mark.parametrize(("task", "aside"), [({"task": "x"}, 0), ({"task": 1}, 1)], ids=["good", "bad"])
async def test_overwritten_inbox_is_not_blamed_on_its_entry(desk: Desk, task: dict[str, Any], aside: int) -> None:
    fields = [b"v", b"1", b"request", json.dumps(task).encode(), b"reply_to", b"shop"]
    await desk.store.connection.call("SET", keys.INBOX, "a string")
    await Inbox(desk, "d1")._take("1-1", fields)
    await until_replies(desk.store, "shop", "rejected" if aside else "accepted")
    assert len(await Unreadable(desk.store).all()) == aside


async def test_notices_overwritten_during_reading_end_no_door(desk: Desk) -> None:
    names = desk.store.all_shards[0]
    watcher = OutcomeWatcher(desk, Runs(desk), "d1")
    await desk.store.connection.call("SET", names.notices, "a string")
    await watcher._look_at_entries(names, [(b"1-1", [b"c", conversation_of_task("a").encode()]), (b"1-2", [b"x", b""])])
    assert watcher.looks == 1
