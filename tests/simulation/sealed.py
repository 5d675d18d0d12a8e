"""A simulation sealed off from the machine: its random numbers come from its seed, its time from its own clock.

Holds: inside of `sealed`, on the thread that entered it, clocks are the simulation's, random numbers and ids are drawn
from the seed, and a thread, a socket, a program or a real pause is an error. Other threads of the test run notice
nothing. No garbage is collected meanwhile: a finalizer would run at an uncontrolled moment.
"""

import gc
import os
import random
import secrets
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, NoReturn

from broker.runtime.host_load import HostLoad
from broker.testing.manual_clock import ManualClock

PROCESS_ID = 4711
HOST_NAME = "simulated"


class NotSealed(AssertionError):
    """The simulation reached for the machine."""


@contextmanager
def sealed(seed: int, clock: ManualClock) -> Iterator[None]:
    """Run the block without a real clock, real chance, threads, sockets, programs, or the load of the machine."""
    drawn = Random(seed)

    def nanoseconds() -> int:
        return round(clock.monotonic() * 1e9)

    def wall() -> float:
        return clock.now().timestamp()

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (time, "time", wall),
        (time, "time_ns", lambda: round(wall() * 1e9)),
        (time, "sleep", _refusal("time.sleep")),
        (secrets, "token_bytes", lambda size=32: drawn.randbytes(size)),
        (secrets, "token_hex", lambda size=32: drawn.randbytes(size).hex()),
        (secrets, "randbelow", drawn.randrange),
        (secrets, "randbits", drawn.getrandbits),
        (secrets, "choice", drawn.choice),
        (uuid, "uuid1", lambda: uuid.UUID(int=drawn.getrandbits(128), version=1)),
        (uuid, "uuid4", lambda: uuid.UUID(int=drawn.getrandbits(128), version=4)),
        (os, "urandom", drawn.randbytes),
        (os, "getpid", lambda: PROCESS_ID),
        (socket, "gethostname", lambda: HOST_NAME),
        (HostLoad, "read", lambda _: {}),
        (socket.socket, "__init__", _refusal("a socket")),
        (subprocess.Popen, "__init__", _refusal("a program")),
        (threading.Thread, "start", _refusal("a thread")),
    ]
    replacements += [(time, name, clock.monotonic) for name in ("monotonic", "perf_counter", "process_time")]
    replacements += [(time, f"{name}_ns", nanoseconds) for name in ("monotonic", "perf_counter", "process_time")]
    replacements += [(random, name, getattr(drawn, name)) for name in _DRAWN]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(_replaced(owner, name, replacement))
        stack.enter_context(_uncollected())
        yield


_DRAWN = ("random", "randint", "randrange", "uniform", "choice", "choices", "sample", "shuffle", "randbytes", "gauss")


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function for the present thread alone."""
    original, mine = getattr(owner, name), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == mine else original)(*args, **kwargs)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _uncollected() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotSealed(f"A simulation asked for {what}.")

    return refuse
