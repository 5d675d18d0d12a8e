"""Keeps the host apart from the programs it runs under the same user id.

Holds: after `seclude`, a program without capabilities can neither trace the host nor open its descriptors by way of
/proc; orphans among its descendants become its children, so that none of them escapes its end.
Does not: keep such a program from killing a host that is not the first of a process namespace. Then the outcome of
what was running is unknown, and said to be.
"""

from __future__ import annotations

from tool_worker.host.compiled import c_library

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def seclude() -> None:
    """Make this process untraceable and the parent of its orphaned descendants.

    Raises:
        OSError: the kernel refuses.
    """
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_CHILD_SUBREAPER, 1)):
        if c_library("prctl", option, value, 0, 0):
            raise OSError(f"prctl {option} is refused")
