"""Faults of the store itself: it is away, loses its tail, refuses writes, or its clock jumps."""

import copy
from dataclasses import dataclass
from enum import StrEnum

from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.wire import REFUSED, NotingServer


class Kind(StrEnum):
    """The kind of a fault."""

    RESTART = "restart"
    """It is away for a while; connections break."""
    LOST_TAIL = "lost tail"
    """It is away for a while, and comes back as it was some time before."""
    REFUSAL = "refusal"
    """It refuses writes for a while, as on a full disk."""
    CLOCK = "clock"
    """Its clock jumps."""


@dataclass(frozen=True)
class Trouble:
    """One of them.

    Attributes:
        at: its start.
        seconds: how long it lasts; of a clock: how far it jumps.
        lost_seconds: the length of the lost tail.
    """

    kind: Kind
    at: float
    seconds: float = 1.0
    lost_seconds: float = 0.0


def schedule(trouble: Trouble, loop: VirtualLoop, server: NotingServer) -> None:
    """Let it happen when its time comes."""
    begin, end = trouble.at, trouble.at + trouble.seconds

    def back_to_then() -> None:
        then = copy.deepcopy(server.keys.values)
        loop.call_at(end, server.come_back, then, len(server.written))

    match trouble.kind:
        case Kind.RESTART:
            loop.call_at(begin, server.go_away)
            loop.call_at(end, server.come_back)
        case Kind.LOST_TAIL:
            loop.call_at(max(0.0, begin - trouble.lost_seconds), back_to_then)
            loop.call_at(begin, server.go_away)
        case Kind.REFUSAL:
            loop.call_at(begin, server.refuse_writes, REFUSED)
            loop.call_at(end, server.refuse_writes, "")
        case Kind.CLOCK:
            loop.call_at(begin, server.clock.jump, trouble.seconds)
