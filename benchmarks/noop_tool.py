"""A tool worker without workspaces: it claims each action and answers it at once.

It serves the pool `noop`, so conversations whose workspace is in that pool reach it and no other worker. What it leaves
out is the tool itself; queue, claim, decoding, append and the record of lost events are those of a real tool worker.
An argument is another pool to serve.

    DECKHANDS_URL=… python -m benchmarks.noop_tool [POOL]
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

from broker.contract.actions import CmdRunAction
from broker.contract.codec import checksum_of
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionQueue, ActionReclaimed
from broker.coordination.membership import HEARTBEAT_SECONDS, Membership
from broker.log.event_log import EventLog
from broker.log.lost_tails import record_gap
from broker.runtime.errors import EventsLost, OwnershipLost
from broker.runtime.ids import new_worker_id
from broker.store.store import Store, open_store

POOL = "noop"
NODE = "benchmark"
BATCH = 64

_log = logging.getLogger(__name__)


class NoopTool:
    """Answers the actions of the pool `noop` in all shards of a store."""

    def __init__(self, store: Store, *, on_action: Callable[[], None] = lambda: None, pool: str = POOL) -> None:
        """Prepare it; `on_action` is called whenever an action has arrived."""
        self._worker_id = new_worker_id("tool")
        self._on_action = on_action
        self._log = EventLog(store)
        self._queues = [
            ActionQueue(store, names, worker_id=self._worker_id, node=NODE, pools=(pool,), is_first=None)
            for names in store.all_shards
        ]
        streams = [queue.streams for queue in self._queues]
        self._membership = Membership(store, self._worker_id, "tool", streams=streams)

    async def run(self) -> None:
        """Serve until cancelled, or until it is presumed dead."""
        await self._membership.register()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                for queue in self._queues:
                    group.create_task(self._serve(queue, group))
        except* OwnershipLost:
            _log.warning("%s was presumed dead; it starts over", self._worker_id)
        finally:
            for queue in self._queues:
                await queue.aclose()
            await self._membership.leave_soon()

    async def _serve(self, queue: ActionQueue, group: asyncio.TaskGroup) -> None:
        while True:
            for delivery in await queue.read(limit=BATCH):
                if isinstance(delivery, ActionDelivery):
                    self._on_action()
                    group.create_task(self._answer(queue, delivery))
                else:
                    await queue.acknowledge(delivery)

    async def _beat(self) -> None:
        while await self._membership.beat(0) is not None:
            await asyncio.sleep(HEARTBEAT_SECONDS)
        raise OwnershipLost(f"{self._worker_id} was swept.")

    async def _answer(self, queue: ActionQueue, delivery: ActionDelivery) -> None:
        try:
            await self._claim_and_answer(queue, delivery)
        except EventsLost as lost:  # its owner carries out what the log has now
            await record_gap(self._log, lost, noticed_by="a no-op tool worker")

    async def _claim_and_answer(self, queue: ActionQueue, delivery: ActionDelivery) -> None:
        if not isinstance(await queue.claim(delivery), ActionClaimed | ActionReclaimed):
            return
        action = await self._log.decode_entry(delivery.conversation_id, delivery.entry, delivery.action_id)
        assert isinstance(action, CmdRunAction), action.kind
        observation = CmdOutputObservation(
            command=action.command,
            metadata=CmdOutputMetadata(exit_code=0),
            source=action.source,
            cause=action.id,
            tool_call_metadata=action.tool_call_metadata,
        )
        await self._log.append_observation(
            delivery.conversation_id,
            observation,
            worker_id=self._worker_id,
            place=delivery.location,
            checksum=checksum_of(delivery.entry),
        )


async def main() -> None:
    """Serve the store that the environment names."""
    store = await open_store(os.environ["DECKHANDS_URL"], patience_seconds=None)
    while True:
        await NoopTool(store, pool=sys.argv[1] if len(sys.argv) > 1 else POOL).run()


if __name__ == "__main__":
    asyncio.run(main())
