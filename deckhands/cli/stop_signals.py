"""The signals by which a person, a terminal or a supervisor ends a command."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_stop_signals(call: Callable[[], object]) -> None:
    """Call something at every Ctrl-C, SIGTERM, and end of the terminal; to be called in the running loop.

    The end of the terminal means nothing to what `nohup` has started.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, call)
