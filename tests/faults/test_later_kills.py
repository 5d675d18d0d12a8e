"""Conversations that start later or expire, in every way in; all processes die in between.

The start is far off, and is then moved to now in the store: no test waits for a clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from broker.coordination.membership import list_members
from broker.log.conversations import Conversations
from broker.log.invariants import find_violations
from broker.store.keys import INBOX
from controller_worker.loop.replay import replay
from deckhands.client.reading.summary import ExitCode
from deckhands.client.tasks.tasks import derive_conversation_id
from deckhands.ingress.context import derive_task_conversation_id
from tests.faults.harness import FaultCluster
from tests.inbox_parts import put, replies
from tests.ingress_parts import Producer, saying

DAY = 86_400.0
LIMIT_SECONDS = 60.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(tmp_path, append_fsync="always").running() as cluster:
        cluster.start_ingress()  # which writes down what the others send
        yield cluster


@pytest.fixture
def producer(cluster: FaultCluster) -> Iterator[Producer]:
    found = Producer(cluster)
    yield found
    found.close()


def start_workers(cluster: FaultCluster) -> None:
    cluster.start()


async def is_there(cluster: FaultCluster, conversation_id: str) -> bool:
    meta = cluster.client.store.known_keys(conversation_id).meta
    return bool(await cluster.client.store.connection.call("EXISTS", meta))


async def move(cluster: FaultCluster, conversation_id: str, field: str, key: str) -> None:
    names = cluster.client.store.known_keys(conversation_id)
    call = cluster.client.store.connection.call
    assert await call("HGET", names.meta, field) is not None
    await call("HSET", names.meta, field, 1)
    await call("ZADD", f"{names.shard.root}:{key}", 1, conversation_id)


async def test_each_conversation_starts_in_time_after_kills(cluster: FaultCluster, producer: Producer) -> None:
    """A client's, a Celery task's and an inbox entry's; then workers, ingress and store die, and come back."""
    start_workers(cluster)
    client, store = cluster.client, cluster.client.store
    expected: dict[str, Any] = producer.options(saying("done"))
    by_client = await client.submit(request_of(expected, delay=DAY), conversation_id="by-client")
    task = producer.run(turns=saying("done"), countdown=int(DAY))
    await put(store, {**producer.options(saying("done")), "task": "x", "id": "a", "delay": DAY})
    ids = [by_client, derive_task_conversation_id(task.id), derive_conversation_id("inbox:shop:a")]
    for conversation_id in ids:
        await cluster.until(lambda cid=conversation_id: is_there(cluster, cid), limit=LIMIT_SECONDS)  # type: ignore[misc]
    for row in await Conversations(store).load_rows(ids):
        assert (row.state, row.wait_reason) == ("loading", "scheduled")
        assert row.not_before is not None
        assert timedelta(days=0.99) < row.not_before - row.created <= timedelta(days=1)
    waiting = await client.summary(by_client)
    assert waiting.not_before is not None
    await cluster.until(lambda: is_answered(cluster), limit=LIMIT_SECONDS)  # otherwise the entry comes again
    for name in list(cluster.workers):
        cluster.kill(name)
    await cluster.restart_store()
    start_workers(cluster)
    cluster.start_ingress()
    await cluster.until(lambda: has_members(cluster, 3), limit=LIMIT_SECONDS)
    assert [row.last_event_id for row in await Conversations(store).load_rows(ids)] == [2, 2, 2]
    for conversation_id in ids:
        await move(cluster, conversation_id, "due_ms", "parked")
    for conversation_id in ids:
        await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
        events = await client.events(conversation_id)
        assert [event.kind for event in events][2] == "conversation.begun"
        assert find_violations(events, conversation_id=conversation_id, is_strict=True) == []
        assert replay(events).divergence is None
    assert (await producer.value(task))["state"] == "finished"
    await cluster.until(lambda: has_replies(cluster, 2), limit=LIMIT_SECONDS)
    assert [reply.event for reply in await replies(store)] == ["accepted", "settled"]


async def has_members(cluster: FaultCluster, number: int) -> bool:
    return len([one for one in await list_members(cluster.client.store) if one.left_seconds > 0]) >= number


async def is_answered(cluster: FaultCluster) -> bool:
    return await cluster.client.store.call("XLEN", INBOX) == 0


async def has_replies(cluster: FaultCluster, number: int) -> bool:
    return len(await replies(cluster.client.store)) >= number


def request_of(options: dict[str, Any], **fields: Any) -> Any:
    from deckhands.client.tasks.spec import TaskSpec

    return TaskSpec.parse({"task": "x", **options, **fields})


async def test_expired_conversation_is_answered_without_any_worker(cluster: FaultCluster, producer: Producer) -> None:
    """Only the ingress runs, which can report the expiry without an agent. A later controller starts nothing."""
    client, store = cluster.client, cluster.client.store
    options = producer.options(saying("too late"))
    controller = cluster.start_controller()  # so that the agent is known
    await cluster.until(lambda: has_members(cluster, 2), limit=LIMIT_SECONDS)
    cluster.kill("c1")
    assert controller.poll() is not None
    by_client = await client.submit(request_of(options, expires=DAY), conversation_id="by-client")
    task = producer.run(turns=saying("too late"), expires=DAY)
    await put(store, {**producer.options(saying("too late")), "task": "x", "id": "a", "expires": DAY})
    ids = [by_client, derive_task_conversation_id(task.id), derive_conversation_id("inbox:shop:a")]
    for conversation_id in ids:
        await cluster.until(lambda cid=conversation_id: is_there(cluster, cid), limit=LIMIT_SECONDS)  # type: ignore[misc]
        await move(cluster, conversation_id, "expires_ms", "expiring")
    for conversation_id in ids:
        summary = await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
        assert (summary.state, summary.error_code, summary.exit_code) == ("error", "expired", ExitCode.EXPIRED)
    with pytest.raises(TaskRevokedError):
        await producer.value(task)
    await cluster.until(lambda: has_replies(cluster, 2), limit=LIMIT_SECONDS)
    settled = (await replies(store))[-1]
    assert (settled.event, settled.content["error_code"]) == ("settled", "expired")
    start_workers(cluster)
    later = await client.submit(request_of(producer.options(saying("in time")), expires=DAY))
    assert (await client.wait_until_settled(later, timeout_seconds=LIMIT_SECONDS)).state == "finished"
    assert [row.last_event_id for row in await Conversations(store).load_rows(ids)] == [3, 3, 3]


async def test_waiting_conversation_can_be_cancelled_started_and_continued(
    cluster: FaultCluster, producer: Producer
) -> None:
    start_workers(cluster)
    await cluster.until(lambda: has_members(cluster, 3), limit=LIMIT_SECONDS)
    client = cluster.client
    names = ("cancelled", "resumed", "paused")
    for name in names:
        request = request_of(producer.options(saying("done")), not_before=datetime.now(UTC) + timedelta(days=1))
        await client.submit(request, conversation_id=name)
    assert (await client.cancel("cancelled", wait_seconds=LIMIT_SECONDS)).state == "stopped"
    await client.resume("resumed")
    await client.pause("paused")
    assert (await client.wait_until_settled("paused", timeout_seconds=LIMIT_SECONDS)).state == "paused"
    assert (await client.wait_until_settled("resumed", timeout_seconds=LIMIT_SECONDS)).state == "finished"
    await client.send_message("cancelled", "after all")
    assert (await client.wait_until_settled("cancelled", timeout_seconds=LIMIT_SECONDS)).state == "finished"
    for name in names:
        assert replay(await client.events(name)).divergence is None
