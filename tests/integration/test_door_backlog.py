"""Results arrive while tens of thousands of new messages wait in the door's queue."""

from __future__ import annotations

from pathlib import Path

from celery import chord

from deckhands.ingress.desk import conversation_of_task
from tests.door_parts import Producer, saying
from tests.faults.harness import FaultCluster
from tests.polling import unhurried, until
from tests.security.hostile_messages import plain_message

BACKLOG = 40_000
AGENTS = 20


async def test_results_do_not_wait_behind_new_messages(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_door()
        producer = Producer(cluster)
        body = producer.app.signature("shop.report", queue="shop", task_id="the-report")
        header = [producer.signature(f"task {n}", saying(f"answer {n}")) for n in range(AGENTS)]
        parts = chord(header, app=producer.app)(body).parent.results
        single = producer.run(turns=saying("alone"), link=producer.app.signature("shop.alone", queue="alone"))
        for result in (*parts, single):
            await producer.begun(result)

        broker = producer.app.backend.client
        fill_queue(producer, BACKLOG)
        cluster.start_controller()
        limit = unhurried(120.0)
        await until(lambda: all(result.ready() for result in (*parts, single)), limit=limit, what="all results")
        await until(lambda: broker.llen("shop") == broker.llen("alone") == 1, limit=limit, what="what follows them")
        assert BACKLOG / 2 < broker.llen("deckhands") < BACKLOG
        assert [result.result["message"] for result in parts] == [f"answer {n}" for n in range(AGENTS)]
        assert single.result["conversation_id"] == conversation_of_task(single.id)
        producer.close()


def fill_queue(producer: Producer, count: int) -> None:
    """Add messages of short tasks to the door's queue, in few commands."""
    broker = producer.app.backend.client
    for start in range(0, count, 2_000):
        entries = [plain_message("deckhands.pause", name=f"short-{start + n}") for n in range(2_000)]
        broker.lpush("deckhands", *entries)
