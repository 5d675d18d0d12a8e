"""The signals by which a user, a terminal or a supervisor stops a command."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_stop_signals(call: Callable[[], object]) -> None:
    """Call a function at every Ctrl-C, SIGTERM and hangup of the terminal. Call this in the running loop.

    The hangup is ignored in a command started by `nohup`.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, call)
