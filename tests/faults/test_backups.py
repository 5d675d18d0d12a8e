"""Backups of the store by each way of docs/archive.md#backup-and-restore, restored: what is lost, and that conversations continue."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from broker.log.invariants import find_violations
from tests.faults.harness import FaultCluster, steps
from tests.integration.command_line import deckhands, environment

COUNT, STEPS = 4, 8
AOF = "appendonlydir"
MANIFEST = "file appendonly.aof.1.base.rdb seq 1 type b\n"

Backup = Callable[[FaultCluster, Path], Awaitable[None]]
Restore = Callable[[Path, Path], None]


async def save_snapshot(cluster: FaultCluster, target: Path) -> None:
    call = cluster.client.store.connection.call
    await call("BGSAVE")

    async def is_idle() -> bool:
        return b"rdb_bgsave_in_progress:0" in await call("INFO", "persistence")

    await cluster.until(is_idle, what="the end of the snapshot")
    assert b"rdb_last_bgsave_status:ok" in await call("INFO", "persistence")
    target.mkdir()
    shutil.copy(cluster.store.directory / "dump.rdb", target)


def restore_snapshot(backup: Path, directory: Path) -> None:
    """With an append-only file, a server does not load `dump.rdb`: the snapshot becomes the file's base."""
    (directory / AOF).mkdir()
    shutil.copy(backup / "dump.rdb", directory / AOF / "appendonly.aof.1.base.rdb")
    (directory / AOF / "appendonly.aof.manifest").write_text(MANIFEST)


async def copy_append_only_file(cluster: FaultCluster, target: Path) -> None:
    call = cluster.client.store.connection.call
    await call("CONFIG", "SET", "auto-aof-rewrite-percentage", "0")

    async def is_idle() -> bool:
        return b"aof_rewrite_in_progress:0" in await call("INFO", "persistence")

    await cluster.until(is_idle, what="the end of a rewrite")
    target.mkdir()
    await asyncio.to_thread(shutil.copytree, cluster.store.directory / AOF, target / AOF)
    await call("CONFIG", "SET", "auto-aof-rewrite-percentage", "100")


def restore_append_only_file(backup: Path, directory: Path) -> None:
    shutil.copytree(backup / AOF, directory / AOF)


async def copy_volume(cluster: FaultCluster, target: Path) -> None:
    """Copy everything while the server writes, as a backup program does."""
    await cluster.client.store.connection.call("CONFIG", "SET", "auto-aof-rewrite-percentage", "0")
    await asyncio.to_thread(
        shutil.copytree, cluster.store.directory, target, ignore=shutil.ignore_patterns("*.sock", "server.lock")
    )


WAYS: Mapping[str, tuple[Backup, Restore]] = {
    "snapshot": (save_snapshot, restore_snapshot),
    "append-only file": (copy_append_only_file, restore_append_only_file),
    "volume": (copy_volume, restore_append_only_file),
}


async def last_ids(cluster: FaultCluster, ids: list[str]) -> dict[str, int]:
    return {cid: await cluster.client.log.load_last_id(cid) for cid in ids}


@pytest.mark.parametrize("way", WAYS)
async def test_a_restored_store_has_all_until_the_backup_and_continues(
    cluster: FaultCluster, tmp_path: Path, way: str
) -> None:
    cluster.require_one_server()
    backup, restore = WAYS[way]
    cluster.start()
    ids = await cluster.submit(steps(STEPS, seconds=0.2), count=COUNT)
    await cluster.until(lambda: all("end-1" in cluster.effects(cid) for cid in ids))
    before = await last_ids(cluster, ids)
    await backup(cluster, tmp_path / "backup")
    (later,) = await cluster.submit(steps(1))
    await cluster.settle([*ids, later])
    after = await last_ids(cluster, ids)
    # The disk is lost. First the workers are stopped, which remember more than the backup has.
    for name in list(cluster.workers):
        cluster.kill(name)
    await cluster.close_workspaces()
    await cluster.kill_store()
    shutil.rmtree(cluster.store.directory / AOF)
    (cluster.store.directory / "dump.rdb").unlink(missing_ok=True)
    restore(tmp_path / "backup", cluster.store.directory)
    await cluster.store.start()
    restored = await last_ids(cluster, ids)
    assert all(before[cid] <= restored[cid] <= after[cid] for cid in ids), (before, restored, after)
    assert any(restored[cid] < after[cid] for cid in ids)
    known = {row.conversation_id for row in await cluster.client.recent()}
    assert known == set(ids)  # the later conversation is lost
    for cid in ids:
        events = await cluster.client.events(cid)
        assert find_violations(events, conversation_id=cid, last_event_id=restored[cid], is_over=False) == []
    cluster.start()
    await cluster.settle(ids)
    for cid in ids:
        assert (await cluster.client.row(cid)).state == "finished"
        assert (await cluster.client.verify(cid)).violations == ()
    env = environment(tmp_path / "home", DECKHANDS_URL=cluster.store.url)
    done = await asyncio.to_thread(deckhands, "doctor", env=env)
    assert f"{COUNT} of {COUNT} logs checked" in " ".join(done.out.split()), done.out + done.err


async def test_a_snapshot_beside_an_append_only_file_is_not_loaded(cluster: FaultCluster, tmp_path: Path) -> None:
    """Why docs/archive.md#backup-and-restore makes the snapshot the base of an append-only file."""
    cluster.require_one_server()
    (cid,) = await cluster.submit(steps(1))
    await save_snapshot(cluster, tmp_path / "backup")
    await cluster.kill_store()
    shutil.rmtree(cluster.store.directory / AOF)
    await cluster.store.start()
    assert await cluster.client.store.connection.call("DBSIZE") == 0
    await cluster.kill_store()
    shutil.rmtree(cluster.store.directory / AOF)
    restore_snapshot(tmp_path / "backup", cluster.store.directory)
    await cluster.store.start()
    assert (await cluster.client.row(cid)).last_event_id >= 2
