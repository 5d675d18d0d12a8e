"""Entries and values for the keys that workers read, as an attacker with access to the store writes them: seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.security.hostile_families import OURS, Command, commands_against, families

ROOT = "deck:{0}"
NAMES = (b"c", b"a", b"e", b"w", b"x", b"t", b"p", b"foo", b"", b"\xff")
TYPED = (
    *("ready", "unread", "parked", "workers", "nodes", "takeovers", "dead", "index", "unreadable"),
    *("notices", "awaited", "expiring", "revoked", "ready:interactive", "tenants", "paces", "clock"),
)
"""What every worker needs of a shard; each is overwritten by a string now and then."""
OVERWRITTEN_IN = 8
"""So many seeds in a row overwrite every key of the table."""
OF_A_WORKER = ("owned", "mail", "about")
KEPT_BY_BEATS = (b"streams", b"ttl_ms", b"end", b"node_patience_ms", b"monotonic", b"lead")
OFFERED = (b"node", b"role", b"pools", b"offer", b"workspace_roots", b"agents", b"directory", b"interactive")
"""What others go by."""


def hostile_commands(seed: int, count: int, *, conversations: list[str], workers: list[str]) -> Iterator[Command]:
    """Commands that write values that no worker of ours writes.

    Args:
        conversations: victims: their keys may be written; entries name them now and then.
        workers: whose mailboxes are written to.
    """
    chance, known = random.Random(seed), [family for family in families() if family.row not in OURS]
    for number in range(count):
        # Not from the beginning: what is overwritten takes no entries until it is moved out of the way.
        if number > 0.9 * count and chance.random() < 0.03:
            yield ("SET", f"{ROOT}:{chance.choice(TYPED)}", "no stream and no set")
            yield ("SET", "deck:tools", "no hash")
        if chance.random() < 0.4:
            family = chance.choice(known)
            yield from commands_against(chance, family, _bytes, conversations=conversations, workers=workers)
        else:
            yield _command(chance, conversations, workers)
    for family in known[seed % OVERWRITTEN_IN :: OVERWRITTEN_IN]:
        yield from commands_against(
            chance, family, _bytes, conversations=conversations, workers=workers, is_of_its_type=False
        )


def _command(chance: random.Random, conversations: list[str], workers: list[str]) -> Command:
    cid = _conversation(chance, conversations)
    match chance.randint(0, 27):
        case 0 | 1 | 2 | 3 | 4 | 5:
            streams = ("act:pool:bash", "act:node:node1", "ready", "ready", "takeovers", "act:node:lost", "notices")
            return ("XADD", f"{ROOT}:{chance.choice(streams)}", "*", *_fields(chance, cid))
        case 6 | 7:
            return ("XADD", f"{ROOT}:worker:{chance.choice(workers)}:mail", "*", *_fields(chance, cid))
        case 8:
            sets = ("parked", "unread", "dead", "index", "awaited", "label:team=shop")
            return ("ZADD", f"{ROOT}:{chance.choice(sets)}", _score(chance), cid)
        case 9:
            return ("ZADD", f"{ROOT}:{chance.choice(('workers', 'nodes'))}", _score(chance), _bytes(chance))
        case 10:
            worker = chance.choice((b"ghost", _bytes(chance)))
            return ("HSET", f"{ROOT}:worker:".encode() + worker + b":about", *_about(chance, KEPT_BY_BEATS + OFFERED))
        case 11:
            return ("ZADD", f"{ROOT}:workers", 1, chance.choice((b"ghost", _bytes(chance))))
        case 12:
            return ("SADD", f"{ROOT}:worker:ghost:owned", cid)
        case 13:
            return ("HSET", "deck:tools", _bytes(chance), _bytes(chance))
        case 14:
            pool = f"{ROOT}:quota:s-any-"
            where = chance.choice(("held", "about", "limits", "state", "shares:1", "level:k"))
            return ("HSET", f"{pool}:{where}", chance.choice((cid, b"keys", b"swept", b"k")), _bytes(chance))
        case 15:
            return ("ZADD", f"{ROOT}:quota:s-any-:{chance.choice(('waiting:0', 'waiting:1', 'called'))}", 1, cid)
        case 16:
            where = chance.choice(("ledger:held", "ledger:lost", "budget:tenant:x", "budget:tenant:x:wanted"))
            return ("HSET", f"{ROOT}:{where}", chance.choice((cid, b"limit", b"spent", b"parent")), _bytes(chance))
        case 17:
            where = chance.choice(("batch:lanes", "batch:about:b", "batch:calls:b", "batch:call:" + "x"))
            return ("HSET", f"{ROOT}:{where}", chance.choice((b"lane", b"count", b"1", b"bytes")), _bytes(chance))
        case 18:
            return ("SADD", f"{ROOT}:ledger:crowded", chance.choice((b"tenant:x", _bytes(chance))))
        case 19 | 20:
            return _against_a_worker(chance, chance.choice(workers), cid)
        case 21 | 22 | 23:
            return _against_ingresses(chance, cid)
    return _against_a_conversation(chance, chance.choice(conversations))


def _about(chance: random.Random, names: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    values = (f"{ROOT}:act:pool:bash {ROOT}:ready x".encode(), b"tool", b"bash", _bytes(chance), b"nan", b"-inf")
    return chance.choice(names), chance.choice(values)


def _against_a_worker(chance: random.Random, worker: str, cid: bytes) -> Command:
    base = f"{ROOT}:worker:{worker}"
    match chance.randint(0, 9):
        case 0 | 1 | 2 | 3 | 4:
            return ("HSET", f"{base}:about", *_about(chance, KEPT_BY_BEATS + OFFERED))
        case 5 | 6 | 7 | 8:
            return ("SADD", f"{base}:owned", cid)
    return ("SET", f"{base}:{chance.choice(OF_A_WORKER)}", _bytes(chance))


def _against_ingresses(chance: random.Random, cid: bytes) -> Command:
    task = chance.choice((b"task-1", b"task-2", _bytes(chance)))
    match chance.randint(0, 8):
        case 0 | 1 | 2:
            return ("ZADD", f"{ROOT}:{chance.choice(('expiring', 'awaited', 'revoked'))}", _score(chance), task)
        case 3:
            return ("ZADD", f"{ROOT}:expiring", _score(chance), cid)
        case 4:
            names = (b"planned", b"expires_ms", b"due_ms", b"not_before_ms", b"wait_reason")
            value = chance.choice((b"waiting", b"over", b"0", _bytes(chance)))
            return ("HSET", f"{ROOT}:c:".encode() + cid + b":meta", chance.choice(names), value)
        case 5 | 6:
            names = (b"kind", b"name", b"kept", b"outcome", b"looks", b"sends", b"answered", b"revoked", b"request_id")
            value = chance.choice((b"celery", b"stream", _bytes(chance)))
            return ("HSET", f"{ROOT}:c:".encode() + cid + b":caller", chance.choice(names), value)
        case 7:
            return ("SET", f"{ROOT}:c:".encode() + cid + chance.choice((b":caller", b":caller:lock")), _bytes(chance))
    return ("HSET", "deck:tools:failed", task, _bytes(chance))


def _against_a_conversation(chance: random.Random, victim: str) -> Command:
    base = f"{ROOT}:c:{victim}"
    match chance.randint(0, 5):
        case 0:
            names = (b"last_id", b"token", b"crashes", b"owner", b"node", b"ready_id", b"rung", b"workspace", b"moves")
            names += (b"gap", b"labels", b"awaited", b"noticed", b"state", b"iterations", b"pool")
            return ("HSET", f"{base}:meta", chance.choice(names), _bytes(chance))
        case 1:
            names = (b"q:5", b"w:5", b"n:5", b"o:5", b"p:x")
            return ("HSET", f"{base}:once", chance.choice(names), _bytes(chance))
        case 2:
            return ("XADD", f"{base}:events", "*", chance.choice((b"e", b"foo")), _bytes(chance))
        case 3:
            return ("SET", f"{base}:{chance.choice(('meta', 'once', 'events', 'snapshot'))}", _bytes(chance))
        case 4:
            return ("SET", f"{base}:snapshot", _bytes(chance))
    return ("XADD", f"{base}:live", "*", "p", _bytes(chance))


def _fields(chance: random.Random, cid: bytes) -> tuple[bytes, ...]:
    if chance.random() < 0.1:
        return (b"foo", b"bar")
    found: list[bytes] = []
    for name in chance.sample(NAMES, chance.randint(1, 6)):
        found += (name, cid if name == b"c" and chance.random() < 0.7 else _bytes(chance))
    return tuple(found)


def _conversation(chance: random.Random, conversations: list[str]) -> bytes:
    return chance.choice((chance.choice(conversations).encode(), b"nobody-1", _bytes(chance)))


def _score(chance: random.Random) -> float | int | str:
    return chance.choice((0, 1, -1, 2**53, "inf", "-inf", 1e300, 1_700_000_000_000))


def _bytes(chance: random.Random) -> bytes:
    plain = (
        *(b"", b"x", b"7", b"-1", b"1e999", b"null", b"{}", b"[[],{}]", b"\xff\xfe", b"\x00", b"../../x", b"a|b"),
        b"|",
    )
    if chance.random() < 0.7:
        return chance.choice((*plain, b"cancel", b"close", b"transfer", b"1-0", b"nan", b" ", b"9" * 400))
    return chance.randbytes(chance.randint(1, 40))
