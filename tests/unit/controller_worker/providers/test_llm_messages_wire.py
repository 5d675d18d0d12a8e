"""Anthropic's wire form, byte for byte where it matters, and the parsing of replies."""

import gc
import json
from typing import Any

import pytest

from broker.contract.tool_specs import ToolSpec
from controller_worker.providers.errors import ContentPolicyError, MalformedReplyError, ModelError, NoResponseError
from controller_worker.providers.llm import CallUsage, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart, ToolCall
from controller_worker.providers.strict_schemas import Strict
from controller_worker.providers.wires.chat_wire import ChatWire
from controller_worker.providers.wires.messages_wire import MessagesWire, read_message
from controller_worker.providers.wires.raw_client import parse_body
from controller_worker.providers.wires.reply import ParsedReply

BASH = ToolSpec("execute_bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
MARK = {"type": "ephemeral"}


def text(role: Any, *texts: str, **fields: Any) -> Message:
    return Message(role, tuple(TextPart(each) for each in texts), **fields)


def result(call_id: str, content: str, **fields: Any) -> Message:
    return text("tool", content, tool_call_id=call_id, name="execute_bash", **fields)


def calls(*ids: str, said: str = "") -> Message:
    return text(
        "assistant", said, tool_calls=tuple(ToolCall(each, "execute_bash", '{"command": "ls"}') for each in ids)
    )


def request(*messages: Message, tools: tuple[ToolSpec, ...] = ()) -> ModelRequest:
    return ModelRequest(messages, tools, "c1", 0, "/w")


def written(*messages: Message, caching: bool = False, tools: tuple[ToolSpec, ...] = ()) -> dict[str, Any]:
    body = MessagesWire(caching_prompt=caching).write_body(
        {"model": "m", "max_tokens": 9}, request(*messages, tools=tools)
    )
    parsed: dict[str, Any] = json.loads(body)
    return parsed


def test_the_smallest_request_byte_for_byte() -> None:
    values = {"model": "m", "max_tokens": 9}
    body = MessagesWire(caching_prompt=False).write_body(values, request(text("user", "Grüß \ud800Gott")))
    assert body.decode() == (
        '{"model":"m","max_tokens":9,"messages":[{"role":"user","content":[{"type":"text","text":"Grüß ?Gott"}]}]}'
    )


def test_a_whole_step_with_marks() -> None:
    assert written(
        text("system", "Be good."),
        text("user", "List the files."),
        Message(
            "assistant",
            (TextPart("I look."),),
            (ToolCall("t1", "execute_bash", '{"command": "ls"}'), ToolCall("t2", "execute_bash", "{}")),
            thinking_blocks=({"type": "thinking", "thinking": "hm", "signature": "s"},),
        ),
        result("t1", "a.txt"),
        result("t2", ""),
        caching=True,
        tools=(BASH,),
    ) == {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be good.", "cache_control": MARK}],
        "tools": [{"name": "execute_bash", "description": "Run a command.", "input_schema": BASH.parameters}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": MARK}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "execute_bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "t2", "name": "execute_bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.txt"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "cache_control": MARK},
                ],
            },
        ],
    }


def test_parameter_whose_name_claude_refuses_is_in_the_description() -> None:
    """Anthropic answers a whole request with 400 if one parameter of one MCP tool is called `$filter`."""
    names = {"a.b-c": {"type": "string"}, "$filter": {"type": "string"}, "x" * 65: {"type": "integer"}}
    schema = {"type": "object", "properties": names, "required": ["a.b-c", "$filter"], "additionalProperties": False}
    [tool] = written(text("user", "go"), tools=(ToolSpec("list", "List.", schema),))["tools"]
    assert tool["input_schema"] == {
        "type": "object",
        "properties": {"a.b-c": {"type": "string"}},
        "required": ["a.b-c"],
    }
    further = json.dumps({"$filter": {"type": "string"}, "x" * 65: {"type": "integer"}})
    assert tool["description"] == f"List.\n\nFurther arguments, with their JSON Schemas: {further}"


def test_tool_with_a_refused_parameter_name_is_not_strict() -> None:
    names = {"$filter": {"type": "string"}, "top": {"type": "integer"}}
    odd = ToolSpec("list", "List.", {"type": "object", "properties": names, "additionalProperties": False})
    wire = MessagesWire(caching_prompt=False)
    asked = request(text("user", "go"), tools=(odd, BASH))
    listed, bash = json.loads(wire.write_body({"model": "m"}, asked, Strict(tools=True)))["tools"]
    assert "strict" not in listed
    assert listed["input_schema"] == {"type": "object", "properties": {"top": {"type": "integer"}}}
    assert bash["strict"] is True


def test_neighbours_become_one_and_empty_messages_vanish() -> None:
    said = [text("user", "one"), text("user", " \n"), text("user", "two"), text("assistant", ""), text("user", "three")]
    blocks = [{"type": "text", "text": each} for each in ("one", "two", "three")]
    assert written(*said)["messages"] == [{"role": "user", "content": blocks}]


THOUGHTS = ({"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking", "data": "x"})


@pytest.mark.parametrize(
    ("message", "blocks"),
    [
        (  # an unsigned thought is not sent
            text("assistant", "yes", thinking_blocks=THOUGHTS),
            [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "yes"}],
        ),
        (
            Message("user", (TextPart("look"), ImagePart("https://example.org/a.png"))),
            [
                {"type": "text", "text": "look"},
                {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
            ],
        ),
    ],
    ids=["thoughts", "images"],
)
def test_blocks_of_a_message(message: Message, blocks: list[dict[str, Any]]) -> None:
    before = [text("user", "hi")] if message.role == "assistant" else []
    assert written(*before, message)["messages"][-1]["content"] == blocks


def test_a_request_has_a_message() -> None:
    with pytest.raises(ValueError, match=r"The messages list is empty\. At least one message is required\."):
        request()


@pytest.mark.parametrize(("kind", "sent"), [("jpg", "jpeg"), ("PNG", "png"), ("webp", "webp"), ("svg+xml", None)])
def test_image_of_an_unsupported_type_leaves_a_note(kind: str, sent: str | None) -> None:
    (message,) = written(Message("user", (ImagePart(f"data:image/{kind};base64,AAAA"),)))["messages"]
    (block,) = message["content"]
    if sent is None:
        assert block == {"type": "text", "text": "[An image of the type image/svg+xml was left out here.]"}
    else:
        assert block["source"] == {"type": "base64", "media_type": f"image/{sent}", "data": "AAAA"}


@pytest.mark.parametrize("arguments", ['{"command": "ls', "[1]", '"text"', '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_are_wrapped(arguments: str) -> None:
    message = Message("assistant", (), (ToolCall("t1", "execute_bash", arguments),))
    block = written(text("user", "hi"), message, result("t1", "bad"))["messages"][1]["content"][0]
    assert block["input"] == {"malformed_arguments": arguments}


def marked_texts(*messages: Message) -> list[str]:
    turns = written(*messages, caching=True)["messages"]
    return [block["text"] for turn in turns for block in turn["content"] if "cache_control" in block]


def test_ends_of_this_and_the_previous_request_are_marked() -> None:
    said = [text("user", "1"), text("assistant", "2"), text("user", "3"), text("user", "4"), text("assistant", "5")]
    assert marked_texts(*said[:1]) == ["1"]
    assert marked_texts(*said[:4]) == ["1", "4"]
    assert marked_texts(*said, text("user", "6"), text("user", "7")) == ["4", "7"]
    assert marked_texts(text("assistant", "0")) == []


@pytest.mark.parametrize("wire", [MessagesWire(caching_prompt=True), ChatWire(cache_marks=True, thoughts="signed")])
def test_every_prefix_is_found_within_twenty_blocks_of_marks(wire: Any) -> None:
    """Claude looks back 20 blocks from each mark; 15 calls with their results are 30."""
    history = [text("system", "Be good."), text("user", "Go.")]
    stored: set[int] = set()
    for step in range(6):
        body = json.loads(wire.write_body({"model": "m"}, request(*history)))
        marks = _marks(body)
        assert len(marks) <= 4
        assert not stored or any(0 <= mark - end <= 20 for mark in marks for end in stored if end == max(stored))
        stored |= set(marks)
        ids = [f"t{step}_{number}" for number in range(15)]
        history.append(Message("assistant", (), tuple(ToolCall(one, "run", "{}") for one in ids)))
        history += [result(one, "ok") for one in ids]


def _marks(body: dict[str, Any]) -> list[int]:
    """Return the places of the marked blocks behind the system prompt, counted from the start."""
    place, marks = 0, []
    for turn in body["messages"]:
        if turn["role"] == "system":
            continue
        content = turn.get("content")
        blocks = content if isinstance(content, list) else [turn]
        for block in [*blocks, *turn.get("tool_calls", ())]:
            place += 1
            if "cache_control" in block or (block is blocks[-1] and "cache_control" in turn):
                marks.append(place)
    return marks


def test_request_may_be_rewritten_while_its_history_grows() -> None:
    wire = MessagesWire(caching_prompt=True)
    history = [text("system", "Be good."), text("user", "go")]
    for number in range(30):
        fresh = MessagesWire(caching_prompt=True).write_body({"model": "m"}, request(*history))
        assert wire.write_body({"model": "m"}, request(*history)) == fresh
        history += [calls(f"t{number}", said=f"step {number}"), result(f"t{number}", "x" * number)]


def test_what_was_written_is_forgotten_with_its_message() -> None:
    wire = MessagesWire(caching_prompt=False)
    messages = [text("user", "one"), calls("t1"), result("t1", "two")]
    wire.write_body({}, request(*messages))
    assert len(wire.written) == 3
    del messages[:]
    gc.collect()
    assert len(wire.written) == 0


def reply_body(*content: Any, **fields: Any) -> bytes:
    message = {"id": "msg_1", "model": "claude-x", "content": list(content), "stop_reason": "end_turn"} | fields
    return json.dumps(message).encode()


def test_a_reply() -> None:
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    body = reply_body(
        *thinking,
        {"type": "text", "text": "I "},
        {"type": "text", "text": "look."},
        {"type": "tool_use", "id": "t1", "name": "execute_bash", "input": {"command": "echo ü"}},
        stop_reason="tool_use",
        usage={
            "input_tokens": 10, "output_tokens": 7, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20,
        },
    )  # fmt: skip
    assert read_message(parse_body(body)) == ParsedReply(
        text="I look.",
        tool_calls=(ToolCall("t1", "execute_bash", '{"command": "echo ü"}'),),
        thinking_blocks=tuple(thinking),
        model="claude-x",
        response_id="msg_1",
        stop_reason="tool_calls",
        usage=CallUsage(prompt_tokens=130, completion_tokens=7, cache_read_tokens=100, cache_write_tokens=20),
    )


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("end_turn", "stop"), ("stop_sequence", "stop"), ("tool_use", "tool_calls"), ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"), ("pause_turn", "pause_turn"),
        (None, ""),
    ],
)  # fmt: skip
def test_stop_reasons(sent: str | None, read: str) -> None:
    assert read_message(parse_body(reply_body({"type": "text", "text": "x"}, stop_reason=sent))).stop_reason == read


@pytest.mark.parametrize(
    "usage",
    [
        *(None, {}, [], "many", 7),
        {"input_tokens": -5, "output_tokens": -1},
        {"input_tokens": "many", "output_tokens": 1.5},
        {"input_tokens": 10**30, "output_tokens": True},
    ],
)
def test_counts_that_are_none_are_nothing(usage: Any) -> None:
    assert read_message(parse_body(reply_body({"type": "text", "text": "x"}, usage=usage))).usage == CallUsage()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>", b"[1]", b"null", b'"text"', b'{"content": "text", "id": 1, "model": 2}',
        b'{"content": [{"type": "text"}], "id": 1, "model": 2}', b'{"content": [{"type": "tool_use", "id": "t"}]}',
        b'{"content": [1]}', b'{"content": []}', b'{"content": null}', b"[" * 100_000, b"\xff\xfe",
        reply_body({"type": "text", "text": "x"})[:-10],
    ],
)  # fmt: skip
def test_invalid_message_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedReplyError) as caught:
        read_message(parse_body(body))
    assert caught.value.retryable is True


REFUSED = "The model refused to answer."


@pytest.mark.parametrize(
    ("content", "fields", "error", "said"),
    [
        ([], {}, NoResponseError, "The reply has no content."),
        ([], {"stop_reason": "refusal"}, ContentPolicyError, REFUSED),
        ([{"type": "text", "text": "Sure, fir"}], {"stop_reason": "refusal"}, ContentPolicyError, REFUSED),
        (
            [],
            {"stop_reason": "refusal", "stop_details": {"type": "refusal", "explanation": "cyber"}},
            ContentPolicyError,
            "cyber",
        ),
    ],
)
def test_replies_with_nothing_in_them(
    content: list[Any], fields: dict[str, Any], error: type[ModelError], said: str
) -> None:
    with pytest.raises(error) as caught:
        read_message(parse_body(reply_body(*content, **fields)))
    assert caught.value.message == said
