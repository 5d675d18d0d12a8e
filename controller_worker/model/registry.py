"""Creates the model for a configuration.

Holds: creating a model sends no request. A configuration that cannot work is rejected here, not at the first call.
"""

from __future__ import annotations

import logging

from broker.runtime import Clock
from controller_worker.model.cache import CachedLLM
from controller_worker.model.text_tools import TextToolsLLM
from controller_worker.model.without_images import WithoutImagesLLM
from controller_worker.providers import (
    COMPATIBLE_PROVIDERS,
    LLM,
    REPLAY_PREFIX,
    SCRIPTED_PREFIX,
    SILENT_MODEL,
    AnthropicBatches,
    AnthropicLLM,
    BatchProvider,
    LitellmLLM,
    LLMConfig,
    LLMConfigError,
    OpenAIBatches,
    OpenAICompatibleLLM,
    ReplayedLLM,
    ScriptedLLM,
    SilentLLM,
    check_provider,
    find_features,
    is_known_to_litellm,
    list_providers,
    look_up,
    may_have_claude_login,
    sees_images,
)

BATCH_BACKENDS = frozenset({"anthropic", "openai"})
LOCAL_BACKENDS = frozenset({"scripted", "replay", "silent"})
RESPONSES_PREFIX = "responses/"
"""Follows the provider in litellm's names of models that are called through the Responses API."""
OPENHANDS_PREFIX = "openhands/"
OPENHANDS_URL = "https://llm-proxy.app.all-hands.dev/"

_log = logging.getLogger(__name__)


def create_llm(config: LLMConfig, clock: Clock) -> LLM:
    """Create the model that the configuration names.

    The first model of a backend imports the provider's library, which takes 1 to 4 CPU-seconds.

    Raises:
        LLMConfigError: the model, its backend or a setting do not fit together.
    """
    config = _resolve_gateway(config)
    check_batches(config)
    backend = find_backend(config)
    try:
        llm = _create(backend, config, clock)
    except OSError as error:
        raise LLMConfigError(
            f"The client of the model {config.model!r} cannot be created: {error.strerror or error}.",
            remedy="If SSL_CERT_FILE or SSL_CERT_DIR is set, it must name certificates.",
        ) from error
    except ModuleNotFoundError as error:
        raise LLMConfigError(
            f"This installation cannot call the model {config.model!r}: it has no {error.name!r}.",
            remedy="Install `pip install 'deckhands[litellm]'` where controller workers run.",
        ) from error
    if not accepts_images(config):
        llm = WithoutImagesLLM(llm)
    llm = _add_text_tools(llm, backend, config)
    return llm if config.cache_dir is None else CachedLLM(llm, config, clock)


def check_llm(config: LLMConfig, clock: Clock, *, may_lack_key: bool = False) -> None:
    """Reject a model whose calls must fail. Sends no request.

    Imports a provider's library only if nothing else can tell.

    Args:
        may_lack_key: calls may have another key than the configured one.

    Raises:
        LLMConfigError: see `create_llm`; or a provider that needs a key has none.
    """
    config = _resolve_gateway(config)
    check_batches(config)
    backend = find_backend(config)
    has_key = may_lack_key or config.api_key is not None
    if backend == "litellm":
        if is_known_to_litellm(config):
            check_provider(config, has_key=has_key)
        else:
            create_llm(config, clock)
    elif backend in LOCAL_BACKENDS or (backend == "anthropic" and not has_key and not may_have_claude_login()):
        create_llm(config, clock)


def _resolve_gateway(config: LLMConfig) -> LLMConfig:
    """Return the settings by which a model of OpenHands' gateway is called; any other settings unchanged."""
    if not config.model.startswith(OPENHANDS_PREFIX):
        return config
    model = "litellm_proxy/" + config.model.removeprefix(OPENHANDS_PREFIX)
    return config.model_copy(update={"model": model, "base_url": config.base_url or OPENHANDS_URL})


def create_batch_provider(config: LLMConfig, clock: Clock) -> BatchProvider:
    """Create the client of the provider's batch API that the configuration asks for.

    Raises:
        LLMConfigError: the model's backend has no batch API.
    """
    check_batches(config)
    if find_backend(config) == "anthropic":
        claude = AnthropicLLM(config, clock)
        return AnthropicBatches(claude.send, claude.aclose)
    other = OpenAICompatibleLLM(config, clock)
    return OpenAIBatches(other.send, other.upload, other.aclose)


def check_batches(config: LLMConfig) -> None:
    """Reject a configuration whose calls cannot be batched.

    Raises:
        LLMConfigError: the model's backend has no batch API.
    """
    if config.batch is not None and find_backend(config) not in {*BATCH_BACKENDS, "silent"}:
        raise LLMConfigError(
            f"The backend {find_backend(config)!r} cannot batch calls of {config.model!r}.",
            remedy="Use a model of anthropic/, or the backend openai with LLM_BASE_URL=https://api.openai.com/v1.",
        )


def check_own_endpoints(config: LLMConfig, name: str) -> None:
    """Reject an entry whose client may send the operator's keys and headers to a conversation's own endpoint.

    Args:
        name: the name of the entry.

    Raises:
        LLMConfigError: it is for another backend than `openai`, which reads keys and headers elsewhere, too.
    """
    if config.own_endpoints and (backend := find_backend(config)) != "openai":
        raise LLMConfigError(
            f"The entry {name!r} has own_endpoints, and its backend is {backend!r}.",
            remedy="Own endpoints are for the backend openai with a base_url. Remove own_endpoints from this entry.",
        )


def _add_text_tools(llm: LLM, backend: str, config: LLMConfig) -> LLM:
    if config.has_text_rollouts and config.native_tool_calling:
        raise LLMConfigError(
            f"With LLM_ROLLOUT_API={config.rollout_api}, replies are text, so the server cannot handle tools.",
            remedy="Unset LLM_NATIVE_TOOL_CALLING, or set LLM_ROLLOUT_API to chat or chat_tokens.",
        )
    if config.native_tool_calling is False or config.has_text_rollouts:
        return TextToolsLLM(llm, config)
    if backend in LOCAL_BACKENDS or config.native_tool_calling or find_features(config.known_as).function_calling:
        return llm
    _log.info("%s is not known to call tools natively: they go into the prompt as text.", config.model)
    return TextToolsLLM(llm, config)


def accepts_images(config: LLMConfig) -> bool:
    """Return whether images are sent to the model. Scripted and replayed models get them."""
    if config.disable_vision is not None:
        return not config.disable_vision
    return find_backend(config) in LOCAL_BACKENDS or sees_images(config.known_as)


def _create(backend: str, config: LLMConfig, clock: Clock) -> LLM:
    if backend == "scripted":
        return ScriptedLLM(config, clock)
    if backend == "silent":
        return SilentLLM()
    if backend == "replay":
        return ReplayedLLM(config)
    if backend == "anthropic":
        return AnthropicLLM(config, clock)
    if backend == "openai":
        return OpenAICompatibleLLM(config, clock)
    return LitellmLLM(config, clock)


def find_backend(config: LLMConfig) -> str:
    """Return the backend: the configured one, else chosen by model and address.

    `auto` chooses scripted and replayed models by their prefix. It chooses the Anthropic backend for Claude at
    Anthropic or at an address with the same protocol. It chooses the OpenAI-compatible backend for any other model with
    an address and no provider in its name, unless the Responses API is required, by the model's name or because OpenAI
    offers the model by no other API. It chooses litellm for all others.

    Raises:
        LLMConfigError: the configured backend cannot serve the model.
    """
    if config.model == SILENT_MODEL:
        return "silent"  # a router has no backend; the models it chooses have theirs
    is_script = config.model.startswith(SCRIPTED_PREFIX)
    if config.backend == "scripted" and not is_script:
        raise LLMConfigError(
            f"The model {config.model!r} is not a script.",
            remedy=f"Name it {SCRIPTED_PREFIX}FILE, or unset the backend.",
        )
    if config.backend == "openai" and config.base_url is None:
        raise LLMConfigError("An OpenAI-compatible server has no address.", remedy="Set LLM_BASE_URL.")
    if config.backend != "auto":
        return config.backend
    if is_script:
        return "scripted"
    if config.model.startswith(REPLAY_PREFIX):
        return "replay"
    first, _, rest = config.model.partition("/")
    provider = config.custom_llm_provider or (first if rest else "")
    if provider == "anthropic" or (not provider and config.model.startswith("claude")):
        return "anthropic"
    if rest.startswith(RESPONSES_PREFIX):
        return "litellm"
    if provider == "openai" and (row := look_up(config.known_as)) is not None and row.asks_responses:
        return "litellm"
    is_compatible = provider in COMPATIBLE_PROVIDERS or provider not in list_providers()
    return "openai" if config.base_url is not None and is_compatible else "litellm"
