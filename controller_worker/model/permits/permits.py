"""State shared by the call permits of a worker's conversations: governor, ledger, batches, and their maintenance.

Holds: the permit of a conversation is given back even after this worker has lost the conversation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from broker.coordination import Figures
from broker.limits import Batches, Governor, Ledger, Quota, QuotaPool, QuotaTable
from broker.runtime import StoreRefused, UsageError, wait_for_tick
from broker.store import Store
from controller_worker.core import compute_ratio
from controller_worker.model.permits.replica_watch import POLL_SECONDS, ReplicaWatch
from controller_worker.providers import MessageMemo

SWEEP_SECONDS = 1.0
"""How often the ledger is swept, and the file of the quota table is looked at."""
FIRST_GUESS_TOKENS = 500

_log = logging.getLogger(__name__)


def stamp_file(path: Path | None) -> tuple[int, int, int] | None:
    """Return what differs after a file was changed or replaced; None if there is no file."""
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Permits:
    """State shared by the permits of a worker's conversations.

    Attributes:
        may_batch: some settings of this worker use a provider's batch API.
        keeps_budgets: some conversation of this worker has a budget, so the ledger is swept.
        tokens: the estimated size of each message.
        figures: the counters of refusals.
    """

    def __init__(
        self, store: Store, table: QuotaTable, *, may_batch: bool = False, figures: Figures | None = None
    ) -> None:
        self.figures = figures or Figures()
        self.governor = Governor(store, table)
        self.ledger = Ledger(store)
        self.batches = Batches(store)
        self.may_batch = may_batch
        self.clock = store.clock
        self.keeps_budgets = False
        self.tokens: MessageMemo[int] = MessageMemo()
        self._typical_output: dict[str, float] = {}
        self._ratios: dict[str, float] = {}
        self._unfinished: set[asyncio.Task[None]] = set()
        self._watch = ReplicaWatch()
        self._table_stamp = stamp_file(table.path)
        self._has_new_table = asyncio.Event()

    def estimate_output_tokens(self, model: str) -> int:
        """Return the typical number of tokens in a model's recent replies."""
        return round(self._typical_output.get(model, FIRST_GUESS_TOKENS))

    def learn_output(self, model: str, tokens: int) -> None:
        """Record the length of a reply."""
        before = self._typical_output.get(model, FIRST_GUESS_TOKENS)
        self._typical_output[model] = before + (tokens - before) / 8

    def ratio(self, model: str) -> float | None:
        """Return the provider's token count divided by the estimate for a model; None before its first reply."""
        return self._ratios.get(model)

    def learn_prompt(self, model: str, *, estimated_tokens: int, prompt_tokens: int) -> None:
        """Record a prompt's ratio of counted to estimated tokens. Increases apply at once, decreases slowly."""
        found = compute_ratio(prompt_tokens, estimated_tokens)
        before = self._ratios.get(model, found)
        self._ratios[model] = found if found > before else before + (found - before) / 8

    def release_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a release in the background, for a call or a conversation that has already ended."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._note_end)

    async def run_maintenance(self, worker_id: str) -> None:
        """Wake conversations when time or a worker's death makes room for their calls. Runs forever."""
        try:
            await self.governor.publish()
        except StoreRefused as error:
            _log.error("cannot publish the quotas, so they are not enforced: %s", error)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.governor.run_wakeups(worker_id))
            group.create_task(self._keep_sweeping())
            if self.governor.table.path is not None:
                group.create_task(self._follow_table())
            group.create_task(self._watch_replicas(worker_id))

    async def read_table_again(self) -> None:
        """Put the quota table into force as its file is now. An invalid table changes nothing."""
        try:
            table = await asyncio.to_thread(self.governor.table.read_again)
        except UsageError as error:
            _log.error("the quota table in force stays: %s", error)
            table = self.governor.table
        await self.governor.use(table)
        self._has_new_table.set()

    async def _follow_table(self) -> None:
        """Read the file of the quota table again whenever it changes."""
        while True:
            await wait_for_tick(SWEEP_SECONDS)
            stamp = await asyncio.to_thread(stamp_file, self.governor.table.path)
            if stamp is None or stamp == self._table_stamp:
                continue
            self._table_stamp = stamp
            try:
                await self.read_table_again()
            except StoreRefused as error:
                _log.error("cannot publish the quotas, so they are not enforced: %s", error)

    async def _watch_replicas(self, worker_id: str) -> None:
        """Report the health of replicas to the store; of all workers, one asks each replica."""
        while True:
            self._has_new_table.clear()
            pools = [pool for pool in self.governor.table.pools if pool.has_replicas]
            if not pools:  # an idle worker does not wake up for nothing
                await self._has_new_table.wait()
                continue
            try:
                await asyncio.gather(
                    *(self._ask_replica(pool, quota, worker_id) for pool in pools for quota in pool.quotas)
                )
            except StoreRefused as error:
                _log.error("cannot record the health of replicas: %s", error)
            await wait_for_tick(POLL_SECONDS)

    async def _ask_replica(self, pool: QuotaPool, quota: Quota, worker_id: str) -> None:
        if not await self.governor.claim_report(pool, quota.key, worker_id, POLL_SECONDS):
            return
        found = await self._watch.ask(quota.base_url or "")
        if not found.is_up:
            _log.warning("the replica %s of %s does not answer", quota.base_url, quota.model)
        await self.governor.report_engine(
            pool, quota.key, worker_id, is_up=found.is_up, cache_tokens=found.cache_tokens, use=found.use
        )

    async def aclose(self) -> None:
        """Wait for all background releases, and end the sweeps of budgets."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        await self.ledger.aclose()
        await self._watch.aclose()

    async def _keep_sweeping(self) -> None:
        while True:
            await wait_for_tick(SWEEP_SECONDS)
            try:
                if self.keeps_budgets:
                    await self.ledger.sweep()
            except StoreRefused as error:
                _log.error("cannot sweep the budgets: %s", error)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("cannot give back a call's reservation: %s", task.exception())
