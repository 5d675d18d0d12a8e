"""The faults of a simulation: boundary and kind.

A boundary is before and after every command that a process sends to the store; boundaries are numbered from 1 in the
order in which any process reaches them. A fault strikes the process that reaches its boundary, or at that moment the
machine of the tool workers, the network, or the store.
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
    SKEW = "skew"
    """The wall clock of the process jumps by an hour."""
    HOSTS = "hosts"
    """SIGKILL of every workspace host."""
    MACHINE = "machine"
    """SIGKILL of every tool worker and workspace host at once."""
    SLOW = "slow"
    """For a while, every command and every reply travels for up to half a second."""
    BURIAL = "burial"
    """Every heartbeat in the store lapses, though the workers live."""
    RESTART = "restart"
    """The store is away for a while; connections break."""
    FAIL_OVER = "fail-over"
    """The store refuses writes as a demoted primary, is away for a while, and comes back with everything."""
    LOST_TAIL = "lost tail"
    """The store is away for a while, and comes back without the effect of the commands at the last boundaries."""
    REFUSAL = "refusal"
    """The store refuses writes for a while, as on a full disk."""
    CLOCK = "clock"
    """The clock of the store jumps by an hour."""


OF_A_PROCESS = (Fault.KILL, Fault.STOP, Fault.PAUSE, Fault.CUT)
"""Those that strike only the process at the boundary."""

LOST_BOUNDARIES = 12
"""How many boundaries a lost tail goes back."""
STOPPED_SECONDS = {Fault.STOP: 4.0, Fault.PAUSE: 1.0}
"""How long; a heartbeat may be 1.7 s late."""
