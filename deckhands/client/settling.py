"""Waiting for a conversation: its log is followed until its status is what somebody waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from broker.contract import codec
from broker.log.event_log import EventLog
from broker.log.lost_tails import followed
from broker.log.status import Status
from broker.runtime.errors import EventsLost
from deckhands.client.errors import NotSettled
from deckhands.reading.summary import Summary, Tally


async def follow(log: EventLog, conversation_id: str, tally: Tally, *, is_enough: Callable[[Status], bool]) -> None:
    """Read events until the status is enough and the log has no more."""
    async with contextlib.aclosing(
        followed(log, conversation_id, after=tally.last_event_id, decode=codec.decode)
    ) as events:
        async for event in events:
            tally.add(event)
            if is_enough(tally.status) and tally.last_event_id >= await log.last_id(conversation_id):
                return


async def settled(log: EventLog, conversation_id: str, *, timeout_seconds: float | None) -> Summary:
    """Wait until nothing happens any more without somebody's input, and return the summary.

    Raises:
        NotSettled: not settled after `timeout_seconds`; it is a `TimeoutError`, too.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while True:
                tally = Tally()
                try:
                    await follow(log, conversation_id, tally, is_enough=lambda status: status.is_settled)
                except EventsLost:
                    continue  # the log continues from an older state
                return tally.summary()
    raise NotSettled(conversation_id, timeout_seconds)
