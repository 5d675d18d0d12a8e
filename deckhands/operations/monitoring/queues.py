"""The depth and the wait of each queue: the ready streams, the action streams, the inbox, Celery's lists.

Holds: the streams of nodes count together, because there may be as many as machines; only the first `MAX_LABEL_VALUES`
pools count by name. A stream with a forged name is not queried.
Does not: know pools without a worker and an offered tool; know how long an entry of a Celery list waited before this
process first read the list.
Keys: reads `deck:{k}:ready…`, `deck:{k}:act:…`, `deck:{k}:turns:…`, `deck:inbox…`, `deck:producers`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from broker.coordination import Producers
from broker.store import INBOX, Connection, ShardKeys, Store, decode_text, parse_number, read_tolerantly, to_pairs
from deckhands.operations.monitoring.families import MAX_LABEL_VALUES, OTHER

POOL = re.compile(r"pool:([A-Za-z0-9_.-]{1,64})")
NODE = re.compile(r"node:[^\x00-\x20]{1,200}")
CONTROLLERS, TOOLS, INGRESSES = "controllers", "tools", "ingresses"
NODES_QUEUE = "nodes"
MAX_POOLS, MAX_NODES = 200, 1_000
"""The maximum number queried, because the names come from workers' reports and may be forged."""
CLASSES = ("0", "1", "2")
MARK_SECONDS = 2.0
MAX_MARKS = 256
MAX_MARK_BYTES = 64 * 1024
MAX_SCANNED = 200_000


@dataclass(slots=True)
class Depth:
    """The entries of one queue.

    Attributes:
        waiting: in the stream, not taken by a worker.
        in_line: waiting for their turn to get into the stream.
        held: taken by workers and not finished.
        oldest_seconds: how long the first waiting entry has been in the stream.
    """

    waiting: float = 0.0
    in_line: float = 0.0
    held: float = 0.0
    oldest_seconds: float = 0.0

    def add(self, other: Depth) -> None:
        """Add another stream of the same queue."""
        self.waiting += other.waiting
        self.in_line += other.in_line
        self.held += other.held
        self.oldest_seconds = max(self.oldest_seconds, other.oldest_seconds)


@dataclass(frozen=True, slots=True)
class _Stream:
    queue: str
    key: str
    group: str
    turns: str = ""


async def read_depths(store: Store, routes: Iterable[str], *, sees_inbox: bool = True) -> dict[str, Depth]:
    """Return the depth of each queue, by name.

    Args:
        routes: of possible action streams: `pool:<name>` and `node:<id>`.
        sees_inbox: this process has the right to read the inbox.

    Raises:
        StoreError: the store does not answer.
    """
    streams = [stream for names in await store.load_shards() for stream in _of_shard(names, sorted(set(routes)))]
    if sees_inbox:
        streams.append(_Stream("inbox", INBOX, INGRESSES))
        own = sorted((await Producers(store).load_all()).values(), key=lambda producer: producer.name)
        streams += [
            _Stream(f"inbox:{producer.name}" if at < MAX_LABEL_VALUES else OTHER, producer.stream, INGRESSES)
            for at, producer in enumerate(own)
        ]
    # A question about a stream that does not exist is refused, and a batch with a refusal is asked again singly.
    counts = await read_tolerantly(store.connection, [("EXISTS", stream.key) for stream in streams])
    existing = [stream for stream, count in zip(streams, counts, strict=True) if count]
    lines = [f"{stream.turns}:{rank}" for stream in streams if stream.turns for rank in CLASSES]
    commands = [("XINFO", "GROUPS", stream.key) for stream in existing]
    replies = await read_tolerantly(store.connection, [("TIME",), *commands, *(("ZCARD", key) for key in lines)])
    now_ms = parse_number(replies[0][0]) * 1000 if replies[0] else 0.0
    in_line = dict(zip(lines, map(parse_number, replies[1 + len(existing) :]), strict=True))
    groups = [_find_group(found, stream.group) for stream, found in zip(existing, replies[1:], strict=False)]
    places = [decode_text(group.get("last-delivered-id")) or "0" for group in groups]
    firsts = [
        ("XRANGE", stream.key, f"({place}", "+", "COUNT", 1) for stream, place in zip(existing, places, strict=True)
    ]
    found = defaultdict[str, Depth](Depth)
    for stream in streams:
        found[stream.queue].in_line += sum(in_line[f"{stream.turns}:{rank}"] for rank in CLASSES if stream.turns)
    for stream, group, first in zip(existing, groups, await read_tolerantly(store.connection, firsts), strict=True):
        depth = Depth(parse_number(group.get("lag")), held=parse_number(group.get("pending")))
        depth.waiting = max(depth.waiting, 1.0) if first else 0.0  # the server does not always know the number
        if first:
            depth.oldest_seconds = max(0.0, now_ms - parse_number(decode_text(first[0][0]).partition("-")[0])) / 1000
        found[stream.queue].add(depth)
    return dict(found)


def _of_shard(names: ShardKeys, routes: list[str]) -> list[_Stream]:
    turns = f"{names.root}:turns"
    found = [
        _Stream("ready", names.ready, CONTROLLERS, f"{turns}:ready"),
        _Stream("ready_interactive", names.ready_interactive, CONTROLLERS, f"{turns}:ready:interactive"),
    ]
    pools = [route for route in routes if POOL.fullmatch(route)][:MAX_POOLS]
    for position, route in enumerate(pools):
        queue = route if position < MAX_LABEL_VALUES else OTHER
        found += [_action_stream(names, queue, route, is_interactive=lane) for lane in (False, True)]
    nodes = [route for route in routes if NODE.fullmatch(route)][:MAX_NODES]
    lanes = [(route, lane) for route in nodes for lane in (False, True)]
    return found + [_action_stream(names, NODES_QUEUE, route, is_interactive=lane) for route, lane in lanes]


def _action_stream(names: ShardKeys, queue: str, route: str, *, is_interactive: bool) -> _Stream:
    key = names.actions(route, is_interactive=is_interactive)
    return _Stream(queue, key, TOOLS, f"{names.root}:turns{key.removeprefix(names.root)}")


def _find_group(found: object, name: str) -> dict[str, object]:
    groups = [to_pairs(each) for each in found] if isinstance(found, list) else []
    return next((group for group in groups if decode_text(group.get("name")) == name), {})


class CeleryWaits:
    """A lower bound of the oldest entry's wait in each Celery list.

    Celery writes no time into its messages, so each poll records the newest entry. The lists are first in, first out:
    as long as that entry waits, all entries before it have waited since that poll.
    """

    def __init__(self) -> None:
        self._marks: dict[str, deque[tuple[float, bytes]]] = {}

    async def oldest_seconds(self, celery: Connection, key: str, length: float, now: float) -> float:
        """Return how long the oldest entry has waited since polling started; 0 for an empty list.

        Raises:
            StoreError: Celery's broker does not answer.
        """
        marks = self._marks.setdefault(key, deque())
        if not length:
            marks.clear()
            return 0.0
        await self._forget_taken(celery, key, marks)
        if not marks or now - marks[-1][0] >= MARK_SECONDS:
            # The last entry is the oldest. On the first poll of a list, no other entry is known.
            ends = [-1, 0] if not marks else [0]
            for entry in await read_tolerantly(celery, [("LINDEX", key, end) for end in ends]):
                if isinstance(entry, bytes) and len(entry) <= MAX_MARK_BYTES:
                    marks.append((now, entry))
        if len(marks) > MAX_MARKS:
            self._marks[key] = deque(mark for place, mark in enumerate(marks) if place % 2 == 0)
        return max(0.0, now - marks[0][0]) if marks else 0.0

    async def _forget_taken(self, celery: Connection, key: str, marks: deque[tuple[float, bytes]]) -> None:
        """Forget entries that have left the list: those before the first remaining one, found by bisection."""
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high) // 2
            search = ("LPOS", key, marks[middle][1], "RANK", -1, "MAXLEN", MAX_SCANNED)
            if (await read_tolerantly(celery, [search]))[0] is None:
                low = middle + 1
            else:
                high = middle
        for _ in range(low):
            marks.popleft()
