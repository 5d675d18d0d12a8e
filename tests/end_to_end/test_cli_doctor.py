"""`deckhands doctor`, on this machine and on one without requirements; and its report on retention rules."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.coordination.action_streams import ActionQueue
from broker.coordination.membership import Membership, list_members
from broker.runtime.child import ChildProcess
from broker.store.connection import MultiplexedConnection
from broker.store.server_checks import find_vulnerability
from broker.store.store import Store, load_server_facts
from deckhands import Client
from deckhands.operations.diagnosis.diagnostics import Finding, examine_store
from tests.integration.command_line import deckhands, environment, finished, read_until, started
from tests.polling import until
from tests.stores import RealServer, emptied, running, valkey_program


def test_it_says_what_this_machine_can_do(tmp_path: Path) -> None:
    done = deckhands("doctor", "--json", env=environment(tmp_path, DECKHANDS_POOLS="bash,browser"))
    assert done.code == 0
    found = {finding["name"]: finding for finding in done.json}
    of_machine = ["sandbox bwrap", "system call filter", "Landlock", "control groups", "room for sessions"]
    of_machine.append("files of forks")
    assert list(found) == [*of_machine, "pool browser"]
    assert found["sandbox bwrap"] == {
        "name": "sandbox bwrap",
        "is_good": True,
        "is_needed": True,
        "detail": "holds: 9 attempts to get out were stopped",
        "remedy": "",
    }
    assert found["system call filter"]["is_good"]
    assert found["pool browser"]["is_good"]


def test_missing_requirements_of_a_pool_are_reported(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_POOLS="bash,browser", DECKHANDS_CHROMIUM=str(tmp_path / "none"))
    done = deckhands("doctor", env=env)
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert last.startswith("missing pool browser")
    assert "which is not a program. Install it (on Debian: apt-get install chromium)" in last


async def test_unreadable_entries_are_shown(tmp_path: Path, valkey_store: Store, valkey_server: RealServer) -> None:
    env = environment(tmp_path, DECKHANDS_URL=valkey_server.url)
    assert (await examine_store(valkey_server.url))[1:] == [Finding("dead letters", True, False, "none")]
    queue = ActionQueue(valkey_store, valkey_store.all_shards[0], worker_id="t", node="n", pools=["bash"])
    worker = Membership(valkey_store, "t", "tool", streams=[queue.streams])
    await worker.register()
    await valkey_store.connection.call("XADD", "deck:{0}:act:pool:bash", "*", "foo", "bar")
    assert await queue.read(limit=10) == []
    await queue.aclose()
    done = await asyncio.to_thread(deckhands, "doctor", env=env)
    assert done.code == 0
    last = done.out.splitlines()[-1]
    assert last.startswith("found   dead letters")
    assert "entries and keys that cannot be read: 1, the last 'entry " in last
    assert "of deck:{0}:act:pool:bash': \"it has no field b'c'\"" in last
    await valkey_store.connection.call("SET", "deck:{0}:dead", "no set")
    finding = (await examine_store(valkey_server.url))[-1]
    assert (finding.is_good, finding.is_needed) == (False, True)
    assert "WRONGTYPE" in finding.detail


def test_a_store_that_serves(tmp_path: Path, valkey_server: RealServer) -> None:
    asyncio.run(emptied(valkey_server.url))
    done = deckhands("doctor", env=environment(tmp_path, DECKHANDS_URL=valkey_server.url))
    assert done.code == 0
    first, *_, last = lines = done.out.splitlines()
    assert first == "ok      sandbox bwrap       holds: 9 attempts to get out were stopped"
    assert last == "ok      store               The store serves."
    assert len(lines) == 7


def test_a_store_of_a_version_that_may_have_a_hole(
    tmp_path: Path, redis_server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.run(facts_of(asyncio.run(emptied(redis_server.url))))
    known = find_vulnerability(told)
    env = environment(tmp_path, DECKHANDS_URL=redis_server.url)
    lines = deckhands("doctor", env=env).out.splitlines()
    if known is None:
        assert lines[-1] == "ok      store               The store serves."
    else:
        assert lines[-1].split()[:3] == ["weaker", "store", "version"]
        assert told["redis_version"] in lines[-1]
        assert "CVE-" in lines[-1]
    monkeypatch.setenv("DECKHANDS_STORE_PATCHED", "1")
    assert [finding.name for finding in asyncio.run(examine_store(redis_server.url))] == ["store"]


@pytest.fixture
def forgetful() -> Iterator[RealServer]:
    yield from running(valkey_program(), "--appendonly", "no")


def test_a_store_without_an_append_only_file(tmp_path: Path, forgetful: RealServer) -> None:
    env = environment(tmp_path, DECKHANDS_URL=forgetful.url)
    done = deckhands("doctor", env=env)
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert last.startswith("missing append-only file    THE STORE KEEPS NO APPEND-ONLY FILE: ")
    assert "Set `appendonly yes` on its server" in last


async def test_workers_warn_once_about_a_store_without_aof(tmp_path: Path, forgetful: RealServer) -> None:
    env = environment(tmp_path, DECKHANDS_URL=forgetful.url, DECKHANDS_CELERY_URL=f"redis+socket://{forgetful.socket}")
    workers = {
        role: ChildProcess.start([sys.executable, "-P", "-m", f"{role}_worker"], log=tmp_path / role, env=env)
        for role in ("controller", "tool")
    }
    try:
        async with await Client.connect(forgetful.url) as client:

            async def both_are_there() -> bool:
                return {member.role for member in await list_members(client.store)} == {"controller", "tool"}

            await until(both_are_there, limit=90, what="both workers")
        for role in workers:
            told = [line for line in (tmp_path / role).read_text().splitlines() if "APPEND-ONLY" in line]
            assert len(told) == 1, told
            assert " ERROR " in told[0]
    finally:
        for worker in workers.values():
            await worker.stop(grace_seconds=20)


async def facts_of(url: str) -> dict[str, str]:
    connection = MultiplexedConnection(url)
    try:
        return await load_server_facts(connection)
    finally:
        await connection.aclose()


FOR_GOOD = "a retention rule deletes conversations permanently, without an archive."
NOBODY = ("--controllers", "0", "--tools", "0", "--ingresses", "0", "--jobs", "0", "--beats", "0")


def rules(tmp_path: Path, text: str = '[[rule]]\nage = "1d"\nthen = "delete"\n') -> str:
    path = tmp_path / "retention.toml"
    path.write_text(text)
    return str(path)


def test_doctor_says_it(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_RETENTION=rules(tmp_path))
    found = {finding["name"]: finding for finding in deckhands("doctor", "--json", env=env).json}
    noticed = {"name": "retention", "is_good": False, "is_needed": False, "detail": FOR_GOOD, "remedy": ""}
    assert found["retention"] == noticed
    assert "archive" not in found
    env |= {"DECKHANDS_ARCHIVE": str(tmp_path / "archive"), "DECKHANDS_RETENTION": rules(tmp_path, "")}
    found = {finding["name"]: finding for finding in deckhands("doctor", "--json", env=env).json}
    assert found["retention"]["is_good"]
    assert found["archive"]["is_good"]


def test_doctor_says_what_cannot_be_used(tmp_path: Path) -> None:
    variables = {"DECKHANDS_RETENTION": rules(tmp_path, "[[rule]]"), "DECKHANDS_ARCHIVE": "nowhere://bucket"}
    done = deckhands("doctor", "--json", env=environment(tmp_path, **variables))
    assert done.code == 1
    found = {finding["name"]: finding for finding in done.json}
    assert "rule.0.age" in found["retention"]["detail"]
    assert "nowhere" in found["archive"]["detail"]
    assert [found[name]["is_needed"] for name in ("retention", "archive")] == [True, True]


def test_up_says_it(tmp_path: Path) -> None:
    with started("up", *NOBODY, env=environment(tmp_path, DECKHANDS_RETENTION=rules(tmp_path))) as running:
        read_until(running, "Ctrl-C stops it")
        running.send_signal(signal.SIGTERM)
        done = finished(running)
    assert f"Retention: {FOR_GOOD}" in done.err.replace("\n", " ")
