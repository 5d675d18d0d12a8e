"""What a provider's headers say is left comes with the reply, through each backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.llm_requests import REQUEST, opened
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
async def test_remaining_quota_comes_with_a_reply(
    model_server: Callable[..., RunningModelServer], backend: Any, model: str, path: str, streams: bool
) -> None:
    # Two seconds' worth at once, and a tenth of a request comes back each second.
    server = model_server("--builtin", "say:hello", "--requests-per-minute", "6")
    request = replace(REQUEST, messages=REQUEST.messages[:2], on_delta=(lambda _: None) if streams else None)
    async with opened(model=model, backend=backend, base_url=server.url + path, api_key="secret-key") as llm:
        assert (await llm.complete(request)).quota_left == {"requests": 0}
