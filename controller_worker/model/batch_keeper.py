"""The cluster's side of batched calls: seals waiting calls into batches, sends them, polls them, delivers the results.

Every worker with settings for batches does this, for all conversations. A lease keeps two workers off the same batch.

Holds: a batch and its calls are in the store before it is sent. If its sender dies, the provider is searched for the
batch before it is sent again. A worker no longer sends a batch after half of the time after which others resend it. A
call is delivered once; its conversation is woken at least once.
Does not: stop a worker that is suspended in the few milliseconds between its check of the clock and the request. When
it continues, it still sends the batch: the provider charges for it, and its results are dropped. OpenAI refuses such a
batch; see `BatchProvider.revoke`.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from broker.contract import LLMSpec
from broker.coordination import wake_conversations
from broker.limits import Batch, Batches
from broker.runtime import StoreRefused, UsageError, failpoint, to_millis
from broker.store import Store
from controller_worker.model.models import Models
from controller_worker.model.registry import create_batch_provider
from controller_worker.providers import (
    BatchProvider,
    BatchSearch,
    BatchSpec,
    BatchUnconfirmed,
    ModelError,
    NoResponseError,
    OutgoingBatch,
    RateLimitError,
    make_lane,
    to_stored_failure,
)

ROUND_SECONDS = 1.0
LEASE_SECONDS = 1_800.0
"""Longer than any single operation on a batch. A dead worker is detected by its heartbeat, not by this lease."""
SEARCH_AGAIN_SECONDS = 2.0
AFTER_ERROR_SECONDS = 30.0
WAKE_AT_ONCE = 200
OPEN_LANES_LIMIT = 64
"""Bounded because each model has a lane, and clients choose model names."""

_log = logging.getLogger(__name__)


class BatchKeeper:
    """One worker's upkeep of all batches."""

    def __init__(self, store: Store, batches: Batches, models: Models) -> None:
        self._store = store
        self._batches = batches
        self._models = models
        self._lanes: dict[str, tuple[BatchProvider, BatchSpec] | None] = {}

    async def run_maintenance(self, worker_id: str) -> None:
        """Run batch upkeep forever. Return at once if no settings of this worker ask for batches."""
        while self._models.may_batch:
            try:
                await self._run_round(worker_id)
            except Exception:  # noqa: BLE001  (the outer edge: what is wrong with a batch must not end a worker)
                _log.exception("the upkeep of batches failed")
            await asyncio.sleep(ROUND_SECONDS)

    async def aclose(self) -> None:
        """Close all connections."""
        for served in self._lanes.values():
            if served is not None:
                await served[0].aclose()

    async def _run_round(self, worker_id: str) -> None:
        lanes = await self._batches.load_lanes()
        for lane, about in lanes.items():
            with _log_errors(f"the lane {lane}"):
                served = await self._find_provider(lane, about)
                if served is not None:
                    await self._seal(lane, worker_id, served[1])
        for batch_id in await self._batches.find_due():
            with _log_errors(f"the batch {batch_id}"):
                batch = await self._batches.lease(batch_id, worker_id, lease_seconds=LEASE_SECONDS)
                if batch is not None:
                    await self._process(batch, worker_id)
        await self._close_idle_lanes(lanes)

    async def _close_idle_lanes(self, wanted: Container[str]) -> None:
        """Close the connections of idle lanes once there are many. The next batch of such a lane opens them again."""
        spare = [lane for lane in self._lanes if lane not in wanted] if len(self._lanes) > OPEN_LANES_LIMIT else ()
        for lane in spare:
            served = self._lanes.pop(lane)
            if served is not None:
                await served[0].aclose()

    async def _find_provider(self, lane: str, about: str) -> tuple[BatchProvider, BatchSpec] | None:
        """Return the provider and settings of a lane; None if this worker's settings do not know the lane."""
        if lane not in self._lanes and about:
            self._lanes[lane] = None
            try:
                spec = LLMSpec.model_validate_json(about)
                config = self._models.find_settings(spec)
                if config is not None and config.batch is not None and make_lane(spec, config) == lane:
                    provider = await asyncio.to_thread(create_batch_provider, config, self._store.clock)
                    self._lanes[lane] = provider, config.batch
            except (ValidationError, UsageError) as error:
                _log.warning("cannot serve batches of %s: %s", about, error)
        return self._lanes.get(lane)

    async def _seal(self, lane: str, worker_id: str, spec: BatchSpec) -> None:
        batch_id = "-"
        while batch_id:
            batch_id, _ = await self._batches.seal(
                lane,
                worker_id,
                lease_seconds=LEASE_SECONDS,
                max_calls=spec.max_calls,
                max_bytes=spec.max_bytes,
                gather_seconds=spec.gather_seconds,
            )

    async def _process(self, batch: Batch, worker_id: str) -> None:
        served = await self._find_provider(batch.lane, batch.lane_description)
        if served is None:  # another worker serves this lane
            await self._batches.record_state(batch, worker_id, look_again_seconds=AFTER_ERROR_SECONDS)
            return
        provider, spec = served
        try:
            if batch.provider:
                await self._fetch(batch, worker_id, provider, spec)
            elif batch.sent_ms:
                await self._find(batch, worker_id, provider, spec)
            else:
                await self._send(batch, worker_id, provider, spec)
        except ModelError as error:
            _log.warning("batch %s: %s", batch.batch_id, error)
            if error.retryable:
                again = error.retry_after_seconds or AFTER_ERROR_SECONDS
                await self._batches.record_state(batch, worker_id, look_again_seconds=again)
            else:
                await self._deliver(batch, worker_id, {}, to_stored_failure(error))

    async def _send(self, batch: Batch, worker_id: str, provider: BatchProvider, spec: BatchSpec) -> None:
        bodies = await self._batches.load_bodies(batch)
        if not bodies:  # every call was withdrawn
            await self._batches.close(batch, worker_id)
            return
        outgoing = OutgoingBatch(batch.batch_id, bodies)
        uploaded = await provider.upload(outgoing)
        now_ms = to_millis(self._store.clock.now())
        began = self._store.clock.monotonic()
        if not await self._batches.record_state(batch, worker_id, sent_ms=now_ms, uploaded=uploaded, sent=len(bodies)):
            return
        failpoint("controller.batch_before_send")
        left_seconds = spec.lost_after_seconds / 2 - (self._store.clock.monotonic() - began)
        if left_seconds <= 0:  # this process was suspended; another worker may be about to send the batch
            _log.warning("batch %s was not sent: its time limit has passed", batch.batch_id)
            await provider.revoke(uploaded)
            await self._batches.record_state(batch, worker_id, look_again_seconds=0.0, sent_ms="", uploaded="")
            return
        try:
            async with asyncio.timeout(left_seconds):
                provider_id = await provider.submit(outgoing, uploaded)
        except RateLimitError:
            await self._batches.record_state(batch, worker_id, sent_ms="")  # the whole batch was refused
            raise
        except (ModelError, TimeoutError) as error:
            if isinstance(error, ModelError) and not error.retryable:
                raise
            # It is unknown whether the batch arrived.
            await self._batches.record_state(batch, worker_id, look_again_seconds=SEARCH_AGAIN_SECONDS)
            return
        failpoint("controller.batch_after_send")
        await self._batches.record_state(batch, worker_id, look_again_seconds=spec.poll_seconds, provider=provider_id)

    async def _find(self, batch: Batch, worker_id: str, provider: BatchProvider, spec: BatchSpec) -> None:
        """Search the provider for a batch that may or may not have been sent."""
        count = int(batch.fields.get("sent", batch.count))
        sought = BatchSearch(batch.batch_id, count, batch.sent_ms, frozenset(await self._batches.list_provider_ids()))
        waited = batch.waited_seconds
        try:
            found = await provider.find(sought)
            if found is None and waited > spec.lost_after_seconds:
                await provider.revoke(batch.fields.get("uploaded", ""))
                found = await provider.find(sought)
        except BatchUnconfirmed:
            await self._batches.record_state(batch, worker_id, look_again_seconds=spec.poll_seconds)
            return
        if found is not None:
            await self._batches.record_state(batch, worker_id, look_again_seconds=0.0, provider=found)
        elif waited > spec.lost_after_seconds:
            _log.warning("batch %s was not sent by %s; sending it again", batch.batch_id, batch.fields.get("worker"))
            await self._batches.record_state(batch, worker_id, look_again_seconds=0.0, sent_ms="", uploaded="")
        else:
            await self._batches.record_state(batch, worker_id, look_again_seconds=SEARCH_AGAIN_SECONDS)

    async def _fetch(self, batch: Batch, worker_id: str, provider: BatchProvider, spec: BatchSpec) -> None:
        results = await provider.results(batch.provider)
        if results is None:
            await self._batches.record_state(batch, worker_id, look_again_seconds=spec.poll_seconds)
            return
        await self._deliver(
            batch, worker_id, results, to_stored_failure(NoResponseError("The batch has no result for the call."))
        )

    async def _deliver(self, batch: Batch, worker_id: str, results: dict[str, bytes], otherwise: bytes) -> None:
        """Deliver the result of every call of a batch, then close the batch."""
        woken: list[str] = []
        for number in await self._batches.list_numbers(batch):
            failpoint("controller.batch_deliver")
            cid = await self._batches.deliver(batch, number, results.get(number, otherwise))
            if cid is not None:
                woken.append(cid)
            if len(woken) >= WAKE_AT_ONCE:
                await wake_conversations(self._store, woken)
                woken.clear()
        await wake_conversations(self._store, woken)
        failpoint("controller.batch_before_close")
        await self._batches.close(batch, worker_id)


@contextmanager
def _log_errors(what: str) -> Iterator[None]:
    """Log an error of one lane or batch so that the others continue."""
    try:
        yield
    except (StoreRefused, LookupError, ValueError, zlib.error):
        _log.exception("cannot process %s", what)
