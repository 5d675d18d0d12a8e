"""The events of an AG-UI run follow from the log: a client that comes back with an id gets the others, each once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction, ChangeAgentStateAction, CmdRunAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationCreated, Event, ModelReply, ModelToolCall, OperatorActed, TokenUsage
from broker.contract.kinds import ConfirmationStatus, EventSource
from broker.contract.observations import AgentStateChangedObservation, CmdOutputObservation
from broker.contract.recall import RecallAction, RecallType
from deckhands.server.protocols.ag_ui_events import Cursor, RunEvents, find_last_run, find_run, mark_run
from deckhands.server.streams import Item

FINISH = ModelToolCall(id="f", name="finish", arguments='{"message": "Done."}')


def numbered(events: Iterable[Event]) -> list[Event]:
    return [event.model_copy(update={"id": number}) for number, event in enumerate(events, 1)]


def state(agent_state: AgentState, **more: Any) -> Event:
    return AgentStateChangedObservation(agent_state=agent_state, **more)


def reply(step: int, text: str = "", *calls: ModelToolCall) -> Event:
    usage = TokenUsage(prompt_tokens=10, completion_tokens=2)
    return ModelReply(content=text, tool_calls=calls, iteration=step, model="m", usage=usage)


def sent(text: str, run_id: str = "") -> list[Event]:
    act = [OperatorActed(author="key", action="message", reason=mark_run(run_id))] if run_id else []
    message = MessageAction(content=text, source=EventSource.USER)
    return [*act, message, RecallAction(recall_type=RecallType.KNOWLEDGE), state(AgentState.RUNNING)]


LABELS = {"ag_ui_thread": "t", "ag_ui_run": "run-1"}
LOG = numbered(
    [
        ConversationCreated(conversation_id="abc", labels=LABELS, source=EventSource.USER),
        *sent("do it"),
        reply(1, "I look around."),
        CmdRunAction(command="ls"),
        CmdOutputObservation(content="a b", cause=6, command="ls"),
        reply(2, "", FINISH),
        AgentFinishAction(final_thought="Done."),
        state(AgentState.FINISHED),
        *sent("more", "run-2"),
        reply(3, "Which one?"),
        MessageAction(content="Which one?", source=EventSource.AGENT, wait_for_response=True),
        state(AgentState.AWAITING_USER_INPUT),
        *sent("the blue one"),
        reply(4, "I ask."),
        CmdRunAction(command="rm b", confirmation_state=ConfirmationStatus.AWAITING_CONFIRMATION),
        state(AgentState.AWAITING_USER_CONFIRMATION, action_id=22),
    ]
)


def items(events: Iterable[Event]) -> list[Item]:
    return [Item("event", {}, event.id, event=event) for event in events]


def piece(text: str, at: int = 0, call: str = "1.1") -> Item:
    return Item("delta", {"call": call, "kind": "text", "text": text, "at": at})


END = Item("end", {})


def read(run: RunEvents, given: Sequence[Item]) -> list[tuple[str, dict[str, Any]]]:
    text = b"".join(map(run.of, given)).decode()
    lines = [frame.split("\n") for frame in text.split("\n\n") if frame.startswith("id: ")]
    return [(first.removeprefix("id: "), json.loads(second.removeprefix("data: "))) for first, second in lines]


def run_of(name: str, cursor: str = "") -> RunEvents:
    start = find_run(LOG, name)
    assert start is not None
    return RunEvents("t", name, start, Cursor.parse(cursor) if cursor else None)


def kinds(found: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    return [event["type"] for _, event in found]


def said(found: Sequence[tuple[str, dict[str, Any]]], name: str) -> str:
    return "".join(e["delta"] for _, e in found if e["type"] == "TEXT_MESSAGE_CONTENT" and e["messageId"] == name)


@pytest.mark.parametrize("name", ["run-1", "run-2"])
def test_any_place_of_a_run_continues_with_the_rest(name: str) -> None:
    whole = read(run_of(name), [*items(LOG), END])
    assert (kinds(whole)[0], kinds(whole)[-1]) == ("RUN_STARTED", "RUN_FINISHED")
    names = [place for place, _ in whole]
    assert len(set(names)) == len(names)
    for number, place in enumerate(names):
        assert read(run_of(name, place), [*items(LOG), END]) == whole[number + 1 :]


def test_a_run_ends_where_the_next_one_starts() -> None:
    first = read(run_of("run-1"), [*items(LOG), END])
    assert first[-1][1]["result"] == "Done."
    assert "more" not in json.dumps(first)
    second = read(run_of("run-2"), [*items(LOG), END])
    assert (second[-1][1]["result"], second[-1][1]["outcome"]) == ("Which one?", {"type": "success"})
    assert [message["content"] for message in second[1][1]["messages"] if message["role"] == "user"] == [
        "do it",
        "more",
    ]
    assert second[-1][1]["usage"] == [{"model": "m", "inputTokens": 10, "outputTokens": 2, "totalTokens": 12}]


def test_messages_of_other_ways_start_runs_and_may_be_interrupted() -> None:
    found = find_last_run(LOG)
    assert found == ("event-18", 18)
    assert find_run(LOG, found[0]) == 18
    assert find_run(LOG, "event-20") is None
    named = [*LOG, *numbered([*LOG, *sent("mine", "event-18")])[len(LOG) :]]
    assert find_run(named, "event-18") == len(LOG) + 2
    run = RunEvents("t", *found)
    last = read(run, [*items(LOG), END])[-1][1]
    (interrupt,) = last["outcome"]["interrupts"]
    assert (interrupt["id"], interrupt["reason"], interrupt["toolCallId"]) == ("confirm-22", "tool_call", "call-22")
    assert interrupt["message"] == "Running command: rm b"


def test_live_text_continues_from_any_of_its_places() -> None:
    live = [piece("I lo"), piece("ok ar", 4), piece("ound.", 9)]
    given = [*items(LOG[:4]), *live, *items(LOG[4:]), END]
    whole = read(run_of("run-1"), given)
    assert said(whole, "step-1") == "I look around."
    assert kinds(whole).count("TEXT_MESSAGE_CONTENT") == 4
    for number, (place, _) in enumerate(whole):
        rest = read(run_of("run-1", place), [*items(LOG), END])
        both = [*whole[: number + 1], *rest]
        assert said(both, "step-1") == "I look around.", place
        without_pieces = [kind for kind in kinds(both) if kind != "TEXT_MESSAGE_CONTENT"]
        assert without_pieces == [kind for kind in kinds(whole) if kind != "TEXT_MESSAGE_CONTENT"], place


def test_another_text_of_a_repeated_call_is_corrected() -> None:
    live = [piece("I guess"), piece("I look", call="1.2")]
    found = read(run_of("run-1"), [*items(LOG[:4]), *live, *items(LOG[4:]), END])
    start = kinds(found).index("TEXT_MESSAGE_END")
    assert kinds(found)[start + 1] == "MESSAGES_SNAPSHOT"
    assert found[start + 1][1]["messages"][-1]["content"] == "I look around."
    assert said(found, "step-1") == "I guess"
    place = next(place for place, event in found if event["type"] == "TEXT_MESSAGE_CONTENT")
    rest = read(run_of("run-1", place), [*items(LOG), END])
    assert kinds(rest)[:2] == ["TEXT_MESSAGE_END", "MESSAGES_SNAPSHOT"]


def test_live_text_waits_for_results_of_the_step_before() -> None:
    ahead = [piece("Next", call="2.1")]
    found = read(run_of("run-1"), [*items(LOG[:6]), *ahead, *items(LOG[6:]), END])
    assert kinds(found).index("TOOL_CALL_RESULT") < [e.get("messageId") for _, e in found].index("step-2")


def test_a_cancelled_run_leaves_no_call_open() -> None:
    log = numbered([*LOG[:6], ChangeAgentStateAction(agent_state=AgentState.STOPPED), state(AgentState.STOPPED)])
    whole = read(run_of("run-1"), [*items(log), END])
    calls = [event["toolCallId"] for _, event in whole if event["type"] == "TOOL_CALL_RESULT"]
    assert (calls, whole[-1][1]["outcome"]) == (["call-6"], {"type": "cancelled"})
    for number, (place, _) in enumerate(whole):
        assert read(run_of("run-1", place), [*items(log), END]) == whole[number + 1 :]


def test_a_server_that_stops_does_not_end_the_run() -> None:
    stopping = Item("problem", {"code": "server_stopping", "detail": "", "retryable": True})
    run = run_of("run-1")
    assert kinds(read(run, [*items(LOG[:5]), stopping]))[-1] != "RUN_ERROR"
    assert run.is_closed


def test_a_failed_conversation_is_an_error_of_the_run() -> None:
    log = numbered([*LOG[:4], state(AgentState.ERROR, reason="It broke.", code="agent_error")])
    last = read(run_of("run-1"), [*items(log), END])[-1][1]
    assert (last["type"], last["code"]) == ("RUN_ERROR", "agent_error")
