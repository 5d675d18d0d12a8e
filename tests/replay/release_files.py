"""Logs and snapshots as a release wrote them: `python -m tests.replay.release_files 0.1.0` writes those of this version.

    releases/<version>/<history>.msgpack    entries, encrypted entries, a snapshot at half of the log, fields of the index

Holds: files of a release never change. A release adds a folder; CI reads all of them with every later version.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgpack

from broker.contract import codec
from broker.contract.events import Event
from broker.log.entries import parse_lines
from broker.store.encryption import Cipher
from controller_worker.core.commit import to_index_fields
from controller_worker.core.controller import fold
from controller_worker.core.state import State, to_snapshot

FOLDER = Path(__file__).with_name("releases")
HISTORIES = Path(__file__).with_name("golden")
CIPHER = Cipher("releases", bytes(range(32)), "conversation")


def read_history(path: Path) -> list[Event]:
    return parse_lines(path.read_text().splitlines(), source=path.name)


def make_file(events: list[Event]) -> dict[str, Any]:
    """Return what this version keeps of a log."""
    entries = [codec.to_entry(event.wire())[0] for event in events]
    half = len(events) // 2
    return {
        "entries": entries,
        "encrypted": [codec.encrypt_entry(entry, CIPHER, number) for number, entry in enumerate(entries, 1)],
        "half": half,
        "snapshot": to_snapshot(fold(State(), events[:half])),
        "fields": to_index_fields(fold(State(), events)),
    }


def main() -> None:
    """Write the files of a release; an existing one is not changed."""
    folder = FOLDER / sys.argv[1]
    folder.mkdir(parents=True)
    for path in sorted(HISTORIES.glob("*.jsonl")):
        (folder / f"{path.stem}.msgpack").write_bytes(msgpack.packb(make_file(read_history(path))))


if __name__ == "__main__":
    main()
