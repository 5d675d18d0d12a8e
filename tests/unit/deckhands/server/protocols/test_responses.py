"""The events of a streamed response: OpenAI's own client accepts them, and the pieces add up to the final text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from deckhands.server.protocols.chat import ChatTurn
from deckhands.server.protocols.response_messages import ResponseRequest
from deckhands.server.protocols.responses import ResponseWriter
from deckhands.server.streams import Item

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
            {"code": "server_stopping", "status": 503, "detail": "It stops.", "remedy": "", "retryable": True},
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
