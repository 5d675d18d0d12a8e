"""`deckhands export --format openhands` and `deckhands import`, by files alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.integration.command_line import deckhands, environment

GOLDEN = Path(__file__).parents[1] / "replay" / "golden" / "files_and_an_unknown_tool.jsonl"
ID = "01m80qagsabx2dtbh5p8gzsgzh"


def test_a_run_is_written_as_a_trajectory_and_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ID
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN, folder / "events.jsonl")
    env = environment(tmp_path)
    trajectory, events = tmp_path / "trajectory.json", tmp_path / "events.jsonl"
    assert deckhands("export", ID, "--format", "openhands", "-o", trajectory, env=env).code == 0
    assert json.loads(trajectory.read_text())[0]["action"] == "message"
    done = deckhands("import", trajectory, "-o", events, env=env)
    assert (done.code, done.out) == (0, "")
    replayed = deckhands("replay", events, "--json", env=env)
    assert (replayed.code, replayed.json[0]["state"]) == (0, "finished")


def test_exported_file_is_imported_as_a_fork(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert deckhands("import", GOLDEN, "-o", events, env=environment(tmp_path)).code == 0
    created = json.loads(events.read_text().splitlines()[0])
    assert created["forked_from"] == f"{ID}@24"
    assert created["conversation_id"] != ID


def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    done = deckhands("import", GOLDEN, env=environment(tmp_path))
    assert done.code == 1
    assert "No cluster is running here." in done.err


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    done = deckhands("import", other, env=environment(tmp_path))
    assert done.code == 2
    assert "is not a trajectory" in done.err


def test_a_person_sees_what_could_not_be_carried_over(tmp_path: Path) -> None:
    env = environment(tmp_path)
    folder = tmp_path / "runs" / ID
    folder.mkdir(parents=True)
    lines = GOLDEN.read_text().splitlines()
    waited = {"id": len(lines) + 1, "kind": "model.deferred", "code": "rate_limit"}
    (folder / "events.jsonl").write_text("\n".join([*lines, json.dumps(waited)]) + "\n")
    trajectory, events = tmp_path / "trajectory.json", tmp_path / "events.jsonl"
    done = deckhands("export", ID, "--format", "openhands", "-o", trajectory, env=env)
    assert done.code == 0
    assert "Left out: 1 event of the kind model.deferred, which OpenHands has no name for." in done.err

    records = json.loads(trajectory.read_text())
    records.insert(3, {"id": 99, "action": "fly"})
    trajectory.write_text(json.dumps(records))
    done = deckhands("import", trajectory, "-o", events, env=env)
    assert done.code == 0
    assert "Event 3 (fly) cannot be read and is left out" in done.err
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("\n".join([*lines[:5], "{", *lines[6:]]))
    done = deckhands("import", damaged, "-o", events, env=env)
    assert done.code == 0
    assert "Line 6 cannot be read and is left out" in done.err
