"""The Chat Completions wire form, and the parsing of replies."""

import json
from dataclasses import replace
from typing import Any

import pytest

from broker.contract.tool_specs import ToolSpec
from controller_worker.providers.errors import ContentPolicyError, MalformedReplyError, ModelError, NoResponseError
from controller_worker.providers.llm import CallUsage, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart, ToolCall
from controller_worker.providers.wires.chat_wire import SEE_BELOW, ChatStream, ChatWire, read_chat_reply, write_tools
from controller_worker.providers.wires.provider_errors import StreamedError, to_model_error
from controller_worker.providers.wires.raw_client import parse_body
from controller_worker.providers.wires.reply import CUT_CALL, ParsedReply

MARK = {"type": "ephemeral"}
HISTORY = (
    Message("system", (TextPart("Be good."),)),
    Message("user", (TextPart("List"), TextPart("the files."))),
    Message(
        "assistant",
        (TextPart(" "),),
        (ToolCall("t1", "execute_bash", '{"command": "ls'),),
        thinking_blocks=({"type": "thinking", "thinking": "hm", "signature": "s"},),
    ),
    Message("tool", (TextPart("a.txt"),), tool_call_id="t1", name="execute_bash"),
)
MALFORMED = '{"malformed_arguments": "{\\"command\\": \\"ls"}'
CALLS = [{"id": "t1", "type": "function", "function": {"name": "execute_bash", "arguments": MALFORMED}}]


def chat_messages(messages: Any, *, cache_marks: bool, is_claude: bool) -> list[dict[str, Any]]:
    return ChatWire(cache_marks=cache_marks, thoughts="signed" if is_claude else "none").write_values(messages)


def test_plain_text_is_a_string() -> None:
    assert chat_messages(HISTORY, cache_marks=False, is_claude=False) == [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "List\nthe files."},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "a.txt", "tool_call_id": "t1", "name": "execute_bash"},
    ]


def test_marks_and_thinking_for_claude_elsewhere() -> None:
    messages = (*HISTORY, Message("assistant", (TextPart("Done."),)))
    assert chat_messages(messages, cache_marks=True, is_claude=True) == [
        {"role": "system", "content": [{"type": "text", "text": "Be good.", "cache_control": MARK}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "List"}, {"type": "text", "text": "the files.", "cache_control": MARK}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": CALLS,
            "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        },
        {
            "role": "tool", "content": "a.txt", "cache_control": MARK, "tool_call_id": "t1", "name": "execute_bash",
        },
        {"role": "assistant", "content": "Done."},
    ]  # fmt: skip


def test_thoughts_that_nobody_signed_stay_at_home() -> None:
    signed = ({"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"})
    thoughts = ({"type": "thinking", "thinking": "of another model"}, *signed)
    message = Message("assistant", (TextPart("Done."),), thinking_blocks=thoughts)
    (written,) = chat_messages([message], cache_marks=True, is_claude=True)
    assert written["thinking_blocks"] == list(signed)
    (written,) = chat_messages([replace(message, thinking_blocks=thoughts[:1])], cache_marks=True, is_claude=True)
    assert "thinking_blocks" not in written


PICTURE = ImagePart("data:image/png;base64,AAAA")
TWO_CALLS = (
    Message("assistant", tool_calls=(ToolCall("t1", "browser", "{}"), ToolCall("t2", "execute_bash", "{}"))),
    Message("tool", (TextPart("a page"), PICTURE), tool_call_id="t1", name="browser"),
    Message("tool", (TextPart("a.txt"),), tool_call_id="t2", name="execute_bash"),
    Message("user", (TextPart("Continue."),)),
)


def test_tool_pictures_follow_all_results() -> None:
    _, page, listing, pictures, message = chat_messages(TWO_CALLS, cache_marks=False, is_claude=False)
    assert page == {"role": "tool", "content": "a page", "tool_call_id": "t1", "name": "browser"}
    assert (listing["role"], listing["content"]) == ("tool", "a.txt")
    shown = {"type": "image_url", "image_url": {"url": PICTURE.url}}
    note = {"type": "text", "text": "Pictures that belong to the result of browser:"}
    assert pictures == {"role": "user", "content": [note, shown]}
    assert message == {"role": "user", "content": "Continue."}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (
            Message("user", (TextPart("look"), PICTURE)),
            [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": PICTURE.url}}],
        ),
        (Message("tool", (PICTURE,), tool_call_id="t1", name="view"), SEE_BELOW),
        (Message("user"), ""),
    ],
    ids=["images make a list", "result that is only a picture", "empty even when marked"],
)
def test_content_of_a_message(message: Message, content: Any) -> None:
    assert chat_messages([message], cache_marks=not message.content, is_claude=False)[0]["content"] == content


def test_claude_takes_pictures_in_results() -> None:
    _, page, *_ = chat_messages(TWO_CALLS, cache_marks=False, is_claude=True)
    assert [part["type"] for part in page["content"]] == ["text", "image_url"]
    assert len(chat_messages(TWO_CALLS, cache_marks=False, is_claude=True)) == len(TWO_CALLS)


def test_messages_with_pictures_are_written_once() -> None:
    wire = ChatWire(cache_marks=False, thoughts="none")
    request = ModelRequest(messages=TWO_CALLS, tools=(), conversation_id="c", iteration=1, workspace="/workspace")
    assert json.loads(wire.write_body({"model": "m"}, request))["messages"] == wire.write_values(TWO_CALLS)
    made = len(wire.written)
    wire.write_body({"model": "m"}, request)
    assert len(wire.written) == made


@pytest.mark.parametrize(("written", "chars"), [("a" * 1_024, 1_024), ("a" * 1_025, 1_024), ("a " * 4_000, 1_023)])
def test_description_of_a_tool_fits_every_provider(written: str, chars: int) -> None:
    """Tools of MCP servers and packages may describe themselves in 8,000 characters; OpenAI takes 1,024."""
    [tool] = write_tools([ToolSpec("think", written, {"type": "object", "properties": {}})])
    description = tool["function"]["description"]
    assert (len(description), description.endswith("[…]")) == (chars, len(written) > 1_024)


@pytest.mark.parametrize("cache_marks", [False, True])
def test_bytes_and_values_say_the_same_while_the_history_grows(cache_marks: bool) -> None:
    wire = ChatWire(cache_marks=cache_marks, thoughts="signed")
    history = list(HISTORY)
    for number in range(5):
        body = wire.write_body({"model": "m"}, ModelRequest(history, (), "c1", number, "/w"))
        assert json.loads(body) == {"model": "m", "messages": wire.write_values(history)}
        history += [Message("user", (TextPart(f"more {number}"),)), Message("assistant", (TextPart("ü"),))]
    assert len(wire.written) == len(history) - (5 if cache_marks else 2)


def reply(content: Any = None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"message": {"content": content} | message, "finish_reason": finish_reason}
    return {"choices": [choice], "model": "m", "id": "r"}


def test_a_reply() -> None:
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "execute_bash", "arguments": '{"command": "ls'}},
        {"id": "t2", "type": "function", "function": {"name": "think", "arguments": {"thought": "ü"}}},
        {"id": "t3", "type": "function", "function": {"name": "finish", "arguments": None}},
    ]
    answer = reply("I look.", "tool_calls", tool_calls=calls) | {
        "usage": {
            "prompt_tokens": 130, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 100},
            "cache_creation_input_tokens": 20,
        },
    }  # fmt: skip
    assert read_chat_reply(answer) == ParsedReply(
        text="I look.",
        tool_calls=(
            ToolCall("t1", "execute_bash", '{"command": "ls'),
            ToolCall("t2", "think", '{"thought":"ü"}'),
            ToolCall("t3", "finish", ""),
        ),
        thinking_blocks=(),
        model="m",
        response_id="r",
        stop_reason="tool_calls",
        usage=CallUsage(prompt_tokens=130, completion_tokens=7, cache_read_tokens=100, cache_write_tokens=20),
    )


THOUGHTS = {"reasoning_tokens": 100}
DOWN = {"code": 502, "message": "Upstream is down."}


@pytest.mark.parametrize("usage", [None, [], "many"])
def test_a_usage_of_another_form_spoils_no_reply(usage: Any) -> None:
    assert read_chat_reply(reply("Hi.") | {"usage": usage}).usage == CallUsage()


@pytest.mark.parametrize("given", [{}, {"id": None}, {"id": ""}])
def test_a_call_without_an_id_gets_one_later(given: dict[str, Any]) -> None:
    answer = reply(tool_calls=[given | {"function": {"name": "ls", "arguments": "{}"}}])
    assert read_chat_reply(answer).tool_calls == (ToolCall("", "ls", "{}"),)
    parts = [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": []}, {"type": "text", "text": "b"}]
    assert read_chat_reply(reply(parts)).text == "ab"


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ({"choices": []}, NoResponseError, "The reply has no choices."),
        ({"choices": None}, NoResponseError, "The reply has no choices."),
        (reply(), NoResponseError, "The reply has no content."),
        (reply(" \t\n"), NoResponseError, "The reply has no content."),
        (reply("\u00a0\u200b\ufeff\u2060"), NoResponseError, "The reply has no content."),
        (reply(refusal="I must not."), ContentPolicyError, "I must not."),
        (reply(finish_reason="content_filter"), ContentPolicyError, "The model refused to answer."),
        ({}, MalformedReplyError, "The reply is not a chat completion"),
        ([1, 2], MalformedReplyError, "The reply is not a chat completion"),
        (None, MalformedReplyError, "The reply is not a chat completion"),
        ({"choices": [{}]}, MalformedReplyError, "The reply is not a chat completion"),
        ({"choices": [{"message": None}]}, MalformedReplyError, "The reply is not a chat completion"),
        (reply(7), MalformedReplyError, "The reply is not a chat completion"),
        (reply(tool_calls=[{"id": "t1"}]), MalformedReplyError, "The reply is not a chat completion"),
    ],
)
def test_replies_without_a_use(answer: Any, error: type[ModelError], said: str) -> None:
    with pytest.raises(error) as caught:
        read_chat_reply(answer)
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(
    ("beside", "choice", "code"),
    [
        ({}, {"finish_reason": "error", "error": DOWN}, "service_unavailable"),
        ({}, {"finish_reason": "stop", "error": DOWN}, "service_unavailable"),
        ({}, {"finish_reason": "error"}, "internal"),
        ({}, {"finish_reason": "insufficient_system_resource"}, "internal"),
        ({}, {"finish_reason": "network_error"}, "internal"),
        ({"error": DOWN}, {"finish_reason": "stop"}, "service_unavailable"),
    ],
)
def test_an_error_beside_an_answer_is_no_answer(beside: dict[str, Any], choice: dict[str, Any], code: str) -> None:
    """OpenRouter's form of a provider that fails within its reply."""
    frame = {"id": "r", "model": "m", **beside}
    with pytest.raises(StreamedError) as raised:
        parse_body(json.dumps(frame | {"choices": [{"message": {"content": "The ans"}, **choice}]}).encode())
    error = to_model_error(raised.value)
    assert (error.code, error.retryable) == (code, True)
    chunk = frame | {"choices": [{"index": 0, "delta": {"content": "The ans"}, **choice}]}
    with pytest.raises(StreamedError):
        ChatStream(lambda _: None).take(json.dumps(chunk))


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("reason", ["max_tokens", "MAX_TOKENS", "model_length", "model_context_window_exceeded"])
def test_cut_in_another_providers_words_is_a_cut(reason: str) -> None:
    found = read_chat_reply({"choices": [{"message": {"tool_calls": [CALL]}, "finish_reason": reason}]})
    assert (found.stop_reason, found.tool_calls[0].problem) == ("length", CUT_CALL)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        *((reason, {"content": "I"}) for reason in ("refusal", "SAFETY", "sensitive", "PROHIBITED_CONTENT")),
        ("tool_calls", {"content": None, "refusal": "I will not."}),
    ],
)
def test_calls_beside_a_refusal_are_not_carried_out(reason: str, message: dict[str, Any]) -> None:
    with pytest.raises(ContentPolicyError):
        read_chat_reply({"choices": [{"message": message | {"tool_calls": [CALL]}, "finish_reason": reason}]})


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        # xAI: thoughts are beside the words; OpenAI: they are a part of them
        ({"completion_tokens": 5, "total_tokens": 115, "completion_tokens_details": THOUGHTS}, CallUsage(10, 105)),
        ({"completion_tokens": 105, "total_tokens": 115, "completion_tokens_details": THOUGHTS}, CallUsage(10, 105)),
        ({"completion_tokens": 5, "cached_tokens": 8}, CallUsage(10, 5, 8)),  # Kimi
        ({"completion_tokens": 5, "prompt_cache_hit_tokens": 8}, CallUsage(10, 5, 8)),  # DeepSeek
        ({"completion_tokens": 5, "completion_tokens_details": 7}, CallUsage(10, 5)),
        ({"prompt_tokens": 10**30, "completion_tokens": -1, "prompt_tokens_details": "none"}, CallUsage()),
        ({"prompt_tokens": 12.0, "completion_tokens": 0.5}, CallUsage(prompt_tokens=12)),
    ],
)
def test_usage_in_other_forms(reported: dict[str, Any], usage: CallUsage) -> None:
    assert read_chat_reply(reply("x") | {"usage": {"prompt_tokens": 10} | reported}).usage == usage
