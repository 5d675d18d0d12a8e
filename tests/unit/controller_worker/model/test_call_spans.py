"""Spans of model calls: the published names of attributes, operations and providers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as published

from broker.runtime.tracing import CONTENT
from controller_worker.model.call_spans import PROVIDERS, UNKNOWN, name_provider
from controller_worker.providers.config import LLMConfig

ROOT = Path(__file__).parents[4]
DEPRECATED = {"gen_ai.completion", "gen_ai.prompt", "gen_ai.system"}
NAMES = {value for name, value in vars(published).items() if name.startswith("GEN_AI_")} - DEPRECATED


def test_all_names_of_attributes_are_published() -> None:
    files = [
        file for folder in ("broker", "controller_worker", "tool_worker") for file in (ROOT / folder).rglob("*.py")
    ]
    used = {name for file in files for name in re.findall(r'"(gen_ai\.[a-z_.]+)"', file.read_text())}
    assert used >= CONTENT | {"gen_ai.provider.name", "gen_ai.operation.name"}
    assert used <= NAMES


def test_names_of_providers_and_operations_are_published() -> None:
    assert set(PROVIDERS.values()) <= {one.value for one in published.GenAiProviderNameValues}
    operations = {one.value for one in published.GenAiOperationNameValues}
    assert {"chat", "invoke_agent", "execute_tool"} <= operations


@pytest.mark.parametrize(
    ("model", "custom", "expected"),
    [
        ("anthropic/claude-sonnet-4-5", None, "anthropic"),
        ("claude-sonnet-4-5", None, "anthropic"),
        ("gpt-4o", None, "openai"),
        ("azure/mine", None, "azure.ai.openai"),
        ("bedrock/anthropic.claude-v2", None, "aws.bedrock"),
        ("vertex_ai/gemini-2.5-pro", None, "gcp.vertex_ai"),
        ("mine", "xai", "x_ai"),
        ("scripted/file.json", None, "scripted"),
    ],
)
def test_provider_has_its_published_name(model: str, custom: str | None, expected: str) -> None:
    assert name_provider(LLMConfig(model=model, custom_llm_provider=custom)) == expected


def test_provider_of_unusable_settings_is_unknown() -> None:
    assert name_provider(None) == UNKNOWN
