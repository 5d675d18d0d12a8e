"""The servers that containers run: no default passwords, and a worker's user that can do its work and no more."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import AgentSpec, LLMSpec
from broker.coordination.quarantine import Quarantine
from broker.log.selection import ConversationQuery, Selection
from broker.runtime.errors import DeckhandsError, FunctionsTooOld, StoreMisconfigured, UsageError
from broker.store.connection import MultiplexedConnection
from broker.store.store import open_store
from broker.tools.tool_offers import ToolOffers
from deckhands.client.client import Client
from tests.polling import unhurried, until
from tests.served_stores import (
    ADMIN,
    LIMIT_SECONDS,
    PASSWORDS,
    QUEUE,
    ROLES,
    SERVE_VALKEY,
    Server,
    allowed_of,
    refusals,
    serving,
    worker,
)
from tests.unit.deckhands.sample_log import state

REFUSED_COMMANDS = (
    *(
        "ACL LIST",
        "BGREWRITEAOF",
        "CLIENT KILL ID 1",
        "CLIENT LIST",
        "CONFIG GET dir",
        "CONFIG SET dir /",
        "DEBUG JMAP",
    ),
    *("EVAL return{} 0", "FAILOVER", "FLUSHALL", "FLUSHDB", "FUNCTION DELETE deckhands", "FUNCTION DUMP"),
    *("FUNCTION FLUSH", "FUNCTION LOAD REPLACE x", "KEYS *", "MODULE LIST", "MONITOR", "PSUBSCRIBE *", "PUBLISH a b"),
    *("RANDOMKEY", "REPLICAOF NO ONE", "RESTORE deck:a 0 b", "SAVE", "SCAN 0", "SCRIPT FLUSH", "SHUTDOWN NOSAVE"),
    *("SORT deck:a", "SUBSCRIBE a", "SWAPDB 0 1", "SET other 1", "GET other", "XADD other * a b"),
)


@pytest.fixture
async def log(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Server]:
    async with serving("log", tmp_path / "log", programs) as server:
        yield server


@pytest.mark.parametrize(
    ("purpose", "changed", "complaint"),
    [
        ("log", {"ADMIN_PASSWORD": ""}, "set ADMIN_PASSWORD; there is no default password"),
        ("log", {"TOOL_PASSWORD": ""}, "set TOOL_PASSWORD; there is no default password"),
        ("queue", {"QUEUE_PASSWORD": ""}, "set QUEUE_PASSWORD; there is no default password"),
        ("log", {"CONTROLLER_PASSWORD": "fifteen-letters"}, "CONTROLLER_PASSWORD is shorter than 16 characters"),
        ("log", {"OPERATOR_PASSWORD": ADMIN}, "ADMIN_PASSWORD and OPERATOR_PASSWORD are the same"),
        ("log", {"ADMIN_PASSWORD": "0123456789 +@all ~*"}, "ADMIN_PASSWORD may hold letters, digits and _ . ~ - only"),
        ("log", {"INGRESS_PASSWORD": ADMIN}, "ADMIN_PASSWORD and INGRESS_PASSWORD are the same"),
        ("log", {"PRODUCERS": "admin=shop-0123456789a"}, "PRODUCERS may not name admin"),
        ("log", {"PRODUCERS": "a:b=shop-0123456789a"}, "a name in PRODUCERS may hold letters, digits and _ . - only"),
        ("log", {"PRODUCERS": "* =x"}, "a name in PRODUCERS may hold letters, digits and _ . - only"),
        ("log", {"PRODUCERS": "shop"}, "PRODUCERS has no password for shop: write shop=PASSWORD"),
        ("log", {"PRODUCERS": "shop=short"}, "PRODUCERS:shop is shorter than 16 characters"),
        ("log", {"PRODUCERS": f"shop={ADMIN}"}, "ADMIN_PASSWORD and PRODUCERS:shop are the same"),
        ("log", {"PRODUCERS": "a=a-0123456789abcd a=b-0123456789abcd"}, "PRODUCERS names a twice"),
        ("queue", {"PRODUCER_PASSWORD": QUEUE}, "QUEUE_PASSWORD and PRODUCER_PASSWORD are the same"),
        ("queue", {"PRODUCER_PASSWORD": "fifteen-letters"}, "PRODUCER_PASSWORD is shorter than 16 characters"),
        ("queue", {"QUEUE_PASSWORD": "0123456789012345\n"}, "QUEUE_PASSWORD may hold letters, digits and _ . ~ - only"),
        ("cache", {}, "usage: serve-valkey log|queue|sentinel"),
    ],
)
def test_no_server_without_good_passwords(
    purpose: str, changed: dict[str, str], complaint: str, programs: dict[str, str], tmp_path: Path
) -> None:
    ended = subprocess.run(
        [SERVE_VALKEY, purpose],
        check=False,
        env={**programs, **PASSWORDS, **changed},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"serve-valkey: {complaint}\n")


async def test_connection_without_a_password_is_refused(log: Server) -> None:
    for login in ("", "admin:wrong@", "operator:wrong@", f":{ADMIN}@", f"default:{ADMIN}@"):
        with pytest.raises(StoreMisconfigured, match="refused the login"):
            await open_store(f"redis://{login}127.0.0.1:{log.port}/0")


async def test_no_role_can_do_anything_dangerous(log: Server) -> None:
    with pytest.raises(FunctionsTooOld, match="store user may not load it"):
        await open_store(log.controller)  # the functions are the admin's to load
    await (await open_store(log.admin)).aclose()
    for role in ROLES.values():
        await (await open_store(log.role(role))).aclose()
    for role in ("operator", "gateway", "metrics", *ROLES.values()):
        may_scan = role in ("operator", "jobs")
        refused = [command for command in REFUSED_COMMANDS if not (may_scan and command == "SCAN 0")]
        assert await allowed_of(refused, log.role(role)) == []


async def test_producer_learns_that_a_tool_is_not_offered(log: Server) -> None:
    await (await open_store(log.admin)).aclose()
    for login in map(log.role, ("operator", "controller", "tool", "ingress", "jobs", "gateway")):
        store = await open_store(login)
        with pytest.raises(UsageError, match="No tool worker offers the tool 'nothing'"):
            await ToolOffers(store).choose(["nothing"])
        await store.aclose()


async def test_clients_choose_by_label_and_delete_with_worker_rights(log: Server) -> None:
    await (await open_store(log.admin)).aclose()
    async with await Client.connect(log.operator) as client:
        cid = await client.submit("x" * 50_000, labels={"team": "a"}, agent=AgentSpec(llm=LLMSpec(model="m")))
        await client.log.append(cid, [state("running"), state("finished")], fields={"state": "finished"})
        pages = ConversationQuery(client.store, Selection({"team": "a"})).iterate_pages()
        assert [row.conversation_id async for page in pages for row in page] == [cid]
        await client.delete(cid)
        assert await client.recent() == []
        shard = client.store.all_shards[0]
        await Quarantine(client.store).quarantine(shard, shard.ready, "1-1", [b"x"], KeyError("c"))
        [entry] = await Quarantine(client.store).list_items()
        assert await Quarantine(client.store).discard([entry.name]) == 1


async def test_the_server_keeps_its_log_and_evicts_nothing(log: Server) -> None:
    connection = MultiplexedConnection(log.admin)
    expected = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "maxmemory-clients": "0",
        "stream-node-max-bytes": "1024",
        "protected-mode": "yes",
    }
    for name, value in expected.items():
        assert await connection.call("CONFIG", "GET", name) == [name.encode(), value.encode()]
    await connection.aclose()


async def test_the_passwords_are_not_in_the_arguments(log: Server) -> None:
    shown = Path(f"/proc/{log.pid}/cmdline").read_bytes()
    assert b"valkey-server" in shown
    assert not any(password.encode() in shown for password in PASSWORDS.values())


async def test_workers_do_all_their_work_with_the_rights_they_have(
    log: Server, tmp_path: Path, programs: dict[str, str]
) -> None:
    script = tmp_path / "script.json"
    command = {"name": "execute_bash", "arguments": {"command": "seq 20000; echo all > done.txt"}}
    finish = {"name": "finish", "arguments": {"message": "done"}}
    script.write_text(json.dumps({"turns": [{"tool_calls": [command]}, {"tool_calls": [finish]}]}))
    await (await open_store(log.admin)).aclose()
    async with AsyncExitStack() as stack:
        queue = await stack.enter_async_context(serving("queue", tmp_path / "queue", programs))
        environment: dict[str, Any] = {
            "PATH": os.environ["PATH"],
            "LLM_SCRIPTS_DIR": "/",
            "DECKHANDS_HOME": str(tmp_path / "home"),
            "DECKHANDS_SANDBOX": "none",
            "DECKHANDS_WORKSPACE_TTL_SECONDS": "1",
        }
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment, log, queue))
        client = await stack.enter_async_context(await Client.connect(log.operator))
        ids = [await client.submit("do it", agent=AgentSpec(llm=LLMSpec(model=f"scripted/{script}"))) for _ in range(3)]
        for conversation_id in ids:
            summary = await client.wait_until_settled(conversation_id, timeout_seconds=unhurried(LIMIT_SECONDS))
            assert summary.state == "finished"
        assert len(await client.recent()) == 3
        for module in ("controller", "tool"):

            async def pongs(role: str = module) -> bool:
                return any(name.startswith(role) for name in await _pongs(queue.role("flower")))

            await until(pongs, limit=unhurried(LIMIT_SECONDS), what=f"{module} worker that answers pings")
    assert await refusals(log) == []


async def _pongs(url: str) -> dict[str, Any]:
    celery = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "celery", "inspect", "ping", "--json", "--timeout", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "CELERY_BROKER_URL": url},
    )
    printed, _ = await celery.communicate()
    return json.loads(printed or "{}")


OF_ANOTHER_ROLE = (
    *("PUBLISH /0.celery.pidbox {}", "SUBSCRIBE /0.celeryev/worker.online", "PSUBSCRIBE *", "KEYS *", "SCAN 0"),
    *("LPUSH deckhands x", "RPOP deckhands", "LRANGE deckhands 0 -1", "LPUSH celery x", "HGETALL deckhands:unacked"),
    *("GET celery-task-meta-x", "SET celery-task-meta-x {}", "PUBLISH celery-task-meta-x {}", "SET other 1"),
    *("SADD _kombu.binding.deckhands x", "SADD _kombu.binding.reply.celery.pidbox x", "BRPOP a.reply.celery.pidbox 0"),
    *("FLUSHALL", "CONFIG GET dir", "ACL LIST", "MONITOR", "CLIENT LIST", "FUNCTION LIST", "HGETALL unacked"),
)
OF_OTHERS = {
    "controller": (*OF_ANOTHER_ROLE, "LPUSH deckhands.tool x", "LPUSH deckhands.jobs x", "HGET deckhands:beat:x meta"),
    "tool": (*OF_ANOTHER_ROLE, "LPUSH deckhands.controller x", "LPUSH deckhands.jobs x", "HGET deckhands:beat:x meta"),
    "jobs": (*OF_ANOTHER_ROLE, "LPUSH deckhands.tool x", "LPUSH deckhands.controller x", "HGET deckhands:beat:x meta"),
    "beat": (*OF_ANOTHER_ROLE, "RPOP deckhands.jobs", "LPUSH deckhands.tool x", "LRANGE deckhands.jobs 0 -1"),
    "ingress": ("PUBLISH /0.celery.pidbox {}", "SUBSCRIBE /0.celeryev/worker.online", "FLUSHALL", "CONFIG GET dir"),
    "metrics": (*OF_ANOTHER_ROLE, "LPUSH deckhands x", "RPOP deckhands", "SET deckhands:beat::lock x", "GET deckhands"),
    "flower": ("LPUSH deckhands x", "RPOP deckhands", "LRANGE deckhands 0 -1", "GET celery-task-meta-x", "SET other 1"),
}
"""What the users of roles may not do in Celery's broker."""


async def test_each_role_has_the_broker_for_its_own_work_only(tmp_path: Path, programs: dict[str, str]) -> None:
    async with serving("queue", tmp_path / "queue", programs) as queue:
        allowed = {role: await allowed_of(commands, queue.role(role)) for role, commands in OF_OTHERS.items()}
    assert allowed == {role: [] for role in OF_OTHERS}


async def test_metrics_are_whole_with_the_rights_of_their_users(tmp_path: Path, programs: dict[str, str]) -> None:
    async with (
        serving("log", tmp_path / "log", programs) as log,
        serving("queue", tmp_path / "queue", programs) as queue,
    ):
        admin = await open_store(log.admin)
        await admin.aclose()
        environment = {
            **os.environ,
            "DECKHANDS_URL": log.role("metrics"),
            "DECKHANDS_CELERY_URL": queue.role("metrics"),
        }
        command = [sys.executable, "-m", "deckhands", "metrics", "--once"]
        shown = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, check=True
        )
    assert "deckhands_scrape_failures 0.0" in shown.stdout
    assert 'deckhands_queue_entries{queue="celery_ingress",standing="waiting"} 0.0' in shown.stdout


async def test_producer_may_only_add_to_inbox_and_read_replies(tmp_path: Path, programs: dict[str, str]) -> None:
    async with serving("log", tmp_path / "log", programs) as server:
        connection = MultiplexedConnection(server.producer)
        try:
            await connection.call("XADD", "deck:inbox", "*", "v", "1", "request", "{}")
            assert await connection.call("XRANGE", "deck:replies:shop", "-", "+") == []
            for command in BEYOND_A_PRODUCER:
                with pytest.raises(DeckhandsError, match="NOPERM"):
                    await connection.call(*command.split())
        finally:
            await connection.aclose()


BEYOND_A_PRODUCER = (
    *("XRANGE deck:inbox - +", "XREAD STREAMS deck:inbox 0", "DEL deck:inbox", "XDEL deck:inbox 1-1"),
    *("XTRIM deck:inbox MAXLEN 0", "XADD deck:replies:shop * a b", "XADD deck:{0}:ready * c x", "HGETALL deck:store"),
    *(
        "XRANGE deck:{0}:ready - +",
        "FCALL deck_now 1 deck:{0}",
        "XGROUP DESTROY deck:inbox ingresses",
        "EVAL return{} 0",
    ),
    *("KEYS *", "SCAN 0", "FLUSHALL", "CONFIG GET dir", "FUNCTION FLUSH", "SUBSCRIBE a", "SET other 1", "GET other"),
)


async def test_a_producer_with_a_user_reads_its_own_answers_only(tmp_path: Path, programs: dict[str, str]) -> None:
    page = (SERVE_VALKEY.parents[1] / "docs" / "producing-work.md").read_text("utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("ACL SETUSER shop ")]
    async with serving("log", tmp_path / "log", programs) as server:
        admin = MultiplexedConnection(server.admin)
        await admin.call(*line.split())
        assert await admin.call("CONFIG", "GET", "proto-max-bulk-len") == [b"proto-max-bulk-len", b"67108864"]
        shop = MultiplexedConnection(server.url("shop:A-LONG-PASSWORD"))
        await shop.call("XADD", "deck:inbox:shop", "*", "v", "1")
        assert await shop.call("XRANGE", "deck:replies:shop", "-", "+") == []
        for command in ("XRANGE deck:replies:other - +", "XADD deck:inbox * v 1", *BEYOND_A_PRODUCER):
            with pytest.raises(DeckhandsError, match="NOPERM"):
                await shop.call(*command.split())
        await shop.aclose()
        await admin.aclose()
