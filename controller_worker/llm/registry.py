"""From a configuration to the model that follows it.

Holds: creating a model sends nothing; what cannot work is refused here and not at the first call.
"""

from __future__ import annotations

import logging

from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import LLMConfigError
from controller_worker.llm.llm import LLM
from controller_worker.llm.model_features import features_of
from controller_worker.llm.scripted import PREFIX as SCRIPTED_PREFIX
from controller_worker.llm.scripted import ScriptedLLM

logger = logging.getLogger(__name__)


def create_llm(config: LLMConfig) -> LLM:
    """Create the model that the configuration names.

    The first model of a backend imports the provider's library: one to four CPU-seconds.

    Raises:
        LLMConfigError: the model, its backend or a setting cannot work together.
    """
    if config.native_tool_calling is False:
        raise LLMConfigError(
            "LLM_NATIVE_TOOL_CALLING=false asks for tool calls in text, which this version does not have.",
            remedy="Unset it, or use a model that calls tools natively.",
        )
    match backend_of(config):
        case "scripted":
            return ScriptedLLM(config)
        case "anthropic":
            from controller_worker.llm.anthropic_backend import AnthropicLLM

            return AnthropicLLM(config)
        case _:
            from controller_worker.llm.litellm_backend import LitellmLLM

            if config.native_tool_calling is None and not features_of(config.model).function_calling:
                logger.info("It is not known whether %s calls tools natively; it is asked to.", config.model)
            return LitellmLLM(config)


def backend_of(config: LLMConfig) -> str:
    """Return the backend: as configured, or by model: scripts, Claude at Anthropic, litellm for all others."""
    if config.backend == "scripted" and not config.model.startswith(SCRIPTED_PREFIX):
        raise LLMConfigError(
            f"The model {config.model!r} is no script.", remedy=f"Name it {SCRIPTED_PREFIX}FILE, or unset the backend."
        )
    if config.backend != "auto":
        return config.backend
    if config.model.startswith(SCRIPTED_PREFIX):
        return "scripted"
    is_native = config.model.startswith("anthropic/") or (
        config.model.startswith("claude") and config.custom_llm_provider in (None, "anthropic")
    )
    return "anthropic" if is_native else "litellm"
