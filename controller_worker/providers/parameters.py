"""Chooses the request parameters of a model, by OpenHands' rules.

Holds: a setting that the model does not support is dropped with a warning, or is an error if `drop_params` is off. No
setting is dropped silently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.model_features import find_features
from controller_worker.providers.model_table import ModelRow, look_up

DEFAULT_MAX_TOKENS = 8_192
MAX_TOKENS_LIMIT = 64_000
LONG_REPLY_TOKENS = 16_000
SAMPLING = frozenset({"temperature", "top_p", "top_k"})

_log = logging.getLogger(__name__)


def make_messages_parameters(config: LLMConfig, model: str) -> dict[str, Any]:
    """Return the parameters of an Anthropic Messages request besides messages and tools.

    Raises:
        LLMConfigError: `drop_params` is off and a setting would have to be dropped.
    """
    features = find_features(config.base_model or model)
    row = look_up(config.base_model or model)
    table_limit = row.max_output_tokens if row is not None else None
    default_max_tokens = min(table_limit, MAX_TOKENS_LIMIT) if table_limit is not None else DEFAULT_MAX_TOKENS
    fields: dict[str, Any] = {"model": model, "max_tokens": config.max_output_tokens or default_max_tokens}
    dropped = {"seed", "safety_settings"}
    effort = "low" if config.reasoning_effort == "minimal" else config.reasoning_effort
    if effort is not None and effort != "none":
        if features.reasoning_effort:
            fields["output_config"] = {"effort": effort}
            if features.adaptive_thinking:
                fields["thinking"] = {"type": "adaptive"}
        else:
            dropped.add("reasoning_effort")
    # Later models accept no sampling parameters; earlier ones accept none while they think.
    thinks = _is_thinking(fields | (config.completion_kwargs or {}))
    sampling = _choose_sampling(config) if features.sampling and not thinks else {}
    dropped |= SAMPLING - set(sampling)
    _report_dropped(config, dropped)
    if config.service_tier:
        fields["service_tier"] = config.service_tier
    if config.context_management is not None:
        fields |= config.context_management.fields
    return fields | sampling | (config.completion_kwargs or {})


def make_chat_parameters(config: LLMConfig, model: str) -> dict[str, Any]:
    """Return the parameters of a Chat Completions request besides messages and tools.

    Raises:
        LLMConfigError: `drop_params` is off and a setting would have to be dropped.
    """
    features = find_features(config.base_model or model)
    sampling: dict[str, Any]
    if features.is_claude:
        thinks = _is_thinking(config.completion_kwargs or {})
        sampling = _choose_sampling(config) if features.sampling and not thinks else {}
    elif features.reasoning or not features.sampling:
        sampling = {}
    else:  # an unknown model may refuse parameters that the user did not set
        chosen = SAMPLING if features.sampling_defaults else SAMPLING & config.model_fields_set
        sampling = {name: getattr(config, name) for name in sorted(chosen)}
    fields: dict[str, Any] = sampling | {
        "seed": config.seed,
        "max_completion_tokens": config.max_output_tokens,
        "service_tier": config.service_tier,
    }
    dropped = {*(SAMPLING - set(sampling)), "context_management"}
    if features.reasoning_effort:
        fields["reasoning_effort"] = config.reasoning_effort
    else:
        dropped.add("reasoning_effort")
    if "mistral" in model.lower() or "gemini" in model.lower():
        fields["safety_settings"] = list(config.safety_settings) if config.safety_settings else None
    else:
        dropped.add("safety_settings")
    _report_dropped(config, dropped)
    return {name: value for name, value in fields.items() if value is not None} | (config.completion_kwargs or {})


def split_body_and_headers(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body fields and the headers of a request.

    `extra_body` and `extra_headers` in `completion_kwargs` are the SDKs' and litellm's names for additional ones.
    """
    body = {name: value for name, value in fields.items() if name not in ("extra_body", "extra_headers")}
    return body | (fields.get("extra_body") or {}), dict(fields.get("extra_headers") or {})


def may_be_long(config: LLMConfig, fields: Mapping[str, Any], row: ModelRow | None) -> bool:
    """Return whether a reply may take minutes, unless the settings decide it.

    Such a reply is streamed even without watchers. During a long silence before an unstreamed reply, proxies and
    servers give up, and the lost reply would be paid for again. The length is unlimited if neither a field nor the
    table limits it.
    """
    if config.stream_replies != "auto":
        return config.stream_replies == "on"
    asked = [fields.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    limits = [limit for limit in asked if isinstance(limit, int)]
    table_limit = row.max_output_tokens if row is not None else None
    limit = min(limits) if limits else table_limit
    return limit is None or limit > LONG_REPLY_TOKENS


def _is_thinking(fields: Mapping[str, Any]) -> bool:
    thinking = fields.get("thinking")
    return isinstance(thinking, Mapping) and thinking.get("type") != "disabled"


def _choose_sampling(config: LLMConfig) -> dict[str, float]:
    """Return Claude's sampling parameters. Claude accepts no top_p together with a temperature."""
    top_p = None if config.temperature is not None else config.top_p
    sampling = {"temperature": config.temperature, "top_p": top_p, "top_k": config.top_k}
    return {name: value for name, value in sampling.items() if value is not None}


def _report_dropped(config: LLMConfig, dropped: set[str]) -> None:
    names = sorted(name for name in dropped & config.model_fields_set if getattr(config, name) is not None)
    if not names:
        return
    if not config.drop_params:
        raise LLMConfigError(f"The model {config.model!r} does not support {', '.join(names)}.", remedy="Unset it.")
    _log.warning("The model %s does not support %s; it is not sent.", config.model, ", ".join(names))
