"""Keeps a worker apart from other programs of the same user.

Without a sandbox, commands of agents run under the worker's own user id; with one, they would after an escape. The
kernel then still asks who may look into a process.

Holds: after `seclude`, a program without CAP_SYS_PTRACE can read neither the environment (which has the store's
password), nor the memory, nor the open files of this process, nor trace it; and it leaves no core dump.
Does not: keep such a program from ending this process; protect a worker that runs as root from commands that do; reach
children, which are open again once they become another program, or the program that started the worker.
"""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def seclude() -> None:
    """Make this process one that others cannot look into. Idempotent.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl PR_SET_DUMPABLE")
