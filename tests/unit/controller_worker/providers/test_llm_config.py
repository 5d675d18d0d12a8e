"""LLMConfig: names, defaults, sources of values, and refused values."""

import logging
from typing import Any

import pydantic
import pytest

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError


def test_every_field_is_read_from_the_environment() -> None:
    env = {
        "LLM_MODEL": "openai/local",
        "LLM_API_KEY": "sk-1",
        "LLM_BASE_URL": "http://127.0.0.1:8000/v1",
        "LLM_NUM_RETRIES": "3",
        "LLM_TIMEOUT": "12.5",
        "LLM_TEMPERATURE": "0.7",
        "LLM_DROP_PARAMS": "false",
        "LLM_BACKEND": "litellm",
        "LLM_TOP_K": "",
        "PATH": "/bin",
    }
    config = LLMConfig.from_env(env)
    assert config.api_key is not None
    assert config.api_key.get_secret_value() == "sk-1"
    assert (config.model, config.base_url, config.num_retries) == ("openai/local", "http://127.0.0.1:8000/v1", 3)
    assert (config.timeout, config.temperature, config.drop_params) == (12.5, 0.7, False)
    assert (config.backend, config.top_k, config.total_timeout_seconds) == ("litellm", None, 12.5)


def test_litellm_variables_stand_in_for_the_address_only() -> None:
    env = {"LITELLM_MODEL": "gpt-4o", "LITELLM_API_KEY": "a", "LLM_API_KEY": "b", "LITELLM_TIMEOUT": "1"}
    config = LLMConfig.from_env(env)
    assert config.model == "gpt-4o"
    assert config.api_key is not None
    assert config.api_key.get_secret_value() == "b"
    assert config.timeout is None


def test_overrides_win_and_none_does_not() -> None:
    config = LLMConfig.from_env({"LLM_MODEL": "gpt-4o", "LLM_SEED": "1"}, model="gpt-5", seed=None)
    assert (config.model, config.seed) == ("gpt-5", 1)


@pytest.mark.parametrize("env", [{}, {"LLM_MODEL": "  "}, {"LLM_API_KEY": "k"}])
def test_a_missing_model_names_what_to_set(env: dict[str, str]) -> None:
    with pytest.raises(LLMConfigError) as caught:
        LLMConfig.from_env(env)
    assert caught.value.code == "llm_config"
    assert caught.value.retryable is False
    for name in ("LLM_MODEL", "LLM_API_KEY", "LLM_BASE_URL"):
        assert name in str(caught.value)


def test_a_key_is_one_line() -> None:
    config = LLMConfig.create(model="gpt-5", api_key="sk-from-a-file\n")
    assert config.secrets == ("sk-from-a-file",)
    with pytest.raises(LLMConfigError, match=r"api_key \(LLM_API_KEY\): a key cannot contain line breaks") as caught:
        LLMConfig.create(model="gpt-5", api_key="sk-one\nsk-two")
    assert "sk-" not in str(caught.value)


def test_a_bad_value_names_its_variable() -> None:
    with pytest.raises(LLMConfigError) as caught:
        LLMConfig.from_env({"LLM_MODEL": "gpt-4o", "LLM_NUM_RETRIES": "many", "LLM_TOP_P": "2"})
    assert "num_retries (LLM_NUM_RETRIES)" in str(caught.value)
    assert "top_p (LLM_TOP_P)" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000/v1", "models", "ftp://models/v1", "http://"),
        *("http://host:99999/v1", "http://host:port/v1", "http://[::1/v1", "http://my models/v1"),
    ],
)
def test_an_address_that_is_none_is_told_at_once(url: str) -> None:
    with pytest.raises(LLMConfigError) as caught:
        LLMConfig.from_env({"LLM_MODEL": "gpt-4o", "LLM_BASE_URL": url})
    assert str(caught.value) == (
        "The model's settings cannot be used: base_url (LLM_BASE_URL): "
        "this is not an address; write one such as https://host/v1"
    )


def test_no_error_shows_the_key() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        LLMConfig.model_validate({"model": "gpt-4o", "api_key": "sk-very-secret", "unheard_of": 1})
    assert "sk-very-secret" not in str(caught.value)
    assert "sk-very-secret" not in repr(LLMConfig.create(model="gpt-4o", api_key="sk-very-secret"))


def test_a_misspelt_variable_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LLMConfig.from_env({"LLM_MODEL": "gpt-4o", "LLM_TEMPRATURE": "1", "LLM_LOG_COMPLETIONS": "true"})
    assert [record.getMessage() for record in caplog.records] == [
        "The environment variable LLM_LOG_COMPLETIONS has no effect: replies are in the log, prompts are never stored.",
        "The environment variable LLM_TEMPRATURE is not known; did you mean LLM_TEMPERATURE?",
    ]


OF_OPENHANDS = "is a setting of OpenHands that is not supported"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(
            ({field: 1}, f"settings cannot be used: '{field}' is not a model setting; did you mean '{nearest}'\\?$")
            for field, nearest in (
                ("modle", "model"),
                ("temprature", "temperature"),
                ("max_output_token", "max_output_tokens"),
            )
        ),
        (
            {"log_completions": True},
            f"'log_completions' {OF_OPENHANDS}: replies are in the log, prompts are never stored$",
        ),
        ({"custom_tokenizer": True}, f"'custom_tokenizer' {OF_OPENHANDS}: tokens are estimated without one$"),
        ({"for_routing": True}, f"'for_routing' {OF_OPENHANDS}: a router names its profiles$"),
        ({"batch": {"gather_second": 1}}, r"batch \(LLM_BATCH\): 'gather_second' .*; did you mean 'gather_seconds'\?"),
        ({"fallbacks": [{"use": "x", "onn": []}]}, r"fallbacks.0 \(LLM_FALLBACKS\): 'onn' .*; did you mean 'on'\?"),
        (
            {"router": {"kind": "rules", "rules": [{"use": "x", "min_token": 1}]}},
            r"router.rules.0 \(LLM_ROUTER\): 'min_token' .*; did you mean 'min_tokens'\?",
        ),
        *(
            ({"completion_kwargs": further}, f"'{name}' comes from the conversation")
            for name in ("tools", "system", "messages", "stream")
            for further in ({name: []}, {"extra_body": {name: []}})
        ),
        ({"completion_kwargs": {"extra_body": 5}}, "'extra_body' must be a table"),
        ({"completion_kwargs": {"extra_headers": 5}}, "'extra_headers' must be a table"),
    ],
)
def test_unknown_setting_is_refused_and_suggests_another(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(LLMConfigError, match=said):
        LLMConfig.create(model="gpt-4o", **settings)


def test_azure_gets_an_api_version() -> None:
    assert LLMConfig(model="azure/gpt-4o").api_version == "2024-12-01-preview"
    assert LLMConfig(model="azure/gpt-4o", api_version="x").api_version == "x"
    assert LLMConfig(model="gpt-4o").api_version is None


@pytest.mark.parametrize(
    ("fields", "is_sent"),
    [
        ({"model": "gpt-5"}, True),
        ({"model": "openai/o3"}, True),
        ({"model": "gpt-5", "base_url": "https://api.openai.com/v1"}, True),
        ({"model": "gpt-5", "base_url": "https://api.openai.com.evil.org/v1"}, False),
        ({"model": "gpt-5", "base_url": "http://127.0.0.1:8000/v1"}, False),
        ({"model": "gemini/gemini-3-pro"}, False),
        ({"model": "gpt-5", "prompt_cache_key": False}, False),
    ],
)
def test_cache_key_goes_only_to_openai_unless_set(fields: dict[str, Any], is_sent: bool) -> None:
    assert LLMConfig.create(**fields).sends_cache_key is is_sent


@pytest.mark.parametrize(
    ("pattern", "url", "is_allowed"),
    [
        ("http://127.0.0.1:*", "http://127.0.0.1:4711/v1", True),
        ("https://*.tunnel.example", "https://a.b.tunnel.example/v1", True),
        ("https://*.tunnel.example", "https://tunnel.example/v1", False),
        ("https://*.tunnel.example", "https://eviltunnel.example/v1", False),
        ("https://*.tunnel.example", "https://a.tunnel.example:8443/v1", False),
        ("http://engine", "http://engine:80/v1", True),
        ("http://engine", "http://ENGINE/v1", True),
        ("http://engine:*", "http://engine@evil.example/v1", False),
        ("http://engine:*", "http://user:pass@engine/v1", False),
        ("http://engine:*", "http://engine.evil.example/v1", False),
        ("http://engine:*", "http://engine:99999/v1", False),
        ("http://engine:*", "http://engine:0/v1", False),
        ("http://engine", "http://engine:0/v1", False),
        ("http://engine:*", "http://eng\tine/v1", False),
        ("http://engine:*", "\nhttp://engine/v1", False),
        ("http://engine:*", "http://engine/v1 x", False),
        ("https://*.tunnel.example", "https://evil.example\\.tunnel.example/v1", False),
        ("https://*.tunnel.example", "https://evil.example%2f.tunnel.example/v1", False),
        ("https://*.tunnel.example", "https://evil.example\u2100.tunnel.example/v1", False),
        ("https://*.tunnel.example", "https://evil.example;.tunnel.example/v1", False),
    ],
)
def test_own_endpoint_must_match_scheme_host_and_port(pattern: str, url: str, is_allowed: bool) -> None:
    config = LLMConfig.create(model="openai/policy", base_url="http://shared/v1", own_endpoints=[pattern])
    if is_allowed:
        assert config.with_endpoint(url, "").base_url == url
    else:
        with pytest.raises(LLMConfigError, match="own_endpoints"):
            config.with_endpoint(url, "")


@pytest.mark.parametrize("field", ["batch", "count_tokens", "router"])
def test_own_endpoints_refuse_calls_to_another_address(field: str) -> None:
    value = {"kind": "rules", "rules": [{"use": "other"}]} if field == "router" else True
    with pytest.raises(LLMConfigError, match=f"own_endpoints cannot have {field}"):
        LLMConfig.create(model="openai/policy", own_endpoints=["http://engine"], **{field: value})


@pytest.mark.parametrize("pattern", ["*", "http://*", "127.0.0.1:*", "http://a*b", "http://host/path", "ftp://host"])
def test_patterns_of_own_endpoints_are_checked(pattern: str) -> None:
    with pytest.raises(LLMConfigError, match="own_endpoints"):
        LLMConfig.create(model="openai/policy", own_endpoints=[pattern])


@pytest.mark.parametrize("name", ["", "a b", "Authorization", "content-type", "X\r\nY", "Host", "X-Ä"])
def test_session_header_must_be_a_further_header(name: str) -> None:
    with pytest.raises(LLMConfigError, match="session_header"):
        LLMConfig.create(model="gpt-5", session_header=name)
