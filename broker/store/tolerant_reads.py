"""Tolerant reads from the store: unusable values count as missing.

Holds: a key of the wrong type affects no other reply. Calls are not retried while the store is away.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from broker.runtime import StoreRefused
from broker.store.connection import Argument, Connection

LARGEST = 2.0**53


async def read_tolerantly(connection: Connection, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """Return the replies to commands; None for refused commands.

    Raises:
        StoreError: the store does not answer.
    """
    try:
        return await connection.call_many(commands)
    except StoreRefused:
        replies = await asyncio.gather(*(connection.call(*command) for command in commands), return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException) and not isinstance(reply, StoreRefused):
            raise reply
    return [None if isinstance(reply, BaseException) else reply for reply in replies]


def parse_number(found: Any) -> float:
    """Parse a non-negative number; 0 if invalid."""
    try:
        value = float(found)
    except (TypeError, ValueError):
        return 0.0
    return min(max(value, 0.0), LARGEST) if math.isfinite(value) else 0.0


def decode_text(found: Any) -> str:
    """Decode a text; empty if invalid."""
    return found.decode(errors="replace") if isinstance(found, bytes) else ""


def to_pairs(flat: Any) -> dict[str, Any]:
    """Convert a flat reply to a dictionary with decoded names."""
    if not isinstance(flat, list) or len(flat) % 2:
        return {}
    return dict(zip(map(decode_text, flat[::2]), flat[1::2], strict=True))
