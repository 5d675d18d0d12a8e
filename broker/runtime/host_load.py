"""The load of this machine: the kernel's figures for CPU, memory and pressure stalls (PSI), as shares between 0 and 1.

Holds: figures that a kernel does not offer are left out. Raises nothing.
Does not: know the limits of a container; the kernel's figures are for the whole machine.
"""

from __future__ import annotations

import re
from pathlib import Path

PROC = Path("/proc")
PRESSURES = ("cpu", "memory", "io")

_SOME_10 = re.compile(r"^some avg10=(\d+(?:\.\d+)?)", re.MULTILINE)
_MEMORY = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB", re.MULTILINE)


class HostLoad:
    """Reads the load repeatedly. The CPU's share covers the time since the last reading.

    Args:
        proc: the directory of the kernel's files.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._jiffies: tuple[int, int] | None = None

    def read(self) -> dict[str, float]:
        """Return `host_cpu`, `host_memory_free` and `host_cpu_stalled`, `host_memory_stalled`, `host_io_stalled`."""
        found = {f"host_{name}_stalled": share for name in PRESSURES if (share := self._read_stalled(name)) is not None}
        memory = dict(_MEMORY.findall(self._read_text("meminfo")))
        if len(memory) == len(("MemTotal", "MemAvailable")) and int(memory["MemTotal"]):
            found["host_memory_free"] = round(int(memory["MemAvailable"]) / int(memory["MemTotal"]), 3)
        if (busy := self._read_busy()) is not None:
            found["host_cpu"] = busy
        return found

    def _read_busy(self) -> float | None:
        fields = self._read_text("stat").partition("\n")[0].split()[1:9]
        if len(fields) < 5 or not all(field.isdigit() for field in fields):
            return None
        numbers = [int(field) for field in fields]
        now = (sum(numbers), numbers[3] + numbers[4])  # idle, and waiting for a disk
        before, self._jiffies = self._jiffies, now
        if before is None or now[0] <= before[0]:
            return None
        return round(min(1.0, max(0.0, 1 - (now[1] - before[1]) / (now[0] - before[0]))), 3)

    def _read_stalled(self, name: str) -> float | None:
        found = _SOME_10.search(self._read_text(f"pressure/{name}"))
        return round(min(1.0, float(found[1]) / 100), 4) if found else None

    def _read_text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
