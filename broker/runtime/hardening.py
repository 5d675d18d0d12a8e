"""Protects a worker from other programs of the same user.

Without a sandbox, agents' commands run under the worker's own user id; with one, they would after an escape. The kernel
then still checks access to a process.

Holds: after `harden_process`, a program without CAP_SYS_PTRACE can neither read the environment (which has the store's
password), the memory or the open files of this process, nor trace it. It leaves no core dump.
Does not: prevent such a program from killing this process; protect a worker that runs as root; protect child processes,
which are accessible again after exec; protect the program that started the worker.
"""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def harden_process() -> None:
    """Make this process inaccessible to other programs. Idempotent.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl PR_SET_DUMPABLE")
