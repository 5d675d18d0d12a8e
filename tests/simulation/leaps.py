"""Leaps of virtual time over spans in which every party only finds nothing: beats, and reads without an entry.

A model call, a command or a pause of a person lasts minutes to hours, while a worker beats twice a second. When all have
looked once and found nothing, and nothing is due, a span is left out: all clocks advance by it, and what is repeated
(beats, blocked reads, looks) happens so much later, as does its trace in the store.

Holds: no span is left out while a message travels, a fault lasts, a worker is missing or a wake-up is unanswered; none
reaches beyond the end of a call, command or pause, or a time that is due in the store. After each, all look again.
What a worker does after a certain time without news happens late by at most the larger of `SHORT_LEAP_SECONDS` and the
time that it has waited.
"""

import asyncio
import math

from broker.coordination.membership import BEATS_PER_FACTS, HEARTBEAT_SECONDS
from broker.testing.keyspace import SortedSet
from broker.testing.memory_store import end_read
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.virtual_loop import SimulatedProcess
from tool_worker.worker.node.usage_bounds import SWEEP_SECONDS
from tool_worker.workspace.launch.host_connection import ANSWER_LIMIT_SECONDS

REPEATED_SECONDS = 1.05
"""The longest pause between two looks of one party, but for blocked reads and those of tool workers below."""
LOOKS_OF_TOOL_WORKERS = (BEATS_PER_FACTS * HEARTBEAT_SECONDS, SWEEP_SECONDS, ANSWER_LIMIT_SECONDS)
"""At their offers, at the workspaces, and whether the host that runs a command lives."""
ROUND_SECONDS = 1.15
"""In this time all have looked."""
LATE_BEAT_SECONDS = 1.0
SHORT_LEAP_SECONDS = 30.0


class IdleSpans:
    """The leaps of one simulation.

    Attributes:
        leapt: how many seconds were left out.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.leapt = 0.0
        self._cluster = cluster
        self._latency = cluster.wire.latency_seconds
        self._changed_at = self._leapt_at = 0.0

    def is_repeated(self, handle: asyncio.TimerHandle, process: SimulatedProcess, delay: float) -> bool:
        """See `Leaps`."""
        if delay <= REPEATED_SECONDS or handle._callback is end_read:  # type: ignore[attr-defined]
            return True
        return process.name.startswith("tools") and any(abs(delay - look) < 1e-6 for look in LOOKS_OF_TOOL_WORKERS)

    def note_change(self, now: float) -> None:
        """See `Leaps`."""
        self._changed_at = now

    def note_leap(self, now: float, seconds: float) -> None:
        """See `Leaps`."""
        self._leapt_at = now + seconds
        self.leapt += seconds
        self._cluster.server.pass_over(seconds)

    def find_longest(self, now: float) -> float:
        """See `Leaps`."""
        wire, server = self._cluster.wire, self._cluster.server
        changed_at = max(self._changed_at, server.changed_at)
        if now - max(changed_at, self._leapt_at) < ROUND_SECONDS or now <= wire.travelling_until:
            return 0.0
        if not server.is_serving or wire.latency_seconds != self._latency or self._cluster.is_troubled:
            return 0.0
        return min(max(SHORT_LEAP_SECONDS, now - changed_at), self._find_due(now))

    def _find_due(self, now: float) -> float:
        """Return for how long nothing in the store is due; 0 if a worker is missing or a wake-up is unanswered."""
        server = self._cluster.server
        due = math.inf
        for key, value in server.keys.values.items():
            if not isinstance(value, SortedSet):
                continue
            if key.endswith(b":workers"):
                if any(now - server.beats.get(worker, -math.inf) > LATE_BEAT_SECONDS for worker in value):
                    return 0.0
            elif key.endswith(b":unread"):
                return 0.0
            elif key.endswith(b":parked"):
                now_ms = float(server.keys.values[key.removesuffix(b":parked") + b":clock"][b"now"])
                due = min(due, *((at - now_ms) / 1_000 for at in value.values()))
        now_ms = server.keys.now_ms()
        expiring = ((at - now_ms) / 1_000 for at in server.keys.expires.values())
        return min(due, *expiring, math.inf)
