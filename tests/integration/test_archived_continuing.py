"""Agents that have finished are archived by workers, and continue after they have been restored or forked."""

from __future__ import annotations

from pathlib import Path

from broker.log.invariants import find_violations
from deckhands.client.archive.archive import Archive
from deckhands.client.client import Client
from tests.faults.harness import FaultCluster, steps
from tests.ingress_parts import Producer
from tests.polling import until

LIMIT_SECONDS = 90.0
AGAIN = {"tool_calls": [{"name": "finish", "arguments": {"message": "done again"}}]}


async def test_an_agent_continues_where_it_was_archived(tmp_path: Path) -> None:
    place, rules = tmp_path / "archive", tmp_path / "retention.toml"
    rules.write_text('[[rule]]\nlabels = {keep = "no"}\nage = "0s"\n[[rule]]\nage = "0s"\n')
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller(DECKHANDS_IDLE_SECONDS="0.1")
        cluster.start_tool()
        cluster.start_jobs(DECKHANDS_ARCHIVE=str(place), DECKHANDS_RETENTION=str(rules))
        client, producer = Client(cluster.client.store, str(place)), Producer(cluster)
        (name,) = await cluster.submit([*steps(1), AGAIN])
        before = await client.wait_until_settled(name, timeout_seconds=LIMIT_SECONDS)
        events = await client.events(name, is_whole=True)

        async def is_gone() -> bool:
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            return not await client.recent()

        await until(is_gone, limit=LIMIT_SECONDS, what="an empty store")
        assert await Archive(str(place)).read_checked(name) == events
        assert await client.summary(name) == before
        rules.write_text("")  # what comes back stays
        fork = await client.fork(name)
        assert await client.restore(name)
        for conversation_id in (name, fork):
            await client.send_message(conversation_id, "Once more.")
            summary = await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
            assert (summary.state, summary.message) == ("finished", "done again")
            log = await client.events(conversation_id)
            assert not find_violations(log, conversation_id=conversation_id)
        assert (await client.events(name, is_whole=True))[: len(events)] == events
        assert cluster.effects(name) == ["begin-0", "end-0"]
        producer.close()
