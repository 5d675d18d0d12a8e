"""Trajectories of OpenHands V0: what one looks like, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import ConversationCreated, Event, ModelReply
from broker.runtime.errors import UsageError
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from controller_worker.loop.replay import replay
from deckhands.openhands.trajectories import ACTIONS, OBSERVATIONS, read_trajectory, trajectory_of
from tests.replay.test_replay import GOLDEN, recorded

CALLS = [{"id": "c1", "type": "function", "function": {"name": "execute_bash", "arguments": '{"command": "ls"}'}}]
RESPONSE = {
    "id": "chatcmpl-1",
    "model": "acme/large",
    "choices": [{"finish_reason": "tool_calls", "message": {"content": "I look.", "tool_calls": CALLS}}],
    "usage": {"prompt_tokens": 900, "completion_tokens": 40, "total_tokens": 940},
}
CALL = {
    "function_name": "execute_bash",
    "tool_call_id": "c1",
    "model_response": RESPONSE,
    "total_calls_in_response": 1,
}
RUN = {
    "id": 4,
    "timestamp": "2025-11-01T10:00:04.000001",
    "source": "agent",
    "message": "Running command: ls",
    "action": "run",
    "tool_call_metadata": CALL,
    "args": {"command": "ls", "is_input": "false", "thought": "I look.", "security_risk": 0, "cwd": None},
    "timeout": 60,
}
TRAJECTORY: list[dict[str, Any]] = [
    {
        "id": 0,
        "timestamp": "2025-11-01T10:00:00",
        "source": "agent",
        "action": "system",
        "args": {
            "content": "You help.",
            "tools": [{"function": {"name": "execute_bash"}}],
            "agent_class": "CodeActAgent",
        },
    },
    {"id": 1, "source": "user", "action": "message", "args": {"content": "Look around\nplease", "images_urls": None}},
    {"id": 2, "source": "user", "action": "recall", "args": {"recall_type": "workspace_context", "query": "Look"}},
    {"id": 3, "source": "environment", "observation": "agent_state_changed", "extras": {"agent_state": "running"}},
    RUN,
    {
        "id": 5,
        "source": "agent",
        "cause": 4,
        "observation": "run",
        "content": "a.txt",
        "tool_call_metadata": CALL,
        "extras": {"command": "ls", "metadata": {"exit_code": 0, "working_dir": "/workspace"}, "hidden": False},
        "success": True,
    },
    {"id": 6, "source": "agent", "action": "finish", "args": {"final_thought": "Done.", "outputs": {}}},
    {"id": 7, "source": "environment", "observation": "agent_state_changed", "extras": {"agent_state": "finished"}},
]


CONFIRMED = next(n for n, fields in enumerate(TRAJECTORY) if fields.get("action") == "run")


def read(tmp_path: Path, trajectory: Any) -> list[Event]:
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(trajectory))
    return read_trajectory(path, "imported-1")


def test_a_trajectory_becomes_a_log(tmp_path: Path) -> None:
    events = read(tmp_path, TRAJECTORY)
    assert [(event.id, event.kind, event.cause) for event in events] == [
        (1, "conversation.created", None),
        (2, "action.system", None),
        (3, "action.message", None),
        (4, "action.recall", None),
        (5, "observation.agent_state_changed", None),
        (6, "model.reply", None),
        (7, "action.run", None),
        (8, "observation.run", 7),
        (9, "action.finish", None),
        (10, "observation.agent_state_changed", None),
    ]
    created, reply, run = events[0], events[5], events[6]
    assert isinstance(created, ConversationCreated)
    assert isinstance(reply, ModelReply)
    assert (created.conversation_id, created.title, created.agent.name) == ("imported-1", "Look around", "CodeActAgent")
    assert (reply.content, reply.tool_calls[0].arguments, reply.usage.prompt_tokens) == (
        "I look.",
        '{"command": "ls"}',
        900,
    )
    assert run.tool_call_metadata is not None
    assert (run.tool_call_metadata.reply_id, run.timeout) == (6, 60.0)
    assert run.timestamp.isoformat() == "2025-11-01T10:00:04.000001+00:00"
    assert fold(State(), events).lifecycle.agent_state == "finished"
    assert replay(events).divergence is None


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_log_that_is_written_and_read_again_says_the_same(path: Path, tmp_path: Path) -> None:
    events = recorded(path)
    again = read(tmp_path, trajectory_of(events))

    def shown(log: list[Event]) -> list[tuple[str, str, Any]]:
        known = {f"action.{name}" for name in ACTIONS} | {f"observation.{name}" for name in OBSERVATIONS}
        kinds = [event for event in log if event.kind in known]
        return [
            (event.kind, event.source, event.wire().get("content") or event.wire().get("command")) for event in kinds
        ]

    assert shown(again) == shown(events)
    assert fold(State(), again).lifecycle.agent_state == fold(State(), events).lifecycle.agent_state
    assert fold(State(), again).tools.pending == ()


def test_what_is_written_is_what_the_original_writes(tmp_path: Path) -> None:
    written = trajectory_of(read(tmp_path, TRAJECTORY))
    assert [event["id"] for event in written] == list(range(8))
    run = written[4]
    assert list(run)[:6] == ["id", "timestamp", "source", "message", "action", "tool_call_metadata"]
    assert (run["timestamp"], run["message"], run["action"]) == (RUN["timestamp"], RUN["message"], "run")
    assert (run["args"]["command"], run["args"]["security_risk"], run["timeout"]) == ("ls", 0, 60.0)
    assert run["tool_call_metadata"]["model_response"]["id"] == "chatcmpl-1"
    assert (written[5]["cause"], written[5]["content"], written[5]["extras"]["metadata"]["exit_code"]) == (
        4,
        "a.txt",
        0,
    )
    assert written[6]["llm_metrics"]["accumulated_token_usage"]["prompt_tokens"] == 900


@pytest.mark.parametrize(
    ("trajectory", "complaint"),
    [
        ({"events": []}, "is no trajectory"),
        ([1], "is no trajectory"),
        ([{"id": 0, "action": "fly"}], "Event 0 of the trajectory cannot be read: .*action.fly"),
        ([{"id": 0}], "Event 0 of the trajectory cannot be read"),
        ([{"id": 0, "action": "message", "args": {}}], "Event 0 of the trajectory cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(trajectory: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=complaint):
        read(tmp_path, trajectory)


def test_an_action_that_openhands_wrote_again_when_it_was_confirmed_waits_no_longer(tmp_path: Path) -> None:
    waiting, observed = TRAJECTORY[CONFIRMED], TRAJECTORY[CONFIRMED + 1]
    waits = {**waiting, "args": {**waiting["args"], "confirmation_state": "awaiting_confirmation"}}
    again = {**waiting, "id": 50, "args": {**waiting["args"], "confirmation_state": "confirmed"}}
    trajectory = [*TRAJECTORY[:CONFIRMED], waits, again, {**observed, "cause": 50}, *TRAJECTORY[CONFIRMED + 2 :]]
    events = read(tmp_path, trajectory)
    first, copy = (event for event in events if event.kind == "action.run")
    assert copy.wire()["replaces"] == first.id
    assert fold(State(), events).tools.pending == ()
