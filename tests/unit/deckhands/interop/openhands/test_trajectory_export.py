"""The quality of an export: the original reads all of it, and every id in it names the same event as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract.events import ConversationCreated, Event, ModelReply, with_id
from deckhands.interop.openhands.trajectory_export import to_trajectory
from deckhands.interop.openhands.v0_kinds import EXTENSION
from tests.controller_parts import Core, bash
from tests.exploring import examples
from tests.replay.test_replay import GOLDEN, recorded
from tests.unit.broker.contract.test_codec import KINDS
from tests.unit.broker.contract.test_codec import _events as events_of
from tests.unit.deckhands.interop.openhands import original_reader
from tests.unit.deckhands.interop.openhands.original_reader import SILENT, event_from_dict

NAMES = {
    *(f"action.{name}" for name in original_reader.ACTIONS),
    *(f"observation.{name}" for name in original_reader.OBSERVATIONS),
}
NOT_WRITTEN = {kind for kind, event_class in KINDS.items() if kind not in NAMES and not event_class.is_shown_to_model}
"""What neither OpenHands has a name for nor a model sees."""


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - NOT_WRITTEN))
@settings(max_examples=examples(15))
@given(content=st.data())
def test_the_original_reads_every_kind(kind: str, content: st.DataObject) -> None:
    event = content.draw(events_of(KINDS[kind]))
    written, left_out = to_trajectory([ConversationCreated(conversation_id="c1", id=1), with_id(event, 2)])
    assert left_out == {}
    fields = json.loads(json.dumps(written, allow_nan=False))[0]
    found = event_from_dict(fields)
    assert (found["id"], found["source"]) == (0, event.source)
    assert isinstance(fields["message"], str)
    assert EXTENSION not in found


@pytest.mark.parametrize("kind", sorted(NOT_WRITTEN - {"conversation.created"}))
@settings(max_examples=examples(3))
@given(content=st.data())
def test_events_without_a_trajectory_name_are_counted(kind: str, content: st.DataObject) -> None:
    event = content.draw(events_of(KINDS[kind]))
    written, left_out = to_trajectory([ConversationCreated(conversation_id="c1", id=1), with_id(event, 2)])
    assert (written, left_out) == ([], {kind: 1})


def test_rolled_back_events_are_left_out() -> None:
    core = Core(double_texting="rollback")
    core.run()
    core.reply(bash("taken back"))
    core.say("something else")
    core.run()
    written, left_out = to_trajectory(core.events)
    assert "taken back" not in str([fields for fields in written if fields.get("action") == "run"])
    assert "something else" in str(written)
    assert left_out["action.run"] == 1


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_original_reads_the_logs_of_real_conversations(path: Path) -> None:
    written, _ = to_trajectory(recorded(path))
    for position, fields in enumerate(written):
        event_from_dict(fields)
        name = fields.get("action") or fields["observation"]
        assert fields["message"] or name in SILENT or not fields.get("content"), fields
        assert fields["id"] == position
        assert fields.get("cause", -1) < position
        if name in ("run", "run_ipython") and "observation" in fields:
            assert fields["success"] is (fields["extras"].get("metadata", {}).get("exit_code", 0) == 0)
        else:
            assert "success" not in fields


def test_what_is_not_written_is_about_the_conversation_itself() -> None:
    assert {kind for kind in NOT_WRITTEN if kind.partition(".")[0] in ("action", "observation")} == {
        *("action.open_workspace", "action.survey", "observation.interrupted"),
        *("observation.survey", "observation.workspace_opened", "observation.workspace_failed"),
        *("action.execute", "observation.execute"),  # a user's, beside the agent
        *("action.feature_check", "observation.feature_check", "action.save_progress"),
        *("action.digest_workspace", "observation.workspace_digest"),
    }


def test_the_two_tables_of_names_are_the_same() -> None:
    from deckhands.interop.openhands import v0_kinds

    assert {name: set(fields) for name, fields in original_reader.ACTIONS.items()} == v0_kinds.ACTIONS
    assert {name: set(fields) for name, fields in original_reader.OBSERVATIONS.items()} == v0_kinds.OBSERVATIONS


def test_missing_reply_leaves_a_response_the_original_reads() -> None:
    events: list[Event] = recorded(next(path for path in GOLDEN if path.stem == "files_and_an_unknown_tool"))
    written, _ = to_trajectory([event for event in events if not isinstance(event, ModelReply)])
    called = [fields["tool_call_metadata"] for fields in written if "tool_call_metadata" in fields]
    assert called
    for fields in written:
        event_from_dict(fields)
    call = called[0]["model_response"]["choices"][0]["message"]["tool_calls"][0]
    assert (call["id"], call["function"]["name"]) == (called[0]["tool_call_id"], called[0]["function_name"])
