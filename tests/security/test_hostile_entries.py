"""Hostile content of the store harms only its owners, ends no worker, and is shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from broker.coordination.membership import ClusterMember, Membership, list_members
from broker.coordination.quarantine import Quarantine
from broker.runtime.errors import CorruptEntry, StoreRefused, UsageError
from broker.store import keys
from broker.store.store import Store
from deckhands.client.tasks.spec import TaskSpec
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import Schedule
from tests.faults.harness import FaultCluster, Worker, steps
from tests.inbox_parts import put, replies
from tests.ingress_parts import Producer, saying
from tests.integration.test_keys_page import pattern_of
from tests.polling import unhurried, until
from tests.security.hostile_entries import ROOT, TYPED, hostile_commands
from tests.security.hostile_families import OURS, table

SEED = 20261124
PARTS = 8
LONG_SECONDS = 300.0
"""For how long a victim's command runs: it is in the hands of its tool worker, and its conversation waits."""
QUOTAS = """
[[quota]]
model = "s*"
requests_per_minute = 600000
concurrency = 100
"""


class Crew:
    """Two workers of each kind, an ingress, a jobs worker, a beat, and an attacker with access to their store."""

    def __init__(self, cluster: FaultCluster) -> None:
        self.cluster = cluster
        self.processes: dict[str, Worker] = {}
        self.producer = Producer(cluster)

    @property
    def store(self) -> Store:
        return self.cluster.client.store

    async def start(self) -> None:
        for name in ("c1", "c2"):
            self.processes[name] = self.cluster.start_controller(name, DECKHANDS_QUOTAS=QUOTAS)
        for name in ("t1", "t2"):
            self.processes[name] = self.cluster.start_tool(name)
        self.processes["d1"] = self.cluster.start_ingress("d1")
        self.processes["j1"] = self.cluster.start_jobs("j1")
        self.processes["b1"] = self.cluster.start_beat("b1")
        await self.work()

    async def members(self) -> list[ClusterMember]:
        """The workers; their sweeps quarantine overwritten keys."""
        found: list[ClusterMember] = []

        async def are_known() -> bool:
            with suppress(StoreRefused):
                found[:] = await list_members(self.store)
            return bool(found)

        await until(are_known, what="workers")
        return found

    async def write(self, *command: str | bytes | float) -> bool:
        with suppress(StoreRefused):  # a key that an earlier command has overwritten
            await self.store.connection.call(*command)
            return True
        return False

    async def work(self) -> None:
        """Carry out an honest conversation, by the same processes as ever."""
        ids: list[str] = []

        async def is_begun() -> bool:  # forged values about the workers last for some beats
            with suppress(UsageError):
                ids[:] = await self.cluster.submit(steps(2))
            return bool(ids)

        await until(is_begun, what="workers that say what they offer")
        await self.cluster.settle(ids)
        await self.cluster.check(ids, commands=2)
        self.check_alive()

    async def work_by_ingresses(self) -> None:
        """Run a task of Celery's, one that starts later, and an entry of the inbox."""
        producer = self.producer
        now, later = producer.run(turns=saying("now")), producer.run(turns=saying("later"), countdown=0.1)
        await put(self.store, {"id": "honest", "task": "do it", **producer.options(saying("by the inbox"))})

        async def is_settled() -> bool:
            return [reply.event for reply in await replies(self.store)] == ["accepted", "settled"]

        await until(is_settled, limit=unhurried(60.0), what="both answers to an entry of the inbox")
        for result, message in ((now, "now"), (later, "later")):
            assert (await producer.value(result, limit=unhurried(60.0)))["message"] == message
        self.check_alive()

    async def work_by_schedule(self) -> None:
        """Run a conversation of a schedule, with a beat and a jobs worker."""
        book, names = ScheduleRepository(self.store, self.cluster.client.secrets), self.store.all_shards[0]
        request = TaskSpec.parse({"task": "look", **self.producer.options(saying("on schedule"))})

        async def is_written() -> bool:  # the job moves away a value in its place
            with suppress(StoreRefused):
                await book.add(Schedule(name="honest", cron="* * * * *"), request)
                await self.store.connection.call("ZADD", names.schedules_due, 1_000, "honest")
                return True
            return False

        async def has_begun() -> bool:
            with suppress(StoreRefused, CorruptEntry):
                return (await book.entry("honest")).status.begun > 0
            return False

        await until(is_written, limit=unhurried(60.0), what="a place for a schedule")
        await until(has_begun, limit=unhurried(60.0), what="the first tick of a schedule")
        await self.cluster.settle([(await book.entry("honest")).status.conversation_id])
        await book.remove("honest")
        self.check_alive()

    async def cut_off(self) -> None:
        """Close all connections to the store, so that every process reads its content again."""
        await self.write("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def is_swept(self) -> bool:
        """Whether what was overwritten has been moved out of the way."""
        self.check_alive()
        commands = [("TYPE", key) for key in (*(f"{ROOT}:{name}" for name in TYPED), keys.INBOX)]
        return b"string" not in await self.store.connection.call_many(commands)

    def check_alive(self) -> None:
        ended = {name: worker.poll() for name, worker in self.processes.items() if worker.poll() is not None}
        assert not ended, "".join(self.cluster.log_of(name)[-3000:] for name in ended)


@pytest.fixture
async def crew(tmp_path: Path) -> AsyncIterator[Crew]:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.is_verified = False
        crew = Crew(cluster)
        await crew.start()
        yield crew
        crew.producer.close()


@pytest.mark.soak
async def test_an_entry_without_its_fields_is_put_aside(crew: Crew) -> None:
    odd = [
        *(("foo", "bar"), ("c", b"\xff", "a", "1", "e", "x"), ("c", "nobody-1"), ("c", "nobody-1", "a", "1")),
        *(
            ("c", "nobody-1", "a", "x", "e", "x"),
            ("c", "nobody-1", "a", "1", "e", "no event"),
            ("a", "1", "x", "close"),
        ),
        *(("c", "../../etc", "a", "0", "x", "close"), ("c", "nobody-1", "a", "0", "x", "dance")),
    ]
    for fields in odd:
        for route in ("pool:bash", "node:node1"):
            await crew.write("XADD", f"{ROOT}:act:{route}", "*", *fields)
    for fields in (("foo", "bar"), ("c", b"\xff"), ("c", "../x"), ("", "")):
        await crew.write("XADD", f"{ROOT}:ready", "*", *fields)
    found = Quarantine(crew.store)

    async def all_are_aside() -> bool:
        crew.check_alive()
        return len(await found.list_items()) >= 2 * len(odd) + 4

    await until(all_are_aside, what="entries put aside")
    assert {entry.key for entry in await found.list_items()} == {
        f"{ROOT}:act:pool:bash",
        f"{ROOT}:act:node:node1",
        f"{ROOT}:ready",
    }
    assert 'cannot be read and was quarantined: "it has no field' in crew.cluster.log_of("t1") + crew.cluster.log_of(
        "t2"
    )
    await crew.work()


@pytest.mark.soak
async def test_unreadable_entries_of_a_dead_worker_do_not_block_burial(crew: Crew) -> None:
    for name in ("t1", "t2"):
        crew.cluster.kill(name)
        del crew.processes[name]
    ghost = (await list_members(crew.store))[0].worker_id
    for fields in (("foo", "bar"), ("a", "1"), ("c", "x"), ("x", "close"), ("c", b"\xff", "a", b"\xfe", "e", "x")):
        await crew.write("XADD", f"{ROOT}:act:pool:bash", "*", *fields)
    await crew.write("XREADGROUP", "GROUP", "tools", ghost, "COUNT", 100, "STREAMS", f"{ROOT}:act:pool:bash", ">")

    async def is_buried() -> bool:
        crew.check_alive()
        return all(member.role != "tool" for member in await list_members(crew.store))

    await until(is_buried, what="burial of the tool workers")
    crew.processes["t3"] = crew.cluster.start_tool("t3")
    await crew.work()


@pytest.mark.parametrize("name", [*TYPED, "act:pool:bash", "act:node:node1"])
async def test_key_of_another_type_is_moved_aside(valkey_store: Store, name: str) -> None:
    role = "ingress" if name == "revoked" else "tool"  # which only ingresses need
    worker = Membership(valkey_store, "w", role, streams=[[f"{ROOT}:act:pool:bash", f"{ROOT}:act:node:node1"]])
    await worker.register()
    await valkey_store.connection.call("SET", f"{ROOT}:{name}", "a string")
    if await worker.beat(1) is None:
        await worker.register()
    assert await worker.beat(2) is not None
    assert await valkey_store.connection.call("GET", f"{ROOT}:{name}:unreadable") == b"a string"
    (entry,) = await Quarantine(valkey_store).list_items()
    assert entry.key == f"{ROOT}:{name}"
    assert entry.why.startswith("it was a string, not a ")


@pytest.mark.parametrize(
    "count", [pytest.param(4_000, id="some"), pytest.param(20_000, id="many", marks=pytest.mark.slow)]
)
async def test_no_hostile_entry_ends_a_worker(crew: Crew, count: int) -> None:
    print(f"seed {SEED}")
    victims = await crew.cluster.submit(steps(1), count=5)
    victims += await crew.cluster.submit(steps(1, seconds=LONG_SECONDS), count=5)
    written = 0
    # In parts: workers that are buried come back under other names.
    for part in range(PARTS):
        workers = [member.worker_id for member in await crew.members()]
        for command in hostile_commands(SEED + part, count // PARTS, conversations=victims, workers=workers):
            written += await crew.write(*command)
            crew.check_alive()
        await crew.cut_off()
    assert written > 0.7 * count, written
    await until(crew.is_swept, what="keys of the right types")
    await crew.write("HDEL", f"{ROOT}:tenants", ":memory")  # a bound of 7 bytes; who wrote it can remove it
    await crew.work()
    await crew.work_by_ingresses()
    await crew.work_by_schedule()


def test_every_key_of_the_table_is_forged() -> None:
    """By the seeds of one run; a new row of the table is forged without being named here."""
    of_its_type, of_another = Counter[str](), Counter[str]()
    rows = [(re.compile(pattern_of(row)), row, kind) for row, kind in table()]
    verbs = {"HSET": "hash", "ZADD": "zset", "XADD": "stream", "SADD": "set", "SET": "string", "RPUSH": "list"}
    for part in range(PARTS):
        for verb, key, *_ in hostile_commands(SEED + part, 14_000 // PARTS, conversations=["c-1"], workers=["w"]):
            name = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
            for pattern, row, kind in rows:
                if verb in verbs and pattern.fullmatch(name):
                    (of_its_type if kind in (verbs[str(verb)], "several") else of_another)[row] += 1
    wanted = {row for row, _ in table()} - OURS
    assert {row for row in wanted if of_its_type[row] < 5} == set()
    assert {row for row in wanted if not of_another[row]} == {row for row, kind in table() if kind == "several"}
