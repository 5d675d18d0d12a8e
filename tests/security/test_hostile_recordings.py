"""Recordings are untrusted: with any content, an import ends, and its log can be stored and read.

Nothing here measures time: an import that exceeds the bounds would take all memory, or never end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from broker.contract.codec import decode, to_entry
from broker.contract.events import Event
from broker.log.invariants import find_violations
from broker.runtime.errors import UsageError
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from deckhands.interop.openhands.recordings import MAX_EVENT_CHARS, MAX_FILE_BYTES, MAX_MARKS
from deckhands.interop.openhands.sdk_conversation import read_sdk_directory
from deckhands.interop.openhands.trajectory_import import read_trajectory
from tests.unit.deckhands.interop.openhands.same_conversation import messages
from tests.unit.deckhands.interop.openhands.test_sdk_conversation import REAL

TASK = {"id": 0, "source": "user", "action": "message", "args": {"content": "Look around"}}
RECALL = {"id": 1, "source": "user", "action": "recall", "args": {"recall_type": "knowledge"}}
START = [TASK, RECALL]
RUN = {"id": 2, "source": "agent", "action": "run", "args": {"command": "ls"}}
OUTPUT = {"id": 3, "source": "agent", "cause": 2, "observation": "run", "content": "a", "extras": {"command": "ls"}}


def read(folder: Path, trajectory: Any) -> tuple[list[Event], list[str]]:
    """Read a trajectory, given as events or as text, and check that every reader can use the log."""
    path = folder / "trajectory.json"
    path.write_text(trajectory if isinstance(trajectory, str) else json.dumps(trajectory))
    events, findings = read_trajectory(path, "c1")
    for event in events:
        assert decode(to_entry(event.wire())[0], event.id).kind == event.kind
        json.dumps(event.export(), allow_nan=False)
    assert find_violations(events, conversation_id="c1", is_over=False) == []
    assert fold(State(), events).tools.pending == ()
    messages(events)
    return events, list(findings.lines())


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events[1:]]


def test_values_that_are_no_plain_json_cost_one_event(tmp_path: Path) -> None:
    begin, end = json.dumps([*START, RUN])[:-1], json.dumps([OUTPUT])[1:]
    for hostile in (
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 200_000 + "1" + "}" * 200_000,
        '{"id": 7, "action": "finish", "args": {"outputs": ' + "[" * 150 + "]" * 150 + "}}",
        '{"id": ' + "9" * 10_000 + ', "action": "think", "args": {}}',
        '{"id": 7 "action": "think"}',
        '{"text, with a bracket ] and a brace }": tru}',
        '"a text of a hundred thousand characters ' + "x" * 100_000 + '"',
        "7",
    ):
        events, findings = read(tmp_path, f"{begin}, {hostile}, {end}")
        assert kinds(events) == ["action.message", "action.recall", "action.run", "observation.run"], hostile[:40]
        assert len(findings) == 1, hostile[:40]
        assert "Event 3" in findings[0]


def test_numbers_that_are_none_count_as_missing(tmp_path: Path) -> None:
    spoken = {
        **RUN,
        "timeout": "@",
        "args": {"command": "ls", "security_risk": "@"},
        "llm_metrics": {"accumulated_cost": "@"},
    }
    for hostile in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "123456789012345678901234567890"):
        text = json.dumps([*START, spoken, OUTPUT]).replace('"@"', hostile)
        events, findings = read(tmp_path, text)
        assert [kind for kind in kinds(events) if kind != "model.reply"] == kinds(events)[:2] + kinds(events)[-2:]
        assert findings == []


def test_long_texts_are_kept_as_the_log_keeps_them(tmp_path: Path) -> None:
    """A text of megabytes goes beside the log; an event that no log can hold is left out by its number."""
    long = OUTPUT | {"extras": {"command": "x" * 5_000_000}}
    events, findings = read(tmp_path, [*START, RUN, long])
    assert (len(events), findings) == (5, [])
    many = {
        "id": 3,
        "source": "agent",
        "action": "finish",
        "args": {"outputs": {f"{n:x}": f"{n * n:x}" for n in range(400_000)}},
    }
    events, findings = read(tmp_path, [*START, RUN, OUTPUT, many])
    assert kinds(events) == ["action.message", "action.recall", "action.run", "observation.run"]
    assert "Event 4 (finish) cannot be read" in findings[0]


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(UsageError, match="is larger than 128 MiB"):
        read_trajectory(path, "c1")


def test_a_file_of_many_small_values_is_not_read(tmp_path: Path) -> None:
    """In memory each of them takes 20 times its place in the file."""
    path = tmp_path / "many.json"
    path.write_text("[" + "[]," * (MAX_MARKS // 2) + "[]]")
    with pytest.raises(UsageError, match="holds more than 16000000 values"):
        read_trajectory(path, "c1")


def test_an_event_longer_than_any_log_holds_costs_that_event(tmp_path: Path) -> None:
    begin, end = json.dumps([*START, RUN])[:-1], json.dumps([OUTPUT])[1:]
    long = '{"id": 9, "action": "message", "args": {"content": "' + "x" * MAX_EVENT_CHARS + '"}}'
    events, findings = read(tmp_path, f"{begin}, {long}, {end}")
    assert kinds(events) == ["action.message", "action.recall", "action.run", "observation.run"]
    assert "Event 3 cannot be read and is left out: it is longer than 48 MiB" in findings[0]


def test_end_of_an_endless_text_is_searched_once(tmp_path: Path) -> None:
    begin = json.dumps([*START, RUN, OUTPUT])[:-1]
    for endless in ('"' + '\\"' * 3_000_000, '{"a": "' + "\\\\" * 3_000_000 + "\\", '["' + '"x' * 3_000_001):
        events, findings = read(tmp_path, f"{begin}, {endless}")
        assert kinds(events)[-1] == "observation.run"
        assert 1 <= len(findings) <= 2


def test_paths_that_are_no_files_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a file"):
        read_trajectory(tmp_path / "pipe", "c1")


def test_references_in_circles_lead_nowhere(tmp_path: Path) -> None:
    own = {"replaces": 2, "reply_id": 1, "replies": [{"id": 1, "seen": 99}]}
    circle = [
        {**RUN, "cause": 2, "deckhands": own},
        {**RUN, "id": 3, "cause": 4, "deckhands": {"replaces": 4}},
        {**OUTPUT, "id": 4, "cause": 4},
        {**OUTPUT, "id": 5, "cause": [5]},
        {**OUTPUT, "id": 6, "cause": True},
    ]
    events, _ = read(tmp_path, [*START, *circle])
    for event in events:
        for name in ("cause", "replaces", "seen_id"):
            assert (getattr(event, name, None) or 0) < event.id


def test_invalid_result_settles_no_action(tmp_path: Path) -> None:
    """Else the action would be taken for one that still runs, and run here."""
    state = {"id": 3, "source": "environment", "cause": 2, "observation": "agent_state_changed"}
    for other in (
        {"id": 3, "source": "agent", "cause": 2, "action": "think", "args": {}},
        state | {"extras": {"agent_state": "paused"}},
        state | {"observation": "loop_detection"},
        {**OUTPUT, "observation": "error", "extras": {}, "deckhands": {"kind": "observation.finish_refused"}},
        {
            **OUTPUT,
            "observation": "error",
            "extras": {},
            "deckhands": {"kind": "observation.finish_verdict", "is_accepted": False},
        },
    ):
        events, _ = read(tmp_path, [*START, RUN, other])
        assert "observation.outcome_unknown" in kinds(events)
        events, _ = read(tmp_path, [*START, RUN, other, {**OUTPUT, "id": 4}])
        assert "observation.outcome_unknown" not in kinds(events)


def test_ids_that_repeat_or_are_none_mean_the_latest(tmp_path: Path) -> None:
    events, findings = read(tmp_path, [*START, RUN, {**RUN, "args": {"command": "pwd"}}, OUTPUT])
    assert findings == []
    assert kinds(events)[3:5] == ["observation.outcome_unknown", "action.run"]
    assert events[-1].cause == events[-2].id
    for own_id in ("1", None, [1], {"a": 1}, 1.5, -5):
        events, _ = read(tmp_path, [*START, {**RUN, "id": own_id}, OUTPUT])
        assert "action.run" in kinds(events)


def test_a_huge_range_of_forgotten_events_forgets_what_there_is(tmp_path: Path) -> None:
    everything = {"forgotten_events_start_id": -(2**62), "forgotten_events_end_id": 2**62}
    condensations = [
        {"id": n, "source": "agent", "action": "condensation", "args": everything} for n in range(4, 2_000)
    ]
    events, findings = read(tmp_path, [*START, RUN, OUTPUT, *condensations])
    assert findings == []
    first = next(event for event in events if event.kind == "action.condensation")
    assert first.forgotten == (2, 3, 4, 5)  # type: ignore[attr-defined]
    backwards = [{**RUN, "id": 5_000 - n} for n in range(2_500)]
    _, findings = read(tmp_path, [*START, *backwards, {**condensations[0], "id": 9_999}])
    assert "unordered ids" in findings[0]


def test_only_the_log_sets_what_only_the_log_may_set(tmp_path: Path) -> None:
    """The fields that only the log sets, and kinds that only the controller writes, cannot come from a file."""
    own = {"blobs": {"command": {"sha256": "0" * 64, "size_bytes": 9}}, "kind": "conversation.created", "id": 99}
    claimed = [
        {**RUN, "args": RUN["args"] | own},  # type: ignore[operator]
        {**OUTPUT, "extras": {"command": "ls"} | own},
    ]
    events, findings = read(tmp_path, [*START, *claimed])
    assert kinds(events) == ["action.message", "action.recall", "action.run", "observation.run"]
    assert findings == []
    assert all(event.blobs is None for event in events)
    for kind in ("conversation.created", "model.reply", "conversation.delegate_ended", "action.survey", ["x"], 7):
        events, findings = read(tmp_path, [*START, {**RUN, "deckhands": {"kind": kind}}])
        assert kinds(events) == ["action.message", "action.recall"]
        assert "cannot stand for" in findings[0]
    for name in ("survey", "open_workspace", "note", "call_tool", "plan"):
        events, findings = read(tmp_path, [*START, {**RUN, "action": name}])
        assert kinds(events) == ["action.message", "action.recall"]
        assert "no action of this name" in findings[0]


@pytest.mark.soak
def test_every_shape_in_every_place_costs_at_most_its_event(tmp_path: Path) -> None:
    odd: list[Any] = [None, True, -1, 1.5, "x", [], [[]], {}, {"a": None}, [None], "\ud800", 2**70]
    call = {"function_name": "execute_bash", "tool_call_id": "c1", "model_response": {"id": "r1"}}
    whole = [*START, {**RUN, "tool_call_metadata": call, "llm_metrics": {"accumulated_token_usage": {}}}, OUTPUT]
    names = ("id", "timestamp", "source", "cause", "action", "observation", "args", "extras", "content", "timeout")
    names += ("tool_call_metadata", "llm_metrics", "deckhands", "message", "success")
    for place in range(len(whole)):
        for name in names:
            for value in odd:
                changed = [record | {name: value} if n == place else record for n, record in enumerate(whole)]
                try:
                    read(tmp_path, changed)
                except UsageError:
                    raise AssertionError((place, name, value)) from None
    for field in ("function_name", "tool_call_id", "model_response", "total_calls_in_response"):
        for value in odd:
            read(tmp_path, [*START, {**RUN, "tool_call_metadata": call | {field: value}}, OUTPUT])
    for field in ("kind", "reply_id", "replies", "replaces", "confirmation_state", "blobs", "cause"):
        for value in odd:
            read(tmp_path, [*START, {**RUN, "deckhands": {field: value}}, OUTPUT])
    for field in ("id", "seen", "response", "service", "cost_usd", "tool_calls", "thinking_blocks", "iteration"):
        for value in odd:
            reply = {"id": 5, "seen": 0, "response": {}} | {field: value}
            read(tmp_path, [*START, {**RUN, "deckhands": {"reply_id": 5, "replies": [reply]}}, OUTPUT])


@pytest.mark.soak
def test_every_shape_costs_at_most_a_few_events(tmp_path: Path) -> None:
    odd: list[Any] = [None, True, 2**70, "x", [[]], {"a": None}]
    whole = [json.loads(file.read_text()) for file in sorted((REAL / "events").iterdir())[:6]]
    places = [(place, (name,)) for place, event in enumerate(whole) for name in event if name != "id"]
    parts = ("action", "observation", "tool_call", "llm_message")
    places += [(n, (part, name)) for n, event in enumerate(whole) for part in parts for name in event.get(part, ())]
    (tmp_path / "events").mkdir()
    (tmp_path / "base_state.json").write_bytes((REAL / "base_state.json").read_bytes())
    for number, event in enumerate(whole):
        (tmp_path / "events" / f"event-{number:05}-{number}.json").write_text(json.dumps(event))
    for place, path in places:
        file = tmp_path / "events" / f"event-{place:05}-{place}.json"
        for value in odd:
            changed = json.loads(json.dumps(whole[place]))
            inner = changed[path[0]] if len(path) == 2 else changed
            inner[path[-1]] = value
            file.write_text(json.dumps(changed))
            events, findings = read_sdk_directory(tmp_path, "c1")
            assert findings.fault_count <= 4, (place, path, value)
            assert find_violations(events, conversation_id="c1", is_over=False) == []
            assert fold(State(), events).tools.pending == ()
            for event in events:
                to_entry(event.wire())
        file.write_text(json.dumps(whole[place]))
