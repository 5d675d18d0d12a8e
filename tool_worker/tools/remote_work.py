"""Work that a call has started elsewhere: a record that outlives the worker, and a way to wait without a slot.

Holds: a call that waits takes no concurrency slot, and the death of its worker does not count against it. The
worker that takes an action over finds its record. It is encrypted if there is a key of the secrets.
Does not: remove the record of an action whose worker dies just after the observation; it is deleted with the log.
Keys: the field `t:<action>` of `deck:{k}:c:<id>:once`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from broker.coordination import NOT_SUSPECTED, CrashAttribution
from broker.log import EventLog, LivePiece, LiveText
from broker.runtime import DeckhandsError
from broker.secrets import ONE_KEY, Secrets, SecretsLocked
from broker.store import Argument, Store
from broker.tools import ToolContext, to_one_line

SEALED = b"sealed:"
PROGRESS_SECONDS = 1.0
MAX_PROGRESS_CHARS = 300
MAX_MASKED_CHARS = 10_000
"""Of a report; masking reads all of them."""
_log = logging.getLogger(__name__)
FreeSlot = Callable[[], AbstractAsyncContextManager[None]]
"""Frees a slot for the time of a block, and waits for one at its end."""


class RemoteWork:
    """The record of one action's work.

    Args:
        secrets: Encrypts the record; None to store it unencrypted.
        free_slot: Frees the slot of the action.

    Attributes:
        is_parked: The action waits without a slot.
    """

    def __init__(
        self,
        store: Store,
        conversation_id: str,
        action_id: int,
        *,
        secrets: Secrets | None = None,
        attribution: CrashAttribution = NOT_SUSPECTED,
        free_slot: FreeSlot = nullcontext,
    ) -> None:
        self._store = store
        self._secrets = secrets
        self._conversation_id = conversation_id
        self._field = f"t:{action_id}"
        self._attribution = attribution
        self._free_slot = free_slot
        self._fields: set[str] = set()
        self.is_parked = False

    async def load(self, asked_id: int | None = None) -> str | None:
        """Return the record, or None.

        Args:
            asked_id: An earlier action, which this one continues; its record is removed with our own.
        """
        name = self._field if asked_id is None else f"t:{asked_id}"
        found: bytes | None = await self._call("HGET", name)
        if found is not None:
            self._fields.add(name)
        if found is None or not found.startswith(SEALED):
            return found.decode(errors="replace") if found is not None else None
        if self._secrets is None:
            raise SecretsLocked("The record of a call is encrypted.", remedy=ONE_KEY)
        return self._secrets.unseal(self._conversation_id, found.removeprefix(SEALED))

    async def save(self, text: str) -> None:
        """Write the record. Idempotent."""
        self._fields.add(self._field)
        content = text.encode()
        if self._secrets is not None:
            with suppress(SecretsLocked):  # there is no key
                content = SEALED + self._secrets.seal(self._conversation_id, text)
        await self._call("HSET", self._field, content)

    async def forget(self, *, is_continued: bool = False) -> None:
        """Remove the record, once the action has its observation. Idempotent.

        Args:
            is_continued: Keep the record of this action for another one, which continues it.
        """
        doomed = self._fields - ({self._field} if is_continued else set())
        if doomed:
            await self._call("HDEL", *sorted(doomed))

    async def _call(self, command: str, *arguments: Argument) -> Any:
        names = await self._store.locate(self._conversation_id)
        return await self._store.call(command, names.once, *arguments)

    @asynccontextmanager
    async def park(self) -> AsyncIterator[None]:
        """Wait in this block without a slot; the death of the worker does not count against the action."""
        await self._attribution.acquit()
        async with self._free_slot():
            self.is_parked = True
            try:
                yield
            finally:
                self.is_parked = False
        await self._attribution.mark_acting()


class CallProgress:
    """What a call reports of its progress, for those who watch the conversation now; nothing of it is in the log.

    At most one report a second is shown, and none without a watcher.
    """

    def __init__(self, log: EventLog, conversation_id: str, action_id: int) -> None:
        self._log = log
        self._conversation_id = conversation_id
        self._call = f"action {action_id}"
        self._shown_at = -math.inf

    async def show(self, progress: float, total: float | None, message: str | None) -> None:
        """Show a report. Never raises."""
        now = asyncio.get_running_loop().time()
        if now - self._shown_at < PROGRESS_SECONDS:
            return
        self._shown_at = now
        try:
            names = await self._log.store.locate(self._conversation_id)
            if not await self._log.store.connection.call("EXISTS", names.watcher_mark):
                return
            masker = await self._log.load_masker(self._conversation_id)
            parts = [f"{progress:g}" if total is None else f"{progress:g} of {total:g}", message or ""]
            text = to_one_line(masker.mask_text(": ".join(filter(None, parts))[:MAX_MASKED_CHARS]), MAX_PROGRESS_CHARS)
            piece = LivePiece(self._call, "progress", f"{text}\n", 0)
            await LiveText(self._log.store, self._conversation_id).add([piece])
        except DeckhandsError as error:
            _log.info("the progress of %s is not shown: %s", self._call, error)


@dataclass(frozen=True, slots=True)
class RemoteContext(ToolContext):
    """The context of a call whose work may continue elsewhere.

    Attributes:
        work: Its record; None where there is no store.
        progress: Shows the progress that the call reports; None if no one watches.
        asks: The earlier call that this one continues with the user's answers, see `MCPAction`.
    """

    work: RemoteWork | None = field(default=None, compare=False, repr=False)
    progress: CallProgress | None = field(default=None, compare=False, repr=False)
    asks: int | None = None
    answers: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
