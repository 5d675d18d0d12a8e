"""Prices and limits from litellm's table, and features by name."""

import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import CallUsage
from controller_worker.providers.model_features import find_features, normalise_name
from controller_worker.providers.model_table import (
    CallPricing,
    ModelRow,
    Prices,
    _row,
    compute_call_cost_usd,
    compute_cost_usd,
    look_up,
)
from controller_worker.providers.openai_backend import COST_HEADER
from controller_worker.providers.parameters import make_chat_parameters, make_messages_parameters
from controller_worker.providers.wires.reply import parse_reported_usd


@pytest.mark.parametrize(
    ("prices", "usage", "usd"),
    [
        # 100 * 3 + 600 * 0.3 + 300 * 3.75 + 100 * 15 = 300 + 180 + 1125 + 1500 microdollars
        (Prices(3e-6, 15e-6, cache_read=0.3e-6, cache_write=3.75e-6), CallUsage(1_000, 100, 600, 300), 3_105e-6),
        (Prices(2e-6, 1e-6), CallUsage(1_000, cache_read_tokens=1_000), 2e-3),
        (Prices(1e-6, 1e-6, cache_read=0.5e-6), CallUsage(10, cache_read_tokens=50, cache_write_tokens=50), 5e-6),
    ],
    ids=["every token once", "cache without its own price costs like input", "more cached than sent"],
)
def test_a_cost_counts_every_token_once(prices: Prices, usage: CallUsage, usd: float) -> None:
    assert compute_cost_usd(prices, usage) == pytest.approx(usd)


def cost_usd(model: str, usage: CallUsage, **pricing: Any) -> float | None:
    row = look_up(model)
    assert row is not None
    return row.cost_usd(usage, CallPricing(**pricing))


@pytest.mark.parametrize(
    ("model", "usage", "pricing", "usd"),
    [
        ("exa_ai/search", CallUsage(1), {}, None),  # priced by the number of results
        ("gemini/gemini-2.5-pro", CallUsage(200_000), {}, 0.25),
        ("gemini/gemini-2.5-pro", CallUsage(200_001), {}, 0.5000025),
        ("dashscope/qwen-flash", CallUsage(1_000, 10), {}, 1_000 * 5e-8 + 10 * 4e-7),
        ("dashscope/qwen-flash", CallUsage(300_000), {}, 300_000 * 2.5e-7),
        ("gpt-5", CallUsage(1_000, 100), {"service_tier": "default"}, 2.25e-3),
        ("gpt-5", CallUsage(1_000, 100), {"service_tier": "flex"}, 1.125e-3),
        ("gpt-5", CallUsage(1_000, 100), {"service_tier": "priority"}, 4.5e-3),
        ("claude-sonnet-4-5", CallUsage(1_000, cache_write_tokens=1_000), {}, 1_000 * 3.75e-6),
        (
            "claude-sonnet-4-5",
            CallUsage(1_000, cache_write_tokens=1_000),
            {"is_cached_for_an_hour": True},
            1_000 * 6e-6,
        ),
    ],
)
def test_cost_by_the_table(model: str, usage: CallUsage, pricing: dict[str, Any], usd: float | None) -> None:
    assert cost_usd(model, usage, **pricing) == (None if usd is None else pytest.approx(usd))


def test_a_row_without_prices_costs_unknown_and_not_nothing() -> None:
    row = ModelRow(None, (), None, None, False, False, True, False, False, False)
    assert row.cost_usd(CallUsage(prompt_tokens=5)) is None


def test_a_batched_call_costs_what_the_table_says_or_half() -> None:
    row = look_up("claude-sonnet-4-5")
    assert row is not None
    usage = CallUsage(prompt_tokens=1_000, completion_tokens=100, cache_read_tokens=500)
    batched = row.cost_usd(usage, CallPricing(is_batched=True))
    assert batched == pytest.approx(500 * 1.5e-6 + 500 * 1.5e-7 + 100 * 7.5e-6)
    untold = replace(row, batch_prices=None)
    assert untold.cost_usd(usage, CallPricing(is_batched=True)) == pytest.approx(batched)
    own = LLMConfig(model="m", input_cost_per_token=0.01, output_cost_per_token=0.02)
    assert compute_call_cost_usd(own, None, CallUsage(10, 10), CallPricing(is_batched=True)) == pytest.approx(0.15)


def test_a_known_model_with_and_without_its_provider() -> None:
    row = look_up("claude-sonnet-4-5")
    assert row is not None
    assert row.prices == Prices(input=3e-6, output=15e-6, cache_read=3e-7, cache_write=3.75e-6)
    assert (row.max_input_tokens, row.max_output_tokens) == (200_000, 64_000)
    assert look_up("anthropic/claude-sonnet-4-5") == look_up("Claude-Sonnet-4-5") == row
    assert look_up("no-such-model") is look_up("openai/no-such-model") is None


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({COST_HEADER: "0.0125"}, 0.0125),
        *(({COST_HEADER: odd}, None) for odd in ("-1", "nan", "inf", "free")),
        ({}, None),
    ],
)
def test_a_gateway_may_tell_the_cost(headers: dict[str, str], told: float | None) -> None:
    assert parse_reported_usd(headers.get("x-litellm-response-cost")) == told


READ_THE_TABLE = """
import sys
from controller_worker.model import registry
from controller_worker.providers import anthropic_backend, litellm_backend, model_table
opened = []
def note(event, arguments):
    if event == 'open' and str(arguments[0]).endswith(model_table.TABLE_FILE):
        opened.append(arguments[0])
sys.addaudithook(note)
assert not any(model_table.look_up(f'scripted//scripts/{number}.json') for number in range(50))
times = len(opened)
assert model_table.look_up('gpt-4o') is not None
print(times, sorted({'litellm', 'anthropic', 'openai', 'httpx', 'httpx2', 'aiohttp'} & set(sys.modules)))
"""


def test_the_table_is_read_once_and_without_a_client() -> None:
    program = [sys.executable, "-c", READ_THE_TABLE]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "1 []"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-4o", "gpt-4o"),
        (" Anthropic/Claude-Sonnet-4 ", "claude-sonnet-4"),
        ("openrouter/qwen/qwen3-coder:free", "qwen3-coder"),
        ("local/qwen3-coder-gguf", "qwen3-coder"),
        ("llama3:8b", "llama3:8b"),
    ],
)
def test_names_are_normalised_as_in_openhands(model: str, name: str) -> None:
    assert normalise_name(model) == name


FEATURES = {
    "claude-sonnet-5-5": "is_claude function_calling reasoning_effort adaptive_thinking prompt_cache stop_words strict_schemas",
    "anthropic/claude-sonnet-4-6": "is_claude function_calling reasoning_effort adaptive_thinking sampling prompt_cache stop_words strict_schemas",
    "claude-haiku-4-5": "is_claude function_calling sampling prompt_cache stop_words strict_schemas",
    "claude-of-the-future": "is_claude function_calling stop_words",
    "gpt-4o": "function_calling sampling stop_words strict_schemas",
    "o3": "function_calling reasoning reasoning_effort sampling stop_words strict_schemas",
    "o1": "function_calling reasoning reasoning_effort sampling strict_schemas",
    "groq/anything": "function_calling sampling stop_words",
    "openai/my-own": "sampling stop_words",
    "gpt-6-sol": "function_calling reasoning reasoning_effort sampling stop_words strict_schemas",
    "o3-pro": "function_calling reasoning reasoning_effort sampling stop_words strict_schemas",
    "gpt-7-of-the-future": "function_calling reasoning reasoning_effort sampling stop_words",
    "moonshot/kimi-k2.5": "function_calling reasoning_effort sampling stop_words",
    "us.openai.gpt-6-sol": "function_calling reasoning_effort stop_words",
}
"""What each model has, besides `sampling_defaults` and `thoughts`."""


@pytest.mark.parametrize("model", FEATURES)
def test_features(model: str) -> None:
    found = asdict(find_features(model))
    del found["sampling_defaults"], found["thoughts"]
    assert " ".join(name for name, value in found.items() if value) == FEATURES[model]


@pytest.mark.parametrize(
    ("model", "takes"),
    [
        *(("gpt-4o", True), ("openai/gpt-4.1", True), ("groq/anything", True), ("deepseek/deepseek-chat", True)),
        *(("gpt-6-sol", False), ("o3-pro", False), ("moonshot/kimi-k2.5", False), ("openai/my-own", False)),
    ],
)
def test_no_default_is_sent_to_models_that_may_refuse(model: str, takes: bool) -> None:
    assert find_features(model).sampling_defaults is takes
    config = LLMConfig.create(model=model)
    assert ("temperature" in make_chat_parameters(config, model)) is takes
    chosen = make_chat_parameters(LLMConfig.create(model=model, temperature=0.6), model)
    assert chosen.get("temperature") == (None if find_features(model).reasoning else 0.6)


@pytest.mark.parametrize("model", ["gpt-10", "kimi-k2.6", "kimi-k3", "gemini/gemini-3-pro-preview", "gemini-4-pro"])
def test_unknown_reasoning_model_takes_effort_without_default(model: str) -> None:
    parameters = make_chat_parameters(LLMConfig.create(model=model, reasoning_effort="high"), model)
    assert parameters == {"reasoning_effort": "high"}


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "gpt-5", "o3", "gpt-4.1"])
def test_a_batched_call_is_never_dearer_than_a_direct_one(model: str) -> None:
    for cached in (0, 500, 1_000):
        usage = CallUsage(prompt_tokens=1_000, completion_tokens=10, cache_read_tokens=cached)
        batched, direct = cost_usd(model, usage, is_batched=True), cost_usd(model, usage)
        assert batched is not None
        assert direct is not None
        assert batched <= direct


def test_batch_without_cached_price_uses_the_direct_discount() -> None:
    row = {
        "input_cost_per_token": 2.0,
        "output_cost_per_token": 8.0,
        "cache_read_input_token_cost": 0.2,
        "input_cost_per_token_batches": 1.0,
        "output_cost_per_token_batches": 4.0,
    }
    assert _row(row).batch_prices == Prices(1.0, 4.0, cache_read=0.1)


def test_long_prompt_in_a_service_tier_is_priced_there() -> None:
    usual, flex = (cost_usd("gpt-5.4", CallUsage(300_000, 1_000), service_tier=name) for name in ("", "flex"))
    assert usual is not None
    assert flex == pytest.approx(usual / 2)


def test_renamed_deployment_has_its_base_models_features() -> None:
    config = LLMConfig.create(model="azure/our-deployment", base_model="o3", reasoning_effort="high")
    fields = make_chat_parameters(config, config.model)
    assert fields["reasoning_effort"] == "high"
    assert "temperature" not in fields
    claude = LLMConfig.create(model="our-claude", base_model="claude-sonnet-4-5", service_tier="auto")
    assert make_messages_parameters(claude, "our-claude")["max_tokens"] == 64_000
    assert make_messages_parameters(claude, "our-claude")["service_tier"] == "auto"
