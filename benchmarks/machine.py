"""The machine that a measurement was made on, and what its processes use."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def describe(store_version: str) -> str:
    """Return one line about the machine and what runs on it."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = found[0].partition(":")[2].strip() if found else platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} CPUs ({model}), {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {store_version}"
    )


def addition_seconds() -> float:
    """Return how long ten million additions in Python take: the machine's own figure, 0.4 s on a fast and idle one."""
    began, total = time.perf_counter(), 0
    for number in range(10_000_000):
        total += number
    return time.perf_counter() - began


def load() -> float:
    """Return how many processes wanted a CPU on average over the last minute."""
    return os.getloadavg()[0]


@contextmanager
def on_one_core(pid: int) -> Iterator[None]:
    """Keep ourselves and another process on one core, where neither has to wake a core for the other.

    A core that waits falls asleep; on a virtual machine, to wake it from another takes 0.03 ms and more, and the
    scheduler moves two processes together and apart as it likes. What is left on one core is their work.
    """
    tasks = [int(task.name) for one in (os.getpid(), pid) for task in Path(f"/proc/{one}/task").iterdir()]
    cores = os.sched_getaffinity(0)
    try:
        for task in tasks:
            os.sched_setaffinity(task, {max(cores)})
        yield
    finally:
        for task in tasks:
            os.sched_setaffinity(task, cores)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds a process has used, by the kernel's own clock of it (nanoseconds, all its threads)."""
    return time.clock_gettime((~pid << 3) | 2)


def resident_kib(pid: int) -> float:
    """Return the memory a process holds now."""
    return psutil.Process(pid).memory_info().rss / 1024


def peak_kib(pid: int) -> float:
    """Return the most memory a process has held so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return float(line.split()[1])


def is_named_by_a_process(text: str) -> bool:
    """Whether the command line of a process other than this one contains a text."""
    found = psutil.process_iter(["pid", "cmdline"])
    return any(
        text in " ".join(process.info["cmdline"] or ()) for process in found if process.info["pid"] != os.getpid()
    )
