"""Confirms writes: after the reply of a write, waits until the store's disk or a replica has it, many writes at a time.

DECKHANDS_ACKS demands confirmations of all writes of a process. A conversation can demand those of its events and of
the claims of its actions; the functions that write them end their reply with its demand. Both demands apply.

Holds: a confirmation asks the server that has replied, after it has replied. A primary that was replaced meanwhile, and
a stale one without its replicas, confirm nothing: the caller does not know the outcome, and repeats its call. With
Sentinels and in a cluster, every replica that may be promoted has to confirm: a primary that is replaced while it lives
can still have another one. While a replica is away, a confirmation may come from one that has just returned, and not
from the one that is being promoted; so a majority of the Sentinels is asked whether this primary stays. A node of a
cluster is asked with each confirmation which replicas it has: one that has joined or returned may be promoted, and one
that a majority of the primaries takes for failed may not.
Keys: `deck:acked`, or `deck:{k}:acked` for a node of a cluster, written before each confirmation. A server confirms
only what the asking connection has written; all earlier writes, of any connection, come before this one in its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from broker.runtime import Acks, OutcomeUnknown, StoreError, StoreMisconfigured, StoreRefused

ACKED_KEY = "deck:acked"
CONFIRM_SECONDS = 1.0
"""How long a confirmation may take; a longer one is an unknown outcome.

After a fail-over, a Sentinel needs up to as long to connect to a replica again.
"""
ASK_SECONDS = 0.25
"""How long one question may take. A replica that connects meanwhile learns of the next one only."""
READING = frozenset(
    {
        *(
            "CLIENT",
            "COMMAND",
            "CONFIG",
            "EXISTS",
            "FCALL_RO",
            "FUNCTION",
            "GET",
            "GETRANGE",
            "HEXISTS",
            "HGET",
            "HGETALL",
            "HKEYS",
        ),
        *("HLEN", "HMGET", "HSCAN", "INFO", "LLEN", "LRANGE", "MEMORY", "MGET", "PING", "SCAN", "SCARD", "SISMEMBER"),
        *("SMEMBERS", "SSCAN", "STRLEN", "TIME", "TTL", "TYPE", "XINFO", "XLEN", "XPENDING", "XRANGE", "XREAD"),
        *("XREADGROUP", "XREVRANGE", "ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZSCAN", "ZSCORE"),
        "LINDEX",
    }
)
"""Commands that need no confirmation. A group's deliveries may be lost with a primary: they are made again."""
DEMANDS: Mapping[Any, Acks] = {b"acks:disk": "disk", b"acks:replica": "replica"}
DEMANDING_FUNCTIONS = frozenset(("deck_append", "deck_claim_action", "deck_close"))
NO_REPLICA_REMEDY = "Start a replica of it, or use `local` or `disk` in DECKHANDS_ACKS and in the task's field `acks`."


def find_demand(command: Sequence[Any], reply: Any) -> Acks | None:
    """Return the demand that ends a function's reply, see `store.with_acks` in prelude.lua; None if there is none."""
    if command[0] != "FCALL" or command[1] not in DEMANDING_FUNCTIONS:
        return None
    return DEMANDS.get(reply[-1]) if isinstance(reply[-1], bytes) else None


class Confirmations:
    """The confirmations of one connection's writes.

    Args:
        send: sends commands to the store; returns their replies, and the epoch of the server.
        count_replicas: returns how many replicas have to confirm.
        count_connected: asks how many of these can be promoted now, after fewer have confirmed.
        check_primary: raises `StoreError` if a replica that has not confirmed may have been promoted.
        find_key: returns the key to write before a confirmation.
        view: asks a server for the replicas that have to confirm; None if others than the server know them.
        read_view: takes the reply to `view`, for `count_replicas`; raises `StoreError` if the server is no primary.
    """

    def __init__(
        self,
        acks: Acks,
        send: Callable[[Sequence[Sequence[str | int]]], Awaitable[tuple[list[Any], int]]],
        count_replicas: Callable[[], int],
        count_connected: Callable[[], Awaitable[int]],
        *,
        check_primary: Callable[[], Awaitable[None]],
        find_key: Callable[[], str],
        view: Sequence[str] | None = None,
        read_view: Callable[[Any], None],
    ) -> None:
        self._acks = acks
        self._send = send
        self._count_replicas = count_replicas
        self._count_connected = count_connected
        self._check_primary = check_primary
        self._find_key = find_key
        self._views = [] if view is None or acks == "disk" else [view]
        self._read_view = read_view
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    async def confirm(self, epoch: int) -> None:
        """Wait until the writes that a server of this epoch has replied to are confirmed.

        Raises:
            OutcomeUnknown: they were not confirmed, and may be lost.
            StoreMisconfigured: the server cannot confirm.
        """
        if self._next is None:  # one that is running may have been sent before the reply
            self._next = asyncio.ensure_future(self._ask(self._running))
        if await asyncio.shield(self._next) != epoch:
            raise OutcomeUnknown("The store's primary changed before it confirmed a write.")

    async def _ask(self, previous: asyncio.Task[int] | None) -> int:
        """Ask once the previous question is answered; everything until then is confirmed together."""
        if previous is not None:
            await asyncio.wait([previous])
        self._running, self._next = self._next, None
        try:
            count, needed, epoch = await self._count_confirming()
        except StoreRefused as error:
            raise StoreMisconfigured(
                f"The store cannot confirm writes: {error.message}",
                remedy="Use Redis or Valkey 7.2 or newer with `appendonly yes` and a user that may call WAIT and "
                "WAITAOF, or DECKHANDS_ACKS=local.",
            ) from error
        except StoreMisconfigured:
            raise
        except StoreError as error:
            raise OutcomeUnknown(f"A write was not confirmed: {error.message}") from error
        if 1 <= count < needed:  # one that died since is left out
            with suppress(StoreError):
                needed = await self._count_connected()
        if count < needed:
            if self._acks == "replica" and await self._has_no_replica():
                raise OutcomeUnknown("The store has no replica that could confirm a write.", remedy=NO_REPLICA_REMEDY)
            many = f"its {needed} replicas" if needed > 1 else "a replica"
            whom = "its disk" if self._acks == "disk" else many
            raise OutcomeUnknown(f"The store did not get a write to {whom} within {CONFIRM_SECONDS:g} s.")
        if self._acks == "replica":
            try:
                await self._check_primary()
            except StoreError as error:
                raise OutcomeUnknown(f"A write was not confirmed: {error.message}") from error
        return epoch

    async def _count_confirming(self) -> tuple[int, int, int]:
        """Ask until enough replicas confirm or time runs out.

        Return how many confirmed, how many must, and the epoch.
        """
        loop = asyncio.get_running_loop()
        deadline, timeout_ms = loop.time() + CONFIRM_SECONDS, int(ASK_SECONDS * 1000)
        while True:
            needed = 1 if self._acks == "disk" else self._count_replicas()
            asks = ("WAITAOF", 1, 0, timeout_ms) if self._acks == "disk" else ("WAIT", needed, timeout_ms)
            (_, confirmed, *views), epoch = await self._send([("SET", self._find_key(), 1), asks, *self._views])
            count = confirmed[0] if self._acks == "disk" else confirmed
            for view in views:  # after the confirmation: a replica that has joined meanwhile counts
                self._read_view(view)
                needed = self._count_replicas()
            if count >= needed or loop.time() + ASK_SECONDS / 2 > deadline:
                return count, needed, epoch

    async def _has_no_replica(self) -> bool:
        try:
            (facts,), _ = await self._send([("INFO", "replication")])
        except StoreError:  # lost meanwhile, or a user that may not ask
            return False
        return b"connected_slaves:0" in facts
