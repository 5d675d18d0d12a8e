"""The quotas of models: the remaining part of each key's limits, the queue, and the limit that blocks it.

Holds: read-only. The governor refills the buckets when it is called; the same arithmetic is repeated here without
changing the store. Controller workers report the quotas with their heartbeats.
Keys: reads `deck:{k}:quota:<pool>:limits`, `…:set`, `…:level:<key>` and `…:waiting:<priority>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from broker.coordination import list_members
from broker.limits import SETTABLE, QuotaPool
from broker.store import Store, decode_text, parse_number, read_tolerantly, to_pairs

PRIORITIES = (0, 1, 2)
MINUTELY = {
    "requests": "requests a minute",
    "input": "input tokens a minute",
    "output": "output tokens a minute",
    "tokens": "tokens a minute",
}
DAILY = {"day_requests": "requests a day", "day_tokens": "tokens a day"}
TITLES = {**MINUTELY, **DAILY, "concurrency": "calls at once"}
MAX_QUOTAS = 100
DAY_SECONDS = 86_400
_LIMIT = re.compile(r"(\w+)=([\d.]+)")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of one key: `left` of the part that may be used `at_once`, in its unit.

    Attributes:
        field: its name in the store; empty if it cannot be set.
        published: what the controllers' file says; `limit` differs if an administrator has set another one.
    """

    name: str
    limit: float
    at_once: float
    left: float
    field: str = ""
    published: float = 0.0


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """One key of a quota.

    Attributes:
        name: the environment variable that contains it, `own`, or `at_` and the address of a replica.
        in_flight: calls in flight.
        blocked_seconds: the remaining wait requested by the provider; 0 for none.
        share: the part of its limits in use, reduced after the provider has refused calls; 1 for all.
        binds: the limit that blocks further calls now; empty if none does.
        set: the limits that an administrator has set, as `name=number …`.
        is_published: whether the controllers' file has the key; if not, it is listed for what is `set`, without limits.
    """

    name: str
    in_flight: int
    blocked_seconds: float
    share: float
    limits: tuple[LimitStatus, ...]
    binds: str
    set: str = ""
    is_published: bool = True


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """The quota of some models, with `waiting` conversations in its queue."""

    models: str
    waiting: int
    keys: tuple[KeyStatus, ...]


async def read_quotas(store: Store) -> list[QuotaStatus]:
    """Return the quotas that running controller workers have, at most `MAX_QUOTAS`.

    Raises:
        StoreError: the store does not answer.
    """
    alive = [member for member in await list_members(store) if member.left_seconds > 0]
    named = {models for member in alive for models in member.about.get("quotas", "").split("\n") if models}
    return [await _read_status(store, models) for models in sorted(named)[:MAX_QUOTAS]]


async def _read_status(store: Store, models: str) -> QuotaStatus:
    pool = QuotaPool(model=models, quotas=()).name
    base = store.find_home(pool).quota(pool)
    sizes = [("ZCARD", f"{base}:waiting:{priority}") for priority in PRIORITIES]
    published, changed, time, *counts = await read_tolerantly(
        store.connection, [("HGETALL", f"{base}:limits"), ("HGETALL", f"{base}:set"), ("TIME",), *sizes]
    )
    set_ = {name: decode_text(value) for name, value in to_pairs(changed).items()}
    limits = {name: decode_text(value) for name, value in to_pairs(published).items()}
    names = [name for name in limits.get("keys", "").split() if _KEY.fullmatch(name)]
    levels = (
        await read_tolerantly(store.connection, [("HGETALL", f"{base}:level:{name}") for name in names])
        if names
        else []
    )
    now = parse_number(time[0]) if time else store.clock.now().timestamp()
    keys = [
        _key(name, (limits.get(name, ""), set_.get(name, "")), to_pairs(level), now)
        for name, level in zip(names, levels, strict=True)
    ]
    gone = [name for name in sorted(set_) if name not in names and _KEY.fullmatch(name)]
    keys += [KeyStatus(name, 0, 0.0, 1.0, (), "", set_[name], is_published=False) for name in gone]
    return QuotaStatus(models, int(sum(map(parse_number, counts))), tuple(keys))


def _key(name: str, written: tuple[str, str], level: Mapping[str, Any], now: float) -> KeyStatus:
    published = {what: parse_number(value) for what, value in _LIMIT.findall(written[0])}
    changed = {what: max(1.0, parse_number(value)) for what, value in _LIMIT.findall(written[1])}
    limits = published | {what: value for what, value in changed.items() if what in published and what in SETTABLE}
    at = parse_number(level.get("at")) / 1000 or now
    blocked = parse_number(level.get("blocked")) / 1000
    share = min(1.0, parse_number(level.get("factor", 1)))
    in_flight = int(parse_number(level.get("in_flight")))
    found = [
        _compute_limit(title, limits[what], limits.get("burst", 1.0), level.get(what), max(0.0, now - at) * share)
        for what, title in MINUTELY.items()
        if limits.get(what)
    ]
    day = int((now - limits.get("day_start", 0.0)) // DAY_SECONDS)
    is_today = int(parse_number(level.get("day"))) == day
    for what, title in DAILY.items():
        if limits.get(what):
            used = parse_number(level.get(what)) if is_today else 0.0
            found.append(LimitStatus(title, limits[what], limits[what], max(0.0, limits[what] - used)))
    slots = limits.get("concurrency") or (parse_number(level.get("window", 8)) if limits.get("replica") else 0.0)
    if slots:
        most = max(1.0, float(int(slots * (share if limits.get("concurrency") else 1.0))))
        found.append(LimitStatus("calls at once", slots, most, max(0.0, most - in_flight)))
    if limits.get("replica") and (cache := limits.get("cache") or parse_number(level.get("cache"))):
        left = max(0.0, cache - parse_number(level.get("cached")))
        found.append(LimitStatus("tokens in its cache", cache, cache, left))
    short = next((one.name for one in found if one.left < 1.0), "")
    binds = "the provider has asked to wait" if blocked > now else short
    if parse_number(level.get("down")) / 1000 > now:
        binds = "it does not answer"
    shown = tuple(_add_published(one, published) for one in found)
    return KeyStatus(name, in_flight, max(0.0, blocked - now), share, shown, binds, written[1])


def _add_published(status: LimitStatus, published: Mapping[str, float]) -> LimitStatus:
    field = next((what for what, title in TITLES.items() if title == status.name and what in published), "")
    return replace(status, field=field, published=published[field]) if field else status


def _compute_limit(name: str, limit: float, burst: float, level: object, passed: float) -> LimitStatus:
    """Return the current level of a bucket; a debt counts as 0."""
    size = max(1.0, limit * burst / 60)
    flow = (limit - size if limit > size else limit) / 60
    stored = size if level is None else _parse_signed(level)
    return LimitStatus(name, limit, size, max(0.0, min(size, stored + passed * flow)))


def _parse_signed(value: object) -> float:
    written = decode_text(value)
    return -parse_number(written[1:]) if written.startswith("-") else parse_number(written)
