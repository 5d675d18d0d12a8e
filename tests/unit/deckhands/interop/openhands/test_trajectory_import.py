"""Trajectories of OpenHands V0: read and written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import ConversationCreated, Event, ModelReply
from broker.contract.file_events import FileEditAction, FileReadAction
from broker.contract.observations import CmdOutputObservation
from broker.log.invariants import find_violations
from broker.runtime.errors import UsageError
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from controller_worker.loop.replay import replay
from deckhands.client.reading.metrics import compute_metrics
from deckhands.interop.openhands.trajectory_export import to_trajectory
from deckhands.interop.openhands.trajectory_import import read_trajectory
from tests.unit.deckhands.interop.openhands.same_conversation import fold_of, messages

CALLS = [{"id": "c1", "type": "function", "function": {"name": "execute_bash", "arguments": '{"command": "ls"}'}}]
RESPONSE = {
    "id": "chatcmpl-1",
    "model": "acme/large",
    "choices": [{"finish_reason": "tool_calls", "message": {"content": "I look.", "tool_calls": CALLS}}],
    "usage": {"prompt_tokens": 900, "completion_tokens": 40, "total_tokens": 940},
}
CALL = {"function_name": "execute_bash", "tool_call_id": "c1", "model_response": RESPONSE, "total_calls_in_response": 1}
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


def read_with_findings(tmp_path: Path, trajectory: Any) -> tuple[list[Event], list[str]]:
    """Read a trajectory, given as its events or as text; check that the log is sound and can be continued."""
    path = tmp_path / "trajectory.json"
    path.write_text(trajectory if isinstance(trajectory, str) else json.dumps(trajectory))
    events, findings = read_trajectory(path, "imported-1")
    assert find_violations(events, conversation_id="imported-1", is_over=False) == []
    assert replay(events).divergence is None
    assert messages(events)
    return events, list(findings.lines())


def read(tmp_path: Path, trajectory: Any) -> list[Event]:
    events, findings = read_with_findings(tmp_path, trajectory)
    assert findings == []
    return events


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
    assert (run.tool_call_metadata.reply_id, run.timeout) == (6, 60.0)
    assert run.timestamp.isoformat() == "2025-11-01T10:00:04.000001+00:00"
    assert fold(State(), events).lifecycle.agent_state == "finished"
    assert replay(events).divergence is None


def test_written_trajectory_equals_the_original_s(tmp_path: Path) -> None:
    written = to_trajectory(read(tmp_path, TRAJECTORY))[0]
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
    ("text", "complaint"),
    [
        ('{"events": []}', "is not a trajectory"),
        ("[1]", "holds no event that can be read. Event 0 cannot be read .* it is a int, not an object"),
        ("[]", "holds no event that can be read"),
        ("", "is not a trajectory"),
        ('[{"id": 0, "action": "fly"}]', r"Event 0 \(fly\) cannot be read .*no action of this name"),
        ("[" + "x," * 2_000 + "1]", "more than 1000 of its events are not JSON"),
    ],
    ids=["object", "number", "nothing", "empty", "no event", "garbage"],
)
def test_invalid_trajectory_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=complaint):
        read_trajectory(path, "imported-1")


def test_action_rewritten_on_confirmation_waits_no_longer(tmp_path: Path) -> None:
    waiting, observed = TRAJECTORY[CONFIRMED], TRAJECTORY[CONFIRMED + 1]
    waits = {**waiting, "args": {**waiting["args"], "confirmation_state": "awaiting_confirmation"}}
    again = {**waiting, "id": 50, "args": {**waiting["args"], "confirmation_state": "confirmed"}}
    trajectory = [*TRAJECTORY[:CONFIRMED], waits, again, {**observed, "cause": 50}, *TRAJECTORY[CONFIRMED + 2 :]]
    events = read(tmp_path, trajectory)
    first, copy = (event for event in events if event.kind == "action.run")
    assert copy.wire()["replaces"] == first.id
    assert fold(State(), events).tools.pending == ()


def changed(position: int, **fields: Any) -> list[dict[str, Any]]:
    """Return the trajectory with other fields in one event."""
    return [record | fields if place == position else record for place, record in enumerate(TRAJECTORY)]


def metrics(cost: float, prompt: int, cached: int = 0) -> dict[str, Any]:
    """Return the metrics that OpenHands copies onto an action."""
    usage = {"model": "acme/large", "prompt_tokens": prompt, "completion_tokens": 1, "cache_read_tokens": cached}
    return {"accumulated_cost": cost, "accumulated_token_usage": usage, "costs": [], "token_usages": []}


def replies(events: list[Event]) -> list[ModelReply]:
    return [event for event in events if isinstance(event, ModelReply)]


def test_one_event_that_cannot_be_read_costs_that_event(tmp_path: Path) -> None:
    for record, reason in (
        (
            {"id": 6, "source": "agent", "action": "fly", "args": {}},
            r"Event 6 \(fly\) cannot be read.*no action of this name",
        ),
        (
            {"id": 6, "source": "agent", "action": "message", "args": {}},
            r"Event 6 \(message\).*content: Field required",
        ),
        ({"id": 6, "source": "nobody", "action": "think", "args": {}}, r"Event 6 \(think\).*source: Input should be"),
        ({"id": 6, "action": ["run"]}, r"Event 6 \(of no kind\)"),
        ({}, r"Event 6 \(of no kind\).*neither an action nor an observation"),
        ("text", "Event 6 cannot be read.*it is a str, not an object"),
        (None, "Event 6 cannot be read"),
    ):
        events, findings = read_with_findings(tmp_path, [*TRAJECTORY[:6], record, *TRAJECTORY[6:]])
        assert len(findings) == 1
        assert re.search(reason, findings[0]), findings
        assert events[-1].kind == "observation.agent_state_changed"
        assert len(events) == 10


def test_what_answers_an_action_that_is_left_out_says_so(tmp_path: Path) -> None:
    events, findings = read_with_findings(tmp_path, changed(4, args={"is_input": "maybe"}))
    assert [event.cause for event in events if event.kind == "observation.run"] == [None]
    assert re.search(r"Event 4 \(run\) .*command: Field required", findings[0])
    assert findings[1:] == ["Left out: 1 links to actions that are not here."]


def test_the_first_faults_are_named_and_the_others_counted(tmp_path: Path) -> None:
    _, findings = read_with_findings(tmp_path, [*TRAJECTORY, *({"action": "fly"} for _ in range(30))])
    assert len(findings) == 21
    assert findings[-1] == "10 more cannot be read and are left out."


def test_truncated_file_keeps_its_contents(tmp_path: Path) -> None:
    text = json.dumps(TRAJECTORY)
    events, findings = read_with_findings(tmp_path, text[: text.index("All done") if "All done" in text else -60])
    assert len(events) == 9
    assert "Event 7 cannot be read" in findings[0]
    whole, findings = read_with_findings(tmp_path, text[:-1])
    assert len(whole) == 10
    assert findings == [
        "Everything after event 7 cannot be read and is left out: the file ends in the middle of the list"
    ]


def test_an_action_without_a_result_is_not_run_again(tmp_path: Path) -> None:
    for trajectory in (TRAJECTORY[:5], TRAJECTORY[:5] + TRAJECTORY[6:], changed(5, extras={"metadata": {}})):
        events, _ = read_with_findings(tmp_path, trajectory)
        result = next(event for event in events if event.kind == "observation.outcome_unknown")
        assert (result.id, result.cause) == (8, 7)
        assert fold(State(), events).tools.pending == ()
        assert messages(events)[-1].role == "tool"


def test_action_waiting_for_a_person_still_waits(tmp_path: Path) -> None:
    waits = {**RUN, "args": {**RUN["args"], "confirmation_state": "awaiting_confirmation"}}
    asked = {"source": "environment", "observation": "agent_state_changed"}
    asked["extras"] = {"agent_state": "awaiting_user_confirmation"}
    events = read(tmp_path, [*TRAJECTORY[:4], asked | {"id": 10}, waits | {"id": 11}])
    assert [(pending.id, pending.is_awaiting) for pending in fold(State(), events).tools.pending] == [(8, True)]
    # A user wrote something else instead, so OpenHands never ran it.
    spoke = {"id": 12, "source": "user", "action": "message", "args": {"content": "Never mind"}}
    running = asked | {"id": 14, "extras": {"agent_state": "running"}}
    recall = {"id": 13, "source": "user", "action": "recall", "args": {"recall_type": "knowledge"}}
    events = read(tmp_path, [*TRAJECTORY[:4], asked | {"id": 10}, waits | {"id": 11}, spoke, recall, running])
    assert fold(State(), events).tools.pending == ()


def test_formats_of_older_versions_are_read(tmp_path: Path) -> None:
    old = {"command": "ls", "exit_code": 2, "command_id": 31, "hidden": False, "formatted_output_and_error": "x"}
    output = next(event for event in read(tmp_path, changed(5, extras=old)) if isinstance(event, CmdOutputObservation))
    assert (output.exit_code, output.metadata.pid) == (2, 31)
    odd = {"command": "ls", "exit_code": "?", "command_id": None, "metadata": {"exit_code": 1, "username": None}}
    output = next(event for event in read(tmp_path, changed(5, extras=odd)) if isinstance(event, CmdOutputObservation))
    assert output.exit_code == 1

    code = "print(file_editor(**{'command': 'str_replace', 'path': '/a.py', 'old_str': 'x', 'new_str': \"y'\"}))"
    edit = changed(4, action="edit", args={"path": "/a.py", "translated_ipython_code": code, "keep_prompt": True})
    edited = next(event for event in read(tmp_path, edit) if isinstance(event, FileEditAction))
    assert (edited.command, edited.old_str, edited.new_str) == ("str_replace", "x", "y'")
    view = "print(file_editor(**{'command': 'view', 'path': '/b.py', 'view_range': [1, 5]}))"
    seen = changed(4, action="read", args={"path": "/b.py", "translated_ipython_code": view})
    seen_event = next(event for event in read(tmp_path, seen) if isinstance(event, FileReadAction))
    assert (seen_event.path, seen_event.view_range) == ("/b.py", (1, 5))
    for harmless in (
        "print(file_editor(**{'path': open('/x')}))",
        "print(file_editor(**" + "[" * 9_000 + "))",
        7,
        None,
    ):
        kept = changed(4, action="read", args={"path": "/c.py", "translated_ipython_code": harmless})
        assert next(event for event in read(tmp_path, kept) if isinstance(event, FileReadAction)).path == "/c.py"


def test_task_list_of_any_content_is_read(tmp_path: Path) -> None:
    tasks = [
        {"id": 1, "title": "One", "status": "completed", "notes": None},
        {"id": None, "title": None, "status": "BLOCKED", "priority": "high"},
        "not a task",
        {"id": "x", "title": 3, "status": None, "notes": ["a"]},
    ]
    plan = changed(4, action="task_tracking", args={"command": "plan", "task_list": tasks}, timeout=None)
    plan[5] = plan[5] | {"observation": "task_tracking", "extras": {"command": "plan", "task_list": tasks}}
    events = read(tmp_path, plan)
    items = fold(State(), events).tasks.items
    assert [(item.id, item.title, item.status, item.notes) for item in items] == [
        ("1", "One", "done", ""),
        ("task-2", "Untitled task", "todo", ""),
        ("x", "3", "todo", "['a']"),
    ]


def test_costs_and_cached_tokens_of_the_recording_add_up(tmp_path: Path) -> None:
    usage = RESPONSE["usage"] | {"prompt_tokens_details": {"cached_tokens": 800}, "cache_creation_input_tokens": 7}
    call = CALL | {"model_response": RESPONSE | {"usage": usage}}
    events = read(tmp_path, changed(4, tool_call_metadata=call))
    assert replies(events)[0].usage.model_dump() == {
        "prompt_tokens": 900,
        "completion_tokens": 40,
        "cache_read_tokens": 800,
        "cache_write_tokens": 7,
    }
    assert compute_metrics(events).accumulated_cost == 0.0

    # The finish has no call; its cost, and that of a condenser, is in the sums alone.
    condensation = {"id": 9, "source": "agent", "action": "condensation", "llm_metrics": metrics(0.75, 1_500, 900)}
    condensation["args"] = {"forgotten_event_ids": [], "summary": "So far.", "summary_offset": 1}
    trajectory = changed(4, llm_metrics=metrics(0.25, 900, 800))
    trajectory[6] = trajectory[6] | {"llm_metrics": metrics(1.0, 2_000, 900)}
    events = read(tmp_path, [*trajectory[:6], condensation, *trajectory[6:]])
    found = compute_metrics(events)
    assert found.accumulated_cost == pytest.approx(1.0)
    assert (found.accumulated_token_usage.prompt_tokens, found.accumulated_token_usage.cache_read_tokens) == (
        2_000,
        900,
    )
    assert [(reply.service, reply.cost_usd) for reply in replies(events)] == [
        ("agent", 0.25),
        ("condenser", 0.5),
        ("agent", 0.25),
    ]
    # A recording that was resumed starts its sums again.
    trajectory[6] = trajectory[6] | {"llm_metrics": metrics(0.125, 100)}
    assert compute_metrics(read(tmp_path, trajectory)).accumulated_cost == pytest.approx(0.375)


def test_absurd_costs_count_as_nothing(tmp_path: Path) -> None:
    for cost in (-1, "much", [], 1e308, True):
        trajectory = changed(
            4, llm_metrics={"accumulated_cost": cost, "accumulated_token_usage": {"prompt_tokens": -3}}
        )
        found = compute_metrics(read(tmp_path, trajectory))
        assert found.accumulated_cost in (0.0, 1e308)
        assert found.accumulated_token_usage.prompt_tokens == 900
    text = json.dumps(changed(4, llm_metrics={"accumulated_cost": -12345, "costs": []})).replace("-12345", "1e999")
    assert compute_metrics(read(tmp_path, text)).accumulated_cost == 0.0


def test_what_is_forgotten_is_forgotten_here(tmp_path: Path) -> None:
    for forgotten in (
        {"forgotten_event_ids": [4, 5, 99]},
        {"forgotten_events_start_id": 4, "forgotten_events_end_id": 5},
    ):
        place = {"summary": "It has looked.", "summary_offset": 3}
        condensation = {"id": 6, "source": "agent", "action": "condensation", "args": forgotten | place}
        after = [{**record, "id": record["id"] + 1} for record in TRAJECTORY[6:]]
        events, findings = read_with_findings(tmp_path, [*TRAJECTORY[:6], condensation, *after])
        assert [event.kind for event in fold_of(events).view().events] == [
            *("action.system", "action.message", "action.recall", "observation.condense", "action.finish")
        ]
        lost = "Left out: 1 ids of events that a condensation forgets and that are not here."
        assert findings == ([lost] if "forgotten_event_ids" in forgotten else [])


def test_summary_keeps_its_place_after_an_omitted_event(tmp_path: Path) -> None:
    place = {"summary": "It has looked.", "summary_offset": 4}
    condensation = {"id": 7, "source": "agent", "action": "condensation", "args": {"forgotten_event_ids": [5]} | place}
    broken = {"id": 3, "source": "agent", "action": "message", "args": {}}
    trajectory = [*TRAJECTORY[:3], broken, {**RUN, "id": 4}, {**TRAJECTORY[5], "id": 5}, condensation]
    events, findings = read_with_findings(tmp_path, trajectory)
    assert len(findings) == 1
    view = [event.kind for event in fold_of(events).view().events]
    assert view == ["action.system", "action.message", "action.recall", "observation.condense", "action.run"]


def test_a_delegate_is_its_result(tmp_path: Path) -> None:
    """OpenHands writes the events of a delegate among its parent's; the parent's model never sees them (5)."""
    asked = {"id": 4, "source": "agent", "action": "delegate", "args": {"agent": "Browser", "inputs": {"task": "look"}}}
    result = {
        "id": 8,
        "source": "agent",
        "observation": "delegate",
        "content": "It says so.",
        "extras": {"outputs": {}},
    }
    inner = [
        {"id": 5, "source": "agent", "action": "system", "args": {"content": "You browse."}},
        {"id": 6, "source": "user", "action": "message", "args": {"content": "TASK: look"}},
        {"id": 7, "source": "agent", "action": "finish", "args": {}, "llm_metrics": metrics(0.5, 70)},
    ]
    for begins in (0, 1):
        spent = TRAJECTORY[6] | {"id": 20, "llm_metrics": metrics(0.75, 90)}
        events, findings = read_with_findings(tmp_path, [*TRAJECTORY[:4], asked, *inner[begins:], result, spent])
        assert findings == [f"Left out: {3 - begins} events of delegates, whose results are kept."]
        assert [event.kind for event in events[5:]] == [
            *("action.delegate", "observation.delegate", "model.reply", "action.finish")
        ]
        assert (events[6].cause, compute_metrics(events).accumulated_cost) == (6, 0.75)
        assert fold(State(), events).delegation.delegates == ()
    # One that has not come back is not sent out again.
    events = read(tmp_path, [*TRAJECTORY[:4], asked])
    assert fold(State(), events).delegation.delegates == ()


def test_a_trajectory_from_before_there_were_recalls_has_them_here(tmp_path: Path) -> None:
    old = [record for record in TRAJECTORY if record.get("action") not in ("recall", "system")]
    events = read(tmp_path, old)
    assert [event.kind for event in events[1:6]] == [
        *("action.message", "observation.agent_state_changed", "action.recall", "observation.null", "model.reply")
    ]
    state = fold(State(), events)
    assert (state.inbox.message, state.lifecycle.agent_state) == (None, "finished")


def test_second_result_of_an_action_becomes_an_observation(tmp_path: Path) -> None:
    stopped = {"id": 20, "source": "agent", "observation": "error", "content": "Stopped.", "cause": 4, "extras": {}}
    events, findings = read_with_findings(tmp_path, [*TRAJECTORY[:5], stopped, *TRAJECTORY[5:]])
    assert findings == ["Left out: 1 links to actions that already have a result."]
    assert [event.cause for event in events if event.kind in ("observation.error", "observation.run")] == [7, None]


def test_two_replies_of_the_same_id_stay_two(tmp_path: Path) -> None:
    other = RESPONSE | {"choices": [{"message": {"content": "Again.", "tool_calls": [CALLS[0] | {"id": "c2"}]}}]}
    call = CALL | {"model_response": other, "tool_call_id": "c2"}
    again = [
        RUN | {"id": 8, "tool_call_metadata": call},
        TRAJECTORY[5] | {"id": 9, "cause": 8, "tool_call_metadata": call},
    ]
    events = read(tmp_path, [*TRAJECTORY[:6], *again])
    assert [reply.content for reply in replies(events)] == ["I look.", "Again."]
