"""Every family of keys in the store, as `broker/store/keys.py` lists them, and commands that write rubbish to each.

Holds: a key that is added to that table is forged too, or `families` says what it needs for that.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from broker.store import keys

Command = tuple[str | bytes | int | float, ...]
Rubbish = Callable[[random.Random], bytes]
SEVERAL: Mapping[str, tuple[tuple[str, str], ...]] = {
    "deck:{k}:turns:<stream>…": tuple(
        (f"deck:{{k}}:turns:{stream}{end}", kind)
        for stream in ("ready", "ready:interactive", "act:pool:bash", "act:node:node1", "act:interactive:pool:bash")
        for end, kind in (
            *(("", "hash"), (":0", "zset"), (":1", "zset"), (":2", "zset")),
            *((":0:shares", "hash"), (":1:shares", "hash"), (":2:shares", "hash")),
        )
    ),
    "deck:{k}:quota:<pool>:…": (
        *(
            (f"deck:{{0}}:quota:s-any-:{name}", "hash")
            for name in ("held", "about", "limits", "state", "shares:1", "level:k")
        ),
        *((f"deck:{{0}}:quota:s-any-:{name}", "zset") for name in ("waiting:0", "waiting:1", "called")),
    ),
    "deck:{k}:budget:<account>:…": tuple(
        (f"deck:{{0}}:budget:<account>:{name}", kind)
        for name, kind in (("children", "set"), ("waiting", "zset"), ("wanted", "hash"))
    ),
    "deck:{k}:ledger:…": (
        *(("deck:{0}:ledger:held", "hash"), ("deck:{0}:ledger:lost", "hash"), ("deck:{0}:ledger:crowded", "set")),
    ),
    "deck:{0}:batch:…": tuple(
        (f"deck:{{0}}:batch:{name}", "hash") for name in ("lanes", "about:b", "calls:b", "call:x")
    ),
}
"""The keys behind the rows of the table that stand for several."""
PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {
    "<name>=<value>": ("team=shop",),
    "<tenant>": ("", "*", "acme"),
    "<route>": ("pool:bash", "node:node1", "node:lost"),
    "<r>": ("pool:bash", "node:node1"),
    "<account>": ("tenant:", "tenant:acme", "experiment:x"),
    "<t>/<u>/<p>": ("acme/ann/shop", "x/x/x"),
    "<sha256>": ("0" * 64, "x"),
    "<state>": ("s" * 43, "x"),
    "<t>": ("0" * 24, "x"),
    "parcel:<name>": ("parcel:a.zip",),
    "<name>": ("schedules", "retire", "orphans", "checkpoints", "forged"),
    "<c>": ("forged",),
    "<n>": ("29000000", "x"),
    "<step>": ("hour", "day", "x"),
    "{k}": ("{0}",),
}
PLACEHOLDER = re.compile("{k}|(?<=:)parcel:<name>|<name>=<value>|<t>/<u>/<p>|<[a-z0-9]+>|…")
FIELDS: Mapping[str, tuple[bytes, ...]] = {
    "tenants": (b"*", b"", b"acme", b":memory"),
    "paces": (b"*", b"", b"acme"),
    "clock": (b"wall", b"now"),
    "once": (b"q:5", b"w:5", b"n:5", b"o:5", b"p:x"),
    "turns": (b"picks",),
    "shares": (b":at", b"", b"acme"),
    "schedules": (b"forged", b"\xff"),
    "standing": (b"forged", b"\xff"),
    "budget": (b"limit", b"spent", b"reserved", b"parent"),
    "parcel": (b"size", b"0", b"name", b"parts", b"sha256"),
    "transfer": (b"what", b"outcome", b"path", b"token"),
    "secrets": (b"TOKEN", b"\xff"),
    "keys": (b"a" * 12, b"\xff"),
}
"""The names of fields that somebody reads, by a part of the key."""
OURS = frozenset({"deck:store"})
"""Workers end, and must, when the store says that it is another one; see `test_hostile_store_facts`."""


@dataclass(frozen=True)
class Family:
    """One key of the table, or one of several that a row covers; `row` is its text in the table."""

    row: str
    key: str
    kind: str


def table() -> list[tuple[str, str]]:
    """Return the rows of the table in `broker/store/keys.py`: key and type."""
    return re.findall(r"^    (deck:\S+) +(\w+) ", keys.__doc__ or "", re.MULTILINE)


def families() -> Iterator[Family]:
    """Yield the keys of the table.

    Raises:
        LookupError: a row covers several keys, and `SEVERAL` does not list them.
    """
    for row, kind in table():
        for key, its_kind in SEVERAL[row] if kind == "several" else ((row, kind),):
            yield Family(row, key, its_kind)


def commands_against(
    chance: random.Random,
    family: Family,
    rubbish: Rubbish,
    *,
    conversations: Sequence[str],
    workers: Sequence[str],
    is_of_its_type: bool = True,
) -> Iterator[Command]:
    """Yield commands that write rubbish to a key of a family, or another type of key in its place."""
    places = {**PLACEHOLDERS, "<w>": tuple(workers), "<id>": tuple(conversations)}
    key = PLACEHOLDER.sub(lambda found: chance.choice(places[found[0]]), family.key)
    kind = family.kind
    if not is_of_its_type:
        yield ("DEL", key)
        kind = "hash" if kind == "string" else "string"
    value, member = rubbish(chance), chance.choice((*(cid.encode() for cid in conversations), rubbish(chance)))
    match kind:
        case "hash":
            named = [field for part, names in FIELDS.items() if part in key.split(":") for field in names]
            yield ("HSET", key, chance.choice((*named, *named, rubbish(chance))), value)
        case "zset":
            yield ("ZADD", key, chance.choice((0, -1, 2**53, "inf", "-inf", 1e300)), member)
        case "stream":
            fields = [part for name in chance.sample((b"c", b"a", b"e", b"x", b"foo"), 2) for part in (name, value)]
            yield ("XADD", key, "*", *fields)
        case "set":
            yield ("SADD", key, member)
        case "list":
            yield ("RPUSH", key, value)
        case _:
            yield ("SET", key, value)
