"""The processes of a cluster on this machine. Each is proven to be a worker before it gets a signal.

A worker reports its host and process id to the store, and any user with the rights of a worker can forge a report. So a
report alone proves nothing: by its command line, the process must run a worker of that role; it must be older than the
report; and this user must be allowed to signal it. The process is held by a descriptor, so a signal never reaches a
later process with the same id.

Does not: reach the workers of other hosts; they are returned by name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from broker.coordination import ClusterMember
from broker.runtime import BEAT, CONTROLLER, INGRESS, JOBS, SERVICES, TOOLS, from_millis, make_worker_id_prefix
from broker.store import parse_number
from deckhands.cluster import MODULES

ROLE_MODULES: Mapping[str, Collection[str]] = {
    "controller": (MODULES[CONTROLLER],),
    "tool": (MODULES[TOOLS],),
    "ingress": (MODULES[INGRESS], MODULES[SERVICES]),
    "jobs": (MODULES[JOBS], MODULES[SERVICES]),
    "beat": (MODULES[BEAT], MODULES[SERVICES]),
}
"""The modules that run a worker, by the role that it reports."""
HOST_PROGRAM = "tool_worker/host/__main__.py"
STORE_PROGRAMS = ("valkey-server", "redis-server")
CLOCK_TOLERANCE_SECONDS = 5.0
"""How much younger than its report a process may seem, because clocks are adjusted."""


@dataclass(frozen=True, slots=True)
class ProvenProcess:
    """A running process, held by a descriptor until the block around it ends.

    Attributes:
        started: its start, in ticks since the boot of the machine.
        arguments: its command line.
    """

    pid: int
    started: int
    arguments: tuple[str, ...]
    handle: int = field(repr=False, compare=False)

    @classmethod
    def open(cls, pid: int) -> ProvenProcess | None:
        """Open a process; None if it has ended or may not be signalled by this user."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return None
        try:
            facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            signal.pidfd_send_signal(handle, 0)  # it has not ended, so what was read is its own; and it is ours
        except (OSError, IndexError):
            os.close(handle)
            return None
        return cls(pid, int(facts[19]), tuple(arguments[:-1]), handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.handle)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return whether the process still existed."""
        try:
            signal.pidfd_send_signal(self.handle, number)
        except ProcessLookupError:
            return False
        return True

    def runs_module(self, modules: Collection[str]) -> bool:
        """Return whether this is a Python process that runs one of these modules, or Celery with its application."""
        pairs = zip(self.arguments, self.arguments[1:], strict=False)
        return any(
            (option == "-m" and name in modules)
            or (option == "-A" and name.removesuffix(".app") in modules and name.endswith(".app"))
            for option, name in pairs
        )

    def compute_age_seconds(self) -> float:
        """Return the time since its start."""
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return uptime - self.started / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Victim:
    """A worker that can be reached, with its process; close it after use."""

    worker_id: str
    role: str
    process: ProvenProcess


@dataclass(frozen=True, slots=True)
class FoundWorkers:
    """The workers of a cluster.

    Attributes:
        victims: the proven workers, one for each process.
        unreachable: the reason, by worker.
    """

    victims: tuple[Victim, ...]
    unreachable: Mapping[str, str]

    def close(self) -> None:
        """Close all processes."""
        for victim in self.victims:
            os.close(victim.process.handle)


def find_workers(members: Sequence[ClusterMember], now: datetime, *, shares_pids: bool = False) -> FoundWorkers:
    """Prove the processes of the workers with a valid heartbeat.

    Args:
        now: the time of this machine's clock, with which workers report when they registered.
        shares_pids: whether the workers' containers share this container's process ids, although their host names
            differ.
    """
    victims: dict[int, Victim] = {}
    unreachable: dict[str, str] = {}
    for member in members:
        if member.left_seconds <= 0:
            continue
        host, pid = _parse_worker_id(member)
        if not pid:
            unreachable[member.worker_id] = "its id names no process"
        elif not shares_pids and f"{member.role}-{host}-" != make_worker_id_prefix(member.role):
            unreachable[member.worker_id] = f"it runs on another host ({host})"
        elif pid not in victims:
            found = _prove(member, pid, now)
            if isinstance(found, str):
                unreachable[member.worker_id] = found
            else:
                victims[pid] = Victim(member.worker_id, member.role, found)
    return FoundWorkers(tuple(victims.values()), unreachable)


def _parse_worker_id(member: ClusterMember) -> tuple[str, int]:
    """Return the host and the process id in a worker's id; the process id is 0 if there is none."""
    parts = member.worker_id.split("-")
    if len(parts) != 4 or not parts[2].isdecimal() or len(parts[2]) > 9:
        return "", 0
    return parts[1], int(parts[2])


def _prove(member: ClusterMember, pid: int, now: datetime) -> ProvenProcess | str:
    """Return the process of a worker, or the reason why it is not proven."""
    process = ProvenProcess.open(pid)
    if process is None:
        return f"process {pid} is not there, or belongs to another user"
    registered_ms = parse_number(member.about.get("clock_ms", ""))
    why = ""
    if not process.runs_module(ROLE_MODULES.get(member.role, ())):
        why = f"process {pid} runs no {member.role} worker of Deckhands"
    elif not registered_ms:
        why = "it does not say when it was registered"
    elif (now - from_millis(int(registered_ms))).total_seconds() > process.compute_age_seconds() + (
        CLOCK_TOLERANCE_SECONDS
    ):
        why = f"process {pid} is younger than the worker"
    if why:
        os.close(process.handle)
        return why
    return process


def find_hosts(conversation_ids: Collection[str]) -> Iterator[tuple[str, ProvenProcess]]:
    """Yield the workspace hosts of conversations on this machine, by their command lines; close each after use."""
    wanted = set(conversation_ids)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        process = ProvenProcess.open(int(entry.name))
        if process is None:
            continue
        found = process.arguments[-1:]
        if found and found[0] in wanted and process.arguments[-2].endswith(HOST_PROGRAM):
            yield found[0], process
        else:
            os.close(process.handle)


def open_store_process(pid: int, directory: Path, *, age_seconds: float) -> ProvenProcess | None:
    """Return the store's process, if it is a server with this age and directory; else None.

    A store on another host, or in a container, may report the number of a process of this host.
    """
    process = ProvenProcess.open(pid)
    if process is None:
        return None
    with suppress(OSError):
        works_there = Path(f"/proc/{pid}/cwd").readlink() == directory.resolve()
        is_as_old = abs(process.compute_age_seconds() - age_seconds) <= CLOCK_TOLERANCE_SECONDS
        if works_there and is_as_old and Path(f"/proc/{pid}/exe").readlink().name in STORE_PROGRAMS:
            return process
    os.close(process.handle)
    return None
