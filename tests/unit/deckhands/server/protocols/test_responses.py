"""The events of a streamed response: OpenAI's own client accepts them, and the pieces add up to the final text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from broker.contract.actions import AgentFinishAction, ChangeAgentStateAction, CmdRunAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationCreated, Event, OperatorActed
from broker.contract.interventions import ConversationChanged
from broker.contract.kinds import EventSource
from broker.contract.observations import AgentStateChangedObservation
from broker.contract.recall import RecallAction, RecallType
from deckhands.server.problems import Problem
from deckhands.server.protocols.chat import ChatTurn
from deckhands.server.protocols.response_messages import ResponseRequest
from deckhands.server.protocols.responses import ResponseWriter, StoredResponse
from deckhands.server.streams import Item
from tests.unit.deckhands.sample_log import numbered

SUMMARY = {"state": "finished", "message": "Done.", "outputs": {}, "prompt_tokens": 3, "completion_tokens": 4}


@cache
def event_type() -> TypeAdapter[Any]:
    from openai.types.responses import ResponseStreamEvent

    return TypeAdapter(ResponseStreamEvent)


def piece(text: str, at: int = 0, call: str = "1.1") -> Item:
    return Item("delta", {"call": call, "kind": "text", "text": text, "at": at})


def reply(text: str, step: int = 1) -> Item:
    return Item("event", {"kind": "model.reply", "content": text, "tool_calls": [], "iteration": step})


def deed(command: str) -> Item:
    return Item("event", {"kind": "action.run", "source": "agent", "command": command, "thought": "So."})


def end(**changed: Any) -> Item:
    return Item("end", {"summary": {**SUMMARY, **changed}})


def streamed(items: Sequence[Item], *, is_live: bool = True) -> list[Any]:
    asked = ResponseRequest(model="CodeActAgent", input="do it", stream=True)
    written = ResponseWriter(ChatTurn("abc", "CodeActAgent"), asked, asked.as_chat(), is_live=is_live)
    text = (written.first() + b"".join(map(written.of, items))).decode()
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [event_type().validate_json(each, strict=True) for each in found]


def texts(events: Sequence[Any], kind: str, name: str) -> list[str]:
    return [getattr(event, name) for event in events if event.type == kind]


def check_brackets(events: Sequence[Any]) -> None:
    """Make sure that each item and part is opened once, before anything of it, and closed once, behind it."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    opened: dict[int, str] = {}
    parts: dict[tuple[int, int], str] = {}
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert event.output_index == len(opened)
            opened[event.output_index] = event.item.id
        elif kind == "output_item.done":
            assert opened.pop(event.output_index) == event.item.id
            assert (event.output_index, 0) not in parts
        elif hasattr(event, "item_id"):
            assert opened[event.output_index] == event.item_id
            place = event.output_index, event.summary_index if "reasoning" in kind else event.content_index
            if kind.endswith("part.added"):
                assert place not in parts
                parts[place] = ""
            elif kind.endswith("text.delta"):
                parts[place] += event.delta
            elif kind.endswith("text.done"):
                assert parts[place] == event.text
            else:
                assert parts.pop(place) == event.part.text
    assert not opened
    assert not parts


LOST = [piece("First I"), piece("around.", 13), deed("ls"), reply("First I look around."), deed("pwd")]
SEQUENCES = {
    "words first": [piece("First I"), piece(" look.", 7), reply("First I look."), deed("ls"), reply("Done.", 2)],
    "a deed first": [deed("ls"), piece("Do", call="1.1"), piece("ne.", 2), reply("Done.")],
    "a piece lost": [*LOST, piece("Do", call="2.1"), reply("Done.", 2)],
    "no words": [deed("ls")],
    "nothing at all": [],
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("is_live", [True, False])
def test_the_sequence_is_what_openais_client_takes(name: str, is_live: bool) -> None:
    from openai import omit
    from openai.lib.streaming.responses._responses import ResponseStreamState

    events = streamed([*SEQUENCES[name], end()], is_live=is_live)
    check_brackets(events)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    taken = [each for event in events for each in state.handle_event(event)]
    said = "".join(texts(taken, "response.output_text.delta", "delta"))
    assert said.endswith("Done.")
    assert texts(taken, "response.output_text.done", "text") == [said]
    last = taken[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == said
    assert said == "Done." or is_live
    items = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in events[-1].response.output] == items
    assert (last.response.usage.total_tokens, last.response.status) == (7, "completed")


def test_words_and_deeds_come_at_once_and_each_once() -> None:
    events = streamed([*SEQUENCES["a piece lost"], end()])
    said = texts(events, "response.output_text.delta", "delta")
    assert said == ["First I", " look around.", "\n\nDo", "ne."]
    assert texts(events, "response.reasoning_summary_text.delta", "delta") == ["run: ls\n", "run: pwd\n"]
    whole = streamed([*SEQUENCES["a piece lost"], end()], is_live=False)
    assert texts(whole, "response.output_text.delta", "delta") == ["Done."]
    assert texts(whole, "response.reasoning_summary_text.delta", "delta") == ["So.\nrun: ls\n", "So.\nrun: pwd\n"]


def test_an_answer_without_a_word_is_a_message_without_one() -> None:
    events = streamed([end(message="")])
    check_brackets(events)
    assert events[-1].response.output_text == ""
    assert [item.type for item in events[-1].response.output] == ["message"]


@pytest.mark.parametrize(
    "last",
    [
        end(state="error", error_code="model", last_error="It broke."),
        Item(
            "problem",
            {"code": "events_lost", "status": 409, "detail": "They are lost.", "remedy": "", "retryable": False},
        ),
    ],
)
def test_a_failure_keeps_what_was_said_as_incomplete(last: Item) -> None:
    events = streamed([piece("First I"), deed("ls"), last])
    failed = events[-1]
    assert failed.type == "response.failed"
    assert [(item.type, item.status) for item in failed.response.output] == [
        ("message", "incomplete"),
        ("reasoning", "incomplete"),
    ]
    assert failed.response.output_text == "First I"
    assert json.loads(failed.model_dump_json())["response"]["error"]["code"] == "server_error"


def test_a_stream_whose_reader_may_come_back_has_no_end() -> None:
    for code in ("server_stopping", "slow_reader"):
        problem = Item("problem", {"code": code, "status": 503, "detail": "-", "remedy": "", "retryable": True})
        assert [event.type for event in streamed([problem])] == ["response.created", "response.in_progress"]


def acted(action: str, **more: Any) -> OperatorActed:
    return OperatorActed(author="key", action=action, **more)


def state(agent_state: AgentState, **more: Any) -> Event:
    return AgentStateChangedObservation(agent_state=agent_state, **more)


def asked_for(agent_state: AgentState) -> Event:
    return ChangeAgentStateAction(agent_state=agent_state, source=EventSource.USER)


def said(text: str) -> list[Event]:
    message = MessageAction(content=text, source=EventSource.USER)
    return [message, RecallAction(recall_type=RecallType.KNOWLEDGE), state(AgentState.RUNNING)]


def finished(text: str) -> list[Event]:
    return [AgentFinishAction(final_thought=text), state(AgentState.FINISHED)]


CREATED = [ConversationCreated(conversation_id="abc", source=EventSource.USER), *said("do it")]
PAUSED = [*CREATED, acted("pause"), asked_for(AgentState.PAUSED), state(AgentState.PAUSED)]
RESUMED = [acted("resume"), asked_for(AgentState.RUNNING), state(AgentState.RUNNING), *finished("first")]
ASKING = [*CREATED, CmdRunAction(command="ls"), state(AgentState.AWAITING_USER_CONFIRMATION, action_id=5)]
CONFIRMED = [acted("confirm"), asked_for(AgentState.USER_CONFIRMED), state(AgentState.USER_CONFIRMED)]
CONFIRMED += [state(AgentState.RUNNING), *finished("first")]
MORE = [acted("message"), *said("more"), *finished("second")]


def stored(events: Sequence[Event], after: int = 0) -> StoredResponse:
    return StoredResponse("abc", after, numbered(*events))


def shown(response: StoredResponse) -> tuple[str, str]:
    """The status and the text of a response."""
    whole = response.whole()
    texts = [part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]]
    return whole["status"], "".join(texts)


@pytest.mark.parametrize(("waiting", "continued"), [(PAUSED, RESUMED), (ASKING, CONFIRMED)])
def test_waiting_response_is_not_over_and_gets_its_answer(waiting: list[Event], continued: list[Event]) -> None:
    assert (shown(stored(waiting))[0], stored(waiting).is_over) == ("in_progress", False)
    whole = [*waiting, *continued]
    assert (shown(stored(whole)), stored(whole).is_over) == (("completed", "first"), True)
    assert shown(stored([*whole, *MORE])) == ("completed", "first")
    assert shown(stored([*whole, *MORE], len(whole))) == ("completed", "second")


def test_paused_response_is_incomplete_behind_the_next_message() -> None:
    whole = [*PAUSED, *MORE]
    assert (shown(stored(whole)), stored(whole).is_over) == (("incomplete", ""), True)
    assert shown(stored(whole, len(PAUSED))) == ("completed", "second")


def test_pause_is_no_numbered_event_of_an_open_response() -> None:
    asked = ResponseRequest(model="CodeActAgent", input="do it", stream=True)
    turn = ChatTurn("abc", "CodeActAgent")
    for is_open, last in ((True, b": paused"), (False, b"event: response.incomplete")):
        written = ResponseWriter(turn, asked, asked.as_chat(), is_open=is_open)
        assert written.of(end(state="paused")).startswith(last)
    assert written.whole(end(state="paused").content["summary"])["status"] == "incomplete"


def test_events_before_its_message_do_not_hide_a_response() -> None:
    done = [*CREATED, *finished("first")]
    whole = [*done, ConversationChanged(title="Renamed"), acted("change"), *MORE]
    assert shown(stored(whole, len(done))) == ("completed", "second")
    assert shown(stored(whole)) == ("completed", "first")
    assert not stored(whole).is_only
    assert stored([*done, ConversationChanged(title="Renamed", source=EventSource.USER)]).is_only
    with pytest.raises(Problem, match="no such response"):
        stored(whole, len(done) + 3)
