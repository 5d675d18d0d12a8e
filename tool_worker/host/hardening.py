"""Process hardening: restrictions on a workspace host and its programs that the kernel never lifts.

Holds:
    - After `harden`, a program without capabilities can neither trace the host nor open its descriptors through
      /proc. Orphans among the host's descendants become its children, so the host can kill all of them when it ends.
    - After `restrict_writes` (Landlock), this process and all its descendants write only below the given directories,
      even if a read-only mount is missing. Changing mounts or the user id does not lift this. In addition to the
      mounts, only device creation and writing to /proc are refused; reading is controlled by the mounts alone.
Does not:
    - Keep a program from killing a host that is not the first process of a namespace. The outcome of a running action
      is then unknown and reported so.
    - Use Landlock on kernels before 5.19, whose version would forbid moving a file between directories.
"""

from __future__ import annotations

import os
import resource
from _struct import pack

from tool_worker.host.compiled import c_library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tool_worker.host.configuration import HostConfiguration

MINIMUM_ABI = 2

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_CHANGE_DIRECTORIES = 0x1FF0  # removing and creating entries of all kinds
_MAKE_DEVICES = (1 << 6) | (1 << 11)
_MOVE_BETWEEN_DIRECTORIES = 1 << 13
_TRUNCATE = 1 << 14  # since version 3
_OUTSIDE_ABSTRACT_SOCKETS, _OUTSIDE_SIGNALS = 1, 2  # since version 6


def harden() -> None:
    """Make this process untraceable and the parent of its orphaned descendants.

    Raises:
        OSError: the kernel refuses.
    """
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_CHILD_SUBREAPER, 1)):
        if c_library("prctl", option, value, 0, 0):
            raise OSError(f"the kernel refuses prctl option {option}")


def lower_limits(configuration: HostConfiguration) -> None:
    """Apply the configured resource limits to this process and its descendants."""
    for name, limit in configuration.resource_limits.items():
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        bound = limit if ceiling == resource.RLIM_INFINITY else min(limit, ceiling)
        resource.setrlimit(kind, (bound, bound))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    return max(0, c_library("syscall", _CREATE_RULESET, None, 0, _ASK_VERSION))


def restrict_writes(directories: list[str]) -> bool:
    """Restrict this process and its descendants to changing files below these directories.

    From Landlock version 6, they can also not connect to abstract sockets or signal processes outside of this process
    tree.

    Returns:
        Whether the restriction is active; False if the kernel does not support it.

    Raises:
        OSError: the kernel supports it but refuses.
    """
    version = landlock_version()
    if version < MINIMUM_ABI:
        return False
    handled = _WRITE_FILE | _CHANGE_DIRECTORIES | _MOVE_BETWEEN_DIRECTORIES | (_TRUNCATE if version >= 3 else 0)
    scopes = _OUTSIDE_ABSTRACT_SOCKETS | _OUTSIDE_SIGNALS if version >= 6 else 0
    # An older kernel rejects a structure with unknown fields. The fields are: files, network, scopes.
    ruleset = pack("=QQQ", handled, 0, scopes)[: 24 if version >= 6 else 8]
    rules = _check_result(c_library("syscall", _CREATE_RULESET, ruleset, len(ruleset), 0))
    try:
        for directory in directories:
            opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                beneath = pack("=Qi", handled & ~_MAKE_DEVICES, opened)
                _check_result(c_library("syscall", _ADD_RULE, rules, _PATH_BENEATH, beneath, 0))
            finally:
                os.close(opened)
        _check_result(c_library("syscall", _RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)
    return True


def _check_result(answer: int) -> int:
    if answer < 0:
        raise OSError("the kernel refuses the Landlock rules for this process")
    return answer
