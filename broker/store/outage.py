"""Logs store outages of a worker: one line when an outage starts, and one when it ends.

Holds: an outage is two log lines, however many calls wait and retry. An outage shorter than half a second is not
logged.
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
        """Record that a call must be repeated."""
        if not self._waiting:
            self._began, self._is_told = clock.monotonic(), False
        self._waiting += 1

    def go_on(self, clock: Clock, error: Exception) -> None:
        """Record that the repeated call has failed, too."""
        if not self._is_told and clock.monotonic() - self._began >= TOLD_AFTER_SECONDS:
            self._is_told = True
            _log.warning("the store is unavailable, conversations wait: %s", error)

    def end(self, clock: Clock) -> None:
        """Record that a call no longer waits: it succeeded or was given up."""
        self._waiting -= 1
        if not self._waiting and self._is_told:
            self._is_told = False
            _log.warning("the store is available again after %.1f s", clock.monotonic() - self._began)
