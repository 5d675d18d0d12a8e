"""The Chat Completions wire form as it is given to litellm. What comes back: tests/integration/test_llm_litellm.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker.tool_specs import ToolSpec
from controller_worker.llm.chat_wire import chat_messages, chat_tools, read_chat_reply
from controller_worker.llm.errors import ContentPolicyError, MalformedReplyError, ModelError, NoResponseError
from controller_worker.llm.messages import ImagePart, Message, TextPart, ToolCall

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
CALLS = [{"id": "t1", "type": "function", "function": {"name": "execute_bash", "arguments": '{"command": "ls'}}]


def test_plain_text_is_a_string() -> None:
    assert chat_messages(HISTORY, cache_marks=False, thinking=False) == [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "List\nthe files."},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "a.txt", "tool_call_id": "t1", "name": "execute_bash"},
    ]


def test_marks_and_thinking_for_claude_elsewhere() -> None:
    messages = (*HISTORY, Message("assistant", (TextPart("Done."),)))
    assert chat_messages(messages, cache_marks=True, thinking=True) == [
        {"role": "system", "content": [{"type": "text", "text": "Be good.", "cache_control": MARK}]},
        {"role": "user", "content": "List\nthe files."},
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


def test_images_make_a_list() -> None:
    message = Message("user", (TextPart("look"), ImagePart("https://example.org/a.png")))
    assert chat_messages([message], cache_marks=False, thinking=False)[0]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]


def test_an_empty_message_stays_empty_even_when_marked() -> None:
    assert chat_messages([Message("user")], cache_marks=True, thinking=False) == [{"role": "user", "content": ""}]


def test_tools() -> None:
    parameters = {"type": "object", "properties": {}}
    assert chat_tools([ToolSpec("think", "Think.", parameters)]) == [
        {"type": "function", "function": {"name": "think", "description": "Think.", "parameters": parameters}}
    ]


def reply(content: str | None = None, finish_reason: str = "stop", refusal: str | None = None) -> Any:
    message = SimpleNamespace(content=content, tool_calls=None, refusal=refusal)
    choice = SimpleNamespace(message=message, finish_reason=finish_reason)
    return SimpleNamespace(choices=[choice], model="m", id="r", usage=None)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (SimpleNamespace(choices=[]), NoResponseError, "The reply has no choices."),
        (reply(), NoResponseError, "The reply has no content."),
        (reply(refusal="I must not."), ContentPolicyError, "I must not."),
        (reply(finish_reason="content_filter"), ContentPolicyError, "The model refused to answer."),
        (SimpleNamespace(choices=[SimpleNamespace()]), MalformedReplyError, "The reply is no chat completion"),
        ("text", MalformedReplyError, "The reply is no chat completion"),
    ],
)
def test_replies_without_a_use(answer: Any, error: type[ModelError], said: str) -> None:
    with pytest.raises(error) as caught:
        read_chat_reply(answer)
    assert caught.value.message.startswith(said)
