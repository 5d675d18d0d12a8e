"""Lines that are never empty remember as many tenants as they need, however many names somebody makes up."""

from __future__ import annotations

from broker.store.store import Store
from tests.conformance.test_governor import Callers
from tests.conformance.test_turns import controllers, start, taken, tenants_of

MADE_UP = 5_000
KEPT = 2_100


async def make_up(store: Store, shares: str) -> None:
    """Let many tenants have had one turn, and one of them many."""
    names = (part for number in range(MADE_UP) for part in (f"made-up-{number}", "1000.5"))
    await store.connection.call("HSET", shares, *names, "ahead", "2000.0")


async def test_the_queue_of_a_busy_model_forgets_made_up_tenants(store: Store) -> None:
    callers = await Callers.limited(store, concurrency=1)
    assert await callers.may_call("first")
    assert not await callers.may_call("busy", tenant="busy")
    shares = f"{store.all_shards[0].quota(callers.pool.name)}:shares:2"
    await make_up(store, shares)
    assert not await callers.may_call("aaa", tenant="another")
    assert await store.connection.call("HLEN", shares) <= KEPT
    assert await store.connection.call("HGET", shares, "ahead") == b"2000.0"  # who has had most, forgets it last
    await store.connection.call("HSET", shares, ":at", "1000.75")
    await make_up(store, shares)
    assert not await callers.may_call("bbb", tenant="another")
    assert await store.connection.call("HLEN", shares) == 3  # whose place has been passed owes nothing


async def test_the_line_of_a_busy_stream_forgets_made_up_tenants(store: Store) -> None:
    await controllers(store)
    for number in range(24):
        await start(store, f"a-{number}", tenant="a")
    shares = f"{store.all_shards[0].root}:turns:ready:2:shares"
    await make_up(store, shares)
    for number in range(24):
        await start(store, f"b-{number}", tenant="b")
    assert await store.connection.call("HLEN", shares) <= KEPT + 3
    shared = tenants_of(await taken(store, 40))
    assert abs(shared["a"] - shared["b"]) <= 9  # eight of `a` were in the stream before anybody stood in line
