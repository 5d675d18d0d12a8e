"""Places in the queues of a store. Invalid entries count as absent.

Holds: a place is a snapshot, not a promise of a turn. A query reads at most `MOST_BEFORE` entries.
Keys: reads `deck:{k}:ready…`, `deck:{k}:act:…`, `deck:{k}:turns:…`, `deck:{0}:quota:…` and `deck:{0}:budget:…`.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from broker.limits import Ledger, Pool
from broker.runtime import DeckhandsError, StoreMisconfigured
from broker.store import ShardKeys, Store, ask, number, pairs, text
from deckhands.client.reasons.facts import BudgetFact, PlaceInLine, QuotaFact

MOST_BEFORE = 1_000
CLASSES = ("0", "1", "2")
IN_LINE = ("turn", "turn p")
ENTRY = re.compile(r"\d{1,20}-\d{1,20}")


async def place_in(
    store: Store, names: ShardKeys, stream: str, entry: str, *, group: str, member: str
) -> tuple[PlaceInLine | None, float | None]:
    """Return a place in a stream or its line, and how many seconds a worker has had the entry.

    Args:
        stream: its key.
        entry: its entry, or its substitute while it is in line.
        member: its name in the line.
    """
    if not stream.startswith(names.root):
        return None, None
    name = stream.removeprefix(f"{names.root}:").removeprefix("act:")
    groups = (await ask(store.connection, [("XINFO", "GROUPS", stream)]))[0]
    found = [pairs(each) for each in groups] if isinstance(groups, list) else []
    about = next((each for each in found if text(each.get("name")) == group), {})
    if entry in IN_LINE:
        return PlaceInLine(name, await _before_in_line(store, names, stream, member, number(about.get("lag")))), None
    if not ENTRY.fullmatch(entry):
        return None, None
    delivered = text(about.get("last-delivered-id")) or "0-0"
    pending = (await ask(store.connection, [("XPENDING", stream, group, entry, entry, 1)]))[0]
    if isinstance(pending, list) and pending:
        return PlaceInLine(name, 0, text(pending[0][1])), number(pending[0][2]) / 1000
    command = ("XRANGE", stream, f"({delivered}", f"({entry}", "COUNT", MOST_BEFORE)
    before = (await ask(store.connection, [command]))[0]
    return PlaceInLine(name, len(before) if isinstance(before, list) else None), None


async def _before_in_line(store: Store, names: ShardKeys, stream: str, member: str, in_stream: float) -> int | None:
    line = f"{names.root}:turns{stream.removeprefix(names.root)}"
    ranks = [("ZRANK", f"{line}:{rank}", member) for rank in CLASSES]
    sizes = [("ZCARD", f"{line}:{rank}") for rank in CLASSES]
    replies = await ask(store.connection, [*ranks, *sizes])
    before = int(in_stream)
    for rank, size in zip(replies[:3], replies[3:], strict=True):
        if isinstance(rank, int):
            return before + rank
        before += int(number(size))
    return None


async def quota_of(store: Store, models: str, conversation_id: str) -> QuotaFact | None:
    """Return the queue of the quota for these models; None if this process may not read it."""
    base = store.all_shards[0].quota(Pool(model=models, quotas=()).name)
    sizes = [("ZCARD", f"{base}:waiting:{rank}") for rank in CLASSES]
    ranks = [("ZRANK", f"{base}:waiting:{rank}", conversation_id) for rank in CLASSES]
    try:
        replies = await ask(store.connection, [*sizes, *ranks])
    except StoreMisconfigured:  # the user of a server that was set up before servers read quotas
        return None
    waiting = [int(number(size)) for size in replies[:3]]
    for at, rank in enumerate(replies[3:]):
        if isinstance(rank, int):
            return QuotaFact(models, sum(waiting), sum(waiting[:at]) + rank)
    return QuotaFact(models, sum(waiting), None)


async def budget_of(store: Store, account: str, conversation_id: str) -> BudgetFact | None:
    """Return an account, and the number of conversations ahead in its queue; None if it cannot be read."""
    try:
        found = await Ledger(store).account(account)
    except (DeckhandsError, ValueError):
        return None
    key = f"{store.all_shards[0].budget(account)}:waiting"
    rank = (await ask(store.connection, [("ZRANK", key, conversation_id)]))[0]
    return BudgetFact(found, rank if isinstance(rank, int) else None)


def shifted(now: datetime, seconds: float) -> datetime:
    """Return the moment this many seconds from now, within the range of dates."""
    return now + timedelta(seconds=max(-1e9, min(seconds, 1e9)))
