"""Model calls that wait for a provider's batch, and the batches they are in.

A call waits in the queue of its lane: one provider, address, key and model. A worker seals what waits there into a
batch, records it, sends it, and later brings the result of each call to its conversation; see `controller_worker`.

Holds: a conversation has one call at most, and its outcome is reported once; a batch is recorded with its calls before
it is sent; at most one live worker has a batch in hand. A batch of which the store has lost a part is over: its calls
are forgotten, and their conversations woken to put them again, so a call may be bought twice then.
Does not: know providers; what a call and a result look like is text to it.
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

from broker.coordination import wake
from broker.runtime import StoreRefused, new_key
from broker.store import WRONG_TYPE, ShardKeys, Store, texts_by_name

COMPRESSION = 1
OPEN_AT_ONCE = 64

_log = logging.getLogger(__name__)


class CallStands(StrEnum):
    """How far a call has come."""

    NONE = "none"
    WAITING = "waiting"
    SENT = "sent"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a conversation.

    Attributes:
        seen_id: the last event that its prompt was made from.
        result: its outcome, once it is done.
    """

    stands: CallStands
    seen_id: int = 0
    result: bytes = b""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that this worker has in hand.

    Attributes:
        about_lane: what was said about its lane; empty when that is not known.
        provider: its id there; empty when that is not known.
        sent_ms: when sending it began for the last time, by the shared time; 0 for never.
        waited_seconds: how long ago that was.
        further: what workers have written down besides.
    """

    batch_id: str
    lane: str
    about_lane: str
    count: int
    provider: str
    sent_ms: int
    waited_seconds: float
    further: Mapping[str, str]


class Batches:
    """The batches of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shard = ShardKeys(0)

    async def ask(self, conversation_id: str, step: str) -> Call:
        """Return how a call stands."""
        outcome, *rest = await self._call("deck_batch_ask", conversation_id, step)
        stands = CallStands(outcome)
        if stands is CallStands.NONE:
            return Call(stands)
        result = zlib.decompress(rest[1]) if stands is CallStands.DONE else b""
        return Call(stands, int(rest[0]), result)

    async def put(
        self, conversation_id: str, step: str, *, seen_id: int, lane: str, about_lane: str, body: bytes
    ) -> None:
        """Queue a call for a batch. Idempotent: the same step is queued once.

        Args:
            about_lane: what a worker needs to know to serve the lane.
            body: what the provider is to be sent.
        """
        packed = zlib.compress(body, COMPRESSION)
        await self._call("deck_batch_put", conversation_id, step, seen_id, lane, about_lane, packed, len(body))

    async def drop(self, conversation_id: str, step: str = "") -> CallStands:
        """Forget a call, or that of one step only. Idempotent.

        Returns:
            How it stood: one that was sent is paid for all the same.
        """
        (outcome, *_) = await self._call("deck_batch_drop", conversation_id, step)
        return CallStands(outcome)

    async def lanes(self) -> dict[str, str]:
        """Return what was said about each lane in which calls wait, by lane."""
        command = ("HGETALL", f"{self._root}:lanes")
        try:
            found = await self._store.call(*command)
        except StoreRefused as error:
            if WRONG_TYPE not in error.message:
                raise
            await self.due()  # moves away what stands in the place of the lanes
            found = await self._store.call(*command)
        return texts_by_name(found)

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
        """Make a batch of those that wait in a lane and take it in hand, if it is time.

        Returns:
            The new batch's id; or an empty one, and in how many seconds it is time, -1 if nothing waits.
        """
        batch_id = new_key()
        limits = (round(lease_seconds * 1000), max_calls, max_bytes, round(gather_seconds * 1000))
        outcome, number = await self._call("deck_batch_seal", lane, batch_id, worker_id, *limits)
        return (batch_id, 0.0) if outcome == "sealed" else ("", -1.0 if number < 0 else number / 1000)

    async def due(self) -> list[str]:
        """Return the batches that somebody should look after now."""
        _, *found = await self._call("deck_batch_due", OPEN_AT_ONCE)
        return [batch.decode() for batch in found]

    async def lease(self, batch_id: str, worker_id: str, *, lease_seconds: float) -> Batch | None:
        """Take a batch in hand; None while another live worker has it, or when it is over.

        One that the store has lost in part is over: those who wait for it are woken.
        """
        outcome, *flat = await self._call("deck_batch_lease", batch_id, worker_id, round(lease_seconds * 1000))
        if outcome == "busy":
            return None
        if outcome == "lost":
            waiting = [cid.decode(errors="backslashreplace") for cid in flat]
            _log.error("the store has lost the batch %s; %d calls are put again", ascii(batch_id), len(waiting))
            await wake(self._store, waiting)
            return None
        found = texts_by_name(flat)
        return Batch(
            batch_id=batch_id,
            lane=found["lane"],
            about_lane=found.get("about_lane", ""),
            count=int(found["count"]),
            provider=found.get("provider", ""),
            sent_ms=int(found.get("sent_ms", 0)),
            waited_seconds=int(found.get("waited_ms", 0)) / 1000,
            further=found,
        )

    async def note(
        self, batch: Batch, worker_id: str, *, look_again_seconds: float | None = None, **fields: str | int
    ) -> bool:
        """Record the state of a batch.

        Args:
            look_again_seconds: gives it out of hand until then; None keeps it.
            fields: `provider` is the provider's id; an empty value takes a field away.

        Returns:
            False when another worker has it in hand now: nothing was written, and nothing more is to be done.
        """
        noted = [part for item in fields.items() for part in item]
        again = "" if look_again_seconds is None else round(look_again_seconds * 1000)
        (outcome, *_) = await self._call("deck_batch_note", batch.batch_id, worker_id, again, *noted)
        return bool(outcome == "noted")

    async def bodies(self, batch: Batch) -> dict[str, bytes]:
        """Return what is to be sent, by the number of each call; what is not wanted or cannot be used is left out."""
        calls = await self._calls(batch)
        names = [f"{self._root}:call:{calls[number].partition(' ')[0]}" for number in calls]
        commands = [("HMGET", name, "body", "batch", "step") for name in names]
        try:
            found = await self._store.call_many(commands)
        except StoreRefused as error:
            if WRONG_TYPE not in error.message:
                raise
            for name in names:
                await self._store.function("deck_keep_kind", (name, self._shard.root), "hash")
            found = await self._store.call_many(commands)
        wanted = {}
        for number, (body, at, step) in zip(calls, found, strict=True):
            step_there = calls[number].rpartition(" ")[2].encode()
            if body is not None and at == batch.batch_id.encode() and step == step_there:
                with suppress(zlib.error):  # it is answered like one for which the batch has no result
                    wanted[number] = zlib.decompress(body)
        return wanted

    async def numbers(self, batch: Batch) -> list[str]:
        """Return the numbers of a batch's calls, in order."""
        return sorted(filter(_is_number, await self._calls(batch)), key=int)

    async def deliver(self, batch: Batch, number: str, result: bytes) -> str | None:
        """Keep the result of a call, unless it is known. Idempotent.

        Returns:
            The conversation to wake; None when nobody waits for it any more.
        """
        packed = zlib.compress(result, COMPRESSION)
        outcome, *cid = await self._call("deck_batch_deliver", batch.batch_id, number, packed)
        return cid[0].decode() if outcome == "delivered" else None

    async def close(self, batch: Batch, worker_id: str) -> None:
        """Forget a batch whose calls are all delivered. Idempotent."""
        await self._call("deck_batch_close", batch.batch_id, worker_id)

    async def known(self) -> set[str]:
        """Return the providers' ids of the batches of the last days."""
        found = await self._store.call("ZRANGE", f"{self._root}:known", 0, -1)
        return {provider.decode(errors="backslashreplace") for provider in found}

    async def _calls(self, batch: Batch) -> dict[str, str]:
        return texts_by_name(await self._store.call("HGETALL", f"{self._root}:calls:{batch.batch_id}"))

    @property
    def _root(self) -> str:
        return f"{self._shard.root}:batch"

    async def _call(self, function: str, *arguments: Any) -> list[Any]:
        return await self._store.function(function, (self._shard.root,), *arguments)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
