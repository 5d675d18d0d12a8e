"""What background jobs write to the disk of a node: workspaces over their limit are found, and their writers killed.

Holds: only workspaces whose programs have written since the last look are measured. In one that is over its limit and
has grown, the programs that wrote meanwhile are killed; its host stays, and its shell unless the shell itself writes.
Does not: see processes in another pid namespace's /proc, as those of containers may be, or files in directories that
were named. Between two looks, a job writes as fast as the disk is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tool_worker.errors import WorkspaceTooLarge
from tool_worker.files.file_tree import TreeLimits, measure
from tool_worker.launch.host_folder import HostFolder
from tool_worker.node.resource_usage import descendants, start_tick

WRITTEN_BYTES = 2**20
"""Programs that have written less since the last look do not fill a disk."""

STOPPED = (
    "[Background jobs wrote to this workspace, its home or /tmp, beyond the limit: {size:,} bytes in {files:,} files, "
    "where {limits.bytes:,} bytes in {limits.files:,} files are allowed. The programs that wrote were killed: {count}. "
    "Delete what you do not need.]"
)

Writer = tuple[int, int]
"""The number of a process and its start, which together name it for ever."""


@dataclass(slots=True)
class _Look:
    """What was seen of a workspace.

    Attributes:
        written: how much each of its programs had written.
        held: how many files and bytes it held.
        times_without_job: how often in a row it had grown beyond its limit and no job was found that wrote.
    """

    written: dict[Writer, int] = field(default_factory=dict)
    held: tuple[int, int] = (0, 0)
    times_without_job: int = 0


class DiskBounds:
    """Looks after the disk use of one node's workspaces.  Blocks.

    Args:
        limits: what each workspace may hold, its home and its /tmp included.
    """

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self._looks: dict[str, _Look] = {}

    def forget_others(self, names: set[str]) -> None:
        """Forget all workspaces but these."""
        for gone in self._looks.keys() - names:
            del self._looks[gone]

    def writers(self, folder: HostFolder, main_pid: int) -> tuple[list[Writer], str]:
        """Return the programs that have to be killed, and what the model has to know of it, with `{count}` in it."""
        before = self._looks.get(folder.conversation_id, _Look())
        written = _written(main_pid)
        grown = {
            writer: size - before.written.get(writer, 0)
            for writer, size in written.items()
            if size - before.written.get(writer, 0) >= WRITTEN_BYTES
        }
        self._looks[folder.conversation_id] = look = _Look(written, before.held)
        if not grown:
            return [], ""
        look.held = files, size = _held(folder)
        is_over = files > self._limits.files or size > self._limits.bytes
        if not is_over or (files <= before.held[0] and size <= before.held[1]):
            return [], ""
        notice = STOPPED.format(size=size, files=files, limits=self._limits, count="{count}")
        below = {pid for child in _children(main_pid) for pid in descendants(child)}
        jobs = [writer for writer in grown if writer[0] in below]
        look.times_without_job = 0 if jobs else before.times_without_job + 1
        # A shell is counted what its commands had written when they ended. Only one that still writes is killed.
        return (jobs or list(grown) if jobs or look.times_without_job > 1 else []), notice


def _held(folder: HostFolder) -> tuple[int, int]:
    files = size = 0
    for directory in (folder.workspace, folder.home, folder.temporary):
        with suppress(OSError, WorkspaceTooLarge):  # it is not there, or for the next action to report
            more_files, more_bytes = measure(directory, TreeLimits(files=2**62, bytes=2**62))
            files, size = files + more_files, size + more_bytes
    return files, size


def _written(main_pid: int) -> dict[Writer, int]:
    written = {}
    for pid in descendants(main_pid):
        with suppress(OSError, ValueError):  # it has ended
            fields = dict(line.split(b": ") for line in Path(f"/proc/{pid}/io").read_bytes().splitlines())
            written[pid, start_tick(pid)] = int(fields[b"wchar"])
    return written


def _children(main_pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{main_pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_bytes().split())
    return found
