"""Replaces itself with another program that the kernel kills when its parent dies.

`child.ChildProcess` starts it as a script, without our packages: `parent_death.py PARENT SIGNAL PROGRAM ARGUMENT…`.
Code that runs between fork and exec could do the same, but is unsafe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request the signal for the parent's death, then exec the program."""
    parent, number, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the line above could request the signal
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606  (its purpose)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
