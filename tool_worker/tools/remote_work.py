"""Work that a call has started elsewhere: a record of it that outlives the worker, and a place to wait without a slot.

Holds: a call that waits takes no concurrency slot, and the death of its worker does not count against it. What was
recorded of an action is found by the worker that takes it over.
Keys: the field `t:<action>` of `deck:{k}:c:<id>:once`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from broker.coordination import NOT_SUSPECTED, CrashAttribution
from broker.store import Store
from broker.tools import ToolContext

FreeSlot = Callable[[], AbstractAsyncContextManager[None]]
"""Frees a slot for the time of a block, and waits for one at its end."""


class RemoteWork:
    """The record of one action's work.

    Args:
        free_slot: Frees the slot of the action.
    """

    def __init__(
        self,
        store: Store,
        conversation_id: str,
        action_id: int,
        *,
        attribution: CrashAttribution = NOT_SUSPECTED,
        free_slot: FreeSlot = nullcontext,
    ) -> None:
        self._store = store
        self._key = store.keys(conversation_id).once
        self._field = f"t:{action_id}"
        self._attribution = attribution
        self._free_slot = free_slot
        self._is_recorded = False

    async def load(self) -> bytes | None:
        """Return the record, or None."""
        found: bytes | None = await self._store.call("HGET", self._key, self._field)
        self._is_recorded = found is not None
        return found

    async def save(self, text: str) -> None:
        """Write the record. Idempotent."""
        self._is_recorded = True
        await self._store.call("HSET", self._key, self._field, text)

    async def forget(self) -> None:
        """Remove the record, once the action has its observation. Idempotent."""
        if self._is_recorded:
            await self._store.call("HDEL", self._key, self._field)

    @asynccontextmanager
    async def park(self) -> AsyncIterator[None]:
        """Wait in this block without a slot; the death of the worker does not count against the action."""
        await self._attribution.mark_waiting()
        async with self._free_slot():
            yield
        await self._attribution.mark_acting()


@dataclass(frozen=True, slots=True)
class RemoteContext(ToolContext):
    """The context of a call whose work may go on elsewhere.

    Attributes:
        work: Its record; None where there is no store.
    """

    work: RemoteWork | None = field(default=None, compare=False, repr=False)
