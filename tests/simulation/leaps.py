"""Leaps of virtual time over spans in which every party would only repeat looks that find nothing: beats, and reads.

A model call, a command or a pause of a person lasts minutes to hours, while a worker beats twice a second. When nothing
travels, nothing is due, and no party has anything left to do, a span is left out: all clocks advance by it. Beats,
blocked reads and upkeep happen so much later, as does their trace in the store; a look of a worker at its work that
would fall into the span happens at its end.

Holds: no span is left out while a message travels, a fault lasts, a worker is missing or a wake-up is unanswered, and
after a fault not before every worker has beaten; none reaches beyond the end of a call, command or pause, another timer
of what happens, or a time that is due in the store. What a worker finds by a look happens late by at most the larger of
`SHORT_LEAP_SECONDS` and the time that it has waited.
"""

import math
from collections.abc import Callable
from types import CodeType
from typing import Any

from broker.coordination.membership import BEATS_PER_FACTS, HEARTBEAT_SECONDS, Membership
from broker.runtime.clock import wait_for_tick
from broker.testing.keyspace import SortedSet
from broker.testing.memory_store import end_read
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.virtual_loop import Pause, SimulatedProcess
from tool_worker.worker.node.usage_bounds import SWEEP_SECONDS
from tool_worker.worker.steps.stop_orders import ANSWER_CHECK_SECONDS
from tool_worker.workspace.launch.host_connection import ANSWER_LIMIT_SECONDS

PAUSES = {
    wait_for_tick.__code__: Pause.LOOK,  # of a process at its work
    Membership.wait_for_next_beat.__code__: Pause.BEAT,
}
OF_TOOL_WORKERS = {
    ANSWER_CHECK_SECONDS: Pause.LOOK,  # whether the log answers an action
    ANSWER_LIMIT_SECONDS: Pause.LOOK,  # whether the host that runs a command lives
    BEATS_PER_FACTS * HEARTBEAT_SECONDS: Pause.BEAT,  # what they offer
    SWEEP_SECONDS: Pause.BEAT,  # the bounds of workspaces
}
"""Their further pauses, by length."""
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
        self._changed_at = self._troubled_at = 0.0
        self._struck = 0
        self._is_troubled = False

    def classify(self, callback: Callable[..., Any], process: SimulatedProcess, delay: float, by: CodeType) -> Pause:
        """See `Leaps`."""
        if callback is end_read:
            return Pause.BEAT
        found = PAUSES.get(by)
        if found is None and process.name.startswith("tools"):
            found = OF_TOOL_WORKERS.get(round(delay, 6))
        return Pause.WORK if found is None else found

    def note_change(self, now: float) -> None:
        """See `Leaps`."""
        self._changed_at = now

    def note_leap(self, now: float, seconds: float) -> None:
        """See `Leaps`."""
        self.leapt += seconds
        self._cluster.server.pass_over(seconds)
        for store in self._cluster.worker_stores.values():
            store.compare_layout(None)  # what each beat of the span would have read

    def find_longest(self, now: float) -> float:
        """See `Leaps`."""
        wire, server = self._cluster.wire, self._cluster.server
        was_troubled, self._is_troubled = self._is_troubled, self._cluster.is_troubled or not server.is_serving
        if len(wire.struck) != self._struck or self._is_troubled or was_troubled:
            self._struck, self._troubled_at = len(wire.struck), now
            return 0.0
        if wire.latency_seconds != self._latency:
            return 0.0
        changed_at = max(self._changed_at, server.changed_at)
        return min(max(SHORT_LEAP_SECONDS, now - changed_at), self._find_due(now))

    def _find_due(self, now: float) -> float:
        """Return for how long nothing in the store is due; 0 if a worker is missing or a wake-up is unanswered."""
        server = self._cluster.server
        due = math.inf
        for key, value in server.keys.values.items():
            if not isinstance(value, SortedSet):
                continue
            if key.endswith(b":workers"):
                earliest = max(self._troubled_at, now - LATE_BEAT_SECONDS)
                if any(server.beats.get(worker, -math.inf) <= earliest for worker in value):
                    return 0.0
            elif key.endswith(b":unread"):
                return 0.0
            elif key.endswith(b":parked"):
                now_ms = float(server.keys.values[key.removesuffix(b":parked") + b":clock"][b"now"])
                due = min(due, *((at - now_ms) / 1_000 for at in value.values()))
        now_ms = server.keys.now_ms()
        expiring = ((at - now_ms) / 1_000 for at in server.keys.expires.values())
        return min(due, *expiring, math.inf)
