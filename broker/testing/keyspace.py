"""The keys of the in-memory store, and its commands on hashes, sets, sorted sets and strings.

Holds: replies equal a real server's: bytes, int, None, or lists of them; errors are raised as `ReplyError`.
Does not: expire, persist or evict keys; implement commands that Deckhands does not use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from hiredis import ReplyError

from broker.runtime import Clock, to_millis

V = TypeVar("V")


class StatusReply(bytes):
    """A status reply such as OK: a table in Lua, bytes elsewhere."""


OK = StatusReply(b"OK")


class Hash(dict[bytes, bytes]):
    """A hash: field → value."""


class Members(dict[bytes, None]):
    """A set with insertion order, so that simulations are deterministic."""


class SortedSet(dict[bytes, float]):
    """A sorted set: member → score."""

    def sort_members(self) -> list[tuple[bytes, float]]:
        """Return members and scores, sorted by score, then by member."""
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


class Keyspace:
    """All keys of one store."""

    def __init__(self, clock: Clock) -> None:
        self.values: dict[bytes, Any] = {}
        self.changed_streams: set[bytes] = set()
        """Streams that have new entries or were removed since blocked reads were last served."""
        self.expires: dict[bytes, int] = {}
        """When keys expire, in milliseconds since the epoch."""
        self._clock = clock

    def now_ms(self) -> int:
        """Return the store's time in milliseconds since the epoch."""
        return to_millis(self._clock.now())

    def find(self, key: bytes, kind: type[V]) -> V | None:
        """Return the value of a key, None if it is missing.

        Raises:
            ReplyError: the value has another type.
        """
        value = self.values.get(key)
        if value is not None and type(value) is not kind:
            raise ReplyError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def find_or_create(self, key: bytes, kind: type[V]) -> V:
        """Return the value of a key, created if missing; raises the errors of `find`."""
        value = self.find(key, kind)
        if value is None:
            value = self.values[key] = kind()
        return value

    def drop_expired(self) -> None:
        """Delete the keys that have expired."""
        if self.expires:
            now_ms = self.now_ms()
            for key in [key for key, at in self.expires.items() if at <= now_ms or key not in self.values]:
                del self.expires[key]
                self.values.pop(key, None)

    def drop_empty(self, key: bytes) -> None:
        """Delete an empty hash or set."""
        if not self.values.get(key, True):
            del self.values[key]
            self.expires.pop(key, None)


Arguments = list[bytes]
Command = Callable[[Keyspace, Arguments], Any]


def _hset(keys: Keyspace, args: Arguments) -> int:
    found = keys.find_or_create(args[0], Hash)
    before = len(found)
    found.update(zip(args[1::2], args[2::2], strict=True))
    return len(found) - before


def _hsetnx(keys: Keyspace, args: Arguments) -> int:
    key, field, value = args
    if field in (keys.find(key, Hash) or ()):
        return 0
    keys.find_or_create(key, Hash)[field] = value
    return 1


def _hget(keys: Keyspace, args: Arguments) -> bytes | None:
    key, field = args
    return (keys.find(key, Hash) or Hash()).get(field)


def _hexists(keys: Keyspace, args: Arguments) -> int:
    return int(_hget(keys, args) is not None)


def _hmget(keys: Keyspace, args: Arguments) -> list[bytes | None]:
    found = keys.find(args[0], Hash) or Hash()
    return [found.get(field) for field in args[1:]]


def _hgetall(keys: Keyspace, args: Arguments) -> list[bytes]:
    return [part for pair in (keys.find(args[0], Hash) or Hash()).items() for part in pair]


def _hdel(keys: Keyspace, args: Arguments) -> int:
    found = keys.find(args[0], Hash) or Hash()
    gone = sum(found.pop(field, None) is not None for field in args[1:])
    keys.drop_empty(args[0])
    return gone


def _hincrby(keys: Keyspace, args: Arguments) -> int:
    key, field, amount = args
    found = keys.find_or_create(key, Hash)
    try:
        value = int(found.get(field, b"0")) + int(amount)
    except ValueError as error:
        raise ReplyError("ERR hash value is not an integer") from error
    if not -(2**63) <= value < 2**63:
        raise ReplyError("ERR increment or decrement would overflow")
    found[field] = b"%d" % value
    return value


def _hlen(keys: Keyspace, args: Arguments) -> int:
    return len(keys.find(args[0], Hash) or ())


def _sadd(keys: Keyspace, args: Arguments) -> int:
    found = keys.find_or_create(args[0], Members)
    before = len(found)
    found.update(dict.fromkeys(args[1:]))
    return len(found) - before


def _srem(keys: Keyspace, args: Arguments) -> int:
    found = keys.find(args[0], Members) or Members()
    before = len(found)
    for member in args[1:]:
        found.pop(member, None)
    keys.drop_empty(args[0])
    return before - len(found)


def _spop(keys: Keyspace, args: Arguments) -> list[bytes]:
    found = keys.find(args[0], Members) or Members()
    gone = list(found)[: int(args[1])]
    _srem(keys, [args[0], *gone])
    return gone


def _scard(keys: Keyspace, args: Arguments) -> int:
    return len(keys.find(args[0], Members) or ())


def _sismember(keys: Keyspace, args: Arguments) -> int:
    return int(args[1] in (keys.find(args[0], Members) or ()))


def _smembers(keys: Keyspace, args: Arguments) -> list[bytes]:
    return list(keys.find(args[0], Members) or ())


def _zadd(keys: Keyspace, args: Arguments) -> int:
    option = args[1].upper()
    start = 2 if option in (b"NX", b"XX") else 1
    try:
        scores = [float(score) for score in args[start::2]]
    except ValueError as error:
        raise ReplyError("ERR value is not a valid float") from error
    pairs = dict(zip(args[start + 1 :: 2], scores, strict=True))
    found = keys.find_or_create(args[0], SortedSet)
    before = len(found)
    if start == 2:
        pairs = {member: score for member, score in pairs.items() if (member in found) is (option == b"XX")}
    found.update(pairs)
    keys.drop_empty(args[0])
    return len(found) - before


def _zscore(keys: Keyspace, args: Arguments) -> bytes | None:
    score = (keys.find(args[0], SortedSet) or SortedSet()).get(args[1])
    return None if score is None else _render_score(score)


def _zrem(keys: Keyspace, args: Arguments) -> int:
    found = keys.find(args[0], SortedSet) or SortedSet()
    gone = sum(found.pop(member, None) is not None for member in args[1:])
    keys.drop_empty(args[0])
    return gone


def _zcard(keys: Keyspace, args: Arguments) -> int:
    return len(keys.find(args[0], SortedSet) or ())


def _zrank(keys: Keyspace, args: Arguments) -> int | None:
    found = keys.find(args[0], SortedSet) or SortedSet()
    if args[1] not in found:
        return None
    return [member for member, _ in found.sort_members()].index(args[1])


def _zremrangebyscore(keys: Keyspace, args: Arguments) -> int:
    return _zrem(keys, [args[0], *_zrangebyscore(keys, args)])


def _zrange(keys: Keyspace, args: Arguments, *, is_reversed: bool = False) -> list[bytes]:
    ranked = (keys.find(args[0], SortedSet) or SortedSet()).sort_members()
    if is_reversed:
        ranked.reverse()
    start, stop = (int(end) + (len(ranked) if int(end) < 0 else 0) for end in args[1:3])
    return _range_members(ranked[max(start, 0) : stop + 1], args[3:])


def _zrevrange(keys: Keyspace, args: Arguments) -> list[bytes]:
    return _zrange(keys, args, is_reversed=True)


def _zscan(keys: Keyspace, args: Arguments) -> list[Any]:
    """Return all matches at once, which a server may do."""
    pattern = args[args.index(b"MATCH") + 1].decode() if b"MATCH" in args else "*"
    ranked = (keys.find(args[0], SortedSet) or SortedSet()).sort_members()
    found = [(member, score) for member, score in ranked if fnmatchcase(member.decode(errors="replace"), pattern)]
    return [b"0", _range_members(found, [b"WITHSCORES"])]


def _zrangebyscore(keys: Keyspace, args: Arguments) -> list[bytes]:
    (low, is_low_open), (high, is_high_open) = _parse_score_end(args[1]), _parse_score_end(args[2])
    found = [
        (member, score)
        for member, score in (keys.find(args[0], SortedSet) or SortedSet()).sort_members()
        if (low < score or (low == score and not is_low_open))
        and (score < high or (score == high and not is_high_open))
    ]
    options = [option.upper() for option in args[3:]]
    if b"LIMIT" in options:
        at = options.index(b"LIMIT")
        offset, count = int(options[at + 1]), int(options[at + 2])
        found = found[offset : offset + count] if count >= 0 else found[offset:]
    return _range_members(found, options)


def _zrevrangebyscore(keys: Keyspace, args: Arguments) -> list[bytes]:
    options = [option.upper() for option in args[3:]]
    limits = options.index(b"LIMIT") if b"LIMIT" in options else None
    pairs = _zrangebyscore(keys, [args[0], args[2], args[1], b"WITHSCORES"])
    found = [(pairs[at], float(pairs[at + 1])) for at in range(len(pairs) - 2, -1, -2)]
    if limits is not None:
        offset, count = int(options[limits + 1]), int(options[limits + 2])
        found = found[offset : offset + count] if count >= 0 else found[offset:]
    return _range_members(found, options)


def _parse_score_end(text: bytes) -> tuple[float, bool]:
    is_open = text.startswith(b"(")
    try:
        return float(text[is_open:]), is_open
    except ValueError as error:
        raise ReplyError("ERR min or max is not a float") from error


def _range_members(ranked: list[tuple[bytes, float]], options: Arguments) -> list[bytes]:
    if b"WITHSCORES" not in (option.upper() for option in options):
        return [member for member, _ in ranked]
    return [part for member, score in ranked for part in (member, _render_score(score))]


def _render_score(score: float) -> bytes:
    if math.isinf(score):
        return b"inf" if score > 0 else b"-inf"
    return b"%d" % score if score.is_integer() else repr(score).encode()


def _get(keys: Keyspace, args: Arguments) -> bytes | None:
    return keys.find(args[0], bytes)


def _set(keys: Keyspace, args: Arguments) -> StatusReply | None:
    key, value, *options = args
    if b"NX" in options and key in keys.values:
        return None
    keys.values[key] = value
    keys.expires.pop(key, None)
    if b"PX" in options:
        keys.expires[key] = keys.now_ms() + int(options[options.index(b"PX") + 1])
    return OK


def _del(keys: Keyspace, args: Arguments) -> int:
    keys.changed_streams.update(args)
    for key in args:
        keys.expires.pop(key, None)
    return sum(keys.values.pop(key, None) is not None for key in args)


def _exists(keys: Keyspace, args: Arguments) -> int:
    return sum(key in keys.values for key in args)


def _pexpire(keys: Keyspace, args: Arguments) -> int:
    """Set when a key expires; the option XX is ignored."""
    if args[0] not in keys.values:
        return 0
    keys.expires[args[0]] = keys.now_ms() + int(args[1])
    return 1


def _expire(keys: Keyspace, args: Arguments) -> int:
    return _pexpire(keys, [args[0], args[1] + b"000"])


def _persist(keys: Keyspace, args: Arguments) -> int:
    return int(keys.expires.pop(args[0], None) is not None)


def _type(keys: Keyspace, args: Arguments) -> StatusReply:
    return _TYPES.get(type(keys.values.get(args[0])), StatusReply(b"stream"))


_TYPES = {
    kind: StatusReply(name)
    for kind, name in (
        (type(None), b"none"),
        (Hash, b"hash"),
        (Members, b"set"),
        (SortedSet, b"zset"),
        (bytes, b"string"),
    )
}


def _rename(keys: Keyspace, args: Arguments) -> StatusReply:
    keys.changed_streams.update(args)
    keys.values[args[1]] = keys.values.pop(args[0])
    keys.expires.pop(args[1], None)
    if args[0] in keys.expires:
        keys.expires[args[1]] = keys.expires.pop(args[0])
    return OK


def _time(keys: Keyspace, _: Arguments) -> list[bytes]:
    seconds, millis = divmod(keys.now_ms(), 1000)
    return [b"%d" % seconds, b"%d" % (millis * 1000)]


def _describe_server(_: Keyspace, __: Arguments) -> bytes:
    about = b"redis_version:8.6.3\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"
    return b"# Server\r\n" + about


COMMANDS: dict[bytes, Command] = {
    b"EXPIRE": _expire,
    b"PEXPIRE": _pexpire,
    b"PERSIST": _persist,
    b"HSET": _hset,
    b"HSETNX": _hsetnx,
    b"HGET": _hget,
    b"HEXISTS": _hexists,
    b"HMGET": _hmget,
    b"HGETALL": _hgetall,
    b"HDEL": _hdel,
    b"HINCRBY": _hincrby,
    b"HLEN": _hlen,
    b"SADD": _sadd,
    b"SREM": _srem,
    b"SPOP": _spop,
    b"SCARD": _scard,
    b"SISMEMBER": _sismember,
    b"SMEMBERS": _smembers,
    b"ZADD": _zadd,
    b"ZSCORE": _zscore,
    b"ZREM": _zrem,
    b"ZREMRANGEBYSCORE": _zremrangebyscore,
    b"ZCARD": _zcard,
    b"ZRANK": _zrank,
    b"ZRANGE": _zrange,
    b"ZREVRANGE": _zrevrange,
    b"ZRANGEBYSCORE": _zrangebyscore,
    b"ZREVRANGEBYSCORE": _zrevrangebyscore,
    b"ZSCAN": _zscan,
    b"GET": _get,
    b"SET": _set,
    b"DEL": _del,
    b"UNLINK": _del,
    b"EXISTS": _exists,
    b"TYPE": _type,
    b"RENAME": _rename,
    b"TIME": _time,
    b"INFO": _describe_server,
}
"""All commands of this file, by name."""
