"""What a checkpoint of a workspace costs: the first, one without a change, one with a single changed file.

    python benchmarks/checkpointing.py [--megabytes 50] [--files 3000] [--rounds 10]

Prints milliseconds as one JSON object; the place is a directory beside the workspace.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from broker.runtime.clock import SystemClock
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles


def make_project(root: Path, files: int, size_bytes: int) -> None:
    """Make files of text-like content in a hundred directories."""
    line = b"def function(argument): return argument  # "
    for number in range(files):
        path = root / f"package-{number % 100}" / f"module-{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = b"".join(line + os.urandom(8).hex().encode() + b"\n" for _ in range(size_bytes // files // 60))
        path.write_bytes(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder, "workspace")
        make_project(workspace, options.files, options.megabytes * 2**20)
        checkpoints, known = Checkpoints(f"file://{folder}/checkpoints", SystemClock()), SavedFiles()

        def save() -> tuple[float, float]:
            began, cpu = perf_counter(), process_time()
            checkpoints.save("conversation", workspace, known)
            return (perf_counter() - began) * 1000, (process_time() - cpu) * 1000

        first, first_cpu = save()
        save()
        unchanged = [save() for _ in range(options.rounds)]
        changed = []
        for number in range(options.rounds):
            (workspace / "package-7" / "module-7.py").write_text(f"changed = {number}\n")
            changed.append(save())
        began = perf_counter()
        restored = checkpoints.restore("conversation", Path(folder, "restored"))
        report = {
            "files": restored.files,
            "megabytes": round(restored.size_bytes / 2**20, 1),
            "first_ms": round(first),
            "first_cpu_ms": round(first_cpu),
            "unchanged_ms": round(statistics.median(wall for wall, _ in unchanged), 1),
            "one_changed_ms": round(statistics.median(wall for wall, _ in changed), 1),
            "one_changed_cpu_ms": round(statistics.median(cpu for _, cpu in changed), 1),
            "restore_ms": round((perf_counter() - began) * 1000),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
