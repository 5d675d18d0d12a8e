"""Webhooks with jobs workers that die: everything that settles hears of, in order, and repeats have the same id."""

from __future__ import annotations

import base64

import pytest

from broker.contract.specs import Tenancy
from broker.runtime.settings import BrokerSettings
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.webhook_jobs import open_repository
from tests.faults.harness import FaultCluster
from tests.webhook_parts import begin_worked, receiving

LIMIT_SECONDS = 90.0
EVENTS = ("conversation.state_changed", "conversation.settled")
SECRET_KEY = base64.b64encode(bytes(32)).decode()
TOLD = ["running", "finished"]


@pytest.mark.parametrize("place", [pytest.param("jobs.planned", marks=pytest.mark.slow), "jobs.delivered"])
async def test_a_worker_that_dies_loses_nothing_that_has_settled(
    cluster: FaultCluster, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.client
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", SECRET_KEY)
    async with receiving() as receiver:
        book = open_repository(JobServices(client.store, BrokerSettings.from_env()))
        await book.add("acme", receiver.url, EVENTS)
        names = [f"one-{number}" for number in range(3)]
        for name in names:
            await begin_worked(client, name, tenancy=Tenancy(tenant="acme"))
        private = {"DECKHANDS_WEBHOOK_PRIVATE": "127.0.0.1", "DECKHANDS_SECRET_KEY": SECRET_KEY}
        cluster.start_jobs("j1", **private, DECKHANDS_FAILPOINTS=f"{place}:kill")
        cluster.start_beat("b1")
        await cluster.until_ended("j1", limit=LIMIT_SECONDS)
        due = f"{client.store.all_shards[0].webhooks}:due"
        for line in await client.store.connection.call("ZRANGE", due, 0, -1):
            await client.store.connection.call("ZADD", due, 1, line)  # as if the minute of the dead worker were over
        cluster.start_jobs("j2", **private)

        async def are_told() -> bool:
            return all(receiver.states(name) == TOLD for name in names)

        await cluster.until(are_told, limit=LIMIT_SECONDS, what="what has settled")
        repeated = len(receiver.requests) - len({headers["webhook-id"] for headers, _ in receiver.requests})
        assert repeated in ((1, 2, 3) if place == "jobs.delivered" else (0,))
