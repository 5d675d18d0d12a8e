"""Forks of one prepared workspace: `python -m benchmarks.forking --directory DIR`.

Makes a workspace of `--megabytes` in `--files`, saves it, and lets `--siblings` forks of it start at once, as a tool
worker does for the first action of each. `DIR` selects the file system; `--no-overlay` measures tool workers that
may not mount: reflinks where the file system has them, else copies. Printed: the first fork, which makes the layer; the
others together; the disk that each has alone; and a copy of the workspace by `cp -a`, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time

from benchmarks.checkpointing import make_project
from benchmarks.cluster import running_cluster
from benchmarks.eval_figures import Line, show
from broker.contract.events import ConversationCreated
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from deckhands.client.forking import build_fork
from tool_worker.workspace import layers
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles
from tool_worker.workspace.checkpoints.checkpointing import Checkpointing
from tool_worker.workspace.files.overlay_mounts import unmount_below
from tool_worker.workspace.launch.shell_state import ShellState

GOAL_SECONDS = 1.0
GOAL_MIB = 4.0
SOURCE = "prepared"


async def measure(root: Path, arguments: argparse.Namespace) -> int:
    """Run once and print what was found; 1 if a fork has other files."""
    place = root / "checkpoints"
    make_project(root / SOURCE, arguments.files, arguments.megabytes * 2**20)
    checkpoints = Checkpoints(f"file://{place}", SystemClock())
    shell = ShellState("declare -x READY=yes\n", "/workspace", "/workspace", 0)
    saved = checkpoints.save(SOURCE, root / SOURCE, SavedFiles(), event=1, get_shell=lambda: shell)
    method = layers.Layers(root / "node").find_method(may_mount=not arguments.no_overlay)
    async with running_cluster(root / "cluster") as cluster:
        log = EventLog(cluster.client.store)
        await log.create(ConversationCreated(conversation_id=SOURCE))
        events = await log.read(SOURCE)
        names = [f"fork-{number}" for number in range(arguments.siblings + 1)]
        for name in names:
            await log.create_from(build_fork(events, name), [], key=name)
        checkpointing = Checkpointing(log, root / "node", checkpoints, every=10)

        async def start(name: str) -> float:
            began = perf_counter()
            notice = await checkpointing.recover(name, 2, may_mount=not arguments.no_overlay)
            assert notice is None, notice
            return perf_counter() - began

        before = _used(root)
        first = await start(names[0])
        of_layer = _used(root) - before
        began, before, cpu = perf_counter(), _used(root), process_time()
        each = await asyncio.gather(*map(start, names[1:]))
        wall, cpu = perf_counter() - began, process_time() - cpu
        used = (_used(root) - before) / arguments.siblings
        copies = []
        for number in range(arguments.copies):
            began = perf_counter()
            subprocess.run(["cp", "-a", "--reflink=never", root / SOURCE, root / f"copy-{number}"], check=True)
            copies.append(perf_counter() - began)
        is_whole = all(_count(root / "node" / name / "workspace") == arguments.files for name in (names[0], names[-1]))
    private = [sum(_list_blocks(root / "node" / name)) / 2**20 for name in names[1:]]
    has_goals = method is layers.CopyMethod.OVERLAY
    size = f"{saved.size_bytes / 2**30:.2f} GiB in {arguments.files:,} files"
    lines = [
        Line("the first fork", round(first, 2), f"s, {of_layer / 2**20:.0f} MiB on the disk"),
        Line(f"{arguments.siblings} siblings at once", round(wall, 3), "s", GOAL_SECONDS if has_goals else None),
        Line("CPU of it", round(cpu, 3), "s"),
        Line("of these the slowest", round(max(each), 3), "s"),
        Line("disk of a sibling, at the most", round(max(private), 3), "MiB", GOAL_MIB if has_goals else None),
        Line("disk that all together took, each", round(used / 2**20, 3), "MiB"),
    ]
    if copies:
        lines.append(Line("a copy by cp -a", round(statistics.median(copies), 2), "s"))
        ratio = statistics.median(copies) * arguments.siblings / wall
        lines.append(Line("copies for all siblings ÷ siblings", round(ratio, 1), ""))
    show("forking", f"{arguments.siblings} forks of {size}, by {method}", lines)
    return 0 if is_whole else 1


def _used(directory: Path) -> int:
    found = os.statvfs(directory)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _count(directory: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(directory))


def _list_blocks(directory: Path) -> Iterator[int]:
    """Yield the bytes of a conversation's folder on the disk, without those that it sees through a mount."""
    device = directory.stat().st_dev
    for top, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if Path(top, name).lstat().st_dev == device]
        for path in (Path(top), *(Path(top, name) for name in files)):
            yield path.lstat().st_blocks * 512


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forking", description=__doc__)
    parser.add_argument("--directory", type=Path, default=None, help="where the node is; a temporary directory")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--siblings", type=int, default=100)
    parser.add_argument("--copies", type=int, default=1, help="how many plain copies to time")
    parser.add_argument("--no-overlay", action="store_true")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().directory) as folder:
        try:
            code = asyncio.run(measure(Path(folder), parser.parse_args()))
        finally:
            unmount_below(Path(folder))
    sys.exit(code)


if __name__ == "__main__":
    main()
