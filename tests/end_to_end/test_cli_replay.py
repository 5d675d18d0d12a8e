"""`deckhands replay` from files and from what runs have left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.integration.command_line import deckhands, environment

GOLDEN = Path(__file__).parents[1] / "replay" / "golden" / "files_and_an_unknown_tool.jsonl"
ID = "01m80qagsabx2dtbh5p8gzsgzh"


def test_a_file_is_replayed(tmp_path: Path) -> None:
    done = deckhands("replay", GOLDEN, env=environment(tmp_path))
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{ID}: 24 events, 13 of them decided again; all are the same.\n"


def test_run_is_replayed_by_id_and_by_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ID
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN, folder / "events.jsonl")
    for source in (ID, folder):
        done = deckhands("replay", source, "--json", env=environment(tmp_path))
        assert done.code == 0
        assert done.json[0]["is_same"] is True


def test_a_difference_is_shown_and_ends_with_one(tmp_path: Path) -> None:
    lines = GOLDEN.read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["agent_state"] == "finished"
    lines[-1] = json.dumps(last | {"agent_state": "rejected"})
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(lines) + "\n")
    done = deckhands("replay", changed, env=environment(tmp_path))
    assert done.code == 1
    assert done.out.startswith(f"{ID}: the first difference is at event 24; 12 decisions before it are the same.\n")
    assert '- "agent_state": "rejected",' in done.out
    assert '+ "agent_state": "finished",' in done.out


def test_what_is_no_log_is_refused_with_the_line(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": 1}\n')
    done = deckhands("replay", other, env=environment(tmp_path))
    assert done.code == 2
    assert "Line 1 of the log is not an event" in done.err
    assert deckhands("replay", tmp_path / "missing.jsonl", env=environment(tmp_path)).code == 2
