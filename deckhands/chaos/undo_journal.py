"""The faults in effect, in a file, so that they can be undone after the death of the process that caused them.

Holds: a fault is in the file before it takes effect, and leaves it after it was undone. Undoing is idempotent, and
succeeds even if the file cannot be written; the fault is then undone again later.
Does not: list faults that end by themselves, such as kills, or faults of proxies, which end with their process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.runtime import DeckhandsError
from broker.store import Store
from deckhands.chaos.victims import ProvenProcess

UNDO_ORDER = {"disk": 0, "stop": 1, "memory": 2}


@dataclass(frozen=True, slots=True)
class OpenFault:
    """A fault in effect.

    Attributes:
        kind: `stop`, `memory` or `disk`.
        pid, started: of `stop`: the stopped process and its start, in ticks since the boot of the machine.
        value: for `memory`, the store's previous limit in bytes; for `disk`, the path of the file that fills it.
        generation: the store's generation, for `memory`.
    """

    kind: str
    pid: int = 0
    started: int = 0
    value: str = ""
    generation: str = ""


class UndoJournal:
    """The file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[OpenFault]:
        """Return the faults in effect; empty if the file does not exist.

        Raises:
            DeckhandsError: the file is damaged.
        """
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
            return [OpenFault(**json.loads(line)) for line in lines]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise DeckhandsError(
                f"The journal of open faults {self._path} is damaged.",
                remedy="Continue stopped workers (`ps -eo pid,stat,args`, `kill -CONT PID`), and remove the file.",
            ) from error

    def add(self, fault: OpenFault) -> None:
        """Record a fault that is about to take effect.

        Raises:
            OSError: it cannot be recorded, as on a full disk.
        """
        self._write([*self.load(), fault])

    def remove(self, fault: OpenFault) -> None:
        """Record that a fault was undone. Idempotent."""
        self._remove_all([fault])

    async def undo_all(self, store: Store | None) -> list[str]:
        """Undo every recorded fault and return a line for each.

        Args:
            store: None: changed limits of stores stay, and stay recorded.
        """
        # The disk comes first, since nothing can be written while it is full, and what needs the store last: it may not
        # answer. The oldest limit was there before the others.
        latest_first = self.load()[::-1]
        faults = sorted(latest_first, key=lambda fault: UNDO_ORDER.get(fault.kind, 0))
        undone: list[OpenFault] = []
        lines: list[str] = []
        try:
            for fault in faults:
                if line := await _undo(fault, store):
                    undone.append(fault)
                    lines.append(line)
        finally:
            self._remove_all(undone)
        return lines

    async def undo(self, fault: OpenFault, store: Store | None) -> str:
        """Undo a fault and return a line about it; empty if undoing needs the store, and there is none. Idempotent."""
        line = await _undo(fault, store)
        if line:
            self.remove(fault)
        return line

    def _remove_all(self, undone: Sequence[OpenFault]) -> None:
        if undone:
            with contextlib.suppress(OSError):
                self._write([fault for fault in self.load() if fault not in undone])

    def _write(self, faults: Sequence[OpenFault]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_text("".join(json.dumps(asdict(fault)) + "\n" for fault in faults), encoding="utf-8")
        draft.replace(self._path)


async def _undo(fault: OpenFault, store: Store | None) -> str:
    if fault.kind == "stop":
        process = ProvenProcess.open(fault.pid)
        if process is None or process.started != fault.started:
            return f"the stopped process {fault.pid} has ended"
        with process:
            process.send(signal.SIGCONT)
        return f"the process {fault.pid} was continued"
    if fault.kind == "disk":
        await asyncio.to_thread(Path(fault.value).unlink, missing_ok=True)
        return f"{fault.value} was removed"
    if store is None or store.generation != fault.generation:
        return ""
    await store.call("CONFIG", "SET", "maxmemory", fault.value)
    return f"the memory limit of the store is {fault.value} again"
