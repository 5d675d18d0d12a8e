"""Server-sent events, cut anywhere, and the replies that are put together from them."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_worker.providers.errors import MalformedReplyError, ModelError, ModelTimeoutError
from controller_worker.providers.llm import Delta
from controller_worker.providers.wires.chat_wire import ChatStream
from controller_worker.providers.wires.event_stream import (
    EVENT_LIMIT_CHARS,
    EventDecoder,
    StreamLimits,
    limit_silences,
    read_events,
)
from controller_worker.providers.wires.messages_wire import MessagesStream
from controller_worker.providers.wires.provider_errors import StreamedError, to_model_error

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


@pytest.mark.parametrize(
    ("chunks", "texts"),
    [([b"data: 1\n\nda", b"ta: end"], ["1", "end"]), ([b"data: 1\n\ndata: end\n\ndata: 2\n\n"], ["1", "end"])],
    ids=["cut within a name", "nothing is taken behind the last event"],
)
async def test_texts_of_chunks(chunks: list[bytes], texts: list[str]) -> None:
    async def sent() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
        if len(chunks) == 1:
            await asyncio.Event().wait()  # a connection that stays open

    taken: list[str] = []

    def take(text: str) -> bool:
        taken.append(text)
        return text == "end"

    await read_events(sent(), StreamLimits(60.0, 60.0), take)
    assert taken == texts


def fed(decoder: EventDecoder, whole: bytes, piece_bytes: int) -> list[str]:
    pieces = (whole[at : at + piece_bytes] for at in range(0, len(whole), piece_bytes))
    return [text for piece in pieces for text in decoder.feed(piece)]


def test_a_long_line_in_small_pieces_comes_through() -> None:
    """If each piece cost as much as the line before it, this would take hours."""
    line = b"data: " + b"x" * (EVENT_LIMIT_CHARS - 6)
    assert fed(EventDecoder(), line + b"\n\n", 128) == ["x" * (EVENT_LIMIT_CHARS - 6)]


@pytest.mark.parametrize(
    ("begin", "more"), [("data: ", "x"), (": a comment", "x"), ("data: ", "ü"), ("", "data:\n"), ("", "data: y\r")]
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 64 * 1024])
def test_an_event_without_an_end_is_refused_at_the_limit(begin: str, more: str, piece_bytes: int) -> None:
    limit = 4096
    with pytest.raises(MalformedReplyError, match="4096 characters"):
        fed(EventDecoder(limit), (begin + (limit + 1) * more).encode(), piece_bytes)


def test_events_up_to_the_limit_come_one_after_the_other() -> None:
    event = b"data: " + 45 * b"x" + b"\ndata: " + 45 * b"x" + b"\n\n"
    assert fed(EventDecoder(100), 50 * event, 1) == 50 * [45 * "x" + "\n" + 45 * "x"]


async def test_a_reply_that_is_one_endless_event_is_malformed() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"data: " + b"x" * 65_000

    with pytest.raises(MalformedReplyError, match=f"{EVENT_LIMIT_CHARS} characters"):
        await read_events(chunks(), StreamLimits(60.0, 60.0), lambda _: False)


def chat(*events: Any) -> tuple[dict[str, Any], list[Delta]]:
    shown: list[Delta] = []
    return taken(ChatStream(shown.append), events), shown


def messages(*events: Any, on_delta: Callable[[Delta], None] = lambda _: None) -> dict[str, Any]:
    return taken(MessagesStream(on_delta), events)


def taken(stream: ChatStream | MessagesStream, events: Sequence[Any]) -> dict[str, Any]:
    for event in events:
        stream.take(event if isinstance(event, str) else json.dumps(event))
    return stream.reply()


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
    assert [delta.text for delta in shown] == [
        *('f {"a"', "\n[call 2] g {", "}"),
        *("\n[call 1] : 1}", "\n[call 3] h {", "}"),
    ]


def test_calls_that_all_have_the_first_place_are_told_apart() -> None:
    reply, _ = chat(
        chunk(tool_calls=[piece('{"a"', index=0, id="x", name="f")]),
        chunk(tool_calls=[piece(": 1}", index=0, id="another each time")]),
        chunk(tool_calls=[piece("{", index=0, id="y", name="f")]),
        chunk("tool_calls", tool_calls=[piece("}", index=0), piece("[]", index=1, id="z", name="g")]),
    )
    assert reply["choices"][0]["message"]["tool_calls"] == [
        {"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "y", "function": {"name": "f", "arguments": "{}"}},
        {"id": "z", "function": {"name": "g", "arguments": "[]"}},
    ]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"object": "error", "message": "This is too much.", "type": "BadRequestError", "code": 400}, "bad_request"),
        ({"message": "This is too much.", "code": 503}, "service_unavailable"),
        ({"type": "error", "message": "This is too much."}, "internal"),
    ],
)
def test_errors_that_are_not_called_one(event: dict[str, Any], code: str) -> None:
    with pytest.raises(StreamedError) as caught:
        chat(chunk(content="cut"), event)
    error = to_model_error(caught.value)
    assert (error.code, str(error)) == (code, "This is too much.")


def test_thought_in_many_pieces_costs_only_its_length() -> None:
    piece = 200 * "x"
    stream = ChatStream(lambda _: None)
    for _ in range(200_000):
        stream.take_chunk({"choices": [{"delta": {"thinking_blocks": [{"type": "thinking", "thinking": piece}]}}]})
    stream.take_chunk(chunk("stop"))
    assert len(stream.reply()["choices"][0]["message"]["thinking_blocks"][0]["thinking"]) == 200_000 * 200


def test_many_calls_without_a_place_are_found_without_a_search() -> None:
    stream = ChatStream(lambda _: None)
    for number in range(100_000):
        stream.take_chunk({"choices": [{"delta": {"tool_calls": [piece("{}", id=f"c{number}", name="f")]}}]})
    stream.take_chunk(chunk("tool_calls"))
    assert len(stream.reply()["choices"][0]["message"]["tool_calls"]) == 100_000


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


START = {"type": "message_start", "message": {"id": "r", "model": "m", "usage": {"input_tokens": 5}}}
STOP = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}}


def test_a_call_whose_arguments_are_no_json_comes_through() -> None:
    block, shown = {"type": "tool_use", "id": "t", "name": "f", "input": {}}, list[Delta]()
    reply = messages(
        START,
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a'}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "not_invented_yet"}},
        {"type": "content_block_start", "index": 1, "content_block": block | {"id": "u"}},
        STOP,
        on_delta=shown.append,
    )
    assert "".join(delta.text for delta in shown) == 'f {"a\n[call 2] f '
    assert reply["content"] == [block | {"input": '{"a'}, block | {"id": "u"}]
    assert reply["usage"] == {"input_tokens": 5, "output_tokens": 3}


def test_counts_that_the_end_does_not_repeat_are_kept() -> None:
    start = {"id": "m", "model": "m", "usage": {"input_tokens": 5, "cache_read_input_tokens": 90, "output_tokens": 1}}
    nothing = {"input_tokens": 0, "cache_read_input_tokens": None, "output_tokens": 7}
    stop = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": nothing}
    usage = messages({"type": "message_start", "message": start}, stop)["usage"]
    assert usage == {"input_tokens": 5, "cache_read_input_tokens": 90, "output_tokens": 7}


def test_many_blocks_are_put_together_in_one_pass() -> None:
    stream = MessagesStream(lambda _: None)
    stream.take(json.dumps(START))
    for index in range(30_000):
        begin = {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}}
        delta = {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": f"{index}"}}
        stream.take(json.dumps(begin))
        stream.take(json.dumps(delta))
    stream.take(json.dumps(STOP))
    assert [block["text"] for block in stream.reply()["content"]] == [str(index) for index in range(30_000)]


BEGIN = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
NO_TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": 7}}


@pytest.mark.parametrize(
    ("read", "events"),
    [
        *((read, events) for read in (chat, messages) for events in ([], ["{"], ["[1]"])),
        (chat, [chunk(content="cut")]),
        (chat, [{"choices": [{"delta": 7}]}]),
        (chat, [chunk("stop", thinking_blocks=[{"type": "thinking", "thinking": 7}])]),
        (messages, [START]),
        (messages, [STOP]),
        (messages, [{"no": "type"}]),
        (messages, [START, BEGIN, NO_TEXT, STOP]),
        (messages, [START, BEGIN, BEGIN | {"index": "x"}, STOP]),
    ],
)
def test_streams_that_are_no_reply(read: Callable[..., Any], events: list[Any]) -> None:
    with pytest.raises(MalformedReplyError):
        read(*events)


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
        found: ModelError = to_model_error(caught.value, secrets=("sk-secret-key",))
        assert (found.code, found.provider_text) == (code, error["message"].replace("sk-secret-key", "<secret-hidden>"))


async def test_behind_a_whole_reply_no_long_silence_is_borne() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()  # a connection that stays open

    with pytest.raises(ModelTimeoutError):
        await read_events(chunks(), StreamLimits(3_600.0, 3_600.0, 0.01), lambda _: False, lambda: True)


async def test_wait_that_completes_the_reply_is_short() -> None:
    """litellm keeps the end of a reply to itself while it waits for the end of the connection."""
    has_ended = False

    async def chunks() -> AsyncIterator[int]:
        nonlocal has_ended
        yield 1
        has_ended = True
        await asyncio.Event().wait()  # a connection that stays open

    limits = StreamLimits(200.0, 200.0, closing_seconds=0.05)
    with pytest.raises(ModelTimeoutError):
        async for _ in limit_silences(chunks(), limits, lambda: has_ended):
            pass


async def test_wait_for_an_incomplete_reply_is_as_long_as_set() -> None:
    going_on = asyncio.Event()

    async def chunks() -> AsyncIterator[int]:
        yield 1
        asyncio.get_running_loop().call_later(0.2, going_on.set)  # many times as long as one behind the end
        await going_on.wait()
        yield 2

    limits = StreamLimits(200.0, 200.0, closing_seconds=0.01)
    assert [chunk async for chunk in limit_silences(chunks(), limits)] == [1, 2]
