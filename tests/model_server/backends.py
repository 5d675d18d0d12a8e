"""Every real client, pointed at a model server: the same settings for all tests that go through all of them."""

from typing import Any

from controller_worker.providers.config import LLMConfig

BACKENDS = ("anthropic", "openai", "litellm")
KEY = "sk-the-right-key"
SERVER_ARGUMENTS = ("--key", KEY, "--model", "test-model", "--model", "claude-test")
"""What a server is started with that takes no other key and knows no other model."""


def settings(backend: str, url: str, **changes: Any) -> LLMConfig:
    """Return the settings of a backend for a server."""
    if backend == "anthropic":
        address = {"model": "claude-test", "base_url": url}
    else:
        address = {"model": "test-model", "base_url": url + "/v1", "backend": backend, "native_tool_calling": True}
    return LLMConfig.create(**address | {"api_key": KEY} | changes)
