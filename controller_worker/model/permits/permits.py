"""State shared by the call permits of a worker's conversations: governor, ledger, batches, and their maintenance.

Holds: the permit of a conversation is given back even after this worker has lost the conversation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from broker.coordination import Figures
from broker.limits import Batches, Governor, Ledger, QuotaTable
from broker.runtime import StoreRefused, wait_for_tick
from broker.store import Store
from controller_worker.core import compute_ratio
from controller_worker.providers import MessageMemo

SWEEP_SECONDS = 1.0
FIRST_GUESS_TOKENS = 500

_log = logging.getLogger(__name__)


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

    async def aclose(self) -> None:
        """Wait for all background releases, and end the sweeps of budgets."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        await self.ledger.aclose()

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
