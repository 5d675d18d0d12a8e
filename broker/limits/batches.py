"""Model calls that wait for a provider's batch, and the batches that contain them.

A call waits in the queue of its lane: one provider, address, key and model. A worker seals the waiting calls into a
batch, records it, sends it, and later delivers the result of each call to its conversation; see `controller_worker`.

Holds: a conversation has at most one call, and its outcome is delivered once. A batch is recorded with its calls before
it is sent. At most one live worker holds a batch. If the store has lost a part of a batch, the batch ends: its calls
are deleted, and their conversations are woken to queue them again, so a call may be bought twice.
Does not: know providers. The formats of calls and results are opaque here.
Keys: `deck:{0}:batch:…`, see batches.lua.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from broker.coordination import wake_conversations
from broker.runtime import StoreRefused, new_key
from broker.store import WRONG_TYPE_PREFIX, ShardKeys, Store, decode_fields

COMPRESSION = 1
MAX_DUE = 64

_log = logging.getLogger(__name__)


class BatchCallStatus(StrEnum):
    """The status of a call."""

    NONE = "none"
    WAITING = "waiting"
    SENT = "sent"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class BatchCall:
    """A call of a conversation.

    Attributes:
        seen_id: the last event in its prompt.
        result: its outcome, once it is done.
    """

    status: BatchCallStatus
    seen_id: int = 0
    result: bytes = b""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that this worker has leased.

    Attributes:
        about_lane: the description of its lane; empty if unknown.
        provider: its id at the provider; empty if unknown.
        sent_ms: shared time of the latest attempt to send it; 0 if never sent.
        waited_seconds: time since then.
        further: all fields recorded by workers.
    """

    batch_id: str
    lane: str
    lane_description: str
    count: int
    provider: str
    sent_ms: int
    waited_seconds: float
    fields: Mapping[str, str]


class Batches:
    """The batches of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shard = ShardKeys(0)

    async def load_call(self, conversation_id: str, step: str) -> BatchCall:
        """Return the status of a call."""
        outcome, *rest = await self._call("deck_batch_ask", conversation_id, step)
        stands = BatchCallStatus(outcome)
        if stands is BatchCallStatus.NONE:
            return BatchCall(stands)
        result = zlib.decompress(rest[1]) if stands is BatchCallStatus.DONE else b""
        return BatchCall(stands, int(rest[0]), result)

    async def put(
        self, conversation_id: str, step: str, *, seen_id: int, lane: str, about_lane: str, body: bytes
    ) -> None:
        """Queue a call for a batch. Idempotent: the same step is queued once.

        Args:
            about_lane: the description that a worker needs to serve the lane.
            body: the request for the provider.
        """
        packed = zlib.compress(body, COMPRESSION)
        await self._call("deck_batch_put", conversation_id, step, seen_id, lane, about_lane, packed, len(body))

    async def drop(self, conversation_id: str, step: str = "") -> BatchCallStatus:
        """Delete a call. If a step is given, only a call of that step is deleted. Idempotent.

        Returns:
            Its status before. A call that was sent is billed anyway.
        """
        (outcome, *_) = await self._call("deck_batch_drop", conversation_id, step)
        return BatchCallStatus(outcome)

    async def load_lanes(self) -> dict[str, str]:
        """Return the descriptions of the lanes with waiting calls, by lane."""
        command = ("HGETALL", f"{self._root}:lanes")
        try:
            found = await self._store.call(*command)
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message:
                raise
            await self.find_due()  # moves a key of another type away
            found = await self._store.call(*command)
        return decode_fields(found)

    async def seal(
        self,
        lane: str,
        worker_id: str,
        *,
        lease_seconds: float,
        max_calls: int,
        max_bytes: int,
        gather_seconds: float,
    ) -> tuple[str, float]:
        """If the time has come, seal the waiting calls of a lane into a batch and lease it.

        Returns:
            The id of the new batch and 0; or an empty id and the seconds until then, -1 if no call waits.
        """
        batch_id = new_key()
        limits = (round(lease_seconds * 1000), max_calls, max_bytes, round(gather_seconds * 1000))
        outcome, number = await self._call("deck_batch_seal", lane, batch_id, worker_id, *limits)
        return (batch_id, 0.0) if outcome == "sealed" else ("", -1.0 if number < 0 else number / 1000)

    async def find_due(self) -> list[str]:
        """Return the batches that need attention now."""
        _, *found = await self._call("deck_batch_due", MAX_DUE)
        return [batch.decode() for batch in found]

    async def lease(self, batch_id: str, worker_id: str, *, lease_seconds: float) -> Batch | None:
        """Lease a batch; None if another live worker holds it, or if it has ended.

        If the store has lost a part of it, the batch ends, and the waiting conversations are woken.
        """
        outcome, *flat = await self._call("deck_batch_lease", batch_id, worker_id, round(lease_seconds * 1000))
        if outcome == "busy":
            return None
        if outcome == "lost":
            waiting = [cid.decode(errors="backslashreplace") for cid in flat]
            _log.error("the store has lost the batch %s; its %d calls are queued again", ascii(batch_id), len(waiting))
            await wake_conversations(self._store, waiting)
            return None
        found = decode_fields(flat)
        return Batch(
            batch_id=batch_id,
            lane=found["lane"],
            lane_description=found.get("about_lane", ""),
            count=int(found["count"]),
            provider=found.get("provider", ""),
            sent_ms=int(found.get("sent_ms", 0)),
            waited_seconds=int(found.get("waited_ms", 0)) / 1000,
            fields=found,
        )

    async def record_state(
        self, batch: Batch, worker_id: str, *, look_again_seconds: float | None = None, **fields: str | int
    ) -> bool:
        """Record the state of a batch.

        Args:
            look_again_seconds: release the batch for this time; None keeps the lease.
            fields: `provider` is the provider's id; an empty value removes a field.

        Returns:
            False if another worker holds it now. Nothing was written, and the caller must stop.
        """
        noted = [part for item in fields.items() for part in item]
        again = "" if look_again_seconds is None else round(look_again_seconds * 1000)
        (outcome, *_) = await self._call("deck_batch_note", batch.batch_id, worker_id, again, *noted)
        return bool(outcome == "noted")

    async def load_bodies(self, batch: Batch) -> dict[str, bytes]:
        """Return the request of each call by its number. Cancelled and unusable ones are left out."""
        calls = await self._load_calls(batch)
        names = [f"{self._root}:call:{calls[number].partition(' ')[0]}" for number in calls]
        commands = [("HMGET", name, "body", "batch", "step") for name in names]
        try:
            found = await self._store.call_many(commands)
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message:
                raise
            for name in names:
                await self._store.call_function("deck_keep_kind", (name, self._shard.root), "hash")
            found = await self._store.call_many(commands)
        wanted = {}
        for number, (body, at, step) in zip(calls, found, strict=True):
            step_there = calls[number].rpartition(" ")[2].encode()
            if body is not None and at == batch.batch_id.encode() and step == step_there:
                with suppress(zlib.error):  # it is answered like a call without a result
                    wanted[number] = zlib.decompress(body)
        return wanted

    async def list_numbers(self, batch: Batch) -> list[str]:
        """Return the numbers of a batch's calls, in order."""
        numbers = [number for number in await self._load_calls(batch) if number.isascii() and number.isdigit()]
        return sorted(numbers, key=int)

    async def deliver(self, batch: Batch, number: str, result: bytes) -> str | None:
        """Store the result of a call, unless it has one. Idempotent.

        Returns:
            The conversation to wake; None if no conversation waits for it.
        """
        packed = zlib.compress(result, COMPRESSION)
        outcome, *cid = await self._call("deck_batch_deliver", batch.batch_id, number, packed)
        return cid[0].decode() if outcome == "delivered" else None

    async def close(self, batch: Batch, worker_id: str) -> None:
        """Delete a batch whose results are all delivered. Idempotent."""
        await self._call("deck_batch_close", batch.batch_id, worker_id)

    async def list_provider_ids(self) -> set[str]:
        """Return the providers' ids of the batches of the last days."""
        found = await self._store.call("ZRANGE", f"{self._root}:known", 0, -1)
        return {provider.decode(errors="backslashreplace") for provider in found}

    async def _load_calls(self, batch: Batch) -> dict[str, str]:
        return decode_fields(await self._store.call("HGETALL", f"{self._root}:calls:{batch.batch_id}"))

    @property
    def _root(self) -> str:
        return f"{self._shard.root}:batch"

    async def _call(self, function: str, *arguments: Any) -> list[Any]:
        return await self._store.call_function(function, (self._shard.root,), *arguments)
