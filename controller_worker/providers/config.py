"""The settings of a model: OpenHands' `LLMConfig`, with its names and defaults.

Holds: an unknown field is rejected, and the error names the most similar known one. No error text contains a value, so
no key leaks. Every wait has a limit.
Does not: read the process environment; `from_env` gets one as an argument. It writes only variables that litellm reads
at import. Some settings of OpenHands are not supported: see `UNSUPPORTED`.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from controller_worker.providers.choices import BatchSpec, Fallback, RouterSpec, RouteRule
from controller_worker.providers.context_management import (
    Compaction,
    ContextManagementSpec,
    ThinkingClearing,
    ToolUseClearing,
)
from controller_worker.providers.errors import LLMConfigError

ENV_PREFIX = "LLM_"
CONFIG_FILE_VARIABLE = "LLM_CONFIG"
"""Names the file of profiles; see `profiles`."""
ENV_FALLBACK_PREFIX = "LITELLM_"
ENV_FALLBACK_FIELDS = ("model", "api_key", "base_url", "api_version")
DEFAULT_TOTAL_TIMEOUT_SECONDS = 600.0
CONVERSATION_FIELDS = frozenset({"messages", "stream", "system", "tools"})
"""Request fields that a setting cannot replace."""
OF_THE_ENTRY_AS: Mapping[str, str] = {
    "api_base": "base_url",
    "aws_bedrock_runtime_endpoint": "base_url",
    "context_window_fallback_dict": "fallbacks",
    "model_list": "fallbacks",
}
ENTRY_FIELDS = frozenset(
    {
        *("model", "api_key", "base_url", "api_version", "custom_llm_provider", "fallbacks", *OF_THE_ENTRY_AS),
        *("aws_access_key_id", "aws_secret_access_key", "aws_region_name"),
    }
)
"""Request fields that set the destination and the key; the settings have fields of their own for these."""
OPENAI_HOST = "api.openai.com"
ADDRESS_BOUND_FIELDS: Mapping[str, Any] = {
    **dict.fromkeys(("api_key", "aws_access_key_id", "aws_secret_access_key", "completion_kwargs")),
    "own_endpoints": (),
}
"""Fields bound to one address, with their values at another one: keys, additional request fields and headers, which may
contain keys, and the addresses that conversations may name in its place."""
AZURE_API_VERSION = "2024-12-01-preview"
LITELLM_ENVIRONMENT: Mapping[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
"""Prevents litellm from fetching prices and from reading a `.env` file in the current directory."""

Toggle = Literal["off", "auto", "on"]

UNSUPPORTED: Mapping[str, str] = {
    "correct_num": "there is no editor that asks a model",
    "custom_tokenizer": "tokens are estimated without one",
    "for_routing": "a router names its profiles",
    "log_completions": "replies are in the log, prompts are never stored",
    "log_completions_folder": "replies are in the log, prompts are never stored",
}
"""Settings of OpenHands that are not supported, with the reason."""

CUSTOM_HEADERS = "ANTHROPIC_CUSTOM_HEADERS"
_ADDRESS_VARIABLE = re.compile(r"(?!DECKHANDS_|LLM_|LITELLM_BASE_URL|ANTHROPIC_)[A-Z0-9_]+_(API_BASE|BASE_URL|API_URL)")
_MADE_OF = "_API_BASE"
_NAMES_A_SECRET = re.compile(r"key|token|secret|passw|auth|cred|cookie|session|signature", re.IGNORECASE)

_ENDPOINT = re.compile(r"https?://(\*\.)?[a-z0-9_.-]+(:(\d{1,5}|\*))?", re.ASCII)
_HOST = re.compile(r"[a-z0-9_.-]+", re.ASCII)
_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)
_HEADERS_IN_USE = frozenset({
    *("accept", "authorization", "connection", "content-encoding", "content-length", "content-type", "cookie", "host"),
    *("proxy-authorization", "transfer-encoding", "user-agent"),
})  # fmt: skip
_log = logging.getLogger(__name__)


class LLMConfig(BaseModel):
    """One model's settings. `model`, `timeout` and the names sent to OpenRouter differ from OpenHands: see below.

    Attributes:
        model: a name as in litellm (`anthropic/claude-…`, `openai/…`, `gemini/…`), a bare name, `scripted/FILE` or
            `replay/FILE`. In a profile, `PROVIDER/*` offers every model of a provider (see `profiles`).
        tenants: the tenants whose conversations may name this entry; None for all.
        scripts_dir: the directory below which conversations may name scripts and recordings; None: they may name none.
        base_model: the real model behind a custom name, such as an Azure deployment. Its features, limits and prices
            apply.
        api_key: the provider's key; without one, Anthropic's SDK and litellm look for theirs in the worker's
            environment.
        base_url: the address of a server of your own, such as `http://host:8000/v1`.
        api_version: the version of Azure's API.
        custom_llm_provider: litellm's name of the provider, if the model's name does not contain it.
        aws_access_key_id: the key's id, for Bedrock.
        aws_secret_access_key: the key, for Bedrock.
        aws_region_name: the region, for Bedrock.
        openrouter_site_url: the site that OpenRouter shows as the caller; None for none.
        openrouter_app_name: the application that OpenRouter shows as the caller; None for none.
        backend: the client library for the calls; `auto` chooses by the model's name and address.
        num_retries: attempts in all, including the first.
        retry_multiplier: seconds of the first wait; each further wait is twice as long, between `retry_min_wait` and
            `retry_max_wait` seconds.
        retry_min_wait: least seconds between two attempts.
        retry_max_wait: most seconds between two attempts, unless the provider names a time.
        timeout: total seconds of one attempt; None means 600.
        connect_timeout: seconds to connect.
        first_byte_timeout: longest silence in seconds before the first byte of a streamed reply; None means
            `read_timeout`.
        read_timeout: longest silence in seconds within a reply, and before one that is not streamed.
        fallbacks: models to try at once, in order, when a call fails: names, or names with the errors they apply to.
        max_message_chars: longest text of one observation in a prompt; longer ones lose their middle.
        temperature: sampling temperature; None: not sent.
        top_p: nucleus sampling; None: not sent.
        top_k: number of candidates of each token; None: not sent.
        seed: the sampling seed, for providers that accept one.
        reasoning_effort: how much the model thinks, in the provider's words (`low`, `medium`, `high`, …).
        max_input_tokens: the longest prompt that a router sends to this model; None: depends on the model.
        max_output_tokens: the longest reply; None: depends on the model.
        caching_prompt: whether prompts are marked for the provider's cache.
        ollama_base_url: replaces `base_url` for models of `ollama/` and `ollama_chat/`.
        disable_vision: True drops images, False sends them; None: depends on the model.
        completion_kwargs: request fields that override all others. Its `extra_body` holds further fields, its
            `extra_headers` further headers.
        safety_settings: sent to Mistral and Gemini only.
        modify_params: whether litellm may repair requests for its providers; applies to the whole worker.
        router: how to choose among profiles for each call; None calls this model.
        cache_dir: a directory of cached replies, or a URL that fsspec can reach (see `cache`); None disables the cache.
        cache_scope: separates cached replies, for example one scope for each sample of the same question.
        cache_ttl_seconds: for how long a cached reply is used.
        batch: use the provider's batch API for conversations without an interactive user; see `batching`.
        drop_params: leave out, with a warning, parameters that the model does not accept; otherwise they are an error.
        native_tool_calling: whether the provider handles tools; False puts them into the prompt as text (see
            `text_tools`); None: depends on the model.
        strict_tools: whether the provider enforces the schemas of tool calls; `auto`: if the table knows that the model
            supports it (see `strictness`).
        structured_output: whether the provider enforces the conversation's output schema on text replies; `auto` as
            for `strict_tools`.
        cache_lifetime: how long Claude keeps a marked prompt. `1h` costs twice the input price; it is for agents whose
            steps take longer than five minutes.
        prompt_cache_key: send the conversation's id, so that its calls reach the same cache; None: to OpenAI only.
        service_tier: sent to the provider. The price is that of the tier named in the reply.
        count_tokens: let the provider count a prompt if its exact size matters; see `prompt_count`.
        disable_stop_word: send no stop word with tools in text.
        stream_replies: whether replies without watchers are streamed; `auto`: only replies that may be long.
        rollout_api: how rollouts send and get exact tokens; see `token_calls`.
        session_header: the header with the conversation's id, by which a router in front of several engines finds the
            one that has the prefix in its cache; None: no header. With the backend `openai` only.
        own_endpoints: the addresses that a conversation may name as its own endpoint, by its secrets. `*` stands for a
            port, or for the first parts of a host. With the backend `openai` only, and without `batch`, `count_tokens`
            and `router`.
        context_management: the parts of a long prompt that Claude's provider drops or summarizes; None disables it.
        input_cost_per_token: USD, together with `output_cost_per_token` instead of the price table's.
        output_cost_per_token: USD, together with `input_cost_per_token`.
    """

    # Keys must not appear in errors, because errors appear in logs and events.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # Differs: no default model, because the original's is discontinued and a guess would cost money.
    model: str = Field(min_length=1)
    tenants: tuple[str, ...] | None = None
    scripts_dir: str | None = Field(default=None, min_length=1)
    base_model: str | None = Field(default=None, min_length=1)
    api_key: SecretStr | None = None
    base_url: str | None = None
    api_version: str | None = None
    custom_llm_provider: str | None = None
    ollama_base_url: str | None = None
    aws_access_key_id: SecretStr | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_region_name: str | None = None
    # Differs: the original identifies itself to OpenRouter as OpenHands, which we are not.
    openrouter_site_url: str | None = None
    openrouter_app_name: str | None = None
    backend: Literal["auto", "anthropic", "openai", "litellm", "scripted", "replay"] = "auto"

    num_retries: int = Field(default=5, ge=1)
    retry_multiplier: float = Field(default=8, gt=0)
    retry_min_wait: float = Field(default=8, ge=0)
    retry_max_wait: float = Field(default=64, ge=0)
    # Differs: the original waits without limit by default. Here a hung provider must not hold a step forever.
    timeout: float | None = Field(default=None, gt=0)
    connect_timeout: float = Field(default=10.0, gt=0)
    first_byte_timeout: float | None = Field(default=None, gt=0)
    read_timeout: float = Field(default=300.0, gt=0)

    fallbacks: tuple[Fallback, ...] = ()
    router: RouterSpec | None = None
    batch: BatchSpec | None = None
    cache_dir: str | None = None
    cache_scope: str = ""
    cache_ttl_seconds: float = Field(default=30 * 86_400.0, gt=0)

    max_message_chars: int = Field(default=30_000, ge=1)
    temperature: float | None = Field(default=0.0, ge=0)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    top_k: float | None = None
    seed: int | None = None
    reasoning_effort: str | None = None
    max_input_tokens: int | None = Field(default=None, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    input_cost_per_token: float | None = Field(default=None, ge=0)
    output_cost_per_token: float | None = Field(default=None, ge=0)
    drop_params: bool = True
    modify_params: bool = True
    disable_vision: bool | None = None
    safety_settings: tuple[dict[str, Any], ...] | None = None
    completion_kwargs: dict[str, Any] | None = Field(default=None, repr=False)  # it may hold keys
    caching_prompt: bool = True
    cache_lifetime: Literal["5m", "1h"] = "5m"
    prompt_cache_key: bool | None = None
    service_tier: str | None = Field(default=None, min_length=1)
    native_tool_calling: bool | None = None
    strict_tools: Toggle = "off"
    structured_output: Toggle = "off"
    count_tokens: bool = False
    disable_stop_word: bool = False
    stream_replies: Literal["auto", "on", "off"] = "auto"
    rollout_api: Literal["chat", "chat_tokens", "completions", "llama_cpp"] = "chat"
    session_header: str | None = Field(default=None, max_length=100)
    own_endpoints: tuple[str, ...] = ()

    context_management: ContextManagementSpec | None = None

    @property
    def has_text_rollouts(self) -> bool:
        """Whether the replies of rollouts are text, so that tools are in the prompt as text."""
        return self.rollout_api in ("completions", "llama_cpp")

    @property
    def known_as(self) -> str:
        """The model's name in the tables."""
        return self.base_model or self.model

    @property
    def sends_cache_key(self) -> bool:
        """Whether calls send the conversation's id as `prompt_cache_key`; other servers may refuse the field."""
        if self.prompt_cache_key is not None:
            return self.prompt_cache_key
        host = (urlsplit(self.base_url or "").hostname or "") if self.base_url else ""
        return host == OPENAI_HOST or (
            not host and self.known_as.removeprefix("openai/").startswith(("gpt-", "o1", "o3", "o4"))
        )

    @property
    def total_timeout_seconds(self) -> float:
        """The time limit of one attempt, from its start to the end of the reply."""
        return self.timeout or DEFAULT_TOTAL_TIMEOUT_SECONDS

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that no text may show: keys, and in `completion_kwargs` each header and field named like a key."""
        keys = (self.api_key, self.aws_access_key_id, self.aws_secret_access_key)
        further = list(_find_secrets(self.completion_kwargs or {}))
        further += [text.rpartition(" ")[2] for text in further]  # without the scheme of an Authorization header
        return tuple(dict.fromkeys([*(key.get_secret_value() for key in keys if key is not None), *further]))

    @field_validator("model")
    @classmethod
    def _has_no_address(cls, value: str) -> str:
        if "://" in value:  # litellm would post prompt and key there
            raise ValueError("a model's name cannot contain an address; set base_url")
        return value

    @field_validator("session_header")
    @classmethod
    def _is_header(cls, value: str | None) -> str | None:
        if value is not None and (not _HEADER.fullmatch(value) or value.lower() in _HEADERS_IN_USE):
            raise ValueError("it is not the name of a header that may be added; write one such as X-Session-ID")
        return value

    @field_validator("own_endpoints")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not _ENDPOINT.fullmatch(one):
                raise ValueError("it lists addresses such as http://127.0.0.1:* or https://*.tunnel.example")
        return value

    def with_endpoint(self, url: str, key: str) -> Self:
        """Return the settings of a conversation that has its own endpoint.

        The keys, the further request fields and headers, and the cache of this entry belong to its own address, and
        stay out.

        Raises:
            LLMConfigError: the operator's table does not list the address.
        """
        if not any(_matches_endpoint(one, url) for one in self.own_endpoints):
            raise LLMConfigError(
                f"The endpoint of the conversation is not among the own_endpoints of the model {self.model!r}.",
                remedy="The operator of the controller workers lists addresses there.",
            )
        own = {**ADDRESS_BOUND_FIELDS, "base_url": url, "api_key": SecretStr(key) if key else None}
        return self.model_copy(update={**own, "cache_dir": None, "fallbacks": ()})

    @field_validator("tenants", mode="before")
    @classmethod
    def _are_names(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not (names := [name.strip() for name in value.split(",") if name.strip()]):
            raise ValueError('no tenant is named; write ["NAME", …], or leave it out to offer it to all')
        return names

    @field_validator("fallbacks", mode="before")
    @classmethod
    def _names_are_enough(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",") if name.strip()]
        return [{"use": item} if isinstance(item, str) else item for item in value]

    @field_validator("base_url", "ollama_base_url")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value and not _is_address(value):
            raise ValueError("this is not an address; write one such as https://host/v1")  # its text may be a key
        return value

    @field_validator("api_key")
    @classmethod
    def _is_a_line(cls, value: SecretStr | None) -> SecretStr | None:
        """Strip a trailing line end, as in a key from a file, because an HTTP header cannot contain one."""
        key = value.get_secret_value().strip() if value is not None else ""
        if any(char < " " or char == "\x7f" for char in key):
            raise ValueError("a key cannot contain line breaks or control characters")
        return SecretStr(key) if value is not None else None

    @field_validator("completion_kwargs")
    @classmethod
    def _leaves_the_rest_alone(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        further = [
            name for name in ("extra_body", "extra_headers") if not isinstance((value or {}).get(name) or {}, dict)
        ]
        for name in further:
            raise ValueError(f"{name!r} must be a table of fields")
        for name in sorted(ENTRY_FIELDS & set(value or {})):
            raise ValueError(f"{name!r} cannot be set here; write {OF_THE_ENTRY_AS.get(name, name)} beside it")
        given = {*(value or {}), *((value or {}).get("extra_body") or {})}
        for name in sorted(CONVERSATION_FIELDS & given):
            raise ValueError(f"{name!r} comes from the conversation and its agent; it cannot be set here")
        return value

    @field_validator("batch", mode="before")
    @classmethod
    def _yes_is_enough(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return {} if value else None
        return value

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_field(cls, fields: Any) -> Any:
        unknown = sorted(set(fields) - set(cls.model_fields)) if isinstance(fields, dict) else []
        if unknown:
            raise ValueError("; ".join(map(_unknown_setting, unknown)))
        return fields

    @model_validator(mode="after")
    def _batches_have_one_model(self) -> Self:
        if self.batch is not None and self.router is not None:
            raise ValueError("a profile with a router cannot be batched; set batch in the profiles that it chooses")
        return self

    @model_validator(mode="after")
    def _own_endpoints_have_no_other_calls(self) -> Self:
        for name in ("batch", "count_tokens", "router") if self.own_endpoints else ():
            if getattr(self, name):  # such calls go to the entry's own address
                raise ValueError(f"an entry with own_endpoints cannot have {name}; write two entries")
        return self

    @model_validator(mode="after")
    def _azure_wants_a_version(self) -> Self:
        if self.model.startswith("azure") and self.api_version is None:
            object.__setattr__(self, "api_version", AZURE_API_VERSION)
        return self

    @classmethod
    def from_env(
        cls, env: Mapping[str, str], beneath: Mapping[str, Any] = MappingProxyType({}), **overrides: Any
    ) -> Self:
        """Read `LLM_<FIELD>`; for the model, its key, address and API version also `LITELLM_<FIELD>`.

        Args:
            env: environment variables; empty values count as unset.
            beneath: fields that the environment overrides.
            overrides: fields that override the environment; None counts as unset.

        Raises:
            LLMConfigError: no model is named, or a value cannot be used.
        """
        fields: dict[str, Any] = dict(beneath)
        pair = [
            {prefix for prefix in (ENV_PREFIX, ENV_FALLBACK_PREFIX) if env.get(prefix + name, "").strip()}
            for name in ("API_KEY", "BASE_URL")
        ]
        # A key and an address that are both set as LITELLM_… belong together. Neither is mixed with one set as LLM_….
        is_whole = all(ENV_FALLBACK_PREFIX in found for found in pair) and any(ENV_PREFIX in found for found in pair)
        others = ENV_FALLBACK_FIELDS if not is_whole else ("model", "api_version")
        for name, field in cls.model_fields.items():
            prefixes = (ENV_PREFIX, ENV_FALLBACK_PREFIX) if name in others else (ENV_PREFIX,)
            value = next((found for prefix in prefixes if (found := env.get(prefix + name.upper(), "").strip())), None)
            if value is not None:
                is_plain = not any(kind in str(field.annotation) for kind in ("dict", "tuple", "Spec"))
                fields[name] = value if is_plain else _parse_text(value)
        for text in find_ignored_variables(env):
            _log.warning("%s", text)
        fields |= {name: value for name, value in overrides.items() if value is not None}
        return cls.create(**fields)

    @classmethod
    def create(cls, **fields: Any) -> Self:
        """Create a config from user-supplied fields.

        Raises:
            LLMConfigError: no model is named, or a value cannot be used.
        """
        if not fields.get("model"):
            raise LLMConfigError(
                "No model is configured.",
                remedy="Set LLM_MODEL and LLM_API_KEY, and LLM_BASE_URL for a server of your own; "
                "LLM_MODEL=scripted/FILE needs neither key nor network.",
            )
        try:
            return cls(**fields)
        except ValidationError as error:
            raise LLMConfigError(
                "The model's settings cannot be used: " + "; ".join(_render_complaint(item) for item in error.errors())
            ) from None


_PARTS: Mapping[str, type[BaseModel]] = {
    "fallbacks": Fallback,
    "rules": RouteRule,
    "router": RouterSpec,
    "batch": BatchSpec,
    "context_management": ContextManagementSpec,
    "clear_thinking": ThinkingClearing,
    "clear_tool_uses": ToolUseClearing,
    "compact": Compaction,
}
"""Nested settings by field name."""


def set_litellm_environment() -> None:
    """Set the variables that litellm reads at import. Variables already set keep their value."""
    for name, value in LITELLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def drop_provider_addresses(known: Iterable[str]) -> list[str]:
    """Remove variables that litellm would read as a provider's address. Return the names that were set.

    Such an address belongs to no entry, but would receive the keys of entries. Variables of other programs stay,
    because hooks, the operator's tools and SDKs read them.

    Args:
        known: the providers; litellm derives variable names from some of them.
    """
    names = frozenset(name for name in os.environ if _ADDRESS_VARIABLE.fullmatch(name))
    found = _find_litellm_variables(names) | {name for name in names if name.removesuffix(_MADE_OF).lower() in known}
    return sorted(name for name in found if os.environ.pop(name, None) is not None)


@lru_cache(maxsize=4)
def _find_litellm_variables(names: frozenset[str]) -> frozenset[str]:
    """Return the variables that the installed litellm's providers read, found by searching its sources."""
    package = importlib.util.find_spec("litellm") if names else None  # finds the package without importing it
    if package is None or package.origin is None:
        return frozenset()
    folder = Path(package.origin).parent
    found = set[str]()
    for part in ("*.py", "litellm_core_utils/**/*.py", "llms/**/*.py", "llms/**/*.json"):
        for path in folder.glob(part):
            text = path.read_text(encoding="utf-8", errors="replace")
            found |= {name for name in names - found if re.search(rf"\b{name}\b", text)}
    return frozenset(found)


def has_provider_key(provider: str) -> bool:
    """Return whether the environment has a provider's own key, such as GROQ_API_KEY."""
    beginning = provider.upper().replace("-", "_").partition("_")[0]
    return any(
        name.startswith(beginning) and re.search(r"KEY|TOKEN", name) for name, text in os.environ.items() if text
    )


def may_have_claude_login() -> bool:
    """Return whether the environment or a file may have a login for Claude, which only Anthropic's SDK reads."""
    is_set = any(name.startswith("ANTHROPIC_") and text for name, text in os.environ.items())
    return is_set or Path("~/.config/anthropic").expanduser().exists()


def has_custom_headers() -> bool:
    """Return whether the environment has further headers for Claude, which only Anthropic's SDK reads."""
    return bool(os.environ.get(CUSTOM_HEADERS))


def _matches_endpoint(pattern: str, url: str) -> bool:
    """Return whether an address has the scheme, the host and the port of a pattern."""
    try:
        wanted, found = pattern.partition("://"), urlsplit(url)
        port = found.port if found.port is not None else (443 if found.scheme == "https" else 80)
    except ValueError:
        return False
    host, _, allowed = wanted[2].partition(":")
    allowed = allowed or ("443" if wanted[0] == "https" else "80")
    name = found.hostname or ""
    if re.search(r"[\x00-\x20\x7f]", url) or not _HOST.fullmatch(name) or not port:
        return False  # parsers of addresses disagree about these
    is_host = name.endswith(host[1:]) if host.startswith("*.") else name == host
    return found.scheme == wanted[0] and is_host and allowed in ("*", str(port)) and "@" not in found.netloc


def _find_secrets(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    """Yield the texts in further request fields that no error and no log may show."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _find_secrets(
                item, is_secret=is_secret or name == "extra_headers" or bool(_NAMES_A_SECRET.search(str(name)))
            )
    elif isinstance(value, list):
        for item in value:
            yield from _find_secrets(item, is_secret=is_secret)
    elif is_secret and isinstance(value, str) and value:
        yield value


def _is_address(text: str) -> bool:
    """Return whether a text is a server's address."""
    try:
        parts = urlsplit(text)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bad port or bad brackets
        return False
    return has_place and re.match(r"https?://[^/]", text) is not None and not re.search(r"\s", parts.netloc)


def _parse_text(text: str) -> Any:
    """Parse a value of a structured field as JSON. Other text is returned as is and fails the field's validation."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _render_complaint(item: Any) -> str:
    place = list(item["loc"])
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        name = str(place.pop())
        parts = next(_PARTS[part] for part in reversed(place) if part in _PARTS)
        text = f"{name!r} is not part of it{_did_you_mean(name, parts.model_fields)}"
    field = ".".join(map(str, place))
    return f"{field} ({ENV_PREFIX}{str(place[0]).upper()}): {text}" if field else text


def _unknown_setting(name: str) -> str:
    if name in UNSUPPORTED:
        return f"{name!r} is a setting of OpenHands that is not supported: {UNSUPPORTED[name]}"
    return f"{name!r} is not a model setting{_did_you_mean(name, LLMConfig.model_fields)}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def find_ignored_variables(env: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that has no effect, by name. OpenHands' own further variables are left out."""
    found = []
    known = {ENV_PREFIX + name.upper() for name in LLMConfig.model_fields} | {CONFIG_FILE_VARIABLE}
    for name in sorted(env):
        field = name.removeprefix(ENV_PREFIX).lower()
        if name.startswith(ENV_PREFIX) and field in UNSUPPORTED:
            found.append(f"The environment variable {name} has no effect: {UNSUPPORTED[field]}.")
        elif name.startswith(ENV_PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if nearest:
                found.append(f"The environment variable {name} is not known; did you mean {nearest[0]}?")
    return found
