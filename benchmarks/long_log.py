"""A long log at the command line: `python -m benchmarks.long_log --events 50000`.

Writes an export of so many events, 0.9 KB each, imports it, and reads it back. Each row is one command:
seconds by the clock, and the CPU of its process, which a busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import redis.asyncio

from benchmarks.history import conversation
from benchmarks.machine import load
from broker.contract.events import with_id
from broker.log.entries import render_event_line
from broker.store.embedded import EmbeddedValkey

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def write_export(path: Path, count: int) -> None:
    """Write what `deckhands export` writes of a conversation."""
    created, events = conversation("long-log", count)
    with path.open("w") as file:
        for number, event in enumerate([created, *events], 1):
            stamped = with_id(event, number).model_copy(update={"timestamp": BEGUN + timedelta(seconds=number)})
            file.write(render_event_line(stamped) + "\n")


def run(name: str, environment: Mapping[str, str], *arguments: str, first_only: bool = False) -> str:
    """Run one command, print its row, and return what it printed; with `first_only`, end it at its first line."""
    began = time.monotonic()
    command = [sys.executable, "-m", "deckhands", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    printed = process.stdout.readline()
    if first_only:
        process.kill()
    else:
        printed += process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert first_only or process.returncode == 0, (arguments, process.returncode)
    seconds, cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    print(f"| {name:<28} | {seconds:>8.2f} s | {cpu:>8.2f} s | {usage.ru_maxrss // 1024:>6} MB |", flush=True)
    return printed


async def pipeline(url: str, path: Path) -> None:
    """Print the row of the floor of an import: its lines, added to a stream as they are, in pipelines of a thousand."""
    began, used = time.monotonic(), time.process_time()
    lines = path.read_bytes().splitlines()
    async with redis.asyncio.from_url(url, socket_timeout=None) as client:
        for start in range(0, len(lines), 1_000):
            sending = client.pipeline(transaction=False)
            for line in lines[start : start + 1_000]:
                sending.xadd("floor", {"e": line})
            await sending.execute()
        await client.delete("floor")
    seconds, cpu = time.monotonic() - began, time.process_time() - used
    print(f"| {'floor: a pipeline of XADD':<28} | {seconds:>8.2f} s | {cpu:>8.2f} s | {'':>6}    |", flush=True)


async def measure(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "long.jsonl"
        write_export(path, count)
        store = EmbeddedValkey(Path(folder) / "store")
        await store.start()
        try:
            environment = {**os.environ, "DECKHANDS_URL": store.url, "DECKHANDS_HOME": folder}
            print(f"{count} events, {path.stat().st_size / 1e6:.0f} MB\n")
            print("| command                      |     clock  |     CPU    |  memory   |")
            print("|------------------------------|------------|------------|-----------|")
            run("import --help: the start", environment, "import", "--help")
            await pipeline(store.url, path)
            conversation_id = run("import", environment, "import", str(path)).split()[-1]
            run("logs, to the first line", environment, "logs", "--plain", conversation_id, first_only=True)
            run("logs", environment, "logs", "--plain", conversation_id)
            run("show", environment, "show", conversation_id)
            run("export", environment, "export", conversation_id)
            print(f"\nLoad of the machine at the end: {load():.1f}")
        finally:
            await store.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=50_000)
    asyncio.run(measure(parser.parse_args().events))
