"""The faults of a simulation: boundary and kind.

A boundary is before and after every command that a process sends to the store; boundaries are numbered from 1 in the
order in which any process reaches them.
"""

from enum import StrEnum


class Fault(StrEnum):
    """How a process fails."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT when its heartbeat has long lapsed: a zombie."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT before its heartbeat has lapsed: what it has in hand may be outdated, nothing worse."""
    CUT = "cut"
    """The connection breaks: before a command, which is not carried out, or after it, and the reply is lost."""


STOPPED_SECONDS = {Fault.STOP: 4.0, Fault.PAUSE: 1.0}
"""How long; a heartbeat may be 1.7 s late."""
