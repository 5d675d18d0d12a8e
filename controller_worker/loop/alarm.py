"""The alarm of a conversation with a time limit: it ends a tool or a model call that is in flight at the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.contract import is_settled
from broker.runtime import Clock
from controller_worker.core import State


class Alarm:
    """Rings when the conversation's time is up."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, state: State) -> None:
        """Set the alarm to the conversation's deadline, if it works and has one. This replaces an earlier setting."""
        self.cancel()
        deadline = state.usage.deadline
        if deadline is not None and not is_settled(state.lifecycle.agent_state):
            left = (deadline - self._clock.now()).total_seconds()
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._ring)

    def cancel(self) -> None:
        """Cancel the alarm."""
        if self._timer is not None:
            self._timer.cancel()
