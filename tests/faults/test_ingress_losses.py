"""What is lost of a Celery queue when ingresses are killed while they take messages: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.celery.taken_entries import TAKEN
from deckhands.ingress.context import derive_task_conversation_id
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present, saying
from tests.polling import unhurried, until

MESSAGES_A_KILL = 20


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, id="some", marks=[pytest.mark.soak, pytest.mark.timeout(1_200)]),
        pytest.param(200, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3_600)]),
    ],
)
async def test_a_killed_ingress_loses_nothing(tmp_path: Path, kills: int) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller()
        for name in ("d0", "d1"):
            cluster.start_ingress(name)
        await all_present(cluster)
        producer = Producer(cluster)
        broker = producer.app.backend.client
        model = producer.options(saying("done"))["model"]
        sent: list[str] = []
        for kill in range(kills):
            before = len(sent)
            for n in range(MESSAGES_A_KILL):
                sent.append(f"task-{before + n}")
                producer.send("submit", "do it", kwargs={"model": model}, task_id=sent[-1], ignore_result=True)
            left = MESSAGES_A_KILL - kill % MESSAGES_A_KILL  # each kill meets another moment of the same work
            await until(lambda left=left: broker.llen("deckhands") < left, limit=unhurried(60.0), what="work")  # type: ignore[misc]
            name = f"d{kill % 2}"
            cluster.kill(name)
            cluster.start_ingress(name)

        def is_drained() -> bool:
            taken = broker.keys(f"{TAKEN}*")
            return not (broker.llen("deckhands") or broker.hlen("deckhands:unacked") or taken)

        await until(is_drained, limit=unhurried(120.0), what="an end of all messages")
        store = cluster.client.store
        metas = [store.keys(derive_task_conversation_id(task_id)).meta for task_id in sent]
        there = await store.connection.call_many([("EXISTS", meta) for meta in metas])
        lost = there.count(0)
        print(f"{kills} ingresses killed, {len(sent)} messages sent, {lost} lost")
        assert lost == 0
        assert len(await cluster.client.recent(limit=2 * len(sent))) == len(sent)
