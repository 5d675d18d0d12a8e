"""The directory of an evaluation when several commands use it at once, or are killed while they write."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from deckhands.evaluation.attempts.record import PROGRESS, ProgressRecord
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.directory import EvaluationRequest, load_request, record_request, write_scripts

COMMANDS, ROUNDS = 8, 10


def test_commands_that_ask_at_once_ask_for_one_evaluation(tmp_path: Path) -> None:
    asked = EvaluationRequest(name="", dataset="shipped", models=("m",))
    ready = Barrier(COMMANDS)

    def one(directory: Path) -> str:
        ready.wait(timeout=10)
        return record_request(directory, asked).name

    with ThreadPoolExecutor(COMMANDS) as commands:
        for number in range(ROUNDS):
            directory = tmp_path / str(number)
            names = set(commands.map(one, [directory] * COMMANDS))
            assert names == {load_request(directory).name}
            assert [path.name for path in directory.iterdir()] == ["evaluation.json"]


def test_scripts_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    """Workers may be reading them: a command that continues an evaluation does not write them over."""
    instances = [Instance("a", "t", turns=({"text": "hello"},)), Instance("b", "t", turns=({"text": "there"},))]
    folder = write_scripts(tmp_path, instances)
    (folder / "b.json").write_text('{"turns": [')  # the command was killed while it wrote
    before = (folder / "a.json").stat()
    assert write_scripts(tmp_path, instances) == folder
    after = (folder / "a.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert json.loads((folder / "b.json").read_text()) == {"turns": [{"text": "there"}]}
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json"]


def test_cut_record_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS
    path.write_text('{"kind": "ended"}\n{"kind": "sta')
    with ProgressRecord(tmp_path) as record:
        record.add_row(AttemptRow(instance="a", model="m", attempt=1, outcome="resolved"))
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["ended", "ended"]
