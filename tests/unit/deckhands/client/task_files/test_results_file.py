"""The file of results: each result once and whole, whenever its writer is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.client.reading.summary import ExitCode, Summary, summarize
from deckhands.client.task_files.submission import open_results
from tests.unit.deckhands.sample_log import finished_log

SUMMARY: Summary = summarize(finished_log())


def test_results_are_appended_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        with open_results(path) as file:
            file.add("a", "c1", SUMMARY)
            file.add("b", "c2", SUMMARY)
            file.add("b", "c2", SUMMARY)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["id"], line["conversation_id"]) for line in found] == [("a", "c1"), ("b", "c2")]
    assert found[0]["summary"] == json.loads(json.dumps(SUMMARY.as_json()))


def test_killed_after_any_byte_it_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_results(path) as file:
        file.add("a", "c1", SUMMARY)
        first = path.stat().st_size
        file.add("b", "c2", SUMMARY)
    whole = path.read_bytes()
    for size in (0, 1, 5, first - 1, first, first + 1, first + 7, first + 8, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:size])
        with open_results(path) as file:
            assert file.done.get("c1", ("finished", ExitCode.FINISHED)) == ("finished", ExitCode.FINISHED)
            file.add("a", "c1", SUMMARY)
            file.add("b", "c2", SUMMARY)
        assert path.read_bytes() == whole, size


@pytest.mark.parametrize(
    "content", ["a list of things\n", '{"id": 3}\n', '{"other": 1}', "x", '{"id": "a", "summary": 3}\n']
)
def test_another_file_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"Line 1 of .* is not a result"), open_results(path):
        pass
    assert path.read_text() == content


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_results(path), pytest.raises(UsageError, match="another process writes it"), open_results(path):
        pass
    with pytest.raises(UsageError, match="cannot be written"), open_results(tmp_path):
        pass
