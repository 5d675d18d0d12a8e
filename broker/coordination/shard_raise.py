"""Raise the number of a store's shards while conversations run.

Nothing moves: conversations stay in their shards, and new ones are spread over all; see `broker.store.layout`. A worker
reads the new shards from its next heartbeat on.

Holds: the number changes in one step, so an interrupted call has either raised it or changed nothing. Repeating the
call completes it.
Does not: lower the number. State that belongs to a name (a quota, a budget, a schedule, a webhook) stays in its shard.
Keys: the field `shards` of `deck:store`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from broker.coordination.membership import SHARDS_FIELD, ClusterMember, list_members
from broker.runtime import UsageError, failpoint
from broker.store import MAX_NUMBERS, MAX_SHARDS, STORE, Argument, ShardKeys, Store

NUMBER = re.compile("[0-9]{1,4}")
POLL_SECONDS = 0.2
SHOWN_WORKERS = 5


@dataclass(frozen=True, slots=True)
class ShardRaise:
    """The outcome of raising the number of shards.

    Attributes:
        before: the previous number; equal to `after` if nothing was raised.
        unaware: live workers that do not read all shards yet.
    """

    before: int
    after: int
    unaware: tuple[str, ...]


async def raise_shards(store: Store, number: int, *, limit_seconds: float = 30.0) -> ShardRaise:
    """Raise the number of shards, and wait until all live workers read the new ones. Idempotent.

    Args:
        number: the new number, up to 1,024.
        limit_seconds: how long to wait for the workers.

    Raises:
        UsageError: the number is lower than the present one or too high, it was raised 15 times before, or a running
            worker is too old to read shards added after its start.
    """
    await store.refresh()
    before = store.shards
    if number < before:
        raise UsageError(
            f"The store has {before} shards, and their number cannot be lowered.",
            remedy="Choose a higher number; conversations cannot leave their shards.",
        )
    if number > MAX_SHARDS:
        raise UsageError(f"{number:,} shards are too many.", remedy=f"Choose {MAX_SHARDS:,} or fewer.")
    if old := [one.worker_id for one in await _list_live(store) if SHARDS_FIELD not in one.about]:
        raise UsageError(
            f"These workers are too old to read more shards: {', '.join(old[:SHOWN_WORKERS])}.",
            remedy="Replace all workers, gateways and other clients by this version first.",
        )
    numbers = store.layout.numbers
    if number > before and len(numbers) >= MAX_NUMBERS:
        raise UsageError(f"The number of shards was raised {len(numbers) - 1} times already.", remedy="Keep it.")
    shards = [ShardKeys(shard) for shard in range(number)]
    await _copy_rules(store, shards)
    failpoint("shards.before_raise")
    if number > before:
        lost = {one for one in await _find_lost(store, number) if one > numbers[0]}
        raised = sorted({*numbers, *lost, number})
        if len(raised) > MAX_NUMBERS:
            raised = [*numbers, number]
        texts = [",".join(map(str, each)) for each in (numbers, raised)]
        if await store.call_function("deck_raise_shards", (STORE,), *texts) == ["changed"]:
            return await raise_shards(store, number, limit_seconds=limit_seconds)  # another call, or a lost reply
        await store.refresh()
    failpoint("shards.raised")
    await _copy_rules(store, shards)  # those that were set meanwhile
    return ShardRaise(before, number, await _wait_for_workers(store, limit_seconds))


async def _find_lost(store: Store, number: int) -> set[int]:
    """Return the lower numbers that workers know or that shards are marked with.

    A store may have lost them in a fail-over.
    """
    facts = [one.about.get(SHARDS_FIELD, "") for one in await _list_live(store)]
    marks = await store.call_many([("HGET", names.layout, SHARDS_FIELD) for names in store.all_shards])
    texts = [*facts, *((mark or b"").decode(errors="replace") for mark in marks)]
    known = [int(text) for text in texts if NUMBER.fullmatch(text) and int(text) < number]
    return {max(known)} if known else set()


async def _copy_rules(store: Store, shards: Sequence[ShardKeys]) -> None:
    """Copy the rules that every shard needs: the rules of tenants, and the list of tenants with webhooks."""
    first, *others = shards
    tenants, hooked = await store.call_many([("HGETALL", first.tenants), ("HGETALL", first.webhook_tenants)])
    commands: list[tuple[Argument, ...]] = [
        ("HSETNX", names.tenants, name, rule)
        for names in others
        for name, rule in zip(tenants[::2], tenants[1::2], strict=True)
    ]
    if hooked:
        commands += [("HSET", names.webhook_tenants, *hooked) for names in others]
        commands += [("HSET", names.clock, "hooked", "1") for names in others]
    await store.call_many(commands)


async def _wait_for_workers(store: Store, limit_seconds: float) -> tuple[str, ...]:
    deadline = store.clock.monotonic() + limit_seconds
    while True:
        unaware = [one.worker_id for one in await _list_live(store) if one.about.get(SHARDS_FIELD) != str(store.shards)]
        if not unaware or store.clock.monotonic() > deadline:
            return tuple(unaware)
        await asyncio.sleep(POLL_SECONDS)


async def _list_live(store: Store) -> list[ClusterMember]:
    return [member for member in await list_members(store) if member.left_seconds > 0]
