"""The files of a run: events that can be read back unchanged, and a summary."""

from __future__ import annotations

import json

import pytest

from broker.runtime.errors import CorruptEntry, UnknownKind
from deckhands.client.reading.summary import summarize
from deckhands.client.runs.records import RunFolder, parse_exported_event, render_event_line
from tests.unit.deckhands.sample_log import finished_log


@pytest.fixture
def folder(tmp_path):
    found = RunFolder(tmp_path)
    with found.recording() as recording:
        for event in finished_log():
            recording.add(event)
    return found


def test_an_event_as_a_line():
    assert json.loads(render_event_line(finished_log()[7])) == {
        "id": 8,
        "kind": "observation.run",
        "source": "environment",
        "cause_id": 7,
        "timestamp": "2026-05-01T12:00:07Z",
        "content": "1 passed",
        "command": "",
        "metadata": {"exit_code": 0, "pid": -1, "prefix": "", "suffix": ""},
        "hidden": False,
    }


def test_a_line_is_ascii_and_one_line():
    event = finished_log()[1].model_copy(update={"content": "ä\n\x1b[31m\u202e"})
    line = render_event_line(event)
    assert line.isascii()
    assert "\n" not in line
    assert "\x1b" not in line


def test_events_come_back_as_they_were(folder):
    assert folder.events() == finished_log()


def test_a_killed_run_has_a_summary_too(folder):
    assert not folder.is_over
    assert folder.summary() == summarize(finished_log())


def test_the_summary_of_a_run_that_is_over(folder):
    folder.finish(summarize(finished_log()))
    folder.events_file.unlink()
    assert folder.is_over
    assert folder.summary() == summarize(finished_log())


def test_recording_anew_takes_the_summary_away(folder):
    folder.finish(summarize(finished_log()))
    with folder.recording():
        assert not folder.is_over


def test_a_last_line_that_was_cut_off_is_left_out(folder):
    text = folder.events_file.read_text()
    folder.events_file.write_text(text[:-20])
    assert folder.events() == finished_log()[:-1]


def test_a_damaged_line_is_named(folder):
    lines = folder.events_file.read_text().splitlines()
    lines[3] = lines[3][:30]
    folder.events_file.write_text("\n".join(lines) + "\n")
    with pytest.raises(CorruptEntry, match=r"Line 4 of .*events\.jsonl is not an event"):
        folder.events()


def test_a_run_that_has_written_nothing(folder):
    folder.events_file.write_text("")
    with pytest.raises(CorruptEntry, match="holds no events"):
        folder.events()


def test_a_damaged_summary_is_named(folder):
    folder.summary_file.write_text('{"summary": true}')
    with pytest.raises(CorruptEntry, match=r"summary\.json is not a summary"):
        folder.summary()


@pytest.mark.parametrize("fields", [[], "x", {}, {"id": "1", "kind": "action.message"}])
def test_what_is_no_event(fields):
    with pytest.raises(CorruptEntry, match="not an object with an id"):
        parse_exported_event(fields)


def test_a_kind_of_a_later_version():
    with pytest.raises(UnknownKind, match=r"action\.teleport"):
        parse_exported_event({"id": 1, "kind": "action.teleport"})
