"""Confirms writes: after the reply of a write, waits until the store's disk or a replica has it, many writes at a time.

Holds: a confirmation asks the server that has replied, after it has replied. A primary that was replaced meanwhile, and
a stale one without its replicas, confirm nothing: the caller does not know the outcome, and repeats its call.
Keys: `deck:acked`, or `deck:{k}:acked` for a node of a cluster, written before each confirmation. A server confirms
only what the asking connection has written; all earlier writes, of any connection, come before this one in its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from broker.runtime import Acks, OutcomeUnknown, StoreError, StoreMisconfigured, StoreRefused

ACKED_KEY = "deck:acked"
CONFIRM_SECONDS = 2.0
"""How long a confirmation may take; a longer one is an unknown outcome."""
READING = frozenset(
    {
        *(
            "CLIENT",
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
    }
)
"""Commands that need no confirmation. A group's deliveries may be lost with a primary: they are made again."""


class Confirmations:
    """The confirmations of one connection's writes.

    Args:
        send: sends commands to the store; returns their replies, and the epoch of the server.
        find_key: returns the key to write before a confirmation.
    """

    def __init__(
        self,
        acks: Acks,
        send: Callable[[Sequence[Sequence[str | int]]], Awaitable[tuple[list[Any], int]]],
        find_key: Callable[[], str],
    ) -> None:
        timeout_ms = int(CONFIRM_SECONDS * 1000)
        self._acks = acks
        self._send = send
        self._find_key = find_key
        self._asks = ("WAITAOF", 1, 0, timeout_ms) if acks == "disk" else ("WAIT", 1, timeout_ms)
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    async def confirm(self, epoch: int) -> None:
        """Wait until the writes that a server of this epoch has replied to are confirmed.

        Raises:
            OutcomeUnknown: they are not; they may be lost.
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
            (_, confirmed), epoch = await self._send([("SET", self._find_key(), 1), self._asks])
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
        if (confirmed[0] if self._acks == "disk" else confirmed) < 1:
            whom = "its disk" if self._acks == "disk" else "a replica"
            raise OutcomeUnknown(f"The store did not get a write to {whom} within {CONFIRM_SECONDS:g} s.")
        return epoch
