"""A file that `deckhands export` has written, whole and damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from broker.contract.events import ConversationCreated, Event
from broker.log.entries import render_event_line
from broker.log.invariants import find_violations
from broker.runtime.errors import UsageError
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from controller_worker.loop.replay import replay
from deckhands.interop.openhands.exported_log import read_exported_log
from deckhands.interop.openhands.recordings import ImportFindings
from tests.replay.test_replay import GOLDEN, finished, recorded
from tests.unit.deckhands.interop.openhands.same_conversation import messages


def read(folder: Path, lines: list[str]) -> tuple[list[Event], ImportFindings]:
    """Read a file, and check that the log is sound."""
    path = folder / "events.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    events, findings = read_exported_log(path, "c1")
    assert find_violations(events, conversation_id="c1", is_over=False) == []
    assert replay(events).divergence is None
    return events, findings


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_whole_file_is_taken_over_as_it_is(path: Path, tmp_path: Path) -> None:
    events = recorded(path)
    found, findings = read(tmp_path, [*map(render_event_line, events), '{"summary": true}', ""])
    assert list(findings.lines()) == []
    assert found[1:] == events[1:]
    created = found[0]
    assert isinstance(created, ConversationCreated)
    assert created.forked_at == len(events)


def test_a_line_that_cannot_be_read_costs_that_line(tmp_path: Path) -> None:
    """Of a command (8) and its output (9), with the reply before (7) and the finish (11) behind them."""
    events = finished()
    lines = [render_event_line(event) for event in events]
    for event_id, result in ((7, None), (8, None), (9, "observation.outcome_unknown"), (10, None), (12, None)):
        for damaged in (
            *('{"id":', "[]", '{"id": 1}', "[" * 100_000, '{"id": ' + "9" * 10_000 + "}", "\x00"),
            json.dumps({"id": event_id, "kind": "observation.tomorrow"}),
            json.dumps({"id": event_id, "kind": "action.message"}),
        ):
            found, findings = read(tmp_path, [*lines[: event_id - 1], damaged, *lines[event_id:]])
            assert [bool(re.match(rf"Line {event_id} ", fault)) for fault in findings.faults] == [True], findings.faults
            assert len(found) == len(events) - (event_id == 12)
            expected = {event.id: event.kind for event in events} | {event_id: result or "observation.null"}
            assert [event.kind for event in found] == [expected[event.id] for event in found]
            assert fold(State(), found).tools.pending == ()
            assert messages(found)[1].role == "user"


def test_an_event_larger_than_any_log_holds_costs_that_event(tmp_path: Path) -> None:
    lines = [render_event_line(event) for event in finished()]
    many = {str(number): Random(number).randbytes(5_000).hex() for number in range(300)}
    large = {"id": 10, "kind": "action.call_tool_mcp", "source": "agent", "name": "x", "arguments": many}
    found, findings = read(tmp_path, [*lines[:9], json.dumps(large), *lines[10:]])
    assert [bool(re.match("Line 10 .*the limit is 1 MiB", fault)) for fault in findings.faults] == [True]
    assert found[9].kind == "observation.null"


def test_action_with_a_lost_result_is_not_run_again(tmp_path: Path) -> None:
    lines = [render_event_line(event) for event in finished()[:9]]
    found, findings = read(tmp_path, [*lines[:8], lines[8][:40]])
    assert (findings.fault_count, found[-1].kind, found[-1].cause) == (1, "observation.outcome_unknown", 8)
    # As in a fork: of a whole file the action has not run yet.
    whole, _ = read(tmp_path, lines[:8])
    assert [pending.id for pending in fold(State(), whole).tools.pending] == [8]


def test_lines_that_are_missing_double_or_in_another_order(tmp_path: Path) -> None:
    events = finished()
    lines = [render_event_line(event) for event in events]
    found, findings = read(tmp_path, [*lines[:6], *lines[8:]])
    assert [event.id for event in found] == list(range(1, 13))
    assert [event.kind for event in found[6:8]] == ["observation.null"] * 2
    found, findings = read(tmp_path, [*lines[:6], *reversed(lines[6:]), lines[3]])
    assert found[1:] == events[1:]
    assert findings.faults == ["Line 13 cannot be read and is left out: there can be no event 4 here"]
    far = json.loads(lines[5]) | {"id": 10**9}
    found, findings = read(tmp_path, [*lines, json.dumps(far)])
    assert len(found) == 12
    assert "999999987 events before it are missing" in findings.faults[0]


def test_without_its_creation_a_log_gets_another_one(tmp_path: Path) -> None:
    lines = [render_event_line(event) for event in finished()]
    found, findings = read(tmp_path, ["{", *lines[1:]])
    assert [event.kind for event in found[:2]] == ["conversation.created", "action.message"]
    assert findings.fault_count == 2


def test_texts_of_another_store_are_not_referred_to(tmp_path: Path) -> None:
    lines = [render_event_line(event) for event in finished()]
    output = json.loads(lines[8]) | {"blobs": {"content": {"sha256": "0" * 64, "size_bytes": 9}}}
    found, findings = read(tmp_path, [*lines[:8], json.dumps(output), *lines[9:]])
    assert (found[8].blobs, list(findings.lines())) == (None, [])


def test_a_file_without_events_is_refused(tmp_path: Path) -> None:
    for lines in ([], ["x"], ['{"summary": true}']):
        with pytest.raises(UsageError, match="holds no events"):
            read(tmp_path, lines)
