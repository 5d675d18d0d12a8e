"""The snapshots of one conversation, read and written by its owner.

Holds: a snapshot belongs to a log that the store still has. A snapshot ahead of its log shows that the log has lost its
tail.
"""

from __future__ import annotations

from broker.coordination import Claimed
from broker.log import name_snapshot_gap
from broker.runtime import failpoint
from controller_worker.core import State, snapshot_of, state_from
from controller_worker.loop.services import Services

EVERY_EVENTS = 50


class Snapshots:
    """Reads and writes the latest snapshot; `version` is that of the latest one known to this owner."""

    def __init__(self, services: Services, claimed: Claimed) -> None:
        self._services = services
        self._claimed = claimed
        self.version = 0

    async def latest(self) -> State:
        """Return the state of the latest usable snapshot, or an empty state."""
        services, claimed = self._services, self._claimed
        conversation_id = claimed.ownership.conversation_id
        state = state_from(await services.owners.load_snapshot(conversation_id)) or State()
        if state.version > claimed.last_id:
            await name_snapshot_gap(services.log, conversation_id, state.version)
            state = State()
        self.version = state.version
        return state

    async def save(self, state: State, checksum: str) -> bool:
        """Save a snapshot; return False if the conversation has another owner.

        Args:
            checksum: of the last event in it.

        Raises:
            EventsLost: the log does not hold that event.
        """
        failpoint("controller.before_snapshot")
        ownership, snapshot = self._claimed.ownership, snapshot_of(state)
        is_kept = await self._services.owners.save_snapshot(
            ownership, snapshot, seen_id=state.version, checksum=checksum
        )
        if is_kept:
            failpoint("controller.after_snapshot")
            self.version = state.version
        return is_kept
