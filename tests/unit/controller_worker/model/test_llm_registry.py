"""The backend of a configuration, and configurations that are refused before a request is sent."""

from pathlib import Path
from typing import Any

import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm, find_backend
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.openai_backend import OpenAICompatibleLLM


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({"model": "scripted/a.json"}, "scripted"),
        ({"model": "claude-sonnet-5"}, "anthropic"),
        ({"model": "anthropic/claude-sonnet-5"}, "anthropic"),
        ({"model": "claude-sonnet-5", "base_url": "http://127.0.0.1:1"}, "anthropic"),
        ({"model": "claude-sonnet-5", "backend": "litellm"}, "litellm"),
        ({"model": "claude-sonnet-5", "custom_llm_provider": "bedrock"}, "litellm"),
        ({"model": "openrouter/anthropic/claude-sonnet-4"}, "litellm"),
        ({"model": "bedrock/anthropic.claude-sonnet-5"}, "litellm"),
        ({"model": "gpt-4o"}, "litellm"),
        ({"model": "my-own"}, "litellm"),
        ({"model": "my-own", "base_url": "http://127.0.0.1:1"}, "openai"),
        ({"model": "openai/my-own", "base_url": "http://127.0.0.1:1"}, "openai"),
        ({"model": "hosted_vllm/Qwen/Qwen3-Coder", "base_url": "http://127.0.0.1:1"}, "openai"),
        ({"model": "Qwen/Qwen3-Coder", "base_url": "http://127.0.0.1:1"}, "openai"),
        ({"model": "my-own", "base_url": "http://127.0.0.1:1", "custom_llm_provider": "openai"}, "openai"),
        ({"model": "my-own", "base_url": "http://127.0.0.1:1", "custom_llm_provider": "azure"}, "litellm"),
        ({"model": "my-own", "base_url": "http://127.0.0.1:1", "backend": "litellm"}, "litellm"),
        ({"model": "openai/responses/gpt-5", "base_url": "http://127.0.0.1:1"}, "litellm"),
        ({"model": "openai/gpt-5-codex", "base_url": "http://127.0.0.1:1"}, "litellm"),
        ({"model": "openai/gpt-5-codex", "base_url": "http://127.0.0.1:1", "backend": "openai"}, "openai"),
        ({"model": "openai/gpt-5", "base_url": "http://127.0.0.1:1"}, "openai"),
        ({"model": "gpt-5-codex", "base_url": "http://127.0.0.1:1"}, "openai"),
        ({"model": "replay/events.jsonl"}, "replay"),
        ({"model": "azure/gpt-4o", "base_url": "http://127.0.0.1:1"}, "litellm"),
        ({"model": "deepseek/deepseek-chat", "base_url": "http://127.0.0.1:1"}, "litellm"),
        ({"model": "openrouter/qwen/qwen3-coder", "base_url": "http://127.0.0.1:1"}, "litellm"),
    ],
)
def test_backends(settings: dict[str, Any], backend: str) -> None:
    assert find_backend(LLMConfig(**settings)) == backend


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model": "gpt-4o", "backend": "scripted"}, "The model 'gpt-4o' is not a script."),
        ({"model": "my-own", "backend": "openai"}, "An OpenAI-compatible server has no address. Set LLM_BASE_URL."),
        (
            {"model": "my-own", "base_url": "http://127.0.0.1:1", "reasoning_effort": "high", "drop_params": False},
            "The model 'my-own' does not support reasoning_effort. Unset it.",
        ),
        (
            {"model": "claude-sonnet-5", "api_key": "k", "temperature": 0.5, "drop_params": False},
            "The model 'claude-sonnet-5' does not support temperature. Unset it.",
        ),
    ],
)
def test_unusable_configuration_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(LLMConfigError) as caught:
        create_llm(LLMConfig(**settings), SystemClock())
    assert complaint in str(caught.value)


def test_models_of_openhands_are_its_proxys() -> None:
    llm = create_llm(LLMConfig.create(model="openhands/claude-sonnet-4", api_key="k"), SystemClock())
    assert isinstance(llm, OpenAICompatibleLLM)
    assert llm._transport.base_url == "https://llm-proxy.app.all-hands.dev"
    assert llm._parameters["model"] == "claude-sonnet-4"


@pytest.mark.parametrize("backend", ["anthropic", "openai"])
@pytest.mark.parametrize("name", ["missing", "no-certificates"])
def test_certificates_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    (tmp_path / "no-certificates").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
    config = LLMConfig(model="my-own", base_url="https://127.0.0.1:1", api_key="k", backend=backend)
    with pytest.raises(LLMConfigError, match=r"client of the model 'my-own' cannot be created: .* If SSL_CERT_FILE"):
        create_llm(config, SystemClock())
