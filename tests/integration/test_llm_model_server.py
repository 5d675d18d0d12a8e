"""The model server itself: it must say what the providers say, or the tests that rest on it mean nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart
from tests.model_server.running_server import RunningModelServer

if TYPE_CHECKING:  # every process of the tests reads this file, and few of them run it
    import anthropic
    import openai

pytest_plugins = ("tests.model_server.fixtures",)

ROOT = Path(__file__).parents[2]
USER: Any = [{"role": "user", "content": "Grüß Gott"}]
SCRIPT = {
    "turns": [
        {
            "text": "I will greet: Grüß Gott, 你好.",
            "thinking": "They are polite.",
            "tool_calls": [{"name": "execute_bash", "arguments": {"command": "echo 你好"}}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "cache_read_tokens": 60, "cache_write_tokens": 30},
        },
        {"text": "Done."},
    ]
}


@pytest.fixture(scope="module")
def server(
    shared_model_server: Callable[..., RunningModelServer], tmp_path_factory: pytest.TempPathFactory
) -> RunningModelServer:
    path = tmp_path_factory.mktemp("scripts") / "greet.json"
    path.write_text(json.dumps(SCRIPT))
    return shared_model_server("--script", str(path), "--model", "m", "--model", "n")


@pytest.fixture
async def claude(server: RunningModelServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    server.clear()
    async with anthropic.AsyncAnthropic(api_key="k", base_url=server.url, max_retries=0) as client:
        yield client


@pytest.fixture
async def gpt(server: RunningModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    server.clear()
    async with openai.AsyncOpenAI(api_key="k", base_url=server.url + "/v1", max_retries=0) as client:
        yield client


async def test_the_turn_is_the_number_of_replies_so_far(gpt: openai.AsyncOpenAI) -> None:
    said = []
    for replies in range(4):
        messages: Any = USER + [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}] * replies
        message = (await gpt.chat.completions.create(model="n", messages=messages)).choices[0].message
        said.append(message.content or [call.id for call in message.tool_calls or ()])
    assert said == [SCRIPT["turns"][0]["text"], "Done.", ["call_0003_0"], ["call_0004_0"]]


async def test_faults_fall_by_turn_and_number(server: RunningModelServer, gpt: openai.AsyncOpenAI) -> None:
    import openai

    later: Any = [*USER, {"role": "assistant", "content": "x"}, *USER]
    server.plan({"kind": "unavailable", "turn": 1, "times": 2}, {"kind": "none"}, {"kind": "rate_limit"})
    outcomes = []
    for messages in (USER, later, later, USER, USER):
        try:
            await gpt.chat.completions.create(model="m", messages=messages)
            outcomes.append(200)
        except openai.APIStatusError as error:
            outcomes.append(error.status_code)
    assert outcomes == [200, 503, 503, 429, 200]
    assert [request["fault"] for request in server.requests()] == [None, *["unavailable"] * 2, "rate_limit", None]
    assert [request["outcome"] for request in server.requests()] == ["answered", *["refused"] * 3, "answered"]


async def test_models_are_listed_and_others_are_not_known(gpt: openai.AsyncOpenAI) -> None:
    import openai

    assert [model.id async for model in gpt.models.list()] == ["m", "n"]
    with pytest.raises(openai.NotFoundError):
        await gpt.chat.completions.create(model="o", messages=USER)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "tool", "content": "x", "tool_call_id": "t1"}], "must be a response to a preceding message"),
        ([{"role": "assistant", "tool_calls": [{"id": "t1"}]}, *USER], "did not have response messages: t1"),
        ([{"role": "assistant", "tool_calls": [{"id": "t1"}]}], "have no response messages"),
        ([{}], "malformed: KeyError"),
    ],
)
async def test_requests_that_providers_refuse_are_refused(
    gpt: openai.AsyncOpenAI, messages: Any, complaint: str
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=complaint):
        await gpt.chat.completions.create(model="m", messages=messages)


async def test_sampling_is_refused_by_the_later_version(claude: anthropic.AsyncAnthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="temperature: Extra inputs are not permitted"):
        await claude.messages.create(model="m", max_tokens=9, messages=USER, extra_body={"temperature": 1.0})


async def test_errors_of_a_script_become_faults(
    model_server: Callable[..., RunningModelServer], tmp_path: Path
) -> None:
    import openai

    error = {"code": "rate_limit", "times": 1, "text": "not so fast", "retry_after_seconds": 3}
    script = tmp_path / "errors.json"
    script.write_text(json.dumps({"turns": [{"text": "at last", "error": error}]}))
    server = model_server("--script", str(script))
    async with openai.AsyncOpenAI(api_key="k", base_url=server.url + "/v1", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="not so fast") as caught:
            await client.chat.completions.create(model="m", messages=USER)
        assert caught.value.response.headers["retry-after"] == "3"
        assert (await client.chat.completions.create(model="m", messages=USER)).choices[0].message.content == "at last"


async def test_two_hundred_calls_at_once_and_all_of_them_cancelled(
    model_server: Callable[..., RunningModelServer],
) -> None:
    server = model_server("--faults", '[{"kind": "hang", "times": null}]', "--records", "0")
    llm = create_llm(LLMConfig.create(model="my-own", base_url=server.url + "/v1"), SystemClock())
    request = ModelRequest((Message("user", (TextPart("hi"),)),), (), "c1", 0, "/w")
    calls = [asyncio.create_task(llm.complete(request)) for _ in range(200)]
    assert (await asyncio.to_thread(server.wait, in_flight=200))["received"] == 200
    for call in calls:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
    assert (await asyncio.to_thread(server.wait, disconnected=200))["in_flight"] == 0
    await llm.aclose()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--builtin", "nonsense"], "there is no built-in script 'nonsense'"),
        (["--script", "nowhere.json"], "The model script 'nowhere.json' cannot be read"),
        (["--faults", "{"], "Expecting property name"),
    ],
)
def test_bad_arguments_are_told(arguments: list[str], complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model_server", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
