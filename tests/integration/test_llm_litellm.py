"""Behaviour of the litellm backend alone; its Chat Completions requests are in `test_llm_chat`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controller_worker.providers.config import drop_provider_addresses
from controller_worker.providers.errors import AuthenticationError, ModelError, OutOfCreditsError
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart
from controller_worker.providers.model_table import list_providers
from tests.integration.llm_requests import REQUEST, answer, opened
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "bash:3")


async def test_another_provider_than_openai(server: RunningModelServer) -> None:
    settings = {"model": "deepseek/deepseek-chat", "api_key": "k", "base_url": server.url + "/v1"}
    reply = await answer(server, settings)
    assert reply.text == "Step 2."
    assert server.requests()[0]["body"]["model"] == "deepseek-chat"


async def test_another_way_to_a_provider_keeps_its_words(server: RunningModelServer) -> None:
    server.plan({"kind": "no_credits"})
    async with opened(model="deepseek/deepseek-chat", api_key="k", base_url=server.url + "/v1") as llm:
        with pytest.raises(OutOfCreditsError) as caught:
            await llm.complete(REQUEST)
    assert caught.value.provider_text == "You exceeded your current quota."


@pytest.mark.parametrize("model", ["openai/gpt-4o", "gpt-4o", "gemini/gemini-2.0-flash"])
async def test_without_a_key_nobody_waits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    async with opened(model=model, backend="litellm") as llm:
        with pytest.raises(AuthenticationError, match=r"Check LLM_API_KEY\.$") as caught:
            await llm.complete(REQUEST)
    assert "Traceback" not in str(caught.value)


async def test_no_image_is_fetched_from_the_controllers_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(await reader.read(1024))
        writer.close()

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    inner = await asyncio.start_server(record, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{inner.sockets[0].getsockname()[1]}"
    picture = ImagePart(f"{address}/picture.png")
    request = replace(REQUEST, messages=(Message("user", (TextPart("What is this?"), picture)),))
    settings = {"model": "gemini/gemini-2.0-flash", "api_key": "k", "disable_vision": False}
    async with inner, opened(**settings, base_url=address) as llm:
        with pytest.raises(ModelError, match="Unable to fetch image"):
            await llm.complete(request)
    assert connections == []


def test_importing_litellm_is_quiet(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DECKHANDS_TEST_LEAK=1\n")
    program = (
        "import os, socket, sys\n"
        "def refuse(*_): raise AssertionError('litellm reached for the network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from controller_worker.providers.config import LLMConfig\n"
        "from controller_worker.model.registry import create_llm\n"
        "from broker.runtime.clock import SystemClock\n"
        "create_llm(LLMConfig(model='gpt-4o', api_key='k'), SystemClock())\n"
        "assert 'litellm' in sys.modules and 'DECKHANDS_TEST_LEAK' not in os.environ\n"
    )
    env, run = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_addresses_that_litellm_reads_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ("AIHUBMIX_API_BASE", "GROQ_API_BASE", "OPENAI_BASE_URL", "OLLAMA_API_BASE")
    others = ("BILLING_API_URL", "DECKHANDS_BASE_URL", "LITELLM_BASE_URL", "LLM_BASE_URL", "SENTRY_BASE_URL")
    for name in (*read, *others):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert drop_provider_addresses(list_providers()) == sorted(read)
    assert not set(read) & set(os.environ)
    assert set(others) < set(os.environ)
