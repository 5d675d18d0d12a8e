"""Prices and limits of models, from the table in the installed litellm. litellm itself is not imported for it.

Importing litellm costs seconds and 250 MB. The table is one JSON file, of which only the rows of models in use are
kept in memory.

Holds: an unknown price is None, never 0. A cost is never negative.
Does not: fetch newer prices; an upgrade of litellm brings them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import CallUsage

TABLE_FILE = "model_prices_and_context_window_backup.json"

OTHER_PROVIDERS = frozenset(
    {"huggingface", "ollama_chat", "openrouter", "sagemaker_chat", "vertex_ai_beta", "watsonx_text", "xinference"}
)
"""Providers without any priced model in the table."""

SERVICE_TIERS = ("flex", "priority")
"""Service tiers with separate prices in the table."""
HOUR_FACTOR = 2.0
"""The price of writing a token to Claude's cache for an hour, as a multiple of the input price."""
BATCH_SHARE = 0.5
"""The default batch price as a share of the normal price. Anthropic and OpenAI both charge half."""

_TIERED = "input_cost_per_token"
_TIER = re.compile(_TIERED + r"_above_(\d+)k_tokens\Z")


@dataclass(frozen=True, slots=True)
class Prices:
    """USD per token. The cache prices are None if the provider has no separate price."""

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None


@dataclass(frozen=True, slots=True)
class CallPricing:
    """The properties of a call that its price depends on.

    Attributes:
        is_batched: made through the provider's batch API.
        service_tier: the tier that the provider reports, such as `flex`; empty for the standard one.
        is_cached_for_an_hour: tokens written to the cache stay there for an hour.
    """

    is_batched: bool = False
    service_tier: str = ""
    is_cached_for_an_hour: bool = False


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of the table.

    Attributes:
        prices: None when not known.
        batch_prices: prices of the provider's batch API; None if the table has none.
        service_prices: by service tier, where they differ from `prices`.
        tiers: prices for prompts above a number of tokens, highest first.
        max_input_tokens: None when not known; likewise `max_output_tokens`.
    """

    prices: Prices | None
    tiers: tuple[tuple[int, Prices], ...]
    max_input_tokens: int | None
    max_output_tokens: int | None
    function_calling: bool
    prompt_cache: bool
    takes_sampling: bool
    takes_effort: bool
    thinks_adaptively: bool
    vision: bool
    reasons: bool = False
    asks_responses: bool = False
    native_schemas: bool = False
    response_schemas: bool = False
    batch_prices: Prices | None = None
    service_prices: Mapping[str, Prices] = field(default_factory=dict)

    def cost_usd(self, usage: CallUsage, sold: CallPricing = CallPricing()) -> float | None:
        """Return the cost of the call; None if the price is not known."""
        tier = next((prices for above, prices in self.tiers if usage.prompt_tokens > above), None)
        has_batch_prices = sold.is_batched and tier is None and self.batch_prices is not None
        direct = self._in_tier_of_service(tier or self.prices, sold.service_tier)
        prices = self.batch_prices if has_batch_prices else direct
        if prices is None:
            return None
        if sold.is_cached_for_an_hour and prices.cache_write is not None:
            prices = replace(prices, cache_write=prices.input * HOUR_FACTOR)
        return compute_cost_usd(prices, usage) * (BATCH_SHARE if sold.is_batched and not has_batch_prices else 1.0)

    def _in_tier_of_service(self, prices: Prices | None, name: str) -> Prices | None:
        """Return prices adjusted to a service tier. The factor for a long prompt is the same as for a short one."""
        service = self.service_prices.get(name)
        if prices is None or self.prices is None or service is None or prices is self.prices:
            return prices if service is None else service
        share = service.input / self.prices.input if self.prices.input else 1.0
        return Prices(*(None if price is None else price * share for price in astuple(prices)))  # type: ignore[arg-type]


def compute_cost_usd(prices: Prices, usage: CallUsage) -> float:
    """Return the cost of the tokens in USD. Cached tokens without a separate price have the normal price."""
    read = min(usage.cache_read_tokens, usage.prompt_tokens)
    write = min(usage.cache_write_tokens, usage.prompt_tokens - read)
    return (
        (usage.prompt_tokens - read - write) * prices.input
        + read * (prices.input if prices.cache_read is None else prices.cache_read)
        + write * (prices.input if prices.cache_write is None else prices.cache_write)
        + usage.completion_tokens * prices.output
    )


def find_max_input_tokens(config: LLMConfig) -> int | None:
    """Return the maximum prompt length in tokens, from the settings or else the table; None if unknown."""
    row = look_up(config.known_as)
    return config.max_input_tokens or (row.max_input_tokens if row is not None else None)


def compute_call_cost_usd(
    config: LLMConfig, row: ModelRow | None, usage: CallUsage, sold: CallPricing = CallPricing()
) -> float | None:
    """Return a call's cost by the configured prices if both are set, otherwise by the table; None if unknown."""
    if config.input_cost_per_token is not None and config.output_cost_per_token is not None:
        cost = compute_cost_usd(Prices(config.input_cost_per_token, config.output_cost_per_token), usage)
        return cost * (BATCH_SHARE if sold.is_batched else 1.0)
    return row.cost_usd(usage, sold) if row is not None else None


def has_price(config: LLMConfig) -> bool:
    """Return whether the price of a model is known, from the settings, the table or the replies of its gateway."""
    if config.input_cost_per_token is not None and config.output_cost_per_token is not None:
        return True
    if find_provider(config.model, config.custom_llm_provider) == "openrouter":
        return True
    row = look_up(config.known_as)
    return row is not None and row.prices is not None


@lru_cache(maxsize=1)
def list_providers() -> frozenset[str]:
    """Return litellm's provider names, the first part of `provider/model`."""
    rows = _read_table().values()
    named = {row.get("litellm_provider") for row in rows if isinstance(row, dict)}
    return frozenset(name for name in named if isinstance(name, str)) | OTHER_PROVIDERS


def find_provider(model: str, custom: str | None = None) -> str:
    """Return litellm's provider of a model. Its keys are used unless the settings have an address.

    Args:
        custom: the provider in the settings.
    """
    first, _, rest = model.partition("/")
    if custom or rest:
        return custom or first
    if model.startswith("claude"):
        return "anthropic"
    row = _read_table().get(model) if model in _names() else None
    named = row.get("litellm_provider") if isinstance(row, dict) else None
    return named if isinstance(named, str) else "openai"


@lru_cache(maxsize=256)
def look_up(model: str) -> ModelRow | None:
    """Return the model's row, or None. The full name is tried first, then the name without leading path parts.

    The first look-up of a model in the table reads the file: about 30 ms. Look-ups of unknown models never read it,
    because conversations could name any number of them.
    """
    listed = _names()
    name = model.strip()
    while True:
        for known in (name, name.lower()):
            if known in listed and isinstance(row := _read_table().get(known), dict):
                return _row(row)
        if "/" not in name:
            return None
        name = name.split("/", 1)[1]


@lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    """Return the names of the models in the table. Cached, unlike the table, which takes 20 MB."""
    return frozenset(_read_table())


def _read_table() -> Mapping[str, Any]:
    spec = find_spec("litellm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, TABLE_FILE)
        if path.is_file():
            table: Mapping[str, Any] = json.loads(path.read_bytes())
            return table
    return {}


def _row(row: Mapping[str, Any]) -> ModelRow:
    tiers = _tiers(row)
    base = next((prices for above, prices in tiers if above == 0), None)
    return ModelRow(
        prices=_prices(row, "") or base,
        batch_prices=_batch_prices(row),
        service_prices=_service_prices(row),
        tiers=tuple((above, prices) for above, prices in tiers if above),
        max_input_tokens=_tokens(row.get("max_input_tokens")),
        max_output_tokens=_tokens(row.get("max_output_tokens")) or _tokens(row.get("max_tokens")),
        function_calling=row.get("supports_function_calling") is True,
        prompt_cache=row.get("supports_prompt_caching") is True,
        takes_sampling=row.get("supports_sampling_params") is not False,
        takes_effort=row.get("supports_output_config") is True,
        thinks_adaptively=row.get("supports_adaptive_thinking") is True,
        reasons=row.get("supports_reasoning") is True,
        asks_responses=row.get("mode") == "responses",
        native_schemas=row.get("supports_native_structured_output") is True,
        response_schemas=row.get("supports_response_schema") is True,
        vision=row.get("supports_vision") is True,
    )


def _prices(row: Mapping[str, Any], suffix: str) -> Prices | None:
    def price(name: str) -> float | None:
        value = row.get(name + suffix, row.get(name))
        return float(value) if isinstance(value, int | float) and value >= 0 else None

    per_input = price("input_cost_per_token")
    per_output = price("output_cost_per_token")
    if per_input is None or per_output is None:
        return None
    return Prices(per_input, per_output, price("cache_read_input_token_cost"), price("cache_creation_input_token_cost"))


def _tiers(row: Mapping[str, Any]) -> list[tuple[int, Prices]]:
    """Return the prices above each prompt length, highest first, from both formats of the table."""
    named = filter(None, map(_TIER.match, row))
    tiers = [(int(match[1]) * 1000, _prices(row, match[0].removeprefix(_TIERED))) for match in named]
    # other keys are tiers of search prices
    steps = [step for step in row.get("tiered_pricing") or () if "range" in step]
    tiers += [(int(step["range"][0]), _prices(step, "")) for step in steps]
    return sorted(((above, prices) for above, prices in tiers if prices is not None), key=lambda tier: -tier[0])


def _service_prices(row: Mapping[str, Any]) -> dict[str, Prices]:
    found = {}
    for tier in SERVICE_TIERS:
        prices = _prices(row, f"_{tier}") if f"{_TIERED}_{tier}" in row else None
        if prices is not None:
            found[tier] = prices
    return found


def _batch_prices(row: Mapping[str, Any]) -> Prices | None:
    named = {name.removesuffix("_batches"): price for name, price in row.items() if name.endswith("_batches")}
    batch = _prices(named, "")
    direct = _prices(row, "")
    if batch is None or direct is None:
        return batch

    def cheaper(price: float | None, of: float | None) -> float | None:
        """Return the batch price of cached tokens; if missing, the normal price with the same discount."""
        return of * BATCH_SHARE if price is None and of is not None else price

    return replace(
        batch,
        cache_read=cheaper(batch.cache_read, direct.cache_read),
        cache_write=cheaper(batch.cache_write, direct.cache_write),
    )


def _tokens(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
