"""Every way a provider fails, through all real clients against a real server: one attempt, the right class, in time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.errors import ModelError
from controller_worker.providers.llm import LLM, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from tests.model_server.backends import BACKENDS, KEY, SERVER_ARGUMENTS, settings
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.* attribute on the instance:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
]

REQUEST = ModelRequest((Message("user", (TextPart("hi"),)),), (), "c1", 0, "/w")


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "bash:3", *SERVER_ARGUMENTS)


@pytest.fixture(params=BACKENDS)
async def make_llm(request: pytest.FixtureRequest, server: RunningModelServer) -> AsyncIterator[Callable[..., LLM]]:
    server.clear()
    made: list[LLM] = []

    def make(**changes: Any) -> LLM:
        changes = {"stream_replies": "off"} | changes
        made.append(create_llm(settings(request.param, changes.pop("url", server.url), **changes), SystemClock()))
        return made[-1]

    make.__name__ = request.param
    yield make
    for llm in made:
        await llm.aclose()


async def failure(llm: LLM, request: ModelRequest = REQUEST) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await llm.complete(request)
    return caught.value


async def spoilt_reply(server: RunningModelServer, llm: LLM, kind: str, request: ModelRequest = REQUEST) -> Completion:
    server.plan({"kind": kind})
    return await llm.complete(request)


in_both_forms = pytest.mark.parametrize(
    "request_of_form", [REQUEST, replace(REQUEST, on_delta=lambda _: None)], ids=["whole", "streamed"]
)
EMPTY_OR_MALFORMED = {"no_response", "malformed_reply"}


FAILURES = {
    "rate_limit": ("rate_limit", True),
    "server_error": ("internal", True),
    "bad_gateway": ("service_unavailable", True),
    "unavailable": ("service_unavailable", True),
    "overloaded": ("service_unavailable", True),
    "gateway_timeout": ("timeout", True),
    "unauthorized": ("authentication", False),
    "forbidden": ("authentication", False),
    "unknown_model": ("not_found", False),
    "too_large": ("context_window", False),
    "context_overflow": ("context_window", False),
    "content_policy": ("content_policy", False),
    "no_credits": ("out_of_credits", False),
    "bad_request": ("bad_request", False),
    "reset": ("service_unavailable", True),
    "cut": ("service_unavailable", True),
    "truncated": ("malformed_reply", True),
    "empty_body": ("malformed_reply", True),
    "html": ("malformed_reply", True),
    "not_an_object": ("malformed_reply", True),
    "error_as_reply": ("rate_limit", True),
    "empty_choices": ("no_response", True),
    "empty_text": ("no_response", True),
    "blank_text": ("no_response", True),
    "only_thoughts": ("no_response", True),
    "refusal": ("content_policy", False),
}
STREAMED_FAILURES = {
    **{kind: FAILURES[kind] for kind in ("rate_limit", "overloaded", "context_overflow", "reset", "cut", "truncated")},
    **{kind: FAILURES[kind] for kind in ("empty_body", "html", "empty_choices", "empty_text", "blank_text")},
    **{kind: FAILURES[kind] for kind in ("only_thoughts", "refusal")},
    "no_finish": ("malformed_reply", True),
}


@pytest.mark.parametrize(
    ("kind", "code", "retryable", "is_streamed"),
    [
        *((kind, *expected, False) for kind, expected in FAILURES.items()),
        *((kind, *expected, True) for kind, expected in STREAMED_FAILURES.items()),
    ],
)
async def test_one_attempt_and_the_right_class(
    server: RunningModelServer,
    make_llm: Callable[..., LLM],
    kind: str,
    code: str,
    retryable: bool,
    is_streamed: bool,
) -> None:
    llm, request = make_llm(), replace(REQUEST, on_delta=(lambda _: None) if is_streamed else None)
    received = server.counts()["received"]
    server.plan({"kind": kind})
    error = await failure(llm, request)
    # In a stream, litellm sees no difference between a reply in another form and one without anything in it.
    is_blurred = is_streamed and make_llm.__name__ == "litellm" and code in EMPTY_OR_MALFORMED
    assert error.code in (EMPTY_OR_MALFORMED if is_blurred else {code})
    assert (error.retryable, error.retry_after_seconds) == (retryable, None)
    assert server.counts()["received"] == received + 1
    assert (await llm.complete(request)).text == "Step 1."


async def test_retry_after_comes_with_each_refusal(server: RunningModelServer, make_llm: Callable[..., LLM]) -> None:
    server.plan(*({"kind": kind, "retry_after": "1.5"} for kind in ("rate_limit", "unavailable")))
    llm = make_llm()
    assert [(await failure(llm)).retry_after_seconds for _ in range(2)] == [1.5, 1.5]


async def test_the_providers_words_are_kept_and_the_key_is_not(
    server: RunningModelServer, make_llm: Callable[..., LLM]
) -> None:
    server.plan({"kind": "bad_request", "text": f"The key {KEY} sent too many bananas."})
    error = await failure(make_llm())
    assert error.provider_text == "The key <secret-hidden> sent too many bananas."
    assert error.last_error == "BadRequestError: The key <secret-hidden> sent too many bananas."


async def test_a_wrong_key(make_llm: Callable[..., LLM]) -> None:
    error = await failure(make_llm(api_key="sk-wrong"))
    assert (error.code, error.last_error) == ("authentication", "STATUS$ERROR_LLM_AUTHENTICATION")
    assert str(error).endswith("Check LLM_API_KEY.")


async def test_an_unknown_model(request: pytest.FixtureRequest, make_llm: Callable[..., LLM]) -> None:
    name = "claude-nobody-knows" if "anthropic" in request.node.callspec.id else "nobody-knows"
    error = await failure(make_llm(model=name))
    assert (error.code, error.provider_text) == ("not_found", f"The model `{name}` does not exist.")


@pytest.mark.parametrize("streams", ["on", "off"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(make_llm: Callable[..., LLM], status: int, streams: str) -> None:
    """Neither prompt nor key reaches the address that it names, on this host by another port and by another name."""
    asked: list[bytes] = []
    reached: list[bytes] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {there}/v1/messages\r\n"
        writer.write(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async def reach(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.read(10_000))
        writer.close()

    async with (
        await asyncio.start_server(redirect, "127.0.0.1", 0) as first,
        await asyncio.start_server(reach, "127.0.0.1", 0) as second,
    ):
        for host in ("127.0.0.1", "localhost"):
            there = f"http://{host}:{second.sockets[0].getsockname()[1]}"
            url = f"http://127.0.0.1:{first.sockets[0].getsockname()[1]}"
            await failure(make_llm(url=url, stream_replies=streams))
    assert (len(asked), reached) == (2, [])
    assert all(KEY.encode() in head for head in asked)


async def test_unreachable_addresses_are_named_and_no_timeouts(
    server: RunningModelServer, make_llm: Callable[..., LLM]
) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and nothing listens there
        silent = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        for url in (silent, "http://no-such-host.invalid", server.url.replace("http:", "https:")):
            error = await failure(make_llm(url=url))
            assert (error.code, error.retryable) == ("service_unavailable", True), url
            assert "timed out" not in str(error)
            assert url != silent or silent.rpartition(":")[2] in str(error)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("hang", "read_timeout"), ("hang_body", "read_timeout"), ("hang", "timeout"), ("drip", "timeout")],
)
async def test_each_phase_has_its_limit(
    server: RunningModelServer, make_llm: Callable[..., LLM], kind: str, limit: str
) -> None:
    await make_llm().complete(REQUEST)  # the first call of a process imports for longer than the limit
    before = server.counts()["disconnected"]
    server.plan({"kind": kind, "times": None})  # for ever
    began = SystemClock().monotonic()
    llm = make_llm(**{limit: 0.5})
    while server.counts()["disconnected"] == before:  # on a busy machine a call may end before it is sent
        error = await failure(llm)
        assert (error.code, error.retryable) == ("timeout", True)
    assert SystemClock().monotonic() - began >= 0.5


async def test_connecting_has_its_limit(make_llm: Callable[..., LLM]) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        error = await failure(make_llm(url=f"http://127.0.0.1:{full.getsockname()[1]}", connect_timeout=0.3))
        for each in waiting:
            each.close()
    assert (error.code, error.retryable) == ("timeout", True)


@in_both_forms
@pytest.mark.parametrize("kind", ["hang", "hang_body", "drip"])
async def test_a_cancelled_call_closes_its_socket(
    server: RunningModelServer, make_llm: Callable[..., LLM], kind: str, request_of_form: ModelRequest
) -> None:
    before = server.counts()["disconnected"]
    server.plan({"kind": kind})
    llm = make_llm()
    call = asyncio.create_task(llm.complete(request_of_form))
    await asyncio.to_thread(server.wait, in_flight=1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(server.wait, disconnected=before + 1)  # by itself the server would never stop
    assert (await llm.complete(request_of_form)).text == "Step 1."


@pytest.mark.parametrize(
    ("backend", "on_delta"),  # only the clock limits litellm's reads
    [
        pytest.param("anthropic", None, id="anthropic-whole"),
        pytest.param("openai", None, id="openai-whole", marks=pytest.mark.soak),
        pytest.param("anthropic", lambda _: None, id="anthropic-streamed", marks=pytest.mark.soak),
        pytest.param("openai", lambda _: None, id="openai-streamed", marks=pytest.mark.soak),
    ],
)
async def test_a_reply_without_end_is_given_up(
    server: RunningModelServer, backend: str, on_delta: Callable[[Delta], None] | None
) -> None:
    server.clear()
    server.plan({"kind": "flood"})
    before = server.counts()["disconnected"]
    llm = create_llm(settings(backend, server.url), SystemClock())
    with pytest.raises(ModelError, match="The reply has more than 64 MiB") as caught:
        await llm.complete(replace(REQUEST, on_delta=on_delta))
    assert (caught.value.code, caught.value.retryable) == ("malformed_reply", True)
    await asyncio.to_thread(server.wait, disconnected=before + 1)
    await llm.aclose()


@in_both_forms
async def test_malformed_calls_come_through_as_they_are(
    server: RunningModelServer, make_llm: Callable[..., LLM], request_of_form: ModelRequest
) -> None:
    llm = make_llm()

    async def calls(kind: str) -> tuple[ToolCall, ...]:
        return (await spoilt_reply(server, llm, kind, request_of_form)).tool_calls

    assert [call.arguments for call in await calls("bad_arguments")] == ['{"command": "ls']
    assert [call.name for call in await calls("unknown_tool")] == ["no_such_tool"]
    assert [call.id for call in await calls("duplicate_ids")] == ["call_same"] * 2
    assert [call.id for call in await calls("many_calls")] == [f"call_0001_{number}" for number in range(50)]


async def test_a_history_of_odd_names_and_ids_is_taken_back(make_llm: Callable[..., LLM]) -> None:
    def turn(name: str, call_id: str) -> tuple[Message, Message]:
        call = ToolCall(call_id, name, "{}")
        result = Message("tool", (TextPart("No such tool."),), tool_call_id=call_id, name=name)
        return Message("assistant", tool_calls=(call,)), result

    odd = "functions.execute_bash<|channel|>commentary"
    turns = [turn(odd, "functions.execute_bash:0"), turn("", "functions.execute_bash:0"), turn("x" * 200, "c1")]
    messages = (*REQUEST.messages, *(message for pair in turns for message in pair))
    reply = await make_llm().complete(replace(REQUEST, messages=messages))
    assert [call.name for call in reply.tool_calls] == ["finish"]


async def test_a_reply_under_a_wrong_content_type_is_read(
    server: RunningModelServer, make_llm: Callable[..., LLM]
) -> None:
    assert (await spoilt_reply(server, make_llm(), "wrong_type")).text == "Step 1."


@in_both_forms
async def test_a_cut_off_reply_says_so(
    server: RunningModelServer, make_llm: Callable[..., LLM], request_of_form: ModelRequest
) -> None:
    reply = await spoilt_reply(server, make_llm(), "length", request_of_form)
    assert (reply.text, reply.stop_reason) == ("This reply was cut", "length")


@in_both_forms
async def test_a_call_with_negative_counts_counts_as_we_estimate_it(
    server: RunningModelServer, make_llm: Callable[..., LLM], request_of_form: ModelRequest
) -> None:
    llm = make_llm(input_cost_per_token=1.0, output_cost_per_token=1.0)
    reply = await spoilt_reply(server, llm, "wrong_usage", request_of_form)
    assert 0 < reply.usage.prompt_tokens < 1_000
    assert 0 < reply.usage.completion_tokens < 100
    assert reply.cost_usd == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_an_address_that_serves_no_model_is_named(server: RunningModelServer) -> None:
    llm = create_llm(settings("openai", server.url + "/no/such/place"), SystemClock())
    missing = await failure(llm)
    await llm.aclose()
    assert missing.code == "not_found"
    assert f"(asked at {server.url}/no/such/place" in str(missing)
