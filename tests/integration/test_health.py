"""The check behind a container's health, against a real store and as the command that containers run."""

from __future__ import annotations

import asyncio
import os
import sys

from broker.health import HEALTHY, LAPSED, UNKNOWN, check
from broker.runtime.ids import new_worker_id
from broker.store.store import Store
from tests.broker_parts import enter, lapse
from tests.stores import LossyWire, RealServer


async def test_a_worker_that_beats_is_healthy(valkey_server: RealServer, valkey_store: Store) -> None:
    await enter(valkey_store, new_worker_id("controller"))
    await enter(valkey_store, new_worker_id("tool"), node="here")
    await enter(valkey_store, new_worker_id("ingress"))
    await enter(valkey_store, new_worker_id("jobs"))
    for role in ("controller", "tool", "ingress", "jobs"):
        verdict = await check(role, valkey_server.url)
        assert verdict.exit_status == HEALTHY
        assert verdict.reason.startswith(f"The {role} worker's heartbeat is valid for 3")


async def test_a_worker_whose_heartbeat_lapsed_is_not(valkey_server: RealServer, valkey_store: Store) -> None:
    worker = new_worker_id("controller")
    await enter(valkey_store, worker)
    await lapse(valkey_store, worker)
    verdict = await check("controller", valkey_server.url)
    assert verdict.exit_status == LAPSED
    assert verdict.reason.startswith("The controller worker's heartbeat lapsed ")


async def test_a_worker_that_was_buried_or_never_came_is_not(valkey_server: RealServer, valkey_store: Store) -> None:
    assert (await check("tool", valkey_server.url)).exit_status == LAPSED
    membership = await enter(valkey_store, new_worker_id("tool"), node="here")
    await membership.leave()
    verdict = await check("tool", valkey_server.url)
    assert (verdict.exit_status, verdict.reason) == (LAPSED, "No tool worker of this host is known to the store.")


async def test_workers_of_other_hosts_and_roles_do_not_count(valkey_server: RealServer, valkey_store: Store) -> None:
    await enter(valkey_store, "controller-elsewhere-7-0a1b2c3d")
    await enter(valkey_store, new_worker_id("tool"), node="here")
    assert (await check("controller", valkey_server.url)).exit_status == LAPSED


async def test_the_youngest_incarnation_counts(valkey_server: RealServer, valkey_store: Store) -> None:
    before = new_worker_id("controller")
    await enter(valkey_store, before)
    await lapse(valkey_store, before)
    await enter(valkey_store, new_worker_id("controller"))
    assert (await check("controller", valkey_server.url)).exit_status == HEALTHY


async def test_without_a_store_nothing_is_said_of_the_worker(valkey_server: RealServer, valkey_store: Store) -> None:
    await enter(valkey_store, new_worker_id("controller"))
    missing = f"unix://{valkey_server.folder}/nobody"
    for role in ("controller", "store"):
        verdict = await check(role, missing)
        assert verdict.exit_status == UNKNOWN
        assert verdict.reason.startswith("Cannot connect to the store")
    assert (await check("store", valkey_server.url)).exit_status == HEALTHY


async def test_a_store_that_is_silent_is_not_waited_for(lossy_wire: LossyWire) -> None:
    lossy_wire.is_silent = True
    async with asyncio.timeout(60):
        assert (await check("store", lossy_wire.url)).exit_status == UNKNOWN


async def test_the_command_answers_with_its_exit_status(valkey_server: RealServer, valkey_store: Store) -> None:
    assert await _command("store", DECKHANDS_URL=valkey_server.url) == (HEALTHY, "The store serves.\n")
    assert await _command("controller", DECKHANDS_URL=valkey_server.url) == (
        LAPSED,
        "No controller worker of this host is known to the store.\n",
    )
    usage = "Usage: python -m broker.health controller|tool|ingress|jobs|beat|store|member\n"
    assert await _command("worker", DECKHANDS_URL=valkey_server.url) == (UNKNOWN, usage)
    status, said = await _command("store", DECKHANDS_SHARDS="many")
    assert (status, said) == (UNKNOWN, "DECKHANDS_SHARDS is 'many'. It must be a number.\n")


async def _command(*arguments: str, **variables: str) -> tuple[int, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DECKHANDS_")}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "broker.health", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**environment, **variables},
    )
    said, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, said.decode()
