"""The inbox while everything but the store is killed: what it accepted is carried out, and once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.harness import FaultCluster
from tests.inbox_parts import answers, put, replies
from tests.ingress_parts import Producer, saying
from tests.polling import unhurried, until

SEED = 20261123


@pytest.mark.parametrize(
    ("entries", "kills"),
    [
        pytest.param(300, 6, id="some"),
        pytest.param(10_000, 200, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(7_200)]),
    ],
)
async def test_no_accepted_entry_is_lost_or_doubled(tmp_path: Path, entries: int, kills: int) -> None:
    chance = random.Random(SEED)
    async with FaultCluster(tmp_path).running() as cluster:
        starts = {"c": cluster.start_controller, "d": cluster.start_ingress}
        for kind, start in starts.items():
            start(f"{kind}1")
            start(f"{kind}2")
        store = cluster.client.store
        options = Producer(cluster).options(saying("done"))
        options = {"model": options["model"]}
        sent, killed = 0, 0
        while sent < entries or killed < kills:
            for _ in range(max(1, entries // kills)):
                if sent < entries:
                    await put(store, {"id": f"entry-{sent}", "task": "do it", **options})
                    sent += 1
            if killed < kills:
                before = await answers(store)

                async def got_on(before: int = before) -> bool:
                    return await answers(store) > before

                await until(got_on, limit=unhurried(120.0), what="one more answer")
                name = f"{chance.choice('cd')}{chance.choice('12')}"
                cluster.kill(name)
                starts[name[0]](name)
                killed += 1

        async def all_are_told() -> bool:
            if await answers(store) < 2 * entries:
                return False
            return len({(reply.request_id, reply.event) for reply in await replies(store)}) == 2 * entries

        await until(all_are_told, limit=unhurried(120.0 + entries / 5), what="both answers to all entries")
        told = await replies(store)
        by_entry = {(reply.request_id, reply.event): reply.conversation_id for reply in told}
        assert Counter(event for _, event in by_entry) == {"accepted": entries, "settled": entries}
        assert all(by_entry[name, "accepted"] == by_entry[name, "settled"] for name, _ in by_entry)
        assert len({*by_entry.values()}) == entries
        rows = await cluster.client.recent(limit=2 * entries)
        assert {row.conversation_id for row in rows} == {*by_entry.values()}
        # One that three workers in a row died with has been given up, and its producer has that answer.
        assert {row.state for row in rows} <= {"finished", "error"}
