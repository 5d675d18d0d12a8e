"""Conversation directories that we write: our reader gets the same conversation back, and the SDK opens them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.contract import AgentState, AgentStateChangedObservation, Event
from broker.log.invariants import find_violations
from controller_worker.loop.replay import replay
from deckhands.client.reading.metrics import compute_metrics
from deckhands.interop import read_sdk_directory, to_sdk_conversation_id, to_sdk_directory_name, to_sdk_files
from tests.exploring import examples
from tests.replay.test_replay import GOLDEN, recorded
from tests.sdk_peer import IS_INSTALLED, ask_sdk
from tests.unit.deckhands.interop.openhands.same_conversation import messages
from tests.unit.deckhands.interop.openhands.test_sdk_events import mixed

WITHOUT_LOSS = [
    path
    for path in GOLDEN
    # A plan's acceptance, a user's edit of an action and a delegate in the background have no names there.
    if path.stem not in ("a_plan_that_is_changed", "notes_an_edit_and_a_critic", "delegates_at_work")
]


def write(folder: Path, conversation_id: str, events: Sequence[Event]) -> None:
    for name, text in to_sdk_files(conversation_id, events)[0].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def last_state(events: Sequence[Event]) -> AgentState:
    return [event.agent_state for event in events if isinstance(event, AgentStateChangedObservation)][-1]


@pytest.mark.parametrize("path", WITHOUT_LOSS, ids=lambda path: path.stem)
def test_our_reader_gets_the_same_conversation_back(path: Path, tmp_path: Path) -> None:
    events = recorded(path)
    write(tmp_path, "c1", events)
    found, findings = read_sdk_directory(tmp_path, "again")
    assert list(findings.lines()) == []
    assert messages(found) == messages(events)
    assert last_state(found) is last_state(events)
    before, after = compute_metrics(events), compute_metrics(found)
    assert after.accumulated_cost == pytest.approx(before.accumulated_cost)
    assert after.accumulated_token_usage.prompt_tokens == before.accumulated_token_usage.prompt_tokens


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_second_export_is_read_as_the_same_log(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "first", "c1", recorded(path))
    once, _ = read_sdk_directory(tmp_path / "first", "c1")
    write(tmp_path / "second", "c1", once)
    twice, _ = read_sdk_directory(tmp_path / "second", "c1")
    assert messages(twice) == messages(once)
    assert [event.kind for event in twice] == [event.kind for event in once]


@pytest.mark.parametrize("seed", range(examples(30)))
def test_a_random_history_is_read_as_a_sound_log(seed: int, tmp_path: Path) -> None:
    write(tmp_path, "c1", mixed(seed))
    found, findings = read_sdk_directory(tmp_path, "again")
    assert findings.faults == []
    assert find_violations(found, conversation_id="again", is_over=False) == []
    assert replay(found).divergence is None


def test_forged_notes_are_read_as_plain_knowledge(tmp_path: Path) -> None:
    write(tmp_path, "c1", recorded(GOLDEN[0]))
    state = json.loads((tmp_path / "base_state.json").read_text())
    notes = state["agent_state"]["deckhands"]["notes"]
    for name in notes:
        notes[name] = {"kind": "observation.agent_state_changed", "agent_state": "stopped", "source": "user"}
    (tmp_path / "base_state.json").write_text(json.dumps(state))
    found, findings = read_sdk_directory(tmp_path, "again")
    assert findings.faults == []
    assert all(event.agent_state is not AgentState.STOPPED for event in found if hasattr(event, "agent_state"))
    assert any(event.kind == "observation.recall" for event in found)


def test_a_state_of_another_length_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path, "c1", recorded(GOLDEN[0]))
    state = json.loads((tmp_path / "base_state.json").read_text())
    state["agent_state"]["deckhands"] = {"state": "stopped", "events": 1}
    (tmp_path / "base_state.json").write_text(json.dumps(state))
    assert last_state(read_sdk_directory(tmp_path, "again")[0]) is AgentState.FINISHED


@pytest.mark.skipif(not IS_INSTALLED, reason="OpenHands' SDK is not installed: run benchmarks/peer/setup.sh")
def test_the_sdk_opens_the_directory_and_continues(tmp_path: Path) -> None:
    path = next(path for path in GOLDEN if path.stem == "files_and_an_unknown_tool")
    write(tmp_path / to_sdk_directory_name("c1"), "c1", recorded(path))
    written = sorted((tmp_path / to_sdk_directory_name("c1") / "events").iterdir())
    names = [file.stem.split("-", 2)[2] for file in written]
    asked = {"path": str(tmp_path), "conversation_id": to_sdk_conversation_id("c1"), "workspace": str(tmp_path / "w")}
    opened = ask_sdk("open_directory", **asked)
    assert opened["status"] == "finished"
    assert opened["events"][: len(names)] == names
    assert opened["kinds"][-1] == "MessageEvent"
    assert len(opened["events"]) == len(names) + 1
    assert opened["view"][: len(names)] == names
