"""Blocking reads of the in-memory store: which reader wakes, and when, on a clock that moves only when all wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from broker.log.append_call import Creator, NewEntry, make_append_arguments
from broker.runtime.errors import OutcomeUnknown, StoreError, UnknownConversation
from broker.store.store import open_store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection, MemoryServer
from tests.broker_parts import CID, begin, message
from tests.jumping_loop import JumpingLoop


async def go_on(seconds: float) -> None:
    """Advance the clock of the scene, and no other."""
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, later.set)
    await later.wait()


def lasting(
    seconds: object = None,
) -> Callable[[Callable[[ManualClock, MemoryServer], Awaitable[None]]], Callable[[], None]]:
    """Make a test of a scene, which ends after so many seconds of its clock."""

    def make_test(scene: Callable[[ManualClock, MemoryServer], Awaitable[None]]) -> Callable[[], None]:
        def play() -> None:
            clock = ManualClock()
            loop = JumpingLoop(clock)
            try:
                loop.run_until_complete(scene(clock, MemoryServer(clock)))  # type: ignore[arg-type]
            finally:
                loop.close()
            assert seconds is None or clock.monotonic() == pytest.approx(seconds)

        return play

    return make_test


@lasting(3_600)
async def test_a_read_that_nobody_answers_ends_with_its_time(clock: ManualClock, server: MemoryServer) -> None:
    assert await MemoryConnection(server).call("XREAD", "BLOCK", 3_600_000, "STREAMS", "s", "$") is None


@lasting(10)
async def test_a_read_wakes_in_the_moment_its_entry_arrives(clock: ManualClock, server: MemoryServer) -> None:
    reader, writer = MemoryConnection(server), MemoryConnection(server)
    reading = asyncio.create_task(reader.call("XREAD", "BLOCK", 0, "STREAMS", "s", "t", "$", "$"))
    await go_on(5)
    await writer.call("HSET", "h", "f", "v")
    await go_on(5)
    entry = await writer.call("XADD", "t", "*", "f", "v")
    assert await reading == [[b"t", [[entry, [b"f", b"v"]]]]]
    assert entry == b"%d-0" % int(clock.now().timestamp() * 1000)


@lasting(62)
async def test_of_those_who_wait_the_first_is_served_first(clock: ManualClock, server: MemoryServer) -> None:
    connection = MemoryConnection(server)
    await connection.call("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")
    command = ("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "BLOCK", 60_000, "STREAMS", "s", ">")
    readers = []
    for _ in range(3):
        readers.append(asyncio.create_task(connection.another(reply_timeout_seconds=70).call(*command)))
        await go_on(1)
    await connection.call_many([("XADD", "s", "*", "n", n) for n in range(2)])
    found = [await reader for reader in readers]
    assert [reply and reply[0][1][0][1] for reply in found] == [[b"n", b"0"], [b"n", b"1"], None]


@lasting()
async def test_timed_out_reader_is_not_served(clock: ManualClock, server: MemoryServer) -> None:
    connection = MemoryConnection(server)
    await connection.call("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")
    command = ("XREADGROUP", "GROUP", "g", "c", "BLOCK", 0, "STREAMS", "s", ">")
    gone = asyncio.create_task(connection.call(*command))
    await go_on(1)
    gone.cancel()
    await go_on(1)
    await connection.call("XADD", "s", "*", "f", "v")
    assert await connection.call("XPENDING", "s", "g") == [0, None, None, None]


@lasting(3)
async def test_a_function_wakes_readers_once_it_is_done(clock: ManualClock, server: MemoryServer) -> None:
    store = await open_store(MemoryConnection(server), clock=clock)
    names = store.all_shards[0]
    await store.call_function("deck_register", (names.root,), "w1", 60_000, "controller", 0)
    command = ("XREADGROUP", "GROUP", "controllers", "w1", "BLOCK", 0, "STREAMS", names.ready, ">")
    reading = asyncio.create_task(store.connection.another(reply_timeout_seconds=5).call(*command))
    await go_on(3)
    keys = store.known_keys("conversation-1")
    arguments = make_append_arguments("conversation-1", Creator("k", "bash"), [NewEntry(b"event")])
    await store.call_function("deck_append", (keys.root, names.root), *arguments)
    ((_, ((_, fields),)),) = await reading
    assert fields == [b"c", b"conversation-1"]


@lasting()
async def test_follower_learns_that_the_store_was_emptied(clock: ManualClock, server: MemoryServer) -> None:
    store = await open_store(MemoryConnection(server), clock=clock)
    log = await begin(store, CID, message())
    tail = log.tail(CID)
    assert [(await anext(tail)).id for _ in range(2)] == [1, 2]
    following = asyncio.ensure_future(anext(tail))
    await go_on(1)
    await store.connection.call("DEL", store.known_keys(CID).meta, store.known_keys(CID).events)
    with pytest.raises(UnknownConversation):
        await following
    assert clock.monotonic() < 12


@lasting()
async def test_closing_ends_what_waits(clock: ManualClock, server: MemoryServer) -> None:
    connection = MemoryConnection(server)
    reading = asyncio.create_task(connection.call("XREAD", "BLOCK", 0, "STREAMS", "s", "$"))
    await go_on(1)
    await connection.aclose()
    with pytest.raises(OutcomeUnknown):
        await reading
    assert await connection.call("EXISTS", "s") == 0


@lasting()
async def test_a_blocked_read_learns_that_its_group_is_gone(clock: ManualClock, server: MemoryServer) -> None:
    connection = MemoryConnection(server)
    await connection.call("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")
    reading = asyncio.create_task(connection.call("XREADGROUP", "GROUP", "g", "c", "BLOCK", 0, "STREAMS", "s", ">"))
    await go_on(1)
    await connection.call("DEL", "s")
    with pytest.raises(StoreError, match="NOGROUP"):
        await reading


@lasting()
async def test_an_unknown_command_is_refused(clock: ManualClock, server: MemoryServer) -> None:
    with pytest.raises(StoreError, match="ERR unknown command 'SUBSCRIBE'"):
        await MemoryConnection(server).call("SUBSCRIBE", "x")


TRIAL = """#!lua name=trial
local function trial(keys, args)
  return {1.9, -1.9, true, {keys[1], args[1], {}}, redis.call('GET', keys[1]) == false, 'x', nil, 'unseen'}
end
redis.register_function('trial', trial)"""


@lasting()
async def test_lua_results_are_truncated_as_by_a_server(clock: ManualClock, server: MemoryServer) -> None:
    connection = MemoryConnection(server)
    await connection.call("FUNCTION", "LOAD", TRIAL)
    assert await connection.call("FCALL", "trial", 1, "k", "a") == [1, -1, 1, [b"k", b"a", []], 1, b"x"]


CROSSING = """#!lua name=crossing
redis.register_function('cross', function(keys, args) redis.pcall('SET', '{a}:1', 'x') return {'done'} end)"""


@lasting()
async def test_function_with_keys_of_two_slots_fails(clock: ManualClock, server: MemoryServer) -> None:
    connection = MemoryConnection(server)
    await connection.call("FUNCTION", "LOAD", CROSSING)
    assert await connection.call("FCALL", "cross", 1, "{a}") == [b"done"]
    with pytest.raises(AssertionError, match="cross touches keys of several slots"):
        await connection.call("FCALL", "cross", 1, "{b}")
