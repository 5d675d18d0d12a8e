"""A thread that sends a worker's heartbeat while its event loop is busy.

A burst of work (two hundred replies at once, each with milliseconds of a provider's library) can block a loop for
longer than a heartbeat may be late. A takeover would then throw away paid model calls, and put the same burst on the
next worker.

Holds: the thread beats only if the loop has turned within `STUCK_AFTER_SECONDS`. So a loop that is stuck, or blocked by
code that never releases the interpreter, is taken over like a dead one. While the loop beats in time, the thread only
watches and has no connection.
Does not: notify the loop. A worker that was declared dead learns it from its own next beat.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import redis

from broker.coordination.membership import HEARTBEAT_SECONDS, QUIET_HEARTBEAT_SECONDS, Membership
from broker.runtime import SYSTEM_CLOCK, Clock, UsageError, load_current_url

LATE_AFTER_SECONDS = QUIET_HEARTBEAT_SECONDS + HEARTBEAT_SECONDS
STUCK_AFTER_SECONDS = 10.0
REPLY_TIMEOUT_SECONDS = 1.0


class HeartbeatThread:
    """Sends the heartbeat of one worker session while its event loop is late. A context manager around the session."""

    def __init__(
        self,
        store_url: str,
        membership: Membership,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store_url = store_url
        self._membership = membership
        self._clock = clock
        self._turned = self._clock.monotonic()
        self._progress = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._turned = self._clock.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()  # not joined: the loop must not wait for a store that does not answer

    def record_turn(self, progress: int) -> None:
        """Record that the loop is alive. The loop calls this at each beat."""
        self._turned, self._progress = self._clock.monotonic(), progress

    def _watch(self) -> None:
        store: redis.Redis | None = None
        silent = 0.0
        while not self._over.wait(max(HEARTBEAT_SECONDS, LATE_AFTER_SECONDS - silent)):
            silent = self._clock.monotonic() - self._turned
            if not LATE_AFTER_SECONDS < silent < STUCK_AFTER_SECONDS:
                continue
            # The store may be unavailable, or have a new primary or password. Then the loop waits for it too, and the
            # next round connects again.
            try:
                url = load_current_url(self._store_url)
                store = store or redis.Redis.from_url(url, socket_timeout=REPLY_TIMEOUT_SECONDS)
                for command in self._membership.make_beat_commands(self._progress):
                    store.execute_command(*command)  # type: ignore[no-untyped-call]
            except (redis.RedisError, OSError, ValueError, UsageError):
                if store is not None:
                    store.close()
                store = None
        if store is not None:
            store.close()
