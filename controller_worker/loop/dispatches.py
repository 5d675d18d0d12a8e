"""The actions of a conversation that are with a tool worker, as known to its owner.

Holds: an awaited action is on an action stream, or is put there now.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker.contract import Ownership, codec
from broker.coordination import DispatchOutcome, Owners
from broker.log import EventLog
from broker.runtime import OwnershipLost


class Dispatches:
    """The awaited actions of one conversation."""

    def __init__(self, log: EventLog, owners: Owners, ownership: Ownership) -> None:
        self._log = log
        self._owners = owners
        self._ownership = ownership
        self._known: set[int] = set()

    def note(self, action_ids: Iterable[int]) -> None:
        """Record actions that were dispatched by the append that wrote them."""
        self._known.update(action_ids)

    def forget(self) -> None:
        """Check all of them again at the next wait."""
        self._known.clear()

    async def ensure(self, action_ids: tuple[int, ...]) -> bool:
        """Ensure that a tool worker has the actions. Return False if one of them is settled already.

        Raises:
            OwnershipLost: the conversation has another owner.
        """
        conversation_id = self._ownership.conversation_id
        for action_id in action_ids:
            if action_id in self._known:
                continue
            entry = await self._log.entry(conversation_id, action_id)
            pool = codec.decode(entry, action_id).pool_wanted
            outcome = await self._owners.dispatch(self._ownership, action_id, entry, pool=pool)
            if outcome is DispatchOutcome.FENCED:
                raise OwnershipLost(f"The conversation {conversation_id} has another owner.")
            if outcome is DispatchOutcome.SETTLED:
                return False
            self._known.add(action_id)
        self._known.intersection_update(action_ids)
        return True
