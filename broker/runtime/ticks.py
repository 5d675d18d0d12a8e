"""Ticks: the moments at which the periodic work of a process is done together, so that an idle process wakes up rarely.

Commands that several loops send in one turn of the event loop travel to the store together.
"""

from __future__ import annotations

import asyncio
import os

SHARE_OF_PID = 0.37


async def wait_for_tick(period_seconds: float) -> None:
    """Wait until the next tick of a period, at most as long as the period.

    The ticks of a process are at the multiples of the period, by the clock of its event loops and moved by a part that
    depends on the process: those of one machine do not wake up at once.
    """
    now = asyncio.get_running_loop().time() + os.getpid() * SHARE_OF_PID
    await asyncio.sleep(period_seconds - now % period_seconds)
