"""What a worker's log says while its store does not serve: one line when that begins, and one when it ends.

Holds: however many calls wait, and however often each is repeated, an outage is two lines; one that is over within
half a second is none.
"""

from __future__ import annotations

import logging

from broker.runtime import Clock

TOLD_AFTER_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Outage:
    """The calls of one process that wait for its store."""

    def __init__(self) -> None:
        self._waiting = 0
        self._began = 0.0
        self._is_told = False

    def begin(self, clock: Clock) -> None:
        """Note that a call has to be repeated."""
        if not self._waiting:
            self._began, self._is_told = clock.monotonic(), False
        self._waiting += 1

    def go_on(self, clock: Clock, error: Exception) -> None:
        """Note that it has to be repeated again."""
        if not self._is_told and clock.monotonic() - self._began >= TOLD_AFTER_SECONDS:
            self._is_told = True
            _log.warning("the store does not serve, so conversations wait until it does: %s", error)

    def end(self, clock: Clock) -> None:
        """Note that a call waits no longer: it was served, or given up."""
        self._waiting -= 1
        if not self._waiting and self._is_told:
            self._is_told = False
            _log.warning("the store serves again, after %.1f s", clock.monotonic() - self._began)
