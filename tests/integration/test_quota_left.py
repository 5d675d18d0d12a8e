"""What a provider's headers say is left comes with the reply, through each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import Delta, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)


@pytest.mark.parametrize(
    ("backend", "model", "path", "streams"),
    [
        ("openai", "openai/m", "/v1", False),
        ("openai", "openai/m", "/v1", True),
        ("anthropic", "anthropic/m", "", False),
        ("anthropic", "anthropic/m", "", True),
        pytest.param("litellm", "openai/m", "/v1", False, marks=pytest.mark.soak),
    ],
)
async def test_what_is_left(
    model_server: Callable[..., RunningModelServer], backend: Any, model: str, path: str, streams: bool
) -> None:
    # Two seconds' worth at once, and a tenth of a request comes back each second.
    server = model_server("--builtin", "say:hello", "--requests-per-minute", "6")
    llm = create_llm(
        LLMConfig.create(model=model, backend=backend, base_url=server.url + path, api_key="secret-key"), SystemClock()
    )

    def forget(_: Delta) -> None:
        return

    request = ModelRequest(
        messages=[Message("user", (TextPart("Hi"),))],
        tools=(),
        conversation_id="conversation-1",
        iteration=0,
        workspace="/workspace",
        on_delta=forget if streams else None,
    )
    try:
        assert (await llm.complete(request)).quota_left == {"requests": 0}
    finally:
        await llm.aclose()
