"""The alarm of a conversation with a time limit: when it rings, a tool or a model call under way is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.contract import is_settled
from broker.runtime import Clock
from controller_worker.core import State


class Alarm:
    """Rings when the time that a conversation may take is over."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, state: State) -> None:
        """Set it to the conversation's deadline, if it works and has one; an earlier one no longer counts."""
        self.cancel()
        deadline = state.usage.deadline
        if deadline is not None and not is_settled(state.lifecycle.agent_state):
            left = (deadline - self._clock.now()).total_seconds()
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._ring)

    def cancel(self) -> None:
        """Do not ring any more."""
        if self._timer is not None:
            self._timer.cancel()
