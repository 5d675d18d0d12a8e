"""Conversation directories of OpenHands' SDK: a real one, and its variations."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import MessageAction
from broker.contract.events import ConversationCreated, Event, ModelReply
from broker.contract.observations import CmdOutputObservation, OutcomeUnknownObservation
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from broker.runtime.errors import UsageError
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from controller_worker.loop.replay import replay
from controller_worker.memory.conversation_memory import ConversationMemory
from controller_worker.memory.view import ViewFold
from deckhands.client.reading.metrics import compute_metrics
from deckhands.client.reading.summary import summarize
from deckhands.interop.openhands.sdk_conversation import read_sdk_directory
from tests.integration.command_line import deckhands, environment
from tests.unit.deckhands.interop.openhands.same_conversation import fold_of

REAL = Path(__file__).with_name("sdk_conversation")
"""Written by openhands-sdk 1.58.0 with its own test model and tools; long texts and paths of the machine are replaced."""

Change = Callable[[dict[str, Any], list[dict[str, Any]]], None]


def changed(folder: Path, change: Change, *, upto: int | None = None) -> Path:
    """Return a copy with another state and other events, as many of them as wanted."""
    state = json.loads((REAL / "base_state.json").read_text())
    events = [json.loads(file.read_text()) for file in sorted((REAL / "events").iterdir())[:upto]]
    state["leaf_event_id"] = events[-1]["id"]
    change(state, events)
    copy = folder / "copy"
    (copy / "events").mkdir(parents=True)
    (copy / "base_state.json").write_text(json.dumps(state))
    for number, event in enumerate(events):
        (copy / "events" / f"event-{number:05}-{event['id']}.json").write_text(json.dumps(event))
    return copy


def read(path: Path, *, faults: int = 0) -> tuple[list[Event], dict[str, int]]:
    """Read a directory; check that the log is sound, and that every call that is shown to a model has a result."""
    events, findings = read_sdk_directory(path, "c1")
    assert findings.fault_count == faults, findings.faults
    assert find_violations(events, conversation_id="c1", is_strict=True, is_over=False) == []
    assert replay(events).divergence is None
    view, memory = ViewFold(), ConversationMemory()
    for event in events:
        view.add(event)
    for event in view.list_events(view.view().events):
        memory.add(event)
    waiting: list[str] = []
    for message in memory.messages():
        if message.role == "tool":
            waiting.remove(message.tool_call_id)
        else:
            assert waiting == []
            waiting = [call.id for call in message.tool_calls]
    return events, dict(+findings.left_out)


def test_a_real_conversation_carries_over() -> None:
    events, left_out = read(REAL)
    assert left_out == {}
    assert [event.kind.replace("observation", "obs") for event in events] == [
        *("conversation.created", "action.system", "action.message", "action.recall", "obs.agent_state_changed"),
        *("obs.null", "model.reply", "action.run", "action.think", "obs.run", "obs.think"),
        *("model.reply", "action.edit", "obs.edit", "model.reply", "action.edit", "obs.edit"),
        *("model.reply", "action.task_tracking", "obs.task_tracking", "model.reply", "obs.error"),
        *("model.reply", "action.read", "action.run", "obs.read", "obs.run"),
        *("model.reply", "action.message", "obs.agent_state_changed"),
        *("action.message", "action.recall", "obs.agent_state_changed", "obs.null"),
        *("model.reply", "action.finish", "obs.agent_state_changed"),
    ]
    created, output = events[0], events[9]
    assert isinstance(created, ConversationCreated)
    assert (created.agent.llm.model, created.workspace.path) == ("test-model", "/srv/project")
    assert (created.title, created.limits.max_iterations) == ("Fix the till", 500)
    assert isinstance(output, CmdOutputObservation)
    assert (output.cause, output.content, output.exit_code, output.metadata.working_dir) == (
        8,
        "hello",
        0,
        "/srv/project",
    )
    state = fold(State(), events)
    assert (state.lifecycle.agent_state, state.usage.iteration, state.tools.pending, state.inbox.message) == (
        "finished",
        8,
        (),
        None,
    )
    assert [task.title for task in state.tasks.items] == ["Fix"]
    summary = summarize(events)
    assert (summary.message, summary.iterations, summary.exit_code) == ("Done.", 8, 0)


def test_costs_and_tokens_go_to_their_replies(tmp_path: Path) -> None:
    def with_costs(state: dict[str, Any], _: list[dict[str, Any]]) -> None:
        ids = ["test-response-1", "test-response-2"]
        state["stats"]["usage_to_metrics"]["agent"] = {
            "model_name": "acme/large",
            "costs": [{"model": "acme/large", "cost": cost, "timestamp": 1.0} for cost in (0.25, 0.5)],
            "response_latencies": [{"model": "acme/large", "latency": 2.0, "response_id": ids[0]}],
            "token_usages": [{"model": "acme/large", "prompt_tokens": 100, "response_id": name} for name in ids],
        }

    events, _ = read(changed(tmp_path, with_costs))
    replies = [event for event in events if isinstance(event, ModelReply)]
    assert [reply.cost_usd for reply in replies] == [0.25, 0.5, *[None] * 6]
    assert (replies[0].usage.prompt_tokens, replies[0].latency_seconds, replies[0].model) == (100, 2.0, "acme/large")
    assert summarize(events).cost_usd == 0.75


def test_an_action_without_a_result_is_not_run_again(tmp_path: Path) -> None:
    def while_running(state: dict[str, Any], _: list[dict[str, Any]]) -> None:
        state["execution_status"] = "running"

    events, _ = read(changed(tmp_path, while_running, upto=3))
    assert isinstance(events[-1], OutcomeUnknownObservation)
    assert (events[-1].cause, fold(State(), events).tools.pending) == (8, ())


def test_an_action_that_waits_for_a_confirmation_still_does(tmp_path: Path) -> None:
    def waiting(state: dict[str, Any], _: list[dict[str, Any]]) -> None:
        state |= {"execution_status": "waiting_for_confirmation", "confirmation_policy": {"kind": "AlwaysConfirm"}}

    events, _ = read(changed(tmp_path, waiting, upto=3))
    stands = fold_status(events)
    assert (stands.state, stands.confirmation_id, stands.is_settled) == ("awaiting_user_confirmation", 8, True)
    state = fold(State(), events)
    assert [(pending.id, pending.is_awaiting) for pending in state.tools.pending] == [(8, True)]
    assert state.setup.agent.confirmation.mode == "always"


def test_only_the_branch_that_it_stands_on_is_taken(tmp_path: Path) -> None:
    def back(state: dict[str, Any], events: list[dict[str, Any]]) -> None:
        state |= {"leaf_event_id": events[5]["id"], "execution_status": "paused"}

    events, left_out = read(changed(tmp_path, back))
    assert left_out == {"events of other branches": 16}
    assert [event.kind for event in events[-2:]] == ["observation.think", "observation.agent_state_changed"]
    assert fold(State(), events).lifecycle.agent_state == "paused"


def test_events_without_an_equivalent_are_counted_by_name(tmp_path: Path) -> None:
    def more(state: dict[str, Any], events: list[dict[str, Any]]) -> None:
        state["secret_registry"]["secret_sources"] = {"TOKEN": {}}
        events[4]["kind"] = "TokenEvent"
        events[2]["action"]["reset"] = True
        state["leaf_event_id"] = None

    events, left_out = read(changed(tmp_path, more))
    assert left_out == {
        "events of the kind TokenEvent": 1,
        "resets of the terminal": 1,
        "secrets (set them again with `deckhands secret`)": 1,
    }
    assert [event.cause for event in events if isinstance(event, OutcomeUnknownObservation)] == [8]


def test_other_tools_condensations_skills_and_rejections(tmp_path: Path) -> None:
    def others(_: dict[str, Any], events: list[dict[str, Any]]) -> None:
        events[1]["extended_content"] = [{"type": "text", "text": "Use tabs."}]
        events[1]["activated_skills"] = ["style"]
        events[2] |= {"tool_name": "grep", "action": {"kind": "GrepAction", "pattern": "x"}}
        events[2]["tool_call"] |= {"name": "grep", "arguments": '{"pattern": "x"}'}
        events[4] |= {"tool_name": "grep", "observation": {"kind": "GrepObservation", "content": []}}
        events[7] |= {"kind": "UserRejectObservation", "rejection_reason": "Not there"}
        events[8] |= {
            "kind": "Condensation",
            "forgotten_event_ids": [events[3]["id"], events[2]["id"]],
            "summary": "It looked around.",
            "summary_offset": 2,
            "llm_response_id": "summary-1",
        }
        del events[9]

    events, _ = read(changed(tmp_path, others, upto=10))
    by_kind = {event.kind: event for event in events}
    assert by_kind["observation.recall"].microagent_knowledge[0].content == "Use tabs."  # type: ignore[attr-defined]
    assert by_kind["action.call_tool"].arguments == {"pattern": "x"}  # type: ignore[attr-defined]
    assert by_kind["observation.user_rejected"].content == "Not there"  # type: ignore[attr-defined]
    condensation = by_kind["action.condensation"]
    assert condensation.forgotten == (8, 9)  # type: ignore[attr-defined]
    assert by_kind["observation.recall"].cause == 4


def test_images_of_messages_carry_over_whoever_sent_them(tmp_path: Path) -> None:
    def shown(_: dict[str, Any], events: list[dict[str, Any]]) -> None:
        for number in (1, 18):
            image = {"type": "image", "image_urls": [f"https://a/{number}.png"]}
            events[number]["llm_message"]["content"].append(image)

    events, _ = read(changed(tmp_path, shown))
    messages = [event for event in events if isinstance(event, MessageAction)]
    assert [message.image_urls for message in messages] == [("https://a/1.png",), ("https://a/18.png",), None]


def test_directory_without_a_state_is_refused_with_the_reason(tmp_path: Path) -> None:
    for name, damage, told in (
        ("text", lambda copy: (copy / "base_state.json").write_text("{"), "base_state.json cannot be read"),
        ("list", lambda copy: (copy / "base_state.json").write_text("[]"), "holds no JSON object"),
        ("deep", lambda copy: (copy / "base_state.json").write_text("[" * 100_000), "nested too deeply"),
        ("none", lambda copy: (copy / "base_state.json").unlink(), "is not a conversation directory"),
    ):
        copy = tmp_path / name
        shutil.copytree(REAL, copy)
        damage(copy)
        with pytest.raises(UsageError, match=told):
            read_sdk_directory(copy, "c1")


def test_an_event_that_is_damaged_or_missing_costs_that_event(tmp_path: Path) -> None:
    """Event 4 is the output of the first command; the branch leads through it."""

    def replaced(text: str) -> Callable[[Path], object]:
        return lambda copy: next((copy / "events").glob("event-00004-*")).write_text(text)

    fields = json.loads(next((REAL / "events").glob("event-00004-*")).read_text())
    for name, damage, reason in (
        ("gap", lambda copy: next((copy / "events").glob("event-00004-*")).unlink(), "Event 4 .*the file is not there"),
        ("text", replaced("{"), "Event 4 cannot be read"),
        ("deep", replaced('{"a":' * 100_000), "Event 4 .*nested too deeply"),
        ("list", replaced("[]"), "Event 4 .*holds no JSON object"),
        ("id", replaced(json.dumps(fields | {"id": 7})), "Event 4 .*no id"),
        ("twice", replaced(json.dumps(fields | {"id": fields["parent_id"]})), "Event 4 .*that of another event"),
        ("empty", replaced(json.dumps(fields | {"observation": None})), r"Event 4 \(ObservationEvent\)"),
        ("link", lambda copy: _dangling(next((copy / "events").glob("event-00004-*"))), "Event 4 .*cannot be read"),
        ("pipe", lambda copy: _pipe(next((copy / "events").glob("event-00004-*"))), "Event 4 .*is not a file"),
    ):
        copy = tmp_path / name
        shutil.copytree(REAL, copy)
        damage(copy)
        _, findings = read_sdk_directory(copy, "c1")
        assert [bool(re.search(reason, fault)) for fault in findings.faults] == [True], (name, findings.faults)
        events, left_out = read(copy, faults=1)
        assert left_out == {}
        results = [event for event in events if event.cause == 8]
        assert [event.kind for event in results] == ["observation.outcome_unknown"], name
        assert len(events) in (36, 37)


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def test_incomprehensible_action_is_omitted_with_its_result(tmp_path: Path) -> None:
    def without_command(_: dict[str, Any], events: list[dict[str, Any]]) -> None:
        del events[2]["action"]["command"]

    path = changed(tmp_path, without_command)
    _, findings = read_sdk_directory(path, "c1")
    assert findings.faults == [
        "Event 2 (ActionEvent) cannot be read and is left out: command: Field required",
        "Event 4 (ObservationEvent) cannot be read and is left out: the action that it answers is not here",
    ]
    events, _ = read(path, faults=2)
    assert [event.kind for event in events[6:9]] == ["model.reply", "action.think", "observation.think"]


def test_condensed_events_are_forgotten_with_their_successors(tmp_path: Path) -> None:
    """A message there is a message, its recall and the recalled text here; a summary keeps its place behind it."""

    def condensed(_: dict[str, Any], events: list[dict[str, Any]]) -> None:
        events[1] |= {"extended_content": [{"type": "text", "text": "Use tabs."}], "activated_skills": ["style"]}
        ids = [event["id"] for event in events]
        events[8] |= {"kind": "Condensation", "forgotten_event_ids": [*ids[2:6], "gone"], "summary": "Looked."}
        events[8] |= {"summary_offset": 2}
        events[9] |= {"kind": "Condensation", "forgotten_event_ids": [ids[1]], "summary": "Began.", "summary_offset": 1}

    path = changed(tmp_path, condensed, upto=10)
    events, left_out = read(path)
    assert left_out == {"ids of events that a condensation forgets and that are not here": 1}
    first, second = (event.id for event in events if event.kind == "action.condensation")
    view = [event.kind for event in fold_of(events[:first]).view().events]
    assert view[:5] == ["action.system", *_MESSAGE, "observation.condense"]
    view = [event.kind for event in fold_of(events[:second]).view().events]
    assert view == ["action.system", "observation.condense", "action.edit", "observation.edit"]


_MESSAGE = ("action.message", "action.recall", "observation.recall")


def test_costs_that_no_reply_has_are_kept(tmp_path: Path) -> None:
    def with_costs(state: dict[str, Any], _: list[dict[str, Any]]) -> None:
        usage = {"prompt_tokens": 700, "completion_tokens": 9, "cache_read_tokens": 600, "cache_write_tokens": 5}
        state["stats"]["usage_to_metrics"] = {
            "agent": {"accumulated_cost": 1.5, "accumulated_token_usage": usage, "costs": [{"cost": 0.5}]},
            "title": {"accumulated_cost": 0.25, "costs": None, "token_usages": [None, {"response_id": 7}]},
            "odd": None,
        }

    events, _ = read(changed(tmp_path, with_costs))
    found = compute_metrics(events)
    assert found.accumulated_cost == 1.75
    assert (found.accumulated_token_usage.prompt_tokens, found.accumulated_token_usage.cache_read_tokens) == (700, 600)


def test_state_of_any_shape_gets_defaults_and_is_named(tmp_path: Path) -> None:
    odd: list[Any] = [7, "x", [], [1], {"a": []}, True, 1e300]
    names = ("agent", "workspace", "max_iterations", "confirmation_policy", "stats", "secret_registry", "tags")
    names += ("execution_status", "leaf_event_id", "stuck_detection", "hook_config")
    for number, (name, value) in enumerate((name, value) for name in names for value in odd):

        def change(state: dict[str, Any], _: list[dict[str, Any]], name: str = name, value: Any = value) -> None:
            state[name] = value

        events, findings = read_sdk_directory(changed(tmp_path / str(number), change), "c1")
        assert len(events) > 30, (name, value)
        assert findings.fault_count <= 1


def test_the_command_line_imports_a_directory(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    done = deckhands("import", REAL, "-o", events, env=environment(tmp_path))
    assert (done.code, done.err.strip()) == (0, f"{events} has 37 events.")
    assert len(events.read_text().splitlines()) == 37
