"""Context editing and compaction: the request fields of the settings, refused settings, and off by default."""

from typing import Any

import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.context_management import add_betas
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.parameters import make_chat_parameters, make_messages_parameters

CLAUDE = "claude-sonnet-4-5"


def config(**fields: Any) -> LLMConfig:
    return LLMConfig.create(model=CLAUDE, **fields)


def test_they_are_off() -> None:
    assert "context_management" not in make_messages_parameters(config(), CLAUDE)
    assert add_betas({}, config().context_management) == {}


def test_true_asks_for_the_values_of_the_provider() -> None:
    spec = {"compact": True, "clear_tool_uses": True, "clear_thinking": True}
    fields = make_messages_parameters(config(context_management=spec), CLAUDE)
    kinds = ["clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"]
    assert fields["context_management"] == {"edits": [{"type": kind} for kind in kinds]}


def test_the_environment_holds_them_as_json() -> None:
    text = '{"clear_thinking": {"keep_turns": "all"}, "clear_tool_uses": {"trigger_tool_uses": 9, "keep": 0}}'
    found = LLMConfig.from_env({"LLM_MODEL": CLAUDE, "LLM_CONTEXT_MANAGEMENT": text}).context_management
    assert found is not None
    assert found.fields["context_management"]["edits"] == [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": 9},
            "keep": {"type": "tool_uses", "value": 0},
        },
    ]


def test_the_beta_header_keeps_what_else_it_names() -> None:
    spec = config(context_management={"compact": True, "clear_tool_uses": True}).context_management
    betas = "context-management-2025-06-27,compact-2026-01-12"
    assert add_betas({"a": "b"}, spec) == {"a": "b", "anthropic-beta": betas}
    assert add_betas({"Anthropic-Beta": "x, compact-2026-01-12"}, spec) == {
        "anthropic-beta": "x,compact-2026-01-12,context-management-2025-06-27"
    }


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({}, "name clear_thinking, clear_tool_uses or compact"),
        ({"compact": False}, "name clear_thinking, clear_tool_uses or compact"),
        ({"compact": {"trigger_tokens": 1000}}, "context_management.compact.trigger_tokens"),
        ({"compact": {"trigger": 1}}, "'trigger' is not part of it; did you mean 'trigger_tokens'?"),
        ({"compcat": True}, "'compcat' is not part of it; did you mean 'compact'?"),
        ({"clear_thinking": {"keep_turns": 0}}, "set 1 or more"),
        ({"clear_tool_uses": {"trigger_tokens": 1, "trigger_tool_uses": 1}}, "not both"),
    ],
)
def test_invalid_settings_are_named(spec: dict[str, Any], complaint: str) -> None:
    with pytest.raises(LLMConfigError, match="LLM_CONTEXT_MANAGEMENT") as caught:
        config(context_management=spec)
    assert complaint in str(caught.value)


def test_a_model_that_takes_none_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"model": "openai/gpt-4o", "context_management": {"compact": True}}
    assert "context_management" not in make_chat_parameters(LLMConfig.create(**settings), "gpt-4o")
    assert "does not support context_management" in caplog.text
    with pytest.raises(LLMConfigError, match="does not support context_management"):
        make_chat_parameters(LLMConfig.create(**settings, drop_params=False), "gpt-4o")


def test_a_claude_by_another_protocol_takes_none_either(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"backend": "openai", "base_url": "http://127.0.0.1:1/v1", "api_key": "k"}
    create_llm(config(context_management={"compact": True}, **settings), SystemClock())
    assert "does not support context_management" in caplog.text
