"""Each cell of docs/rights.md, tried with the password of the role on real servers: what is not granted is refused."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.contract.fencing import Ownership
from broker.contract.notes import Note, NotebookKey
from broker.coordination.membership import Membership
from broker.coordination.notebooks import Notebooks
from broker.coordination.quarantine import Quarantine
from broker.coordination.shard_raise import raise_shards
from broker.limits.batches import Batches
from broker.limits.governor import CallGranted, CallOutcome, Governor, Priority
from broker.limits.ledger import Ledger, list_accounts
from broker.limits.quotas import QuotaTable
from broker.limits.tenants import TenantTable, publish_tenants
from broker.runtime.errors import DeckhandsError
from broker.runtime.ids import new_worker_id
from broker.runtime.settings import BrokerSettings
from broker.store.connection import MultiplexedConnection
from broker.store.function_library import build_source
from broker.store.keys import ShardKeys, shard_of
from broker.store.store import open_store
from deckhands.operations.jobs.cleanup import trim_operations
from deckhands.operations.jobs.job import JobServices
from deckhands.server.auth.operations import Operations
from tests.broker_parts import begin, enter
from tests.security.hostile_families import Family
from tests.served_stores import Server, allowed_of, refusals, serving
from tests.store_rights import (
    ADDS,
    READS,
    ROLES,
    all_families,
    all_functions,
    key_of,
    may_add,
    may_call,
    may_read,
    may_remove,
    rights_of,
)
from tests.stores import server_program

LEAST_REFUSED = 500
Cell = tuple[str, tuple[str, ...], bool]
"""The role, the command, and whether the page grants it."""

BEYOND_A_TOOL_WORKER = (
    *("HSET deck:{0}:keys x {}", "HGETALL deck:{0}:keys", "HSET deck:{0}:budget:tenant:acme limit 1"),
    *("HSET deck:{0}:schedules x {}", "ZADD deck:{0}:schedules:due 0 x", "HSET deck:{0}:webhooks x {}"),
    *("HSET deck:{0}:webhook:x:sent a b", "RPUSH deck:{0}:operations:record x", "HGETALL deck:{0}:notes:a/b/c"),
    *("DEL deck:{0}:c:x:events", "XDEL deck:{0}:c:x:events 1-0", "XTRIM deck:{0}:c:x:events MAXLEN 0"),
    *("XRANGE deck:{0}:c:x:events - +", "XREVRANGE deck:{0}:c:x:events + -", "XREAD STREAMS deck:{0}:c:x:events 0"),
    *("XINFO STREAM deck:{0}:c:x:events FULL", "XLEN deck:{0}:c:x:events", "HGETALL deck:{0}:batch:calls:x"),
    *("UNLINK deck:{0}:c:x:meta", "RENAME deck:{0}:c:x:events deck:{0}:c:y:events", "GET deck:{0}:c:x:snapshot"),
    *("XADD deck:inbox * v 1", "XRANGE deck:replies:shop - +", "HGETALL deck:{0}:c:x:caller", "SET deck:{0}:job:a b"),
    *("FCALL deck_end_deletion 2 deck:{0}:c:x deck:{0} x", "FCALL deck_claim 2 deck:{0}:c:x deck:{0} x y z"),
)
BEYOND_THE_SERVER = (
    *("DEL deck:{0}:operations:record", "LTRIM deck:{0}:operations:record 1 0", "LSET deck:{0}:operations:record 0 x"),
    *("LPOP deck:{0}:operations:record", "LREM deck:{0}:operations:record 0 x", "SET deck:{0}:operations:record x"),
    *("RENAME deck:{0}:operations:record deck:{0}:keys:x", "EXPIRE deck:{0}:operations:record 0"),
)


@asynccontextmanager
async def serving_with(program: str, folder: Path) -> AsyncIterator[Server]:
    (folder / "programs").mkdir()
    (folder / "programs" / "valkey-server").symlink_to(server_program(program))
    programs = {"PATH": f"{folder / 'programs'}:{os.environ['PATH']}"}
    async with serving("log", folder / "log", programs) as log:
        await (await open_store(log.admin)).aclose()
        yield log


@pytest.fixture(params=["valkey", "redis"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    async with serving_with(request.param, tmp_path) as found:
        yield found


def key_cells() -> Iterable[Cell]:
    tries: tuple[tuple[Callable[[Family], tuple[str, ...]], Callable[[str, Family], bool]], ...] = (
        (lambda one: READS[one.kind], may_read),
        (lambda one: ADDS[one.kind], may_add),
        (lambda _: ("DEL",), may_remove),
    )
    for family in all_families():
        for command_of, may in tries:
            name, *arguments = command_of(family)
            for role in ROLES:
                yield role, (name, key_of(family), *arguments), may(role, family)


def function_cells() -> Iterable[Cell]:
    for function in all_functions():
        for role in ROLES:
            yield role, ("FCALL", function, "1", "deck:{0}"), may_call(role, function)


async def find_refused(log: Server, role: str, commands: list[tuple[str, ...]], sign: str) -> list[bool]:
    """Return for each command whether it was refused to a role, as a sign in the server's reply shows."""
    connection = MultiplexedConnection(log.role(role))

    async def is_refused(command: tuple[str, ...]) -> bool:
        try:
            await connection.call(*command)
        except DeckhandsError as error:
            return sign in str(error)
        return False

    try:
        return list(await asyncio.gather(*map(is_refused, commands)))
    finally:
        await connection.aclose()


async def wrong_cells(log: Server, cells: list[Cell], sign: str) -> list[Cell]:
    """Return the cells that the server does not keep."""
    wrong = []
    for role in ROLES:
        own = [cell for cell in cells if cell[0] == role]
        refused = await find_refused(log, role, [command for _, command, _ in own], sign)
        wrong += [cell for cell, is_refused in zip(own, refused, strict=True) if cell[2] is is_refused]
    return wrong


async def test_every_cell_of_the_page_is_what_the_server_does(log: Server) -> None:
    keys, functions = list(key_cells()), list(function_cells())
    assert await wrong_cells(log, keys, "NOPERM") == []
    assert await wrong_cells(log, functions, "'fcall' command") == []
    assert sum(not is_granted for *_, is_granted in (*keys, *functions)) >= LEAST_REFUSED


def test_only_server_and_operator_write_administrative_keys() -> None:
    part = re.compile(r"deck:\{[0k]\}:(keys|schedules|webhooks|operations)(:record)?$")
    administrative = [family for family in all_families() if part.match(family.key)]
    assert len(administrative) == 4
    for one in administrative:
        writers = {role for role in ROLES if may_add(role, one) or may_remove(role, one)}
        expected = {"webhooks": {"operator", "gateway", "jobs"}}  # jobs turn one off whose receiver is gone
        assert writers == expected.get(one.key.rpartition(":")[2], {"operator", "gateway"}), one.key
        assert not may_remove("jobs", one)


async def test_tool_worker_reaches_nothing_of_the_administration(log: Server) -> None:
    assert await allowed_of(BEYOND_A_TOOL_WORKER, log.tool) == []


WRONG_TYPES = (
    *((role, "deck:{0}:ready", "stream") for role in ("gateway", "ingress", "controller", "jobs", "tool")),
    *((role, "deck:{1}:news", "zset") for role in ("gateway", "ingress", "controller", "jobs", "tool")),
    *((role, "deck:{0}:unreadable", "stream") for role in ("ingress", "controller", "jobs", "tool")),
    *((role, "deck:{0}:worker:w1:about", "hash") for role in ("ingress", "controller", "jobs", "tool")),
    *((role, "deck:{0}:turns:ready:0", "zset") for role in ("gateway", "ingress", "controller", "jobs", "tool")),
    *((role, "deck:{0}:act:pool:bash", "stream") for role in ("controller", "tool")),
    *(("tool", "deck:tools", "hash"), ("tool", "deck:tools:failed", "hash")),
    *(("ingress", "deck:inbox", "stream"), ("ingress", "deck:replies:shop", "stream")),
    *(("jobs", "deck:{0}:webhooks", "hash"), ("jobs", "deck:{0}:schedules:due", "zset")),
    *(("gateway", "deck:{0}:schedules", "hash"), ("controller", "deck:{0}:tenants", "hash")),
    *(("controller", "deck:{0}:budgets", "set"), ("controller", "deck:{0}:batch:lanes", "hash")),
)
"""A role, a key that holds another type, and its right type."""


async def test_each_role_moves_a_key_of_another_type_away(log: Server) -> None:
    admin = MultiplexedConnection(log.admin)
    stuck = []
    for role, key, kind in WRONG_TYPES:
        store = await open_store(log.role(role))
        await admin.call("DEL", key)
        await admin.call("SET", key, f"of {role}")
        try:
            await Quarantine(store).move_away(key, kind, ValueError("it was a string"))
        except DeckhandsError as error:
            stuck.append((role, key, str(error)))
        else:
            aside = f"{key}:unreadable" if "{" in key else f"{{{key}}}:unreadable"
            assert await admin.call("GET", aside) == f"of {role}".encode()
        await admin.call("DEL", key)
        await store.aclose()
    await admin.aclose()
    assert stuck == []


@pytest.mark.parametrize("role", ["ingress", "controller", "jobs", "tool"])
async def test_a_worker_joins_a_shard_whose_queue_has_another_type(log: Server, role: str) -> None:
    admin = MultiplexedConnection(log.admin)
    await admin.call("DEL", "deck:{0}:ready")
    await admin.call("SET", "deck:{0}:ready", "a string")
    store = await open_store(log.role(role))
    await Membership(store, new_worker_id(role), role).register()
    assert await admin.call("GET", "deck:{0}:ready:unreadable") == b"a string"
    await store.aclose()
    await admin.aclose()


async def test_server_adds_to_the_record_and_changes_nothing_in_it(log: Server) -> None:
    store = await open_store(log.gateway)
    record = Operations(store)
    for number in range(5):
        await record.record("key:a", "acme", "delete", f"c{number}", "")
    await store.call("RPUSH", store.all_shards[0].operations, "forged")
    assert await allowed_of(BEYOND_THE_SERVER, log.gateway) == []
    latest = await record.latest(limit=2)
    older = await record.latest(before=latest[-1].id, limit=10)
    assert [one.target for one in (*latest, *older)] == ["c4", "c3", "c2", "c1", "c0"]
    assert await record.latest(before="0-0") == []
    assert len(await record.latest(before=f"{10**15 - 1}-0")) == 5
    await store.aclose()


async def test_jobs_trim_the_record_and_add_nothing_to_it(log: Server, tmp_path: Path) -> None:
    admin = MultiplexedConnection(log.admin)
    record = "deck:{0}:operations:record"
    await admin.call("RPUSH", record, '{"at": 1}', '{"at": 9e14}')
    store = await open_store(log.jobs)
    assert await trim_operations(JobServices(store, BrokerSettings())) == {"removed": 1}
    assert await refusals(log) == []
    beyond = (f"RPUSH {record} x", f"LSET {record} 0 x", f"DEL {record}", f"LPOP {record}", f"RENAME {record} deck:x")
    assert await allowed_of(beyond, log.jobs) == []
    assert await admin.call("LRANGE", record, 0, -1) == [b'{"at": 9e14}']
    await admin.call("DEL", record)
    await admin.call("SET", record, "a string")
    assert await trim_operations(JobServices(store, BrokerSettings())) == {"removed": 0}
    assert await admin.call("GET", f"{record}:unreadable") == b"a string"
    await store.aclose()
    await admin.aclose()


async def test_controller_uses_quotas_budgets_batches_and_notes_with_its_rights(log: Server) -> None:
    store = await open_store(log.controller)
    await enter(store, "w1")
    for cid in ("aaa", "bbb"):
        await begin(store, cid)
    await publish_tenants(store, TenantTable(), 0.8)
    governor = Governor(store, QuotaTable.parse('[[quota]]\nmodel = "acme/large"\nconcurrency = 1'))
    pool = governor.find_pool("acme/large", "")
    assert pool is not None
    await governor.publish()
    asked: dict[str, Any] = {
        "input_tokens": 1,
        "output_tokens": 1,
        "priority": Priority.BATCH,
        "tenant": "",
        "fence": "0",
    }
    assert isinstance(await governor.reserve(pool, "aaa", "w1", **asked), CallGranted)
    await governor.reserve(pool, "bbb", "w1", **asked)
    await governor.settle(pool, "aaa", "w1", CallOutcome.OK)
    await governor.wake_next(pool, "w1")
    await governor.withdraw(pool, "bbb", "w1")
    ledger, accounts, owner = Ledger(store), list_accounts("aaa", tenant="acme"), Ownership("aaa", "w1", "1")
    await ledger.reserve(owner, accounts, worst_usd=0.25, total_usd=0.0)
    await ledger.settle(owner, accounts, total_usd=0.1)
    await ledger.sweep()
    batches = Batches(store)
    await batches.put("aaa", "1", seen_id=1, lane="l", about_lane="{}", body=b"{}")
    await batches.load_call("aaa", "1")
    await batches.drop("aaa", "1")
    book = NotebookKey("acme", "ann", "shop")
    await Notebooks(store).write(book, Note(id="1", text="x"))
    await Notebooks(store).erase(book)
    await store.aclose()
    assert await refusals(log) == []


async def test_only_servers_and_operators_raise_a_limit(log: Server) -> None:
    gateway, controller = await open_store(log.gateway), await open_store(log.controller)
    await Ledger(gateway).set_limit("tenant:acme", 1.0)
    limits = gateway.all_shards[0].limits
    beyond = (f"HSET {limits} tenant:acme 9", f"HINCRBY {limits} tenant:acme 9", f"DEL {limits}", f"SET {limits} x")
    for role in ("controller", "jobs", "tool", "ingress", "metrics"):
        assert await allowed_of(beyond, log.role(role)) == []
    with pytest.raises(DeckhandsError):
        await Ledger(controller).set_limit("tenant:acme", 9.0)
    await controller.call("HSET", controller.all_shards[0].budget("tenant:acme"), "limit", "9000000000")
    account = await Ledger(controller).load_account("tenant:acme")
    assert account.limit_usd == 1.0
    owner, accounts = Ownership("aaa", "w1", "1"), list_accounts("aaa", tenant="acme")
    ledger = Ledger(controller)
    await enter(controller, "w1")
    assert await ledger.reserve(owner, accounts, worst_usd=0.9, total_usd=0.0) is None
    other = Ownership("bbb", "w1", "1")
    assert await ledger.reserve(other, list_accounts("bbb", tenant="acme"), worst_usd=5.0, total_usd=0.0) is not None
    await gateway.aclose()
    await controller.aclose()


def test_roles_that_sweep_have_each_command_of_the_functions() -> None:
    called = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", build_source())}
    called -= {"info", "time"} | {"lrange", "ltrim"}  # of no role, and of jobs for the record of operations
    of_containers = {"xgroup": "xgroup|create", "xinfo": "xinfo|groups"}
    for role in ("operator", "controller", "jobs"):
        assert {of_containers.get(name, name) for name in called} <= rights_of(role)[0].commands


async def test_raised_shards_need_no_further_right(log: Server) -> None:
    ids = [cid for cid in (f"conversation-{n}" for n in range(40)) if shard_of(cid, 8)]
    old = ids.pop()
    admin = await open_store(log.admin)
    await begin(admin, old)
    operator = await open_store(log.operator, deploys=False)
    await raise_shards(operator, 8)
    for role in ("operator", "gateway", "ingress", "controller", "jobs", "tool", "metrics"):
        store = await open_store(log.role(role), deploys=False)
        assert (await store.locate(old)).shard == ShardKeys(0)
        if role in ("tool", "metrics"):
            with pytest.raises(DeckhandsError, match=r"NOPERM|may not"):
                await begin(store, ids.pop())
        else:
            await begin(store, ids.pop())
        await store.aclose()
    for one in (operator, admin):
        await one.aclose()
