"""The worker of jobs dies at every step of retiring: each conversation is in the store or in the archive, and whole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from broker.contract.events import Event, Parent
from broker.runtime.errors import DeckhandsError
from broker.store.keys import ShardKeys
from deckhands.client.archive.archive import Archive
from deckhands.client.client import Client
from tests.archive_parts import begin_ended, delegate_ended
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer
from tests.polling import until

LIMIT_SECONDS = 60.0
STEPS = (
    "archive.before_write",
    "archive.written",
    "archive.checked",
    "retire.begun",
    "deletion.texts_gone",
    "deletion.before_end",
    "retire.deleted",
)
ROUND = ("alone-1", "alone-2", "parent", "child")


async def begin_round(client: Client, number: int) -> dict[str, list[Event]]:
    """Begin two conversations, and one with a delegate; returns their logs."""
    alone_1, alone_2, parent, child = (f"{name}-{number}" for name in ROUND)
    await begin_ended(client, alone_1)
    await begin_ended(client, alone_2)
    await begin_ended(client, child, parent=Parent(conversation_id=parent, delegate_id=2))
    await begin_ended(client, parent, delegate_ended(child))
    names = (alone_1, alone_2, parent, child)
    return {name: await client.events(name, is_whole=True) for name in names}


async def whole_in_one(client: Client, name: str, log: list[Event]) -> bool:
    """Say whether a conversation is whole in the store or in the archive, and so reads as it did."""
    assert client.archive is not None
    try:
        archived = await client.archive.read_checked(name)
    except DeckhandsError:  # not there, or a part
        archived = None
    if archived is None:
        return await Client(client.store).events(name, is_whole=True) == log
    return archived == log


@pytest.mark.parametrize("steps", [STEPS, pytest.param(STEPS * 5, marks=pytest.mark.slow)], ids=["once", "often"])
async def test_conversation_is_present_or_archived_after_any_step(tmp_path: Path, steps) -> None:
    place, rules = tmp_path / "archive", tmp_path / "retention.toml"
    rules.write_text('[[rule]]\nage = "0s"\n')
    environment = {"DECKHANDS_ARCHIVE": str(place), "DECKHANDS_RETENTION": str(rules)}
    logs: dict[str, list[Event]] = {}
    async with FaultCluster(tmp_path).running() as cluster:
        producer = Producer(cluster)
        client = Client(cluster.client.store, str(place))
        for number, step in enumerate(steps, 1):
            logs |= await begin_round(client, number)
            await client.store.connection.call(
                "DEL", ShardKeys(0).job_lock("retire")
            )  # of the worker before; it would lapse
            hit = 1 if step == "retire.begun" else 1 + number % 2
            worker = cluster.start_jobs(f"j{number}", DECKHANDS_FAILPOINTS=f"{step}:kill@{hit}", **environment)
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            assert await asyncio.to_thread(worker.wait, LIMIT_SECONDS) == -signal.SIGKILL, step
            for name, log in logs.items():
                assert await whole_in_one(client, name, log), f"{name} after {step}"
                assert await client.events(name, is_whole=True) == log, f"{name} after {step}"
        cluster.start_jobs("last", **environment)

        async def retired() -> bool:
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            return not await client.recent()

        await until(retired, limit=LIMIT_SECONDS, what="an empty store")
        archive = Archive(str(place))
        for name, log in logs.items():
            assert await archive.read_checked(name) == log, name
        assert await client.store.connection.call("KEYS", "deck:*:c:*") == []
        drafts = place / ".drafts"
        for draft in drafts.iterdir():  # of the workers that were killed
            os.utime(draft, (0, 0))

        async def swept() -> bool:
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            return not [*drafts.iterdir()]

        await until(swept, limit=LIMIT_SECONDS, what="an archive without drafts")
        producer.close()
