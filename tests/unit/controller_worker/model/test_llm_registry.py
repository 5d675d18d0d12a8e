"""The backend of a configuration, and configurations that are refused before a request is sent."""

from pathlib import Path
from typing import Any

import pytest

from broker.contract import LLMSpec
from broker.runtime.clock import SystemClock
from controller_worker.model.models import Models
from controller_worker.model.registry import create_llm, find_backend
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.openai_backend import OpenAICompatibleLLM
from controller_worker.providers.scripted import SILENT_MODEL


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
        *(
            (
                {"model": "a", "base_url": "http://h", "native_tool_calling": True, "rollout_api": api},
                f"With LLM_ROLLOUT_API={api}, replies are text, so the server cannot handle tools.",
            )
            for api in ("completions", "llama_cpp")
        ),
    ],
)
def test_unusable_configuration_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(LLMConfigError) as caught:
        create_llm(LLMConfig(**settings), SystemClock())
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ("azure/gpt-4o", "litellm"),
        ("bedrock/anthropic.claude-sonnet-5", "litellm"),
        ("anthropic/claude-sonnet-5", "anthropic"),
        ("deepseek/deepseek-chat", "litellm"),
        ("replay/events.jsonl", "replay"),
        ("scripted/turns.json", "scripted"),
    ],
)
async def test_only_the_openai_backend_has_own_endpoints(tmp_path: Path, model: str, backend: str) -> None:
    table = tmp_path / "models.toml"
    entry = f'model = "{model}"\nbase_url = "http://127.0.0.1:1"\nown_endpoints = ["http://engine"]'
    table.write_text(f"[llm.policy]\n{entry}\n")
    models = Models({"LLM_CONFIG": str(table)}, SystemClock())
    with pytest.raises(LLMConfigError, match=f"'policy' has own_endpoints, and its backend is '{backend}'"):
        await models.get_client(LLMSpec(model="policy"))


async def test_other_addresses_do_not_inherit_own_endpoints(tmp_path: Path) -> None:
    table = tmp_path / "models.toml"
    base = 'model = "openai/policy"\nbase_url = "http://127.0.0.1:1"\nown_endpoints = ["http://engine"]'
    other = 'model = "anthropic/claude-sonnet-5"\nbase_url = "http://127.0.0.1:2"\napi_key = "k"'
    table.write_text(f"[llm]\n{base}\n[llm.other]\n{other}\n")
    models = Models({"LLM_CONFIG": str(table)}, SystemClock())
    for name, patterns in (("other", ()), (SILENT_MODEL, ()), (None, ("http://engine",))):
        _, config = await models.get_client(LLMSpec(model=name))
        assert config.own_endpoints == patterns
    await models.aclose()


async def test_a_router_chooses_no_entry_with_own_endpoints(tmp_path: Path) -> None:
    table = tmp_path / "models.toml"
    base = 'model = "openai/policy"\nbase_url = "http://127.0.0.1:1"'
    router = 'router = {kind = "multimodal", secondary = "policy"}'
    table.write_text(f'[llm]\n{base}\n[llm.auto]\n{router}\n[llm.policy]\nown_endpoints = ["http://engine"]\n')
    models = Models({"LLM_CONFIG": str(table)}, SystemClock())
    with pytest.raises(LLMConfigError, match="router chooses 'policy'"):
        await models.get_client(LLMSpec(model="auto"))


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
