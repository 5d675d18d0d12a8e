"""Membership: each worker's heartbeat in each shard, which carries its progress, and the sweep for dead workers.

The metrics of a worker travel with its heartbeat. Every few beats, a worker writes its facts to the store again; one
field contains these figures. So a reader of the store gets the figures of all workers, and no worker needs a port.

Holds: any worker declares another one dead whose heartbeat has expired. Its conversations go back to the ready stream,
and its deliveries to their streams. A worker that was declared dead in one shard learns it from its next beat, hands
back its work in the other shards, and starts over. A beat is one round trip, on a cluster one to each node; a node that
does not answer delays no beat elsewhere. A worker to which the store answers slowly announces a longer time to live. A
worker that was stopped itself does not, because its later death would be detected later. The beats keep the store's
time by the workers' monotonic clocks, and return it to the workers: see clock.lua and `SharedClock`. Every few beats
repeat the worker's facts, because others rely on them; a foreign write to them lasts only until then. A figure has at
most `MAX_LABELS` labels; further ones count under `OTHER`. Labels are short and plain, because providers choose the
names of models. Figures are validated when read, because any process with the rights of a worker could have written
them; invalid ones are left out.
Does not: store history. A counter starts at 0 with its worker. If the worker is killed, its last seconds are lost.
Keys: `deck:{k}:workers`, `deck:{k}:clock`, `deck:{k}:worker:<w>:about`, the field `figures` of
`deck:{k}:worker:<w>:about` of the first shard.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from broker.runtime import (
    HEARTBEAT_TTL_SECONDS,
    WORKER,
    Clock,
    FunctionsReplaced,
    HostLoad,
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    read_version,
    to_millis,
)
from broker.store import (
    READ_FACTS,
    WORKER_FIELD,
    Argument,
    ClusterConnection,
    ShardKeys,
    Store,
    decode_fields,
    own_version,
)

FIELD = "figures"
MAX_LABELS = 32
"""For one figure of one worker."""
MAX_LABEL_CHARS = 100
MAX_TEXT_CHARS = 65_536
MAX_FIGURES = 50
LARGEST = 2.0**53
OTHER = "other"
MAX_LAGS = 50
"""A quarter of a minute of beats."""

_UNSAFE_CHARS = re.compile(r"[^ !#-\[\]-~]")
"""Characters that are not printable ASCII, or that JSON escapes. Without them, a text of figures has a bounded
length."""

LabeledValues = Mapping[str, float]
"""Values by label. The label of a figure without labels is empty."""


class Figures:
    """The figures of one worker. Only its event loop changes them."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {}
        self._lags: deque[float] = deque(maxlen=MAX_LAGS)

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter."""
        values = self._values.setdefault(name, {})
        if label not in values:
            label = _UNSAFE_CHARS.sub("?", label[:MAX_LABEL_CHARS])
            if label not in values and len(values) >= MAX_LABELS:
                label = OTHER
        values[label] = values.get(label, 0.0) + amount

    def set(self, **now: float) -> None:
        """Set the current values of some gauges."""
        for name, value in now.items():
            self._values[name] = {"": value}

    def record_lag(self, seconds: float) -> None:
        """Record how late the event loop was for something due at a certain time."""
        lag = max(0.0, seconds)
        self._lags.append(lag)
        self.add("loop_late_seconds", lag)
        self.set(loop_lag_seconds=max(self._lags))

    def render(self) -> str:
        """Return all figures in the format of `read_figures`."""
        return json.dumps(self._values)


def read_figures(text: str) -> dict[str, dict[str, float]]:
    """Parse figures by name and label. Invalid ones are left out. Raises nothing."""
    try:
        found = json.loads(text) if 0 < len(text) <= MAX_TEXT_CHARS else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    figures = list(found.items())[:MAX_FIGURES]
    return {name: values for name, given in figures if (values := _parse_values(given))}


def _parse_values(given: object) -> dict[str, float]:
    if not isinstance(given, dict):
        return {}
    pairs = list(given.items())[: MAX_LABELS + 1]
    return {label: float(value) for label, value in pairs if len(label) <= MAX_LABEL_CHARS and _is_usable(value)}


def _is_usable(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= LARGEST and math.isfinite(value)


HEARTBEAT_SECONDS = 0.3
QUIET_HEARTBEAT_SECONDS = 0.55
"""The interval while the worker makes no progress: a third of the shortest usual time to live."""
SELDOM_HEARTBEAT_SECONDS = 2.0
"""The interval of a worker that holds neither conversations nor actions: nothing waits until its death is known."""
MIN_BEATS_PER_TTL = 3
"""A heartbeat lives for at least this many beats, at their recent speed."""
SLOWNESS_DECAY = 0.97
"""Decay per beat of the slowest beat's duration."""
MAX_TTL_SECONDS = 60.0
TURN_SECONDS = 0.1
MAX_TURN_SECONDS = 0.3
"""A longer turn of the event loop says nothing about the store."""
SILENT_SECONDS = 60.0
HAND_BACK_SECONDS = 3.0
UNANSWERED_PATIENCE_SECONDS = 3.0
BEATS_PER_FACTS = 5
"""A worker repeats its facts after this many beats."""
MAX_DEADLINE_MS = 2.0**52
"""A stored deadline may be infinite if it was forged."""
ROLES = ("controller", "tool")
SHARDS_FIELD = "shards"
"""The fact with the number of shards whose streams a worker reads."""
WALL_FIELD = "wall_ms"
"""The fact with the clock of the worker's machine, at most a few beats old."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BeatResult:
    """The results of one beat and its sweep.

    Attributes:
        expired: conversations that did not start in time; the caller appends their end.
    """

    removed_count: int
    woken_count: int
    notified_again: int
    expired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """A worker as others see it. `left_seconds` is the time until its heartbeat expires, negative afterwards."""

    worker_id: str
    role: str
    left_seconds: float
    about: Mapping[str, str]


class LoopStopwatch:
    """Measures a wait in turns of the event loop. A context manager around the wait.

    A process that was stopped, or a loop that was blocked, finds a reply late although it arrived in time. Such a turn
    counts as at most `MAX_TURN_SECONDS`.
    """

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._turned = clock.monotonic()

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(TURN_SECONDS, self._turn)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._count()

    def _turn(self) -> None:
        self._count()
        self._timer = asyncio.get_running_loop().call_later(TURN_SECONDS, self._turn)

    def _count(self) -> None:
        now = self._clock.monotonic()
        self.seconds += min(now - self._turned, MAX_TURN_SECONDS)
        self._turned = now


_STORE = "store"
"""Instead of a node: the check that the store is still the same."""


class Membership:
    """One worker session."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        role: str,
        *,
        streams: Sequence[Sequence[str]] = (),
        about: Mapping[str, str] | None = None,
        ttl_seconds: float = HEARTBEAT_TTL_SECONDS,
        figures: Figures | None = None,
        holds_work: bool = True,
    ) -> None:
        """Describe the worker.

        Args:
            holds_work: whether it holds conversations or actions, which another worker must take over soon.
            streams: for a tool worker, its action streams, for each shard.
            about: facts to show, such as node and pid.
            ttl_seconds: time to live of a heartbeat while beats are fast.
            figures: its metrics; None for new ones.
        """
        self.figures = figures if figures is not None else Figures()
        self._store = store
        self._worker_id = worker_id
        self._role = role
        self._shards = store.all_shards
        self._streams = list(streams) or [()] * store.shards
        self._about = dict(about or {})
        self._fast_ttl_seconds = ttl_seconds
        self._slowest_seconds = 0.0
        self._beats = 0
        self._progress = -1
        self._intervals = (
            (HEARTBEAT_SECONDS, QUIET_HEARTBEAT_SECONDS) if holds_work else (SELDOM_HEARTBEAT_SECONDS,) * 2
        )
        self._interval_seconds, _ = self._intervals
        self._host_load = HostLoad()
        self._pending: dict[Any, asyncio.Task[list[Any]]] = {}

    @property
    def shards(self) -> Sequence[ShardKeys]:
        """The shards in which it is registered."""
        return self._shards

    @property
    def ttl_seconds(self) -> float:
        """The time to live of the next beat."""
        slow = MIN_BEATS_PER_TTL * (self._interval_seconds + self._slowest_seconds)
        return max(self._fast_ttl_seconds, min(slow, MAX_TTL_SECONDS))

    async def register(self) -> None:
        """Register in every shard. Idempotent."""
        WORKER.set(self._worker_id)
        # First measure the response time, which decides the time to live of a heartbeat.
        await self._ask(lambda: [("FCALL", "deck_now", 1, self._store.all_shards[0].root)])
        await self._ask(lambda: self._make_register_commands(0))

    async def join_new_shards(
        self, list_streams: Callable[[ShardKeys], Sequence[str]] | None = None
    ) -> list[ShardKeys]:
        """Register in shards that were added since, and return them, so that this worker reads their streams.

        Args:
            list_streams: returns the action streams of a tool worker in a shard.
        """
        known = len(self._shards)
        if self._store.shards == known:
            return []
        new = self._store.all_shards[known:]
        self._shards = [*self._shards, *new]
        self._streams += [list_streams(names) if list_streams is not None else () for names in new]
        await self._ask(lambda: self._make_register_commands(known))
        self._beats = -1  # the next beat says how many shards this worker reads
        _log.info("the store has %d shards now, and had %d", len(self._shards), known)
        return new

    async def beat(self, progress: int) -> BeatResult | None:
        """Beat in every shard and do the work that is due there, in one round trip.

        Returns:
            The results, or None if this worker was declared dead in a shard and owns nothing there any more.

        Raises:
            StoreMisconfigured: the store is not the one that was opened.
            FunctionsReplaced: its functions do not serve this worker any more, or are about to.
        """
        self._interval_seconds = self._intervals[progress == self._progress]
        self._progress = progress
        self._beats += 1
        repeats = self._beats % BEATS_PER_FACTS == 0
        if repeats:
            self.figures.set(**self._host_load.read())
        connection = self._store.connection
        try:
            if isinstance(connection, ClusterConnection):
                commands = self.make_beat_commands(progress, repeats_facts=repeats)
                replies = await self._beat_nodes(connection, commands)
                if not replies:
                    return BeatResult(0, 0, 0)
            else:
                replies = await self._ask(lambda: self.make_beat_commands(progress, repeats_facts=repeats))
        except StoreRefused as error:
            # The sweep found damaged data. Log it and continue: if this worker ended, the next one would find the same.
            _log.error("a sweep failed: %s", error)
            return BeatResult(0, 0, 0)
        if any(outcome == b"swept" for outcome, *_ in replies):
            return None
        _, removed, woken, notified, expired, _ = zip(*replies, strict=True)
        names = tuple(cid.decode(errors="backslashreplace") for found in expired for cid in found)
        return BeatResult(sum(removed), sum(woken), sum(notified), names)

    def make_beat_commands(self, progress: int, *, repeats_facts: bool = False) -> list[tuple[Argument, ...]]:
        """Return the beats of `tick` as commands, for a connection of another thread."""
        ttl_ms, patience_ms = int(self.ttl_seconds * 1000), int(UNANSWERED_PATIENCE_SECONDS * 1000)
        beat = (self._worker_id, ttl_ms, progress, patience_ms, int(self._store.clock.monotonic() * 1000))
        facts = self._make_facts(self._about) if repeats_facts else [()] * len(self._shards)
        return [
            ("FCALL", "deck_tick", 1, names.root, *beat, *said) for names, said in zip(self._shards, facts, strict=True)
        ]

    async def _beat_nodes(self, connection: ClusterConnection, commands: list[tuple[Argument, ...]]) -> list[Any]:
        """Beat in the shards of each node of a cluster, and return the replies of those that answer in time.

        A node that does not answer delays its own shards alone; it is asked again when its last beat has ended.
        """
        parts: dict[Any, list[int]] = {}
        with suppress(StoreUnavailable):
            parts = await connection.group_by_node(commands)
        for node, places in parts.items():
            if node not in self._pending:
                self._start(node, self._beat_node([commands[at] for at in places], has_first=0 in places))
        if _STORE not in self._pending:
            self._start(_STORE, self._check_store())
        await asyncio.wait(self._pending.values(), timeout=self._interval_seconds)
        done = [node for node, beat in self._pending.items() if beat.done()]
        return [reply for node in done for reply in self._pending.pop(node).result()]

    def _start(self, node: Any, beat: Coroutine[Any, Any, list[Any]]) -> None:
        self._pending[node] = task = asyncio.create_task(beat)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # this worker may have ended

    async def _beat_node(self, commands: list[tuple[Argument, ...]], *, has_first: bool) -> list[Any]:
        clock = self._store.clock
        sent = clock.monotonic()
        with LoopStopwatch(clock) as waited:
            try:
                replies = await self._store.connection.call_many(commands)
            except (StoreUnavailable, OutcomeUnknown):
                return []
        self._slowest_seconds = max(waited.seconds, SLOWNESS_DECAY * self._slowest_seconds)
        if has_first and isinstance(replies[0][-1], int):
            clock.apply_store_time(replies[0][-1], sent=sent)
        return replies

    async def _check_store(self) -> list[Any]:
        with suppress(StoreUnavailable, OutcomeUnknown):
            facts, time = await self._store.connection.call_many([READ_FACTS, ("TIME",)])
            self._compare(facts, time)
            await self._store.repair_layout(facts[-1])
        return []

    async def wait_for_next_beat(self) -> None:
        """Wait until the next beat is due, and record how late the loop is."""
        began = self._store.clock.monotonic()
        await asyncio.sleep(self._interval_seconds)
        self.figures.record_lag(self._store.clock.monotonic() - began - self._interval_seconds)

    async def leave(self) -> None:
        """Hand everything back at once. Idempotent.

        If a shard fails, the others are still handed back; then its error is raised.
        """

        async def leave_shard(names: ShardKeys) -> None:
            while await self._store.call_function("deck_leave", (names.root,), self._worker_id) != ["left"]:
                pass  # each call hands back up to a thousand items

        left = await asyncio.gather(*map(leave_shard, self._store.all_shards), return_exceptions=True)
        for error in left:
            if error is not None:
                raise error

    async def leave_soon(self) -> None:
        """Hand back the remaining work of this worker in the shards where it is not presumed dead.

        Where the store does not answer in time, others take over when the heartbeat expires. That may take a minute.
        """
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await self.leave()

    def _make_register_commands(self, first: int) -> list[tuple[Argument, ...]]:
        facts = self._make_facts({**self._about, "clock_ms": str(to_millis(self._store.clock.machine_now()))})
        ttl_ms = int(self.ttl_seconds * 1000)
        return [
            ("FCALL", "deck_register", 1, names.root, self._worker_id, ttl_ms, *said)
            for names, said in zip(self._shards[first:], facts[first:], strict=True)
        ]

    def _make_facts(self, about: dict[str, str]) -> list[tuple[Argument, ...]]:
        """Return the facts of this worker, for each shard."""
        now = {WORKER_FIELD: f"{read_version()} {own_version().stamp}"}
        now |= {WALL_FIELD: str(to_millis(self._store.clock.machine_now())), SHARDS_FIELD: str(len(self._shards))}
        fields = [part for item in (about | now).items() for part in item]
        said: list[tuple[Argument, ...]] = [(self._role, len(streams), *streams, *fields) for streams in self._streams]
        return [(*said[0], FIELD, self.figures.render()), *said[1:]]

    @asynccontextmanager
    async def handing_back(self) -> AsyncIterator[None]:
        """Hand everything back if the block fails because this worker may no longer call the store's functions."""
        try:
            yield
        except* FunctionsReplaced:
            await self.leave_soon()
            raise

    def _compare(self, facts: Sequence[bytes | None], time: Sequence[bytes]) -> None:
        generation, *versions, shards = facts
        self._store.compare_generation(generation)
        self._store.compare_layout(shards)
        self._store.functions.compare(*versions, time=time)

    async def _ask(self, commands: Callable[[], list[tuple[Argument, ...]]]) -> list[Any]:
        """Send commands whose replies end with the store's time, and check that it is still the same store."""
        clock, connection = self._store.clock, self._store.connection

        async def ask() -> list[Any]:
            sent = clock.monotonic()
            with LoopStopwatch(clock) as waited:
                try:
                    *replies, facts, time = await connection.call_many([*commands(), READ_FACTS, ("TIME",)])
                except StoreRefused:
                    self._compare(*await connection.call_many([READ_FACTS, ("TIME",)]))  # the clearer error
                    raise
            self._compare(facts, time)
            await self._store.repair_layout(facts[-1])
            self._slowest_seconds = max(waited.seconds, SLOWNESS_DECAY * self._slowest_seconds)
            if isinstance(replies[0][-1], int):
                clock.apply_store_time(replies[0][-1], sent=sent)
            return replies

        return await self._store.retry(ask)


async def list_members(store: Store) -> list[ClusterMember]:
    """Return the workers of the first shard, the longest silent first; empty if no functions were ever deployed."""
    names = store.all_shards[0]
    flat = await store.call("ZRANGE", names.workers, 0, -1, "WITHSCORES")
    if not flat:
        return []
    _, now_ms = await store.call_function("deck_now", (names.root,))
    found = []
    for worker, deadline in zip(flat[::2], flat[1::2], strict=True):
        worker_id = worker.decode(errors="backslashreplace")
        try:
            pairs = await store.call("HGETALL", names.worker_facts(worker_id))
        except StoreRefused:  # a key of another type, until the next sweep; other workers are not affected
            pairs = []
        about = decode_fields(pairs)
        deadline_ms = max(-MAX_DEADLINE_MS, min(float(deadline), MAX_DEADLINE_MS))
        found.append(ClusterMember(worker_id, about.get("role", ""), (deadline_ms - now_ms) / 1000, about))
    return found


async def find_silent_roles(store: Store) -> list[str]:
    """Return the roles without a heartbeat in the last minute."""
    heard = {member.role for member in await list_members(store) if member.left_seconds > -SILENT_SECONDS}
    return [role for role in ROLES if role not in heard]
