"""Streamed replies through every real client: the same reply as in one piece, and failures that only streams have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.errors import BadRequestError, ModelError
from controller_worker.providers.llm import LLM, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from tests.model_server.backends import BACKENDS, SERVER_ARGUMENTS, settings
from tests.model_server.running_server import RunningModelServer
from tests.polling import unhurried

pytest_plugins = ("tests.model_server.fixtures",)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.* attribute on the instance:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
]
"""litellm looks at each chunk in ways that Pydantic advises against."""

SCRIPT = {
    "turns": [
        {
            "text": "I will greet: Grüß Gott, 你好.",
            "thinking": "They are polite, 好.",
            "tool_calls": [
                {"name": "execute_bash", "arguments": {"command": "echo 你好"}},
                {"name": "think", "arguments": {"thought": "hm"}},
            ],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "cache_read_tokens": 60, "cache_write_tokens": 30},
        },
        {"text": "Done."},
    ]
}
USER = Message("user", (TextPart("hi"),))
ATTEMPTS = 20


@pytest.fixture(scope="module")
def server(
    shared_model_server: Callable[..., RunningModelServer], tmp_path_factory: pytest.TempPathFactory
) -> RunningModelServer:
    path = tmp_path_factory.mktemp("scripts") / "greet.json"
    path.write_text(json.dumps(SCRIPT))
    return shared_model_server("--script", str(path), *SERVER_ARGUMENTS, "--model", "gpt-5")


@pytest.fixture(params=BACKENDS)
async def make_llm(request: pytest.FixtureRequest, server: RunningModelServer) -> AsyncIterator[Callable[..., LLM]]:
    server.clear()
    made: list[LLM] = []

    def make(**changes: Any) -> LLM:
        made.append(create_llm(settings(request.param, server.url, **changes), SystemClock()))
        return made[-1]

    make.__name__ = request.param
    yield make
    for llm in made:
        await llm.aclose()


class Shown:
    """A user's view of a reply in progress."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def text(self, kind: str) -> str:
        return "".join(delta.text for delta in self.deltas if delta.kind == kind)


def request(shown: Shown | None) -> ModelRequest:
    return ModelRequest((USER,), (), "c1", 0, "/w", on_delta=None if shown is None else shown.deltas.append)


async def failure(llm: LLM, shown: Shown | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await llm.complete(request(shown or Shown()))
    return caught.value


def without_time(reply: Completion) -> dict[str, Any]:
    return {name: getattr(reply, name) for name in Completion.__slots__ if name != "latency_seconds"}


async def test_a_streamed_reply_is_the_reply(server: RunningModelServer, make_llm: Callable[..., LLM]) -> None:
    shown, llm = Shown(), make_llm(max_output_tokens=8_000)
    whole = await llm.complete(request(None))
    streamed = await llm.complete(request(shown))
    assert without_time(streamed) == without_time(whole)
    assert streamed.tool_calls == (
        ToolCall("call_0001_0", "execute_bash", '{"command": "echo 你好"}'),
        ToolCall("call_0001_1", "think", '{"thought": "hm"}'),
    )
    assert shown.text("text") == "I will greet: Grüß Gott, 你好."
    assert len([delta for delta in shown.deltas if delta.kind == "text"]) > 1
    assert shown.text("thinking") == "They are polite, 好."
    shown_calls = shown.text("call").replace("\\u4f60\\u597d", "你好")
    assert shown_calls == 'execute_bash {"command": "echo 你好"}\n[call 2] think {"thought": "hm"}'
    assert [body["body"].get("stream") for body in server.requests()] == [None, True]


@pytest.mark.parametrize("kind", ["crlf", "no_done", "split", "drip", "not_streamed", "wrong_type"])
async def test_streams_that_are_odd_but_whole(
    server: RunningModelServer, make_llm: Callable[..., LLM], kind: str
) -> None:
    server.plan({"kind": kind, "interval_seconds": 0.0001})
    if (make_llm.__name__, kind) == ("litellm", "not_streamed"):
        # To the openai SDK below it, such a reply is an empty stream.
        assert (await failure(make_llm())).code == "malformed_reply"
        return
    reply = await make_llm().complete(request(Shown()))
    assert (reply.text, len(reply.tool_calls), reply.stop_reason) == ("I will greet: Grüß Gott, 你好.", 2, "tool_calls")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, 20)


@pytest.mark.parametrize("kind", ["held_open", "reset_behind"])
async def test_reply_is_whole_when_the_protocol_says_so(
    server: RunningModelServer, make_llm: Callable[..., LLM], kind: str
) -> None:
    llm = make_llm(first_byte_timeout=200.0, timeout=200.0, read_timeout=20.0)
    received = server.counts()["received"]
    for _ in range(3):
        server.plan({"kind": kind})
        reply = await llm.complete(request(Shown()))
        assert (reply.text, len(reply.tool_calls)) == ("I will greet: Grüß Gott, 你好.", 2)
        assert (reply.stop_reason, reply.usage.completion_tokens) == ("tool_calls", 20)
    assert server.counts()["received"] == received + 3


FINISHING_FORMS = {
    "chat": ("openai/test-model", "/v1", 0),
    "chat without its [DONE]": ("openai/test-model", "/v1", 1),
    "chat without its usage": ("openai/test-model", "/v1", 2),
    "messages": ("anthropic/claude-test", "", 0),
    "messages without their stop": ("anthropic/claude-test", "", 1),
    "responses": ("openai/responses/gpt-5", "/v1", 0),
}
"""By name: a model, the path of its address, and how many events do not come behind the one that ends the reply."""


@pytest.mark.parametrize("form", FINISHING_FORMS)
@pytest.mark.parametrize("kind", ["held_open", "reset_behind"])
async def test_litellm_reply_is_whole_in_each_form_of_end(server: RunningModelServer, kind: str, form: str) -> None:
    model, path, left_out = FINISHING_FORMS[form]
    at_server = {"model": model, "base_url": server.url + path, "native_tool_calling": True}
    # Only the rescue can end this in time: the limits are far above what a test may take.
    llm = create_llm(
        settings("litellm", server.url, **at_server, read_timeout=280.0, first_byte_timeout=280.0), SystemClock()
    )
    received = server.counts()["received"]
    server.plan({"kind": kind, "left_out": left_out})
    reply = await llm.complete(request(Shown()))
    assert (reply.text, len(reply.tool_calls)) == ("I will greet: Grüß Gott, 你好.", 2)
    assert (reply.stop_reason, server.counts()["received"]) == ("tool_calls", received + 1)
    if form != "chat without its usage":
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, 20)


async def test_calls_share_a_connection(server: RunningModelServer, make_llm: Callable[..., LLM]) -> None:
    """A reader that leaves at the last event, before the end of the body, costs the next call a handshake."""
    llm = make_llm()
    for _ in range(4):
        await llm.complete(request(Shown()))
    assert len({record["peer"] for record in server.requests()[-3:]}) == 1


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_stop_reason_decides_what_happens_to_calls(
    server: RunningModelServer, make_llm: Callable[..., LLM], is_streamed: bool
) -> None:
    llm = make_llm()
    server.plan({"kind": "cut_call"})
    cut = await llm.complete(request(Shown() if is_streamed else None))
    assert [bool(call.problem) for call in cut.tool_calls] == [False, True]
    assert "was not carried out" in cut.tool_calls[1].problem
    server.plan({"kind": "refused_call"})
    with pytest.raises(ModelError) as refused:
        await llm.complete(request(Shown() if is_streamed else None))
    assert refused.value.code == "content_policy"


async def test_an_error_within_a_stream(server: RunningModelServer, make_llm: Callable[..., LLM]) -> None:
    server.plan({"kind": "error_event"})
    error = await failure(make_llm())
    assert error.retryable
    assert error.code in ("service_unavailable", "internal")
    assert error.provider_text


@pytest.mark.parametrize(
    ("kind", "limits", "told"),
    [
        ("hang", {"first_byte_timeout": 0.5}, ""),
        # How long a busy machine takes to the first byte says nothing of the silence behind it.
        ("hang_body", {"read_timeout": 0.5, "first_byte_timeout": 200.0}, "within the reply"),
        ("drip", {"timeout": 0.5}, "no whole reply within 0.5 s"),
    ],
)
async def test_each_phase_has_its_limit(
    server: RunningModelServer, make_llm: Callable[..., LLM], kind: str, limits: dict[str, float], told: str
) -> None:
    await make_llm().complete(request(None))  # the first call of a process imports for longer than the limit
    before = server.counts()["disconnected"]
    server.plan({"kind": kind, "times": None})  # for ever
    began = SystemClock().monotonic()
    llm = make_llm(**limits)
    for _ in range(ATTEMPTS):  # on a busy machine a call may end before it is sent, or for another of the limits
        error = await failure(llm)
        assert (error.code, error.retryable) == ("timeout", True)
        if told in error.message and server.counts()["disconnected"] > before:
            break
    else:
        raise AssertionError(error.message)
    assert SystemClock().monotonic() - began >= 0.5


async def test_long_reply_is_streamed_without_watchers(
    server: RunningModelServer, make_llm: Callable[..., LLM]
) -> None:
    short, long = make_llm(max_output_tokens=8_000), make_llm(max_output_tokens=20_000)
    in_one_piece, streamed = await short.complete(request(None)), await long.complete(request(None))
    assert without_time(streamed) == without_time(in_one_piece)
    for llm in (
        make_llm(stream_replies="on", max_output_tokens=8_000),
        make_llm(stream_replies="off", max_output_tokens=20_000),
    ):
        await llm.complete(request(None))
    assert [body["body"].get("stream") for body in server.requests()] == [None, True, True, None]


async def test_a_reply_that_nothing_limits_may_be_long(server: RunningModelServer) -> None:
    for model in (None, "gpt-5", "gpt-4o-2024-05-13"):  # the last one writes up to 4,096 tokens
        llm = create_llm(settings("openai", server.url, base_model=model), SystemClock())
        server.clear()
        await llm.complete(request(None))
        await llm.aclose()
        assert [body["body"].get("stream", False) for body in server.requests()] == [model != "gpt-4o-2024-05-13"]


async def test_server_without_streams_is_asked_for_whole_replies(server: RunningModelServer) -> None:
    server.clear()
    llm = create_llm(settings("openai", server.url), SystemClock())
    try:
        server.plan({"kind": "bad_request", "text": "Extra inputs are not permitted: stream_options"})
        for _ in range(2):
            assert (await llm.complete(request(None))).stop_reason == "tool_calls"
        assert [body["body"].get("stream") for body in server.requests()] == [True, None, None]
        server.plan({"kind": "bad_request", "text": "Extra inputs are not permitted: stream_options"})
        with pytest.raises(BadRequestError):
            await llm.complete(request(Shown()))  # a watcher has requested a stream
    finally:
        await llm.aclose()


async def test_silence_before_a_long_streamed_reply_is_no_timeout(
    server: RunningModelServer, make_llm: Callable[..., LLM]
) -> None:
    """A reply that takes longer than the longest silence comes through; in one piece it would be a timeout."""
    slower = min(unhurried(1.0), 20.0)  # on a busy machine this process itself is silent at times
    llm = make_llm(max_output_tokens=20_000, read_timeout=2.0 * slower, first_byte_timeout=200.0)
    await llm.complete(request(None))  # the first call of a process imports for longer than the limit
    server.plan({"kind": "drip", "interval_seconds": 0.002 * slower})
    assert (await llm.complete(request(None))).stop_reason == "tool_calls"
