"""A ledger of effects: an external program that tools of every kind report to, which knows nothing of Deckhands.

    python -m tests.effects_ledger FILE PORT

A client sends `KEY NAME MODE`, a line. In the mode `once` an effect takes place only if the key is new, as at a service
that takes idempotency keys; in the mode `each` every request is an effect. The mode `seen` asks whether the key is known.
The answer is `first`, `again` or `new`.

Holds: a request is in the file, synchronized to the disk, before it is answered. The answer is late, so that many kills
fall between an effect and its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MODES = ("once", "each", "seen")
MAX_LINE = 1_000
ANSWER_SECONDS = 0.15


class Ledger:
    """The program."""

    def __init__(self, path: Path) -> None:
        self._seen = {json.loads(line)["key"] for line in path.read_text().splitlines()} if path.exists() else set()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def take(self, line: str) -> str:
        key, name, mode = line.split()
        assert mode in MODES, mode
        is_known = key in self._seen
        if mode == "seen":
            return "again" if is_known else "new"
        entry = {"key": key, "name": name, "is_effect": mode == "each" or not is_known}
        os.write(self._file, json.dumps(entry).encode() + b"\n")
        os.fsync(self._file)
        self._seen.add(key)
        return "again" if is_known else "first"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):
            while line := (await reader.readline()).decode():
                answer, is_due = self.take(line), asyncio.Event()
                asyncio.get_running_loop().call_later(ANSWER_SECONDS, is_due.set)
                await is_due.wait()
                writer.write(answer.encode() + b"\n")
                await writer.drain()
        writer.close()


@dataclass(frozen=True)
class Requests:
    """What the file of a ledger says: how often each key was sent, and how many effects each action had.

    An action is the part of its key before the hash: another hash would be a second effect of it.
    """

    sent: Counter[str]
    effects: Counter[str]

    @classmethod
    def read(cls, path: Path) -> Requests:
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return cls(
            Counter(entry["key"] for entry in entries),
            Counter(entry["key"].rpartition("-")[0] for entry in entries if entry["is_effect"]),
        )


def report(port: int, key: str, name: str, mode: str) -> str:
    """Send a request to a ledger and return its answer; for tools in Python."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, connection.makefile("rw") as lines:
        lines.write(f"{key} {name} {mode}\n")
        lines.flush()
        return lines.readline().strip()


def make_command(port: int, name: str, mode: str) -> str:
    """Return a command of bash that reports under the key in its environment, and prints the answer."""
    request = f'echo "$DECKHANDS_IDEMPOTENCY_KEY {name} {mode}"'
    return f"exec 7<>/dev/tcp/127.0.0.1/{port} && {request} >&7 && read -r answer <&7 && echo $answer; exec 7>&-"


@contextmanager
def running(path: Path, port: int) -> Iterator[None]:
    """A ledger as a separate process."""
    import subprocess

    command = [sys.executable, "-m", "tests.effects_ledger", str(path), str(port)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert program.stdout is not None
        with program.stdout:
            assert program.stdout.readline() == b"ready\n"
        yield
    finally:
        program.kill()
        program.wait()


async def main() -> None:
    ledger = Ledger(Path(sys.argv[1]))
    server = await asyncio.start_server(ledger.serve, "127.0.0.1", int(sys.argv[2]), limit=MAX_LINE)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
