"""Logs and snapshots of each release are read, folded to the same state, and decided again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker.contract import codec
from controller_worker.core.commit import to_index_fields
from controller_worker.core.controller import fold
from controller_worker.core.state import SNAPSHOT_VERSION, State, parse_snapshot
from controller_worker.loop.replay import replay
from tests.replay.release_files import CIPHER, FOLDER, HISTORIES, make_file, read_history

RELEASES = sorted(path.name for path in FOLDER.iterdir())
FILES = sorted(FOLDER.rglob("*.msgpack"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(path.read_bytes())
    return found


def test_the_first_release_is_there_with_every_history() -> None:
    assert RELEASES[0] == "0.1.0"
    assert {path.stem for path in (FOLDER / "0.1.0").iterdir()} == {path.stem for path in HISTORIES.iterdir()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_log_of_a_release_is_folded_and_decided_as_before(path: Path) -> None:
    kept = read(path)
    events = [codec.decode(entry, number) for number, entry in enumerate(kept["entries"], 1)]
    whole = fold(State(), events)
    fields = to_index_fields(whole)
    assert {name: fields[name] for name in kept["fields"]} == kept["fields"]
    assert replay(events).divergence is None
    decrypted = [
        codec.decode(codec.decrypt_entry(entry, CIPHER, number), number)
        for number, entry in enumerate(kept["encrypted"], 1)
    ]
    assert decrypted == events


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_snapshot_of_a_release_gives_the_same_state_or_none(path: Path) -> None:
    kept = read(path)
    events = [codec.decode(entry, number) for number, entry in enumerate(kept["entries"], 1)]
    state = parse_snapshot(kept["snapshot"])
    # A version with other parts of a state cannot read it, and folds the whole log.
    if state is not None:
        assert state.version == kept["half"]
        assert fold(state, events[kept["half"] :]) == fold(State(), events)


def test_a_changed_format_of_entries_or_snapshots_shows() -> None:
    """When this fails, the change is one that other versions see: docs/deployment.md says what to do for them."""
    kept = {path.stem: read(path) for path in (FOLDER / RELEASES[-1]).iterdir()}
    for path in sorted(HISTORIES.glob("*.jsonl")):
        made = make_file(read_history(path))
        assert [entry[0] for entry in made["entries"]] == [entry[0] for entry in kept[path.stem]["entries"]]
        assert made["snapshot"][0] == kept[path.stem]["snapshot"][0] == SNAPSHOT_VERSION
