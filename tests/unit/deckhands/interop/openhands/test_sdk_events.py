"""Logs as events of OpenHands' SDK: judged by the SDK itself, and by what they must keep."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from broker.contract import (
    AgentSpec,
    AgentState,
    AgentStateChangedObservation,
    CmdOutputObservation,
    CmdRunAction,
    CondensationAction,
    ConfirmationStatus,
    ConversationCreated,
    ErrorObservation,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    ModelToolCall,
    RolledBackObservation,
    SystemMessageAction,
    ToolCallMetadata,
)
from deckhands.interop import (
    SdkConversation,
    SdkPlace,
    SdkTranslation,
    to_sdk_agent,
    to_sdk_conversation_id,
    to_sdk_events,
)
from tests.exploring import examples
from tests.replay.mixed_history import MixedHistory
from tests.replay.test_replay import GOLDEN, recorded
from tests.sdk_peer import IS_INSTALLED, ask_sdk

SEEDS = examples(30)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
needs_sdk = pytest.mark.skipif(not IS_INSTALLED, reason="OpenHands' SDK is not installed: run benchmarks/peer/setup.sh")


def mixed(seed: int) -> list[Event]:
    history = MixedHistory(seed)
    history.run()
    for _ in range(40):
        history.happen()
    history.come_to_rest()
    return history.events


def all_histories() -> dict[str, list[Event]]:
    golden = {path.stem: recorded(path) for path in GOLDEN}
    return golden | {f"mixed-{seed}": mixed(seed) for seed in range(SEEDS)}


def numbered(*events: Event) -> list[Event]:
    return [event.model_copy(update={"id": n, "timestamp": NOW}) for n, event in enumerate(events, 1)]


def called(reply_id: int, call_id: str, total: int = 1, name: str = "execute_bash") -> ToolCallMetadata:
    return ToolCallMetadata(function_name=name, tool_call_id=call_id, reply_id=reply_id, total_calls_in_response=total)


def reply(*call_ids: str, response_id: str = "r1", **fields: Any) -> ModelReply:
    calls = tuple(ModelToolCall(id=one, name="execute_bash", arguments='{"command": "ls"}') for one in call_ids)
    return ModelReply(tool_calls=calls, response_id=response_id, model="m", **fields)


START = (
    ConversationCreated(conversation_id="c1"),
    MessageAction(content="List the files.", source=EventSource.USER),
    SystemMessageAction(content="You are an agent.", tools=("execute_bash", "glob")),
)


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    return [fields["kind"] for fields in events]


@needs_sdk
def test_the_sdk_accepts_every_event() -> None:
    histories = all_histories()
    written = {name: to_sdk_events(name, events)[0] for name, events in histories.items()}
    judged = ask_sdk("judge_events", conversations=written)
    assert judged["problems"] == []
    assert len(judged["views"]) == len(histories)
    for name in (path.stem for path in GOLDEN):
        shown = [fields["id"] for fields in written[name] if fields["kind"] != "PauseEvent"]
        assert judged["views"][name] == shown, f"the SDK leaves out events of {name}"
    for name, messages in judged["messages"].items():
        waiting: list[str] = []
        for message in messages:
            if message["role"] == "tool":
                waiting.remove(message["answers"])
                continue
            assert waiting == [], f"{name}: a call without a result before {message}"
            waiting = list(message["calls"])


@needs_sdk
def test_the_sdk_reads_states_and_costs() -> None:
    states, infos, expected = {}, {}, {}
    for path in GOLDEN:
        conversation = SdkConversation(path.stem)
        for event in recorded(path):
            conversation.add(event)
        states[path.stem] = conversation.to_state(SdkPlace("/work"))
        infos[path.stem] = conversation.to_info(SdkPlace("/work"))
        replies = [event for event in recorded(path) if isinstance(event, ModelReply)]
        expected[path.stem] = sum(one.usage.prompt_tokens for one in replies)
    found = ask_sdk("judge_states", states=states, infos=infos)
    assert {one["status"] for one in found.values()} == {"finished"}
    assert all(one["info_cost"] == pytest.approx(one["cost"]) for one in found.values())
    assert all(found[name]["prompt_tokens"] >= tokens for name, tokens in expected.items())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_events_are_the_same_wherever_reading_resumes(seed: int) -> None:
    events = mixed(seed)
    whole, _ = to_sdk_events("c1", events)
    assert len({fields["id"] for fields in whole}) == len(whole)
    for stop in range(0, len(events), 7):
        first, second = SdkTranslation("c1"), SdkTranslation("c1")
        before = [fields for event in events[:stop] for fields in first.add(event)]
        for event in events[:stop]:
            second.add(event)
        after = [fields for event in events[stop:] for fields in second.add(event)] + second.end()
        assert before + after == whole


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_parent_was_written_before(seed: int) -> None:
    seen: set[str | None] = {None}
    for fields in to_sdk_events("c1", mixed(seed))[0]:
        assert fields["parent_id"] in seen
        seen.add(fields["id"])


def test_ids_differ_between_conversations() -> None:
    events = numbered(*START)
    assert not {f["id"] for f in to_sdk_events("a", events)[0]} & {f["id"] for f in to_sdk_events("b", events)[0]}


def test_calls_of_one_reply_stand_together() -> None:
    events = numbered(
        *START,
        reply("a", "b", "c", content="Both."),
        CmdRunAction(command="ls", tool_call_metadata=called(4, "a", 3)),
        CmdOutputObservation(command="ls", content="x", cause=5, tool_call_metadata=called(4, "a", 3)),
        ErrorObservation(content="Bad arguments.", tool_call_metadata=called(4, "b", 3)),
        MessageAction(content="And hidden ones.", source=EventSource.USER),
        CmdRunAction(command="ls", tool_call_metadata=called(4, "c", 3)),
        CmdOutputObservation(command="ls", content="y", cause=9, tool_call_metadata=called(4, "c", 3)),
    )
    written, _ = to_sdk_events("c1", events)
    assert kinds_of(written) == [
        *("SystemPromptEvent", "MessageEvent", "ActionEvent", "ActionEvent", "ActionEvent"),
        *("ObservationEvent", "AgentErrorEvent", "ObservationEvent", "MessageEvent"),
    ]
    actions = written[2:5]
    assert [one["tool_call_id"] for one in actions] == ["a", "b", "c"]
    assert [bool(one["thought"]) for one in actions] == [True, False, False]
    assert {one["llm_response_id"] for one in actions} == {"r1"}
    assert actions[1]["action"] is None
    assert [one["action"] and one["action"]["kind"] for one in actions][::2] == ["TerminalAction"] * 2
    assert written[5]["action_id"] == actions[0]["id"]
    assert written[8]["llm_message"]["content"][0]["text"] == "And hidden ones."


def test_replies_with_one_id_are_told_apart() -> None:
    events = numbered(*START, reply("a"), reply("b"))
    conversation = SdkTranslation("c1")
    for event in events:
        conversation.add(event)
    assert conversation.find_response_id(4) == "r1"
    assert conversation.find_response_id(5) == "r1-5"


def test_a_confirmed_action_is_written_once() -> None:
    waits = {"confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION}
    action = CmdRunAction(command="ls", tool_call_metadata=called(4, "a"))
    events = numbered(
        *START,
        reply("a"),
        action.model_copy(update=waits),
        AgentStateChangedObservation(agent_state=AgentState.AWAITING_USER_CONFIRMATION),
        action.model_copy(update={"replaces": 5}),
        CmdOutputObservation(command="ls", content="x", cause=7, tool_call_metadata=called(4, "a")),
    )
    conversation = SdkConversation("c1")
    written = [fields for event in events[:6] for fields in conversation.add(event)]
    assert conversation.execution_status == "waiting_for_confirmation"
    assert conversation.translation.find_open_actions() == [written[-1]["id"]]
    written += [fields for event in events[6:] for fields in conversation.add(event)]
    assert kinds_of(written)[2:] == ["ActionEvent", "ObservationEvent"]
    assert written[3]["action_id"] == written[2]["id"]


def test_a_rollback_continues_on_another_branch() -> None:
    events = numbered(
        *START,
        AgentStateChangedObservation(agent_state=AgentState.FINISHED),
        MessageAction(content="Wrong.", source=EventSource.USER),
        reply("a"),
        CmdRunAction(command="ls", tool_call_metadata=called(6, "a")),
        MessageAction(content="Rather this.", source=EventSource.USER),
        RolledBackObservation(start_id=5, kept=(8,)),
        reply(response_id="r2", content="Done."),
        MessageAction(content="Done.", source=EventSource.AGENT),
    )
    written, _ = to_sdk_events("c1", events)
    by_id = {fields["id"]: fields for fields in written}
    branch, leaf = [], written[-1]["id"]
    while leaf is not None:
        branch.append(by_id[leaf])
        leaf = by_id[leaf]["parent_id"]
    texts = [one["llm_message"]["content"][0]["text"] for one in reversed(branch) if one["kind"] == "MessageEvent"]
    assert texts == ["List the files.", "Rather this.", "Done."]
    assert "Wrong." in {one["llm_message"]["content"][0]["text"] for one in written if one["kind"] == "MessageEvent"}


def test_a_second_condensation_forgets_the_first_summary() -> None:
    events = numbered(
        *START,
        MessageAction(content="a", source=EventSource.AGENT),
        MessageAction(content="b", source=EventSource.AGENT),
        CondensationAction(forgotten_event_ids=(4,), summary="one", summary_offset=2),
        CondensationAction(forgotten_event_ids=(5,), summary="two", summary_offset=2),
    )
    first, second = to_sdk_events("c1", events)[0][-2:]
    assert first["summary_offset"] == 2
    assert len(first["forgotten_event_ids"]) == 1
    assert f"{first['id']}-summary" in second["forgotten_event_ids"]


def test_states_have_the_sdk_names() -> None:
    conversation = SdkConversation("c1")
    for event in numbered(*START):
        conversation.add(event)
    assert conversation.execution_status == "idle"
    for state, code, expected in (
        (AgentState.RUNNING, "", "running"),
        (AgentState.AWAITING_USER_INPUT, "", "finished"),
        (AgentState.ERROR, "", "error"),
        (AgentState.ERROR, "stuck_in_loop", "stuck"),
        (AgentState.PAUSED, "", "paused"),
    ):
        conversation.add(AgentStateChangedObservation(id=4, agent_state=state, code=code, timestamp=NOW))
        assert conversation.execution_status == expected


def test_ids_of_conversations_become_uuids() -> None:
    known = "0a5e4c6e-6a2a-4d44-8f8e-2f0c3f1f4a55"
    assert to_sdk_conversation_id(known.replace("-", "")) == known
    assert to_sdk_conversation_id("c1") == to_sdk_conversation_id("c1") != to_sdk_conversation_id("c2")


def test_agent_of_a_program_is_shown_with_its_command() -> None:
    for command, words in (("claude --acp 'a b'", ["claude", "--acp", "a b"]), ("a && b", ["bash", "-c", "a && b"])):
        found = to_sdk_agent(AgentSpec(name=f"acp:{command}"))
        assert (found["kind"], found["acp_command"]) == ("ACPAgent", words)


def test_client_imports_modules_of_enabled_tools_only() -> None:
    conversation = SdkConversation("c-1")
    agent = AgentSpec(enable_cmd=True, enable_editor=False, enable_plan_mode=False, enable_delegation=True)
    conversation.add(ConversationCreated(id=1, conversation_id="c-1", agent=agent))
    assert conversation.to_info(SdkPlace())["tool_module_qualnames"].keys() == {"terminal", "task"}
