"""Results arrive while tens of thousands of new messages wait in the ingress's queue, and when a thousand runs end at once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from celery import chord, group

from broker.contract.agent_state import AgentState
from broker.contract.observations import AgentStateChangedObservation
from deckhands.ingress.context import derive_task_conversation_id
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, saying
from tests.polling import unhurried, until
from tests.security.hostile_messages import plain_message

BACKLOG = 40_000
ENDED = 1_000
AGENTS = 20


async def test_results_do_not_wait_behind_new_messages(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_ingress()
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
        assert single.result["conversation_id"] == derive_task_conversation_id(single.id)
        producer.close()


async def test_thousand_runs_that_end_at_once_are_answered_once(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_ingress()
        producer = Producer(cluster)
        model = producer.options(saying("never asked"))["model"]
        after = producer.app.signature("shop.report", queue="shop")
        part = producer.app.signature(
            "deckhands.run", kwargs={"task": "x", "model": model}, queue="deckhands", link=[after]
        )
        sent = group([part.clone() for _ in range(ENDED)], app=producer.app).apply_async().results
        ids = [derive_task_conversation_id(result.id) for result in sent]
        cluster.forged.update(ids)
        calls = [("EXISTS", cluster.client.store.known_keys(name).meta) for name in ids]

        async def have_begun() -> bool:
            return all(await cluster.client.store.call_many(calls))

        limit = unhurried(240.0)
        await until(have_begun, limit=limit, what="all beginnings")
        ending = [
            AgentStateChangedObservation(agent_state=state) for state in (AgentState.RUNNING, AgentState.FINISHED)
        ]
        fields = {"state": AgentState.FINISHED.value}
        await asyncio.gather(*(cluster.client.log.append(name, ending, fields=fields) for name in ids))

        pongs = await asyncio.to_thread(producer.app.control.ping, timeout=limit, limit=1)
        with pytest.raises(Exception, match="No conversation with the id"):
            await producer.value(producer.send("pause", "of-nobody"), limit=limit)
        broker = producer.app.backend.client
        keys = [producer.app.backend.get_key_for_task(result.id) for result in sent]

        def states() -> Counter[str]:
            return Counter(json.loads(text)["status"] if text else "none" for text in broker.mget(keys))

        await until(lambda: broker.llen("shop") >= ENDED, limit=limit, what="what follows them")
        await until(lambda: states() == {"SUCCESS": ENDED}, limit=limit, what="all results")
        values = [json.loads(text)["result"] for text in broker.mget(keys)]
        reports = [json.loads(entry)["headers"] for entry in broker.lrange("shop", 0, -1)]
        assert [value["conversation_id"] for value in values] == ids
        assert len(pongs) == 1
        assert sorted(report["parent_id"] for report in reports) == sorted(result.id for result in sent)
        producer.close()


def fill_queue(producer: Producer, count: int) -> None:
    """Add messages of short tasks to the ingress's queue, in few commands."""
    broker = producer.app.backend.client
    for start in range(0, count, 2_000):
        entries = [plain_message("deckhands.pause", name=f"short-{start + n}") for n in range(2_000)]
        broker.lpush("deckhands", *entries)
