"""A tool worker is handed its own action again: it was presumed dead while it still had the action in hand."""

import asyncio
from pathlib import Path

from broker.contract.actions import CmdRunAction
from broker.contract.events import AgentSpec, ConversationCreated
from broker.contract.observations import CmdOutputObservation
from broker.coordination.membership import Membership
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.simulation.canonical import CID, environment, said
from tests.simulation.simulated_cluster import Cluster

COMMAND_SECONDS = 1.0
SLACK_SECONDS = 1.0


async def bury(store: Store, worker_id: str) -> None:
    """Let a worker's heartbeat lapse and another one sweep."""
    names = store.all_shards[0]
    other = Membership(store, "tool-other", "tool")
    await other.register()
    await store.connection.call_many([("ZADD", names.workers, 1, worker_id), ("HDEL", f"{names.root}:clock", "quiet")])
    assert await other.beat(0) is not None
    assert await store.connection.call("ZSCORE", names.workers, worker_id) is None


def test_action_handed_on_to_its_holder_does_not_wait(tmp_path: Path) -> None:
    cluster = Cluster(1, {}, environment(tmp_path))
    cluster.node.run_seconds = COMMAND_SECONDS

    async def answered_after() -> float:
        """Bury the tool worker as soon as it has its first action, and return how long that action took."""
        await cluster.open()
        cluster.start("controller", cluster.controller)
        cluster.start("tools", cluster.tools)
        store = await cluster.open()
        log = EventLog(store)
        created = ConversationCreated(conversation_id=CID, agent=AgentSpec(tool_concurrency=2))
        await log.create(created, [said("<task>")], key="task")
        begun = 0.0
        async with asyncio.timeout(60):
            async for event in log.tail(CID):
                if isinstance(event, CmdRunAction) and not begun:
                    begun = cluster.clock.monotonic()
                    once = store.known_keys(CID).once
                    while (worker := await store.connection.call("HGET", once, f"w:{event.id}")) is None:
                        await asyncio.sleep(0.01)
                    await bury(store, worker.decode())
                if isinstance(event, CmdOutputObservation):
                    break
        return cluster.clock.monotonic() - begun

    assert cluster.run(answered_after()) < COMMAND_SECONDS + SLACK_SECONDS
    assert len(set(cluster.node.executions)) == len(cluster.node.executions)
