"""Streams of the in-memory store: entries, consumer groups, and pending entries of each consumer.

Holds: ids rise strictly within a stream, even after a trim. A read without new entries changes only the list of
consumers. Semantics: Redis 7.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

from hiredis import ReplyError

from broker.testing.keyspace import OK, Arguments, Command, Keyspace, StatusReply

Id = tuple[int, int]

LAST_SEQ = (1 << 64) - 1
TRIM_SLACK = 100
"""How many excess entries an approximate trim may leave: a real server drops whole nodes of a hundred."""


@dataclass
class PendingEntry:
    """An entry that was delivered to a consumer and not acknowledged."""

    consumer: bytes
    delivered_ms: int
    deliveries: int = 1


@dataclass
class ConsumerGroup:
    """A consumer group: its last delivered id, its consumers, and their pending entries."""

    last: Id
    consumers: dict[bytes, None] = field(default_factory=dict)
    pending: dict[Id, PendingEntry] = field(default_factory=dict)

    def list_pending(self, consumer: bytes | None = None) -> list[tuple[Id, PendingEntry]]:
        """Return the pending entries of a consumer, or of all, sorted by id."""
        return sorted(
            (item for item in self.pending.items() if consumer in (None, item[1].consumer)), key=lambda item: item[0]
        )


@dataclass
class Stream:
    """A stream: its ids in order, and the fields of each entry."""

    ids: list[Id] = field(default_factory=list)
    fields: dict[Id, Arguments] = field(default_factory=dict)
    last: Id = (0, 0)
    groups: dict[bytes, ConsumerGroup] = field(default_factory=dict)

    def find_ids(self, first: Id, final: Id, count: int | None = None) -> list[Id]:
        """Return the ids from `first` to `final`, both included, at most `count`."""
        found = self.ids[bisect_left(self.ids, first) : bisect_right(self.ids, final)]
        return found if count is None else found[:count]

    def to_reply(self, entry_id: Id) -> list[Any]:
        """Return an entry as a reply; its fields are None if it was trimmed."""
        return [render_id(entry_id), self.fields.get(entry_id)]

    def trim_first(self, number: int) -> int:
        """Trim the first `number` entries and return how many were removed."""
        gone, self.ids = self.ids[:number], self.ids[number:]
        for entry_id in gone:
            del self.fields[entry_id]
        return len(gone)


@dataclass
class StreamRead:
    """An XREAD or XREADGROUP.

    Attributes:
        group: the group of XREADGROUP, else empty.
        block_ms: how long to wait; 0 for no limit, None not to wait.
        streams: key → id to read after; `>` for undelivered entries.
    """

    group: bytes
    consumer: bytes
    count: int | None
    block_ms: int | None
    streams: dict[bytes, bytes]

    @staticmethod
    def parse(command: Arguments) -> StreamRead | None:
        """Parse a command as a read; None if it is another command."""
        name, *args = command
        if name.upper() not in (b"XREAD", b"XREADGROUP"):
            return None
        group, consumer = (args[1], args[2]) if name.upper() == b"XREADGROUP" else (b"", b"")
        at = 3 if group else 0
        options = dict[bytes, int]()
        while args[at].upper() != b"STREAMS":
            options[args[at].upper()] = int(args[at + 1])
            at += 2
        names = args[at + 1 :]
        half = len(names) // 2
        streams = dict(zip(names[:half], names[half:], strict=True))
        return StreamRead(group, consumer, options.get(b"COUNT"), options.get(b"BLOCK"), streams)

    def run(self, keys: Keyspace) -> list[Any] | None:
        """Perform the read once; None if there are no entries."""
        for key, after in self.streams.items():
            if after == b"$":
                self.streams[key] = render_id((keys.find(key, Stream) or Stream()).last)
        groups = [_find_group(keys, key, self.group) for key in self.streams] if self.group else []
        for _, group in groups:
            group.consumers[self.consumer] = None
        found = []
        for key, after in self.streams.items():
            stream = keys.find(key, Stream)
            if stream is None:
                continue
            if not self.group:
                entries = [stream.to_reply(n) for n in stream.find_ids(_next(parse_id(after)), LAST_ID, self.count)]
            elif after == b">":
                entries = self._deliver(stream, keys.now_ms())
            else:
                held = stream.groups[self.group].list_pending(self.consumer)
                entries = [stream.to_reply(n) for n, _ in held if n > parse_id(after)][: self.count]
            if entries or (self.group and after != b">"):
                found.append([key, entries])
        return found or None

    def _deliver(self, stream: Stream, now_ms: int) -> list[list[Any]]:
        group = stream.groups[self.group]
        news = stream.find_ids(_next(group.last), LAST_ID, self.count)
        for entry_id in news:
            group.pending[entry_id] = PendingEntry(self.consumer, now_ms)
            group.last = entry_id
        return [stream.to_reply(entry_id) for entry_id in news]


LAST_ID: Id = (LAST_SEQ, LAST_SEQ)


def parse_id(text: bytes, *, seq: int = 0) -> Id:
    """Parse an id, completed by `seq`; `-` and `+` are the lowest and the highest possible id."""
    if text in (b"-", b"+"):
        return (0, 0) if text == b"-" else LAST_ID
    ms, dash, rest = text.partition(b"-")
    try:
        return int(ms), int(rest) if dash else seq
    except ValueError as error:
        raise ReplyError("ERR Invalid stream ID specified as stream command argument") from error


def render_id(entry_id: Id) -> bytes:
    """Render an id."""
    return b"%d-%d" % entry_id


def _next(entry_id: Id) -> Id:
    return entry_id[0], entry_id[1] + 1


def _find_group(keys: Keyspace, key: bytes, name: bytes) -> tuple[Stream, ConsumerGroup]:
    stream = keys.find(key, Stream)
    if stream is None or name not in stream.groups:
        raise ReplyError(f"NOGROUP No such key '{key.decode()}' or consumer group '{name.decode()}'")
    return stream, stream.groups[name]


def _trim(stream: Stream, options: Arguments) -> int:
    how, *rest = options
    is_rough = rest[0] == b"~"
    limit = rest[1] if rest[0] in (b"~", b"=") else rest[0]
    if how.upper() == b"MINID":
        surplus = bisect_left(stream.ids, parse_id(limit))
    else:
        surplus = max(len(stream.ids) - int(limit), 0)
    return 0 if is_rough and surplus < TRIM_SLACK else stream.trim_first(surplus)


def _xadd(keys: Keyspace, args: Arguments) -> bytes:
    key, *rest = args
    trim: Arguments = []
    if rest[0].upper() in (b"MAXLEN", b"MINID"):
        length = 3 if rest[1] in (b"~", b"=") else 2
        trim, rest = rest[:length], rest[length:]
    if rest[0] == b"0-0":
        raise ReplyError("ERR The ID specified in XADD must be greater than 0-0")
    stream = keys.find(key, Stream) or Stream()
    if rest[0] == b"*":
        entry_id = max((keys.now_ms(), 0), _next(stream.last))
    else:
        entry_id = parse_id(rest[0])
        if entry_id <= stream.last:
            raise ReplyError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
    keys.values[key] = stream
    stream.ids.append(entry_id)
    stream.fields[entry_id] = rest[1:]
    stream.last = entry_id
    if trim:
        _trim(stream, trim)
    keys.changed_streams.add(key)
    return render_id(entry_id)


def _xlen(keys: Keyspace, args: Arguments) -> int:
    return len((keys.find(args[0], Stream) or Stream()).ids)


def _xrange(keys: Keyspace, args: Arguments) -> list[Any]:
    stream = keys.find(args[0], Stream) or Stream()
    count = int(args[4]) if len(args) > 3 else None
    found = stream.find_ids(_parse_start(args[1]), parse_id(args[2], seq=LAST_SEQ), count)
    return [stream.to_reply(entry_id) for entry_id in found]


def _xrevrange(keys: Keyspace, args: Arguments) -> list[Any]:
    count = int(args[4]) if len(args) > 3 else None
    return _xrange(keys, [args[0], args[2], args[1]])[::-1][:count]


def _xdel(keys: Keyspace, args: Arguments) -> int:
    stream = keys.find(args[0], Stream)
    found = {parse_id(text) for text in args[1:]} & set(stream.ids) if stream else set()
    for entry_id in found:
        assert stream is not None
        stream.ids.remove(entry_id)
        del stream.fields[entry_id]
    return len(found)


def _xtrim(keys: Keyspace, args: Arguments) -> int:
    stream = keys.find(args[0], Stream)
    return _trim(stream, args[1:]) if stream is not None else 0


def _read(name: bytes) -> Command:
    def run(keys: Keyspace, args: Arguments) -> list[Any] | None:
        read = StreamRead.parse([name, *args])
        assert read is not None
        return read.run(keys)

    return run


def _xack(keys: Keyspace, args: Arguments) -> int:
    stream = keys.find(args[0], Stream)
    group = stream.groups.get(args[1]) if stream is not None else None
    if group is None:
        return 0
    return sum(group.pending.pop(parse_id(entry), None) is not None for entry in args[2:])


def _xpending(keys: Keyspace, args: Arguments) -> list[Any]:
    _, group = _find_group(keys, args[0], args[1])
    if len(args) == 2:
        held = group.list_pending()
        if not held:
            return [0, None, None, None]
        counts = [
            [name, b"%d" % len(group.list_pending(name))]
            for name in sorted(group.consumers)
            if group.list_pending(name)
        ]
        return [len(held), render_id(held[0][0]), render_id(held[-1][0]), counts]
    idle_ms, rest = (int(args[3]), args[4:]) if args[2].upper() == b"IDLE" else (0, args[2:])
    first, final, count = _parse_start(rest[0]), parse_id(rest[1], seq=LAST_SEQ), int(rest[2])
    now = keys.now_ms()
    held = [
        (entry_id, item)
        for entry_id, item in group.list_pending(rest[3] if len(rest) > 3 else None)
        if first <= entry_id <= final and now - item.delivered_ms >= idle_ms
    ]
    return [[render_id(n), item.consumer, now - item.delivered_ms, item.deliveries] for n, item in held[:count]]


def _xclaim(keys: Keyspace, args: Arguments) -> list[Any]:
    stream, group = _find_group(keys, args[0], args[1])
    options = [part.upper() for part in args]
    is_brief = b"JUSTID" in options
    end = min((options.index(name) for name in (b"RETRYCOUNT", b"JUSTID") if name in options), default=len(args))
    deliveries = int(args[options.index(b"RETRYCOUNT") + 1]) if b"RETRYCOUNT" in options else None
    found = []
    for entry_id in map(parse_id, args[4:end]):
        if _claim(stream, group, entry_id, args[2], keys.now_ms(), idle_ms=int(args[3])):
            item = group.pending[entry_id]
            item.deliveries = item.deliveries + (not is_brief) if deliveries is None else deliveries
            found.append(render_id(entry_id) if is_brief else stream.to_reply(entry_id))
    return found


def _xautoclaim(keys: Keyspace, args: Arguments) -> list[Any]:
    stream, group = _find_group(keys, args[0], args[1])
    now_ms, idle_ms, start, count = keys.now_ms(), int(args[3]), _parse_start(args[4]), int(args[6])
    claimed: list[Any] = []
    removed: list[bytes] = []
    following: Id = (0, 0)
    for entry_id, item in group.list_pending():
        if entry_id < start:
            continue
        if len(claimed) + len(removed) == count:
            following = entry_id
            break
        if entry_id not in stream.fields:
            del group.pending[entry_id]
            removed.append(render_id(entry_id))
        elif _claim(stream, group, entry_id, args[2], now_ms, idle_ms=idle_ms):
            item.deliveries += 1
            claimed.append(stream.to_reply(entry_id))
    return [render_id(following), claimed, removed]


def _claim(stream: Stream, group: ConsumerGroup, entry_id: Id, consumer: bytes, now_ms: int, *, idle_ms: int) -> bool:
    """Give a pending entry to another consumer; return whether it was idle long enough and still exists."""
    group.consumers[consumer] = None
    item = group.pending.get(entry_id)
    if item is not None and entry_id not in stream.fields:
        del group.pending[entry_id]
        item = None
    if item is None or now_ms - item.delivered_ms < idle_ms:
        return False
    item.consumer = consumer
    item.delivered_ms = now_ms
    return True


def _parse_start(text: bytes) -> Id:
    """Parse the first id of a range; after `(`, the range excludes it."""
    return _next(parse_id(text[1:])) if text.startswith(b"(") else parse_id(text)


def _xinfo(keys: Keyspace, args: Arguments) -> list[Any]:
    stream = keys.find(args[1], Stream)
    if stream is None:
        raise ReplyError("ERR no such key")
    if args[0].upper() == b"STREAM":
        return [b"length", len(stream.ids), b"last-generated-id", render_id(stream.last)]
    assert args[0].upper() == b"GROUPS"
    return [
        [
            *(b"name", name, b"consumers", len(group.consumers), b"pending", len(group.pending)),
            *(b"last-delivered-id", render_id(group.last)),
            *(b"lag", len(stream.find_ids(_next(group.last), LAST_ID))),
        ]
        for name, group in sorted(stream.groups.items())
    ]


def _xgroup(keys: Keyspace, args: Arguments) -> StatusReply | int:
    verb, key, name, *rest = args
    stream = keys.find(key, Stream)
    if verb.upper() == b"CREATE":
        if stream is None:
            if b"MKSTREAM" not in (option.upper() for option in rest):
                raise ReplyError("ERR The XGROUP subcommand requires the key to exist.")
            stream = keys.find_or_create(key, Stream)
        if name in stream.groups:
            raise ReplyError("BUSYGROUP Consumer Group name already exists")
        stream.groups[name] = ConsumerGroup(stream.last if rest[0] == b"$" else parse_id(rest[0]))
        return OK
    assert verb.upper() == b"DELCONSUMER"
    if stream is None:
        raise ReplyError("ERR The XGROUP subcommand requires the key to exist.")
    _, group = _find_group(keys, key, name)
    gone = group.list_pending(rest[0])
    for entry_id, _ in gone:
        del group.pending[entry_id]
    group.consumers.pop(rest[0], None)
    return len(gone)


COMMANDS: dict[bytes, Command] = {
    b"XADD": _xadd,
    b"XLEN": _xlen,
    b"XRANGE": _xrange,
    b"XREVRANGE": _xrevrange,
    b"XTRIM": _xtrim,
    b"XDEL": _xdel,
    b"XINFO": _xinfo,
    b"XGROUP": _xgroup,
    b"XREAD": _read(b"XREAD"),
    b"XREADGROUP": _read(b"XREADGROUP"),
    b"XACK": _xack,
    b"XPENDING": _xpending,
    b"XCLAIM": _xclaim,
    b"XAUTOCLAIM": _xautoclaim,
}
"""All commands of this file, by name."""
