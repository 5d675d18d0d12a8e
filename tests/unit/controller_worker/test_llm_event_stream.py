"""Server-sent events, cut anywhere, and the replies that are put together from them."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_worker.llm.chat_stream import ChatStream
from controller_worker.llm.errors import MalformedReplyError, ModelError
from controller_worker.llm.event_stream import EventDecoder, StreamLimits, event_texts
from controller_worker.llm.llm import Delta
from controller_worker.llm.messages_stream import MessagesStream
from controller_worker.llm.provider_errors import StreamedError, model_error

STREAM = 'event: a\ndata: {"x": "ü"}\n\n: a comment\nid: 7\ndata:one\ndata: two\n\n\ndata: 你好\n\ndata: [DONE]'
TEXTS = ['{"x": "ü"}', "one\ntwo", "你好", "[DONE]"]


def decoded(chunks: list[bytes]) -> list[str]:
    decoder = EventDecoder()
    return [text for chunk in chunks for text in decoder.feed(chunk)] + decoder.finish()


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12), st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_stream_may_be_cut_anywhere(cuts: list[int], line_end: str) -> None:
    whole = STREAM.replace("\n", line_end).encode()
    places = [0, *sorted(cuts), len(whole)]
    assert decoded([whole[begin:end] for begin, end in itertools.pairwise(places)]) == TEXTS


async def test_texts_of_chunks() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\nda"
        yield b"ta: 2"

    assert [text async for text in event_texts(chunks(), StreamLimits(1.0, 1.0))] == ["1", "2"]


def chat(*events: Any) -> tuple[dict[str, Any], list[Delta]]:
    shown: list[Delta] = []
    stream = ChatStream(shown.append)
    for event in events:
        stream.take(event if isinstance(event, str) else json.dumps(event))
    return stream.reply(), shown


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "r", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def piece(arguments: str, **fields: Any) -> dict[str, Any]:
    name = fields.pop("name", None)
    return fields | {"function": {"arguments": arguments} | ({"name": name} if name else {})}


def test_calls_that_arrive_interleaved_or_without_a_place() -> None:
    reply, shown = chat(
        chunk(tool_calls=[piece('{"a"', index=0, id="x", name="f"), piece("{", index=1, id="y", name="g")]),
        chunk(tool_calls=[piece("}", index=1), piece(": 1}", index=0)]),
        chunk(tool_calls=[piece("{", id="z", name="h")]),
        chunk("tool_calls", tool_calls=[piece("}")]),
        "[DONE]",
    )
    assert reply["choices"][0]["message"]["tool_calls"] == [
        {"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "y", "function": {"name": "g", "arguments": "{}"}},
        {"id": "z", "function": {"name": "h", "arguments": "{}"}},
    ]
    assert [delta.text for delta in shown] == ['f {"a"', "g {", "}", ": 1}", "h {", "}"]


def test_signed_thinking_by_a_gateway_is_put_together() -> None:
    reply, shown = chat(
        chunk(thinking_blocks=[{"type": "thinking", "thinking": "a"}], reasoning_content="a"),
        chunk(thinking_blocks=[{"type": "thinking", "thinking": "b"}], reasoning_content="b"),
        chunk(thinking_blocks=[{"type": "thinking", "signature": "s"}]),
        chunk(thinking_blocks=[{"type": "redacted_thinking", "data": "x"}]),
        chunk("stop", content="Hi."),
    )
    assert reply["choices"][0]["message"]["thinking_blocks"] == [
        {"type": "thinking", "thinking": "ab", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    assert [(delta.kind, delta.text) for delta in shown] == [("thinking", "a"), ("thinking", "b"), ("text", "Hi.")]


@pytest.mark.parametrize("events", [[], [chunk(content="cut")], ["{"], ["[1]"], [{"choices": [{"delta": 7}]}]])
def test_chat_streams_that_are_no_reply(events: list[Any]) -> None:
    with pytest.raises(MalformedReplyError):
        chat(*events)


def messages(*events: Any) -> dict[str, Any]:
    stream = MessagesStream(lambda _: None)
    for event in events:
        stream.take(event if isinstance(event, str) else json.dumps(event))
    return stream.reply()


START = {"type": "message_start", "message": {"id": "r", "model": "m", "usage": {"input_tokens": 5}}}
STOP = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}}


def test_a_call_whose_arguments_are_no_json_comes_through() -> None:
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    reply = messages(
        START,
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a'}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "not_invented_yet"}},
        {"type": "content_block_start", "index": 1, "content_block": block | {"id": "u"}},
        STOP,
    )
    assert reply["content"] == [block | {"input": '{"a'}, block | {"id": "u"}]
    assert reply["usage"] == {"input_tokens": 5, "output_tokens": 3}


@pytest.mark.parametrize("events", [[], [START], [STOP], ["{"], ["[1]"], [{"no": "type"}]])
def test_message_streams_that_are_no_reply(events: list[Any]) -> None:
    with pytest.raises(MalformedReplyError):
        messages(*events)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"type": "overloaded_error", "message": "Overloaded"}, "service_unavailable"),
        ({"type": "rate_limit_error", "message": "slow"}, "rate_limit"),
        ({"code": "context_length_exceeded", "message": "long"}, "context_window"),
        ({"type": "server_error", "message": "boom sk-secret-key"}, "internal"),
    ],
)
def test_errors_within_a_stream(error: dict[str, str], code: str) -> None:
    for take in (ChatStream(lambda _: None).take, MessagesStream(lambda _: None).take):
        with pytest.raises(StreamedError) as caught:
            take(json.dumps({"type": "error", "error": error}))
        found: ModelError = model_error(caught.value, secrets=("sk-secret-key",))
        assert (found.code, found.provider_text) == (code, error["message"].replace("sk-secret-key", "<secret-hidden>"))
