"""A thread that sends a worker's heartbeat while its event loop is busy.

A burst of work (two hundred replies at once, each with milliseconds of a provider's library) can block a loop for
longer than a heartbeat may be late. A takeover would then discard paid model calls and move the same burst to the next
worker.

Holds: the thread beats only if the loop has turned within `STUCK_AFTER_SECONDS`. So a loop that is stuck, or blocked by
code that never releases the interpreter, is taken over like a dead one. While the loop beats in time, the thread only
watches and has no connection. A node of a cluster that does not answer delays the beats at the others by
`REPLY_TIMEOUT_SECONDS` at most, which is less than the time to live of a heartbeat.
Does not: notify the loop. A worker that was declared dead learns it from its own next beat.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from broker.coordination.membership import HEARTBEAT_SECONDS, QUIET_HEARTBEAT_SECONDS, Membership
from broker.runtime import SYSTEM_CLOCK, Clock, DeckhandsError
from broker.store import Argument, Connection, connect

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
        silent = 0.0
        connection: Connection | None = None
        with asyncio.Runner() as runner:
            while not self._over.wait(max(HEARTBEAT_SECONDS, LATE_AFTER_SECONDS - silent)):
                silent = self._clock.monotonic() - self._turned
                if not LATE_AFTER_SECONDS < silent < STUCK_AFTER_SECONDS:
                    continue
                # The store may be unavailable. Then the loop waits for it too.
                with suppress(DeckhandsError, TimeoutError):
                    connection = connection or connect(self._store_url, reply_timeout_seconds=REPLY_TIMEOUT_SECONDS)
                    runner.run(send_beats(connection, self._membership.make_beat_commands(self._progress)))
            if connection is not None:
                runner.run(connection.aclose())


async def send_beats(connection: Connection, commands: Sequence[Sequence[Argument]]) -> None:
    """Send the heartbeats of all shards.

    Raises:
        TimeoutError: some got no answer in time; beats to other nodes may have succeeded.
    """
    async with asyncio.timeout(REPLY_TIMEOUT_SECONDS):  # a connection that is being opened continues with the next beat
        await connection.call_many(commands)
