"""The history of appends and acknowledgements of a run with fail-overs, and its checker.

Holds: the checker uses nothing of the code under test but the dictionary of its compression. It compares what was
acknowledged with the raw entries that the servers hold at the end: their ids, and a mark in each that names its call,
its owner and the owner's token.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

DICTIONARY = zstandard.ZstdCompressionDict((Path(__file__).parents[1] / "broker/contract/events.zdict").read_bytes())
DECOMPRESSOR = zstandard.ZstdDecompressor(dict_data=DICTIONARY)
PRODUCER = "producer"
MARK = re.compile(rb"<n=([0-9]{1,9}) w=([A-Za-z0-9_.-]{1,64}) t=([0-9]{1,20})>")

Log = Sequence[tuple[bytes, bytes]]
"""The id of each entry of a stream, and all its bytes, in order."""


def unpack(fields: Sequence[bytes]) -> bytes:
    """Return the bytes of an entry of a stream, with the event in it decompressed."""
    (event,) = [value for name, value in zip(fields[::2], fields[1::2], strict=True) if name == b"e"]
    return DECOMPRESSOR.decompress(event[6:]) if event[1] == 2 else event  # plain


@dataclass(frozen=True, slots=True)
class Call:
    """One call that appends one event; `acknowledged_id` is the id it was acknowledged with, None if it never was."""

    conversation: str
    worker: str
    token: int
    acknowledged_id: int | None = None
    acknowledged_at: float | None = None


@dataclass(slots=True)
class History:
    """The calls by number, and the times of the promotions; times are seconds of one clock."""

    calls: dict[int, Call] = field(default_factory=dict)
    promotions: list[float] = field(default_factory=list)
    replaced: list[float] = field(default_factory=list)
    """The promotions whose server Sentinels replaced before all conversations continued."""
    latest: dict[str, float] = field(default_factory=dict)
    """When the latest event of each conversation was acknowledged."""

    def call(self, conversation: str, worker: str, token: int) -> tuple[int, str]:
        """Record a call; return its number, and the mark to write."""
        number = len(self.calls)
        self.calls[number] = Call(conversation, worker, token)
        return number, f"<n={number} w={worker} t={token}>"

    def acknowledge(self, number: int, event_id: int, at: float) -> None:
        called = self.calls[number]
        self.calls[number] = Call(called.conversation, called.worker, called.token, event_id, at)
        self.latest[called.conversation] = at

    def count_acknowledged(self) -> int:
        return sum(call.acknowledged_id is not None for call in self.calls.values())

    def save(self, path: Path) -> None:
        calls = [
            [call.conversation, call.worker, call.token, call.acknowledged_id, call.acknowledged_at]
            for call in self.calls.values()
        ]
        path.write_text(json.dumps({"calls": calls, "promotions": self.promotions, "replaced": self.replaced}))

    @classmethod
    def load(cls, path: Path) -> History:
        found = json.loads(path.read_text())
        calls = {number: Call(*call) for number, call in enumerate(found["calls"])}
        return cls(calls, found["promotions"], found["replaced"])

    def takeover_seconds(self) -> list[float]:
        """Return, for each lasting promotion and conversation, the time until its next acknowledged event.

        If Sentinels replace the server that they have promoted, they take eight seconds or more to make it a replica,
        and nothing is confirmed until then.
        """
        times: dict[str, list[float]] = {}
        for call in self.calls.values():
            if call.acknowledged_at is not None:
                times.setdefault(call.conversation, []).append(call.acknowledged_at)
        return [
            next(at for at in sorted(acknowledged) if at >= promoted) - promoted
            for promoted in self.promotions
            if promoted not in self.replaced
            for acknowledged in times.values()
            if acknowledged and max(acknowledged) >= promoted
        ]


def find_faults(history: History, logs: Mapping[str, Log]) -> list[str]:
    """Return every contradiction between what was acknowledged and what the logs hold; empty if there is none."""
    faults: list[str] = []
    places: dict[int, list[tuple[str, int]]] = {}
    for conversation, log in logs.items():
        if [entry for entry, _ in log] != [f"{number}-0".encode() for number in range(1, len(log) + 1)]:
            faults.append(f"{conversation}: its ids are not 1 to {len(log)} without a gap")
        faults += _find_token_faults(conversation, log)
        for position, (_, entry) in enumerate(log, 1):
            for number, worker, token in _marks([(b"", entry)]):
                places.setdefault(number, []).append((conversation, position))
                call = history.calls.get(number)
                if call is None or (call.conversation, call.worker, call.token) != (conversation, worker, token):
                    faults.append(f"{conversation}: event {position} is of call {number}, which was another one")
    faults += [
        f"call {number} was written {len(found)} times: {found}" for number, found in places.items() if found[1:]
    ]
    for number, call in history.calls.items():
        acknowledged = (call.conversation, call.acknowledged_id)
        if call.acknowledged_id is not None and acknowledged not in places.get(number, ()):
            faults.append(f"call {number} was acknowledged as event {acknowledged}, which is lost")
    ids = Counter((c.conversation, c.acknowledged_id) for c in history.calls.values() if c.acknowledged_id is not None)
    faults += [f"event {event} was acknowledged {count} times" for event, count in ids.items() if count > 1]
    return faults


def _find_token_faults(conversation: str, log: Log) -> list[str]:
    """Return where an owner wrote after a later one, and tokens with two owners."""
    owners = [(token, worker) for _, worker, token in _marks(log) if worker != PRODUCER]
    faults = [
        f"{conversation}: the owner {later[1]} with token {later[0]} wrote after token {earlier[0]}"
        for earlier, later in itertools.pairwise(owners)
        if later[0] < earlier[0]
    ]
    workers: dict[int, set[str]] = {}
    for token, worker in owners:
        workers.setdefault(token, set()).add(worker)
    return faults + [
        f"{conversation}: token {token} has owners {found}" for token, found in workers.items() if len(found) > 1
    ]


def _marks(log: Log) -> Iterable[tuple[int, str, int]]:
    for _, entry in log:
        for number, worker, token in MARK.findall(entry):
            yield int(number), worker.decode(), int(token)


def describe_times(seconds: Sequence[float]) -> str:
    """Return the count, p50, p99 and maximum of durations."""
    ordered = sorted(seconds)
    if not ordered:
        return "none"
    at = {share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)}
    return f"{len(ordered)} times, p50 {at[0.5]:.2f} s, p99 {at[0.99]:.2f} s, max {ordered[-1]:.2f} s"
