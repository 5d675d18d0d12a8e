"""The store in memory answers what a real server answers: random commands, then random calls of the functions."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import broker
from broker.runtime.errors import StoreError
from broker.store.connection import Connection, MultiplexedConnection
from broker.store.function_library import build_source
from broker.store.store import Store, open_store
from broker.testing import keyspace, streams
from broker.testing.memory_store import MemoryConnection
from tests.exploring import examples
from tests.protocol_world import CONTROLLERS, CONVERSATIONS, NODES, SLOTS, Step, World
from tests.stores import RealServer, emptied


@dataclass(frozen=True)
class Id:
    """The id of the n-th entry that this side added to a stream (modulo how many there are)."""

    stream: str
    n: int


@dataclass
class Side:
    """One of the two stores, and the ids it has made so far."""

    connection: Connection
    ids: dict[str, list[bytes]] = field(default_factory=dict)

    async def run(self, command: tuple[Any, ...]) -> Any:
        """Perform a command and return its reply without what depends on the moment."""
        try:
            reply = await self.connection.call(*(self._resolve(part) for part in command))
        except StoreError as error:
            return error.message.partition("answered: ")[2].split()[0]
        if command[0] == "XADD":
            self.ids.setdefault(command[1], []).append(reply)
        return _normal(command[0], reply)

    def _resolve(self, part: Any) -> Any:
        if isinstance(part, Id):
            made = self.ids.get(part.stream) or [b"0-0"]
            return made[part.n % len(made)]
        return part


def _normal(name: str, reply: Any) -> Any:
    if name in ("SMEMBERS", "SPOP") and reply:
        return sorted(reply)
    if name == "HGETALL":
        return dict(zip(reply[::2], _timeless(reply[1::2]), strict=True))
    if name == "XINFO" and reply and isinstance(reply[0], bytes):
        facts = dict(zip(reply[::2], reply[1::2], strict=True))
        return _timeless([facts[b"length"], facts[b"last-generated-id"]])
    if name == "XINFO":
        # Servers do not agree on whether a read that finds nothing makes its consumer known.
        facts = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in reply]
        return [_timeless([group[b"name"], group[b"pending"], group[b"last-delivered-id"]]) for group in facts]
    if name == "XPENDING" and reply and isinstance(reply[0], list):
        return _timeless([[entry, consumer, deliveries] for entry, consumer, _, deliveries in reply])
    return _timeless(reply)


def _timeless(reply: Any) -> Any:
    if isinstance(reply, list):
        return [_timeless(item) for item in reply]
    if isinstance(reply, bytes):
        return re.sub(rb"\b1\d{12}\b", b"<ms>", re.sub(rb"\b1\d{12}-\d+", b"<id>", reply))
    return reply


words = st.sampled_from(["a", "b", "c", "ü\0\n", ""])
numbers = st.sampled_from(["0", "1", "-1", "2.5", "1e3", "inf", "-inf", "x"])
ends = st.sampled_from(["-inf", "+inf", "0", "(1", "1", "2.5", "(2.5"])
small = st.integers(-3, 4).map(str)
hashes = st.sampled_from(["h1", "h2", "x1"])
sets = st.sampled_from(["s1", "s2", "h1"])
sorted_sets = st.sampled_from(["z1", "z2", "s1"])
stream_names = st.sampled_from(["x1", "x2"])
groups = st.sampled_from(["g", "k"])
consumers = st.sampled_from(["c1", "c2"])
counts = st.integers(1, 3).map(str)


def _command(*parts: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*(part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts))


def _on_stream(name: str) -> st.SearchStrategy[tuple[Any, ...]]:
    ids = st.builds(Id, st.just(name), st.integers(0, 5))
    places = st.one_of(ids, st.sampled_from(["-", "+", "0", "5", "5-1"]))
    return st.one_of(
        _command("XADD", name, "*", "f", words),
        _command("XADD", name, "*", "f", words, "g", words),
        _command("XADD", name, "MAXLEN", counts, "*", "f", words),
        _command("XADD", name, st.sampled_from(["0-0", "5-0", "5-1", "9999999999999-0"]), "f", words),
        _command("XLEN", name),
        _command("XRANGE", name, places, places),
        _command("XRANGE", name, "-", "+", "COUNT", counts),
        _command("XREVRANGE", name, places, places),
        _command("XREVRANGE", name, "+", "-", "COUNT", counts),
        _command("XRANGE", name, st.sampled_from(["(0", "(0-0", "(5-0", "(5-1"]), "+"),
        _command("XREAD", "COUNT", counts, "STREAMS", name, st.one_of(ids, st.sampled_from(["0", "$"]))),
        _command("XGROUP", "CREATE", name, groups, st.sampled_from(["0", "$"]), "MKSTREAM"),
        _command("XGROUP", "CREATE", name, groups, "0"),
        _command("XGROUP", "DELCONSUMER", name, groups, consumers),
        _command("XREADGROUP", "GROUP", groups, consumers, "COUNT", counts, "STREAMS", name, ">"),
        _command("XREADGROUP", "GROUP", groups, consumers, "STREAMS", name, st.one_of(ids, st.just("0"))),
        _command("XACK", name, groups, ids),
        _command("XACK", name, groups, ids, ids),
        _command("XPENDING", name, groups),
        _command("XPENDING", name, groups, "-", "+", counts),
        _command("XPENDING", name, groups, ids, ids, "1"),
        _command("XPENDING", name, groups, "-", "+", counts, consumers),
        _command("XPENDING", name, groups, "IDLE", "0", st.sampled_from(["-", "(0-0", "(5-1"]), "+", counts),
        _command("XCLAIM", name, groups, consumers, "0", ids),
        _command("XCLAIM", name, groups, consumers, "0", ids, ids, "RETRYCOUNT", "0", "JUSTID"),
        _command("XCLAIM", name, groups, consumers, "999999", ids),
        _command("XAUTOCLAIM", name, groups, consumers, "0", st.one_of(ids, st.just("0-0")), "COUNT", counts),
        _command("XINFO", "STREAM", name),
        _command("XINFO", "GROUPS", name),
        _command("XTRIM", name, "MINID", ids),
        _command("XTRIM", name, "MAXLEN", "=", counts),
    )


commands = st.one_of(
    _command("HSET", hashes, words, words),
    _command("HSET", hashes, words, words, words, words),
    _command("HSETNX", hashes, words, words),
    _command("HGET", hashes, words),
    _command("HEXISTS", hashes, words),
    _command("HMGET", hashes, words, words),
    _command("HGETALL", hashes),
    _command("HDEL", hashes, words, words),
    _command("HINCRBY", hashes, words, small),
    _command("HLEN", hashes),
    _command("SADD", sets, words, words),
    _command("SREM", sets, words, words),
    _command("SPOP", sets, "9"),
    _command("SCARD", sets),
    _command("SMEMBERS", sets),
    _command("ZADD", sorted_sets, numbers, words),
    _command("ZADD", sorted_sets, numbers, words, numbers, words),
    _command("ZADD", sorted_sets, st.sampled_from(["NX", "XX"]), numbers, words),
    _command("ZSCORE", sorted_sets, words),
    _command("ZREM", sorted_sets, words, words),
    _command("ZCARD", sorted_sets),
    _command("ZRANK", sorted_sets, words),
    _command("ZREMRANGEBYSCORE", sorted_sets, ends, ends),
    _command("ZRANGE", sorted_sets, small, small),
    _command("ZRANGE", sorted_sets, small, small, "WITHSCORES"),
    _command("ZREVRANGE", sorted_sets, small, small, "WITHSCORES"),
    _command("ZRANGEBYSCORE", sorted_sets, ends, ends),
    _command("ZRANGEBYSCORE", sorted_sets, ends, ends, "WITHSCORES", "LIMIT", "1", small),
    _command("SET", st.sampled_from(["t1", "h1"]), words),
    _command("SET", "t1", words, "NX", "PX", "100000"),
    _command("EXPIRE", hashes, "1000"),
    _command("GET", st.sampled_from(["t1", "h1"])),
    _command("DEL", st.sampled_from(["t1", "h1", "x2"]), "s1"),
    _command("EXISTS", "t1", "h1", "x1"),
    _command("FCALL", "absent", "0"),
    _command("XREAD", "STREAMS", "x1", "x2", "0", "0"),
    _command("XREADGROUP", "GROUP", "g", consumers, "STREAMS", "x1", "x2", ">", ">"),
    _on_stream("x1"),
    _on_stream("x1"),
    _on_stream("x2"),
)


def test_the_double_knows_what_the_broker_sends() -> None:
    folder = Path(broker.__file__).parent
    sent = set(re.findall(r"redis\.call\('([A-Z]+)'", build_source()))
    # The last ones carry what nobody decides by (no double is watched, and none has files on their way), or speak
    # to Celery's broker.
    passing = ("live_text.py", "stored_files.py", "transfers.py", "taken_entries.py")
    others = {"connection.py", "confirmation.py", "embedded.py", "health.py", "sentinel.py", *passing}
    others |= {"cluster.py", "routing.py", "server_control.py"}
    for path in sorted(
        path for path in folder.rglob("*.py") if path.name not in others and "testing" not in path.parts
    ):
        sent |= set(re.findall(r'[(\[]"([A-Z]{3,})"', path.read_text(encoding="utf-8")))
    known = {name.decode() for name in (*keyspace.COMMANDS, *streams.COMMANDS)} | {"FCALL", "FUNCTION"}
    assert len(sent) > 25
    # Options at the start of a line; a risk; variables; what jobs do, which run on no double.
    passing_words = {"BLOCK", "MINID", "LOW", "PATH", "TMPDIR", "PTTL", "LRANGE", "LTRIM"}
    assert sent - known == passing_words | {"COMMAND", "WAIT", "WAITAOF"}  # what a server is asked that may lack some


async def _compare(server: RealServer, sequence: list[tuple[Any, ...]]) -> None:
    real = Side(MultiplexedConnection(await emptied(server.url)))
    double = Side(MemoryConnection())
    try:
        for side in (real, double):
            await side.connection.call("FUNCTION", "LOAD", build_source())
        for position, command in enumerate(sequence):
            expected, found = await real.run(command), await double.run(command)
            assert found == expected, f"command {position}: {command}"
    finally:
        await real.connection.aclose()


@pytest.mark.parametrize("program", ["valkey", "redis"])
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(commands, max_size=40))
def test_commands(program: str, request: pytest.FixtureRequest, sequence: list[tuple[Any, ...]]) -> None:
    asyncio.run(_compare(request.getfixturevalue(f"{program}_server"), sequence))


conversation_ids = st.sampled_from(CONVERSATIONS)
controllers = st.sampled_from(CONTROLLERS)
tool_slots = st.sampled_from(tuple(NODES))
slots = st.sampled_from(SLOTS)
picks = st.integers(0, 3)


def _step(verb: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(verb), *arguments)


steps = st.one_of(
    _step("begin", conversation_ids),
    _step("say", conversation_ids, st.sampled_from(["k1", "k2", "k3"])),
    _step("close", conversation_ids),
    _step("requeue", conversation_ids),
    _step("restart", slots),
    _step("lapse", slots),
    _step("tick", slots, st.sampled_from([0, 3_600_000])),
    _step("leave", slots),
    _step("hear", controllers),
    _step("answer", picks),
    _step("answer", picks),
    _step("claim", controllers, conversation_ids),
    _step("decide", picks, st.integers(0, 3), st.booleans()),
    _step("decide", picks, st.just(1), st.just(False)),
    _step("settle_as_owner", picks),
    _step("release", picks, st.sampled_from([None, 1])),
    _step("mark", picks),
    _step("dispatch", picks),
    _step("take", tool_slots),
    _step("take", tool_slots),
    _step("run", picks, st.booleans()),
    _step("run", picks, st.just(False)),
    _step("copy", st.sampled_from(["pool:bash", "node:n1", "node:n2"])),
)
losses = _step("lose", st.sampled_from(["ready", "pool:bash", "node:n1", "node:n2"]))

BEGINNING: list[Step] = [("begin", CONVERSATIONS[0]), ("claim", "c1", CONVERSATIONS[0]), ("decide", 0, 2, False)]


async def _world(store: Store, sequence: list[Step]) -> tuple[World, list[Any]]:
    world = World(store)
    await world.start()
    return world, [await world.do(step) for step in [*BEGINNING, *sequence]]


async def _lose_nothing(sequence: list[Step], *, dispatches: bool) -> None:
    world, _ = await _world(await open_store(MemoryConnection()), sequence)
    await world.settle(dispatches=dispatches)
    await world.check()


PARKED_AND_CLOSED: list[Step] = [("close", CONVERSATIONS[0]), ("hear", "c1"), ("release", 0, 1)]


@settings(max_examples=examples(30))
@example(sequence=PARKED_AND_CLOSED)
@given(sequence=st.lists(steps, max_size=40))
def test_crashes_zombies_and_copies_lose_nothing(sequence: list[Step]) -> None:
    asyncio.run(_lose_nothing(sequence, dispatches=False))


@settings(max_examples=examples(30))
@given(sequence=st.lists(st.one_of(steps, losses), max_size=40))
def test_lost_entries_are_found_by_asking(sequence: list[Step]) -> None:
    asyncio.run(_lose_nothing(sequence, dispatches=True))


async def _compare_worlds(server: RealServer, sequence: list[Step]) -> None:
    real = await open_store(await emptied(server.url))
    try:
        expected_world, expected = await _world(real, sequence)
        world, found = await _world(await open_store(MemoryConnection()), sequence)
        for step, one, other in zip([*BEGINNING, *sequence], expected, found, strict=True):
            assert _timeless(other) == _timeless(one), step
        await expected_world.settle(dispatches=True)
        await world.settle(dispatches=True)
        for cid in CONVERSATIONS:
            key = world.store.known_keys(cid).events
            one, other = [len(await side.connection.call("XRANGE", key, "-", "+")) for side in (real, world.store)]
            assert one == other
    finally:
        await real.aclose()


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(st.one_of(steps, losses), max_size=40))
def test_the_store_in_memory_does_what_a_real_one_does(valkey_server: RealServer, sequence: list[Step]) -> None:
    asyncio.run(_compare_worlds(valkey_server, sequence))
