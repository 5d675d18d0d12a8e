"""A kernel filter (seccomp BPF) of the system calls that workspace programs may not make.

It lists refused calls, not allowed ones, because build tools, interpreters and databases must work in a workspace as
they do outside. It refuses calls that change the machine, inspect other programs, or create namespaces that expose more
of the kernel, and calls that are used more often to escape from containers than for work in them.

Holds:
    - A refused call fails with a common error (`EPERM`; `ENOSYS` for unknown calls). No program is killed.
    - No program limits, schedules or slows the first process, which is the host that serves it. The kernel would allow
      it, because both have the same user id.
    - No file gets a set-user-id or set-group-id mode: outside the sandbox it would run as its owner.
Does not: follow pointers. `clone3` and `openat2` pass the checked values through a pointer. They are reported as
unknown calls, and programs then use `clone` and `openat`.
"""

# Differs: netlink sockets of the routing family are allowed. Every program that lists network interfaces needs one,
#   and without capabilities they are read-only.

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

REFUSED = (
    # mounts and file systems
    *("mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick"),
    *("mount_setattr", "open_by_handle_at", "quotactl", "quotactl_fd", "swapon", "swapoff", "fanotify_init"),
    # namespaces
    *("unshare", "setns"),
    # other programs
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "perf_event_open"),
    # the kernel itself
    *("bpf", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "add_key", "request_key"),
    *("keyctl", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "lookup_dcookie"),
    *("modify_ldt", "iopl", "ioperm", "uselib", "syslog", "acct", "nfsservctl"),
    # the machine
    *("reboot", "settimeofday", "clock_settime", "clock_adjtime", "sethostname", "setdomainname", "vhangup"),
)
SOCKET_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
REFUSED_TERMINAL_REQUESTS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}
"""Requests that inject text into a terminal as if it had been typed."""

PROCESS_CALLS = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setattr", "sched_setaffinity")
"""System calls whose first argument is a process."""
PROCESS_SET_CALLS = {"setpriority": 2, "ioprio_set": 3}
"""System calls whose second argument is a process, group or user, by the kind in the first. This kind is a user."""
HOST_PID = 1

MODE_AT = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
MODE_OF_NEW_AT = {"open": 2, "openat": 3}
"""The position of the mode, directly after the flags. It exists only if a flag creates a file."""
SET_ID_BITS = 0o6000
CREATION_FLAGS = 0o20000100  # O_CREAT, O_TMPFILE

UNKNOWN = ("clone3", "openat2")

NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_AF_NETLINK = 16
_X32_BIT = 0x40000000

# From 424 on, the numbers are the same on every machine.
_SHARED_NUMBERS = """
    io_uring_setup 425 io_uring_enter 426 io_uring_register 427 open_tree 428 move_mount 429 fsopen 430
    fsconfig 431 fsmount 432 fspick 433 clone3 435 openat2 437 pidfd_getfd 438 mount_setattr 442 quotactl_fd 443
    fchmodat2 452
"""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The system call numbers of one kind of machine. `numbers` leaves out calls that it lacks."""

    audit_number: int
    numbers: dict[str, int]


def _parse_numbers(table: str) -> dict[str, int]:
    words = (table + _SHARED_NUMBERS).split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


_X86_64 = Architecture(
    0xC000003E,
    _parse_numbers(
        """
        open 2 ioctl 16 socket 41 socketpair 53 clone 56 creat 85 chmod 90 fchmod 91 ptrace 101 syslog 103 mknod 133
        uselib 134 setpriority 141 sched_setparam 142 sched_setscheduler 144 vhangup 153 modify_ldt 154
        pivot_root 155 acct 163 settimeofday 164 mount 165 umount2 166 swapon 167 swapoff 168 reboot 169 sethostname 170
        setdomainname 171 iopl 172 ioperm 173 init_module 175 delete_module 176 quotactl 179 nfsservctl 180
        sched_setaffinity 203 lookup_dcookie 212 clock_settime 227 kexec_load 246 add_key 248 request_key 249 keyctl 250
        ioprio_set 251 openat 257 mknodat 259 fchmodat 268 unshare 272 perf_event_open 298 fanotify_init 300
        prlimit64 302 open_by_handle_at 304 clock_adjtime 305 setns 308 process_vm_readv 310 process_vm_writev 311
        kcmp 312 finit_module 313 sched_setattr 314 kexec_file_load 320 bpf 321 userfaultfd 323
        """
    ),
)
_AARCH64 = Architecture(
    0xC00000B7,
    _parse_numbers(
        """
        lookup_dcookie 18 ioctl 29 ioprio_set 30 mknodat 33 umount2 39 mount 40 pivot_root 41 nfsservctl 42 fchmod 52
        fchmodat 53 openat 56 vhangup 58 quotactl 60 acct 89 unshare 97 kexec_load 104 init_module 105
        delete_module 106 clock_settime 112 syslog 116 ptrace 117 sched_setparam 118 sched_setscheduler 119
        sched_setaffinity 122 setpriority 140 reboot 142 sethostname 161 setdomainname 162 settimeofday 170 socket 198
        socketpair 199 add_key 217 request_key 218 keyctl 219 clone 220 swapon 224 swapoff 225 perf_event_open 241
        prlimit64 261 fanotify_init 262 open_by_handle_at 265 clock_adjtime 266 setns 268 process_vm_readv 270
        process_vm_writev 271 kcmp 272 finit_module 273 sched_setattr 274 bpf 280 userfaultfd 282 kexec_file_load 294
        """
    ),
)
ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}

# One instruction: operation, relative jump if true, relative jump if false, constant.
_FORM = struct.Struct("=HBBI")
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_Instruction = tuple[int, int, int, int]


def make_system_call_filter(machine: str = platform.machine()) -> bytes:
    """Return the filter for a kind of machine; empty if its numbers are not known here."""
    architecture = ARCHITECTURES.get(machine)
    if architecture is None:
        return b""
    return b"".join(_FORM.pack(*instruction) for instruction in _make_program(architecture))


def _make_program(architecture: Architecture) -> Iterator[_Instruction]:
    numbers = architecture.numbers
    yield _load(_ARCHITECTURE_AT)
    # Programs for another kind of machine, such as 32-bit ones, use other numbers. For them every call is unknown.
    yield (_EQUAL, 1, 0, architecture.audit_number)
    yield _fail(errno.ENOSYS)
    yield _load(_NUMBER_AT)
    yield (_AT_LEAST, 0, 1, _X32_BIT)
    yield _fail(errno.ENOSYS)
    for name in REFUSED:
        if name in numbers:
            yield from _run_if_equal(numbers[name], [_fail(errno.EPERM)])
    for name in UNKNOWN:
        yield from _run_if_equal(numbers[name], [_fail(errno.ENOSYS)])
    yield from _make_host_rules(numbers)
    yield from _make_mode_rules(numbers)
    yield from _run_if_equal(
        numbers["clone"],
        [_load(_find_offset(0)), (_ANY_BIT, 0, 1, NAMESPACE_FLAGS), _fail(errno.EPERM), _allow()],
    )
    for name in ("socket", "socketpair"):
        yield from _run_if_equal(numbers[name], list(_make_socket_rules()))
    requests = [
        step for value in REFUSED_TERMINAL_REQUESTS.values() for step in _run_if_equal(value, [_fail(errno.EPERM)])
    ]
    yield from _run_if_equal(numbers["ioctl"], [_load(_find_offset(1)), *requests, _allow()])
    yield _allow()


def _make_host_rules(numbers: dict[str, int]) -> Iterator[_Instruction]:
    of_host = _run_if_equal(HOST_PID, [_fail(errno.EPERM)])
    for name in PROCESS_CALLS:
        yield from _run_if_equal(numbers[name], [_load(_find_offset(0)), *of_host, _allow()])
    for name, whole_user in PROCESS_SET_CALLS.items():
        of_user = _run_if_equal(whole_user, [_fail(errno.EPERM)])
        yield from _run_if_equal(
            numbers[name], [_load(_find_offset(0)), *of_user, _load(_find_offset(1)), *of_host, _allow()]
        )


def _make_mode_rules(numbers: dict[str, int]) -> Iterator[_Instruction]:
    judged = [(_ANY_BIT, 0, 1, SET_ID_BITS), _fail(errno.EPERM), _allow()]
    for name, position in MODE_AT.items():
        if name in numbers:
            yield from _run_if_equal(numbers[name], [_load(_find_offset(position)), *judged])
    making = [(_ANY_BIT, 1, 0, CREATION_FLAGS), _allow()]
    for name, position in MODE_OF_NEW_AT.items():
        if name in numbers:
            flags = _load(_find_offset(position - 1))
            mode = _load(_find_offset(position))
            yield from _run_if_equal(numbers[name], [flags, *making, mode, *judged])


def _make_socket_rules() -> Iterator[_Instruction]:
    yield _load(_find_offset(0))
    for family in SOCKET_FAMILIES.values():
        yield from _run_if_equal(family, [_allow()])
    routing_only = [_load(_find_offset(2)), *_run_if_equal(0, [_allow()]), _fail(errno.EAFNOSUPPORT)]
    yield from _run_if_equal(_AF_NETLINK, routing_only)
    yield _fail(errno.EAFNOSUPPORT)


def _run_if_equal(value: int, steps: list[_Instruction]) -> list[_Instruction]:
    """Return instructions that run if the loaded value equals this one. They must end with a verdict."""
    return [(_EQUAL, 0, len(steps), value), *steps]


def _load(offset: int) -> _Instruction:
    return (_LOAD, 0, 0, offset)


def _find_offset(position: int) -> int:
    """Return the offset of the lower half of an argument, the only part of it that the kernel reads here."""
    return _ARGUMENTS_AT + 8 * position


def _fail(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _FAIL | number)


def _allow() -> _Instruction:
    return (_RETURN, 0, 0, _ALLOW)
