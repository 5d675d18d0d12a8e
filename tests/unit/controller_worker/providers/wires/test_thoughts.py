"""Thoughts that a model wants back: each family's form, from its reply to the next request."""

import json
from typing import Any

import pytest

from controller_worker.model.model_call import to_model_reply
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from controller_worker.providers.model_features import find_features
from controller_worker.providers.wires.chat_wire import ChatStream, ChatWire, read_chat_reply

CALL = {"id": "call_1", "function": {"name": "execute_bash", "arguments": "{}"}}
SIGNATURE = {"google": {"thought_signature": "c2lnbmVk"}}
SEALED = {"id": "rs_1", "summary": [], "encrypted_content": "sealed"}
CLAUDES = {"type": "thinking", "thinking": "Hm.", "signature": "s"}


def replied(**fields: Any) -> dict[str, Any]:
    message = {"content": "Now.", "tool_calls": [CALL], **fields}
    return {"id": "r", "model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}]}


def sent_again(model: str, reply: dict[str, Any]) -> dict[str, Any]:
    read = read_chat_reply(reply)
    kept = json.loads(json.dumps(read.thinking_blocks))  # as the log does
    message = Message("assistant", (TextPart(read.text),), read.tool_calls, thinking_blocks=tuple(kept))
    wire = ChatWire(cache_marks=False, thoughts=find_features(model).thoughts)
    (written,) = wire.write_values([message])
    return written


@pytest.mark.parametrize(
    ("model", "fields", "again"),
    [
        ("moonshot/kimi-k2.5", {"reasoning_content": "Hm."}, {"reasoning_content": "Hm."}),
        ("deepseek/deepseek-chat", {"reasoning_content": "Hm."}, {"reasoning_content": "Hm."}),
        ("deepseek/deepseek-reasoner", {"reasoning": "Hm."}, {"reasoning_content": "Hm."}),
        (
            "openai/responses/gpt-5",
            {"reasoning_items": [SEALED]},
            {"reasoning_items": [SEALED | {"type": "reasoning"}]},
        ),
        ("o3-pro", {"reasoning_items": [SEALED]}, {"reasoning_items": [SEALED | {"type": "reasoning"}]}),
        ("openrouter/claude-sonnet-4-5", {"thinking_blocks": [CLAUDES]}, {"thinking_blocks": [CLAUDES]}),
        ("gpt-4o", {"reasoning_content": "Hm."}, {}),
        ("moonshot/kimi-k2.5", {"thinking_blocks": [CLAUDES]}, {}),
        ("openai/responses/gpt-5", {"thinking_blocks": [CLAUDES]}, {}),
        ("claude-sonnet-4-5", {"reasoning_items": [SEALED], "reasoning_content": "Hm."}, {}),
    ],
)
def test_a_family_reads_its_own_thoughts_again(model: str, fields: dict[str, Any], again: dict[str, Any]) -> None:
    found = sent_again(model, replied(**fields))
    assert {name: found[name] for name in found if "reason" in name or "think" in name} == again


@pytest.mark.parametrize(
    "attached", [{"extra_content": SIGNATURE}, {"provider_specific_fields": {"thought_signature": "x"}}]
)
def test_gemini_gets_the_signature_of_each_call_back(attached: dict[str, Any]) -> None:
    calls = [CALL | {"id": "call_0"}, CALL | attached]
    assert [
        call.get(next(iter(attached)))
        for call in sent_again("gemini/gemini-3-pro", replied(tool_calls=calls))["tool_calls"]
    ] == [None, attached[next(iter(attached))]]
    assert not set(attached) & set(sent_again("gpt-4o", replied(tool_calls=calls))["tool_calls"][1])


@pytest.mark.parametrize("call_id", ["", "same"])
def test_call_signature_without_an_id_finds_its_call(call_id: str) -> None:
    calls = [CALL | {"id": call_id}, CALL | {"id": call_id, "extra_content": SIGNATURE}]
    read = read_chat_reply(replied(tool_calls=calls))
    event = to_model_reply(read.to_completion(cost_usd=None, latency_seconds=0.0), iteration=1, seen_id=1, event_id=2)
    asked = tuple(ToolCall(call.id, call.name, call.arguments) for call in event.tool_calls)
    message = Message("assistant", (), asked, thinking_blocks=event.thinking_blocks)
    (written,) = ChatWire(cache_marks=False, thoughts="calls").write_values([message])
    assert [call.get("extra_content") for call in written["tool_calls"]] == [None, SIGNATURE]
    assert "place" not in json.dumps(event.wire())


def test_a_streamed_signature_is_kept() -> None:
    stream = ChatStream(lambda _: None)
    for delta in (
        {"tool_calls": [{"id": "call_1", "extra_content": SIGNATURE, **CALL}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ""}}]},
        {"reasoning_items": [SEALED]},
        {"reasoning_items": [SEALED]},
    ):
        stream.take_chunk({"id": "r", "model": "m", "choices": [{"index": 0, "delta": delta}]})
    stream.take_chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    signed, sealed = {"type": "call", "id": "call_1", "extra_content": SIGNATURE}, SEALED | {"type": "reasoning"}
    assert read_chat_reply(stream.reply()).thinking_blocks == (sealed, signed)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_items": [7]},
        {"reasoning_items": {"a": 1}},
        {"tool_calls": [CALL | {"extra_content": "text"}]},
        {"tool_calls": [CALL | {"provider_specific_fields": None}]},
    ],
)
def test_thoughts_of_an_odd_form_are_an_error_or_nothing(fields: dict[str, Any]) -> None:
    from controller_worker.providers.errors import MalformedReplyError

    try:
        assert read_chat_reply(replied(**fields)).thinking_blocks == ()
    except MalformedReplyError:
        assert "reasoning_items" in fields


def test_a_signature_that_is_geminis_never_reaches_claude() -> None:
    """litellm gives Gemini's thoughts the form of Claude's."""
    reply = replied(thinking_blocks=[{"type": "thinking", "thinking": "g", "signature": "of Gemini"}])
    assert "thinking_blocks" not in sent_again("claude-sonnet-4-5", reply | {"model": "gemini-3-pro"})
    assert "thinking_blocks" in sent_again("claude-sonnet-4-5", reply | {"model": "our-claude"})


def test_signature_stays_with_its_call_when_others_are_hidden() -> None:
    calls = [CALL | {"id": "a", "extra_content": SIGNATURE}, CALL | {"id": "b"}]
    read = read_chat_reply(replied(tool_calls=calls))
    shown = Message("assistant", (), read.tool_calls[1:], thinking_blocks=read.thinking_blocks)
    (written,) = ChatWire(cache_marks=False, thoughts="calls").write_values([shown])
    assert "extra_content" not in written["tool_calls"][0]


@pytest.mark.parametrize("blocks", [[[["x", 1]]], [{}], [7], ["text"]])
def test_thoughts_without_a_form_are_left_out(blocks: list[Any]) -> None:
    assert read_chat_reply(replied(thinking_blocks=blocks, reasoning_items=[{}, {"type": "x"}])).thinking_blocks == ()
