"""The operator's table of models: a TOML file of named settings, in addition to the environment.

    [llm]                                  # the base: for conversations that name no model
    model = "anthropic/claude-sonnet-4-5"
    api_key = "${ANTHROPIC_KEY}"           # taken from the environment
    fallbacks = ["spare", {use = "long", on = ["context_window"]}]

    [llm.spare]                            # the base, merged with these settings (OpenHands 6.1)
    api_key = "${SECOND_KEY}"
    tenants = ["acme"]                     # whose conversations may name it

    [llm.gemini]
    model = "gemini/*"                     # any model of this provider, with this key
    api_key = "${GEMINI_KEY}"

A conversation names an entry: a profile, the exact model of an entry, or a model that a pattern matches. `find` turns
the name into a reference; `config` turns a reference into settings. References are internal and never come from a
conversation: a profile's name, `PROFILE#MODEL` for a model of its pattern or for its fallback, and `#MODEL` for another
model with the base settings.

Holds: an unknown name is rejected with the list of names. `LLM_…` variables override `[llm]` and never reach a profile.
A profile with another address or provider than the base does not inherit the fields bound to the base's address
(`ADDRESS_BOUND_FIELDS`). The file is read once.
Differs: a bad value is an error that names it. The original warns and uses the defaults, and may so use another model
than requested.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from broker.contract import PATTERN_END, SCRIPT_PREFIXES, ModelTable, OfferedModel, not_offered_error
from broker.runtime import UsageError
from controller_worker.providers.config import (
    ADDRESS_BOUND_FIELDS,
    CONFIG_FILE_VARIABLE,
    ENV_FALLBACK_FIELDS,
    ENV_FALLBACK_PREFIX,
    ENV_PREFIX,
    LLMConfig,
)
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.model_table import find_provider, has_price

SECTION = "llm"
ADDRESS_FIELDS = ("model", "base_url", "custom_llm_provider", "ollama_base_url")
OWN_ADDRESS_PROVIDERS = frozenset({"anthropic", "openai", "custom_openai", "hosted_vllm", "litellm_proxy", "lm_studio"})
"""Providers called at `base_url`, if set, with the model's name in the body only."""
PATTERN_PROVIDERS = frozenset(
    {
        *("anthropic", "cerebras", "deepseek", "fireworks_ai", "gemini", "groq", "mistral", "moonshot", "openai"),
        *("openrouter", "perplexity", "together_ai", "xai", "zai"),
    }
)
"""Providers with one fixed address, which the model's name cannot change."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class Profiles:
    """The base settings and the named profiles.

    Attributes:
        is_open: conversations may name any model and any file, because they belong to the user who started this worker.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        named: Mapping[str, Mapping[str, Any]],
        env: Mapping[str, str],
        *,
        is_open: bool = False,
    ) -> None:
        self._base = base
        self._named = named
        self._env = env
        self.is_open = is_open

    @classmethod
    def from_env(cls, env: Mapping[str, str], *, is_open: bool = False) -> Self:
        """Read the file that LLM_CONFIG names, if it is set.

        Raises:
            LLMConfigError: the file is missing, is not TOML, or has an invalid section.
        """
        path = env.get(CONFIG_FILE_VARIABLE, "").strip()
        if not path:
            return cls({}, {}, env, is_open=is_open)
        try:
            tables = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise LLMConfigError(f"{CONFIG_FILE_VARIABLE} {path!r} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise LLMConfigError(f"{CONFIG_FILE_VARIABLE} {path!r} is not TOML: {error}.") from None
        section = tables.get(SECTION)
        if not isinstance(section, dict):
            raise LLMConfigError(f"{CONFIG_FILE_VARIABLE} {path!r} has no section [{SECTION}].")
        fields = {name: value for name, value in section.items() if not _is_profile(name, value)}
        named = {name: value for name, value in section.items() if _is_profile(name, value)}
        for name in named:
            if not name or "#" in name or name.endswith(PATTERN_END):
                raise LLMConfigError(f"{CONFIG_FILE_VARIABLE} {path!r}: {name!r} cannot be the name of a profile.")
        return cls(fields, named, env, is_open=is_open)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the profiles, in the file's order."""
        return tuple(self._named)

    @property
    def default(self) -> str:
        """The model of conversations that name none, even if its settings are invalid; empty without one."""
        return self._find_variable("model") or str(self._base.get("model", ""))

    @cached_property
    def table(self) -> ModelTable:
        """The models that conversations may name."""
        return ModelTable(
            entries=tuple(entry for entry, _ in self._entries),
            has_scripts=bool(self._find_base_field("scripts_dir")),
            is_open=self.is_open,
        )

    @cached_property
    def _own_entries(self) -> list[tuple[OfferedModel, str]]:
        """The names of the base and the profiles themselves, with their references. The empty name is the base."""
        base = self._find_base_field("model")
        entries = [_make_entry(base, "", self._find_base_field("tenants"))] if base else []
        for name, fields in self._named.items():
            tenants = self._tenants(name)
            if not str({**self._base, **fields}.get("model", "")).endswith(PATTERN_END):
                entries.append(_make_entry(name, name, tenants))
            # The base's model belongs to the base, not to each profile that changes only its temperature.
            if model := self._fill_or_none("model", fields.get("model")):
                entries.append(_make_entry(model, name, tenants))
        return entries

    @cached_property
    def _entries(self) -> list[tuple[OfferedModel, str]]:
        """Every name that conversations may use: first those of the entries, then those of their fallbacks.

        A fallback is offered to the same tenants as the settings that name it, and uses those settings.
        """
        entries = list(self._own_entries)
        named = [("", self._find_base_field("fallbacks"), self._find_base_field("tenants"))]
        named += [(name, fields.get("fallbacks"), self._tenants(name)) for name, fields in self._named.items()]
        for profile, fallbacks, tenants in named:
            for each in fallbacks if isinstance(fallbacks, list | tuple) else ():
                use = each.get("use") if isinstance(each, Mapping) else each
                if isinstance(use, str) and use and use not in self._named:
                    entries.append(_make_entry(use, f"{profile}#{use}", tenants))
        return entries

    def list_unpriced(self, further: Iterable[str] = ()) -> list[str]:
        """Return the names without a known price, among those that conversations may use and further ones.

        Scripts are left out, because their turns have prices, and so are names with invalid settings.
        """
        found = []
        for name in dict.fromkeys([*(entry.name for entry, _ in self._entries), *further]):
            if name.startswith(SCRIPT_PREFIXES) or name.endswith(PATTERN_END):
                continue
            with contextlib.suppress(UsageError):  # a call reports the error
                config = self.load_config(self.find_reference(name))
                if not config.model.startswith(SCRIPT_PREFIXES) and not has_price(config):
                    found.append(name)
        return found

    def has_field(self, field: str) -> bool:
        """Return whether any of the settings contain a field."""
        is_in_env = bool(self._env.get(ENV_PREFIX + field.upper(), "").strip())
        return is_in_env or any(field in fields for fields in (self._base, *self._named.values()))

    def find_reference(self, name: str | None, tenant: str | None = None) -> str:
        """Return the reference for a model named by a conversation.

        Args:
            name: None or empty: the base's model.
            tenant: the conversation's tenant; None for the operator, who may use every entry.

        Raises:
            ModelNotOffered: no entry with this name is offered to the tenant; the message lists the offered ones.
        """
        if not name:
            base = next((entry for entry, reference in self._own_entries if not reference), None)
            if tenant is None or base is None or base.is_for(tenant):
                return ""
            raise not_offered_error("", tenant, [self.table])
        if (reference := _find_match(self._entries, name, tenant)) is not None:
            return reference
        if self.is_open or (self.table.has_scripts and name.startswith(SCRIPT_PREFIXES)):
            return f"#{name}"
        raise not_offered_error(name, tenant or "", [self.table])

    def find_fallback(self, reference: str, name: str, tenant: str | None) -> str:
        """Return the reference of a fallback that a reference's settings name.

        Raises:
            ModelNotOffered: the fallback is a profile for other tenants.
        """
        if name in self._named:
            return self.find_reference(name, tenant)
        found = _find_match(self._own_entries, name, tenant)
        return f"{reference.partition('#')[0]}#{name}" if found is None else found

    def load_config(self, reference: str | None = None, **overrides: Any) -> LLMConfig:
        """Return the settings for a reference or the name of an entry.

        Args:
            reference: None or empty: the base.
            overrides: fields that override all others; None counts as unset.

        Raises:
            LLMConfigError: no model is named, or a value cannot be used.
            ModelNotOffered: there is no such entry.
        """
        profile, mark, model = (reference or "").partition("#")
        if not mark and profile and profile not in self._named:
            profile, mark, model = self.find_reference(profile).partition("#")
        if profile in self._named:
            fields = self._merge(profile)
            wanted = {field: value for field, value in overrides.items() if value is not None}
            try:
                filled = self._fill(fields)
                _check_pattern(filled, model)
                if model and _find_address(filled | {"model": model}) != _find_address(filled):
                    filled = {field: value for field, value in filled.items() if field not in ADDRESS_BOUND_FIELDS}
                return LLMConfig.create(
                    **filled | ({"model": model} if model else {}) | {"scripts_dir": None}, **wanted
                )
            except LLMConfigError as error:
                raise LLMConfigError(f"Profile {profile!r}: {error.message}", remedy=error.remedy) from None
        base = LLMConfig.from_env(self._env, self._inherit(), **{"model": model or None, **overrides})
        own = self._find_base_field("model")
        if own and (not model or model.startswith(own.removesuffix("*"))):
            _check_pattern(base.model_dump(include=set(ADDRESS_FIELDS)) | {"model": own}, model)
        if not model:
            return base.model_copy(update={"scripts_dir": None})  # the operator named it
        if model.startswith(SCRIPT_PREFIXES):
            base = base.model_copy(update={"own_endpoints": ()})
            return base.model_copy(update={"scripts_dir": None}) if self.is_open else base
        if own and find_address(base.model_copy(update={"model": own})) != find_address(base):
            return base.model_copy(update=ADDRESS_BOUND_FIELDS)
        return base

    def load_profile(self, name: str) -> LLMConfig:
        """Return the settings of a profile.

        Raises:
            LLMConfigError: there is no such profile, or a value cannot be used.
        """
        if name not in self._named:
            near = difflib.get_close_matches(name, self._named, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(self._named) or 'none'}."
            raise LLMConfigError(f"There is no model profile {name!r}.", remedy=hint)
        return self.load_config(name)

    def _find_base_field(self, field: str) -> Any:
        """Return a field of the base settings, even if other fields are invalid; None if it is not set."""
        # a base without a model still has its other settings
        for model in (None, "none") if field != "model" else (None,):
            try:
                value = getattr(LLMConfig.from_env(self._env, self._inherit(), model=model), field)
            except LLMConfigError:
                continue
            return [each.use for each in value] if field == "fallbacks" else value
        return self._fill_or_none(field, self._base.get(field))

    def _merge(self, name: str) -> dict[str, Any]:
        """Return the fields of a profile: its own and those of the base, without fields bound to another address."""
        own = self._named[name]
        merged = {**self._base, **own}
        if _find_address(merged) != _find_address(self._base):
            for field in ADDRESS_BOUND_FIELDS:
                if field not in own:
                    merged.pop(field, None)
        return merged

    def _tenants(self, name: str) -> Any:
        return self._fill_or_none("tenants", {**self._base, **self._named[name]}.get("tenants"))

    def _inherit(self) -> dict[str, Any]:
        """Return the base's fields. Fields bound to its address are left out if the environment names another one."""
        given = {name: self._find_variable(name) for name in ADDRESS_FIELDS}
        filled = self._fill(self._base)
        if _find_address({**filled, **{name: text for name, text in given.items() if text}}) == _find_address(filled):
            return filled
        return {name: value for name, value in filled.items() if name not in ADDRESS_BOUND_FIELDS}

    def _find_variable(self, field: str) -> str:
        """Return the environment's value of a field; empty if it is not set."""
        own = self._env.get(ENV_PREFIX + field.upper(), "").strip()
        if own or field not in ENV_FALLBACK_FIELDS:
            return own
        return self._env.get(ENV_FALLBACK_PREFIX + field.upper(), "").strip()

    def _fill_or_none(self, name: str, value: Any) -> Any:
        try:
            return self._value(name, value)
        except LLMConfigError:
            return None

    def _fill(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._value(name, value) for name, value in fields.items()}

    def _value(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for variable in _VARIABLE.findall(value):
            if not self._env.get(variable, "").strip():
                raise LLMConfigError(f"{name} needs the environment variable {variable}, which is not set.")
        return _VARIABLE.sub(lambda found: self._env[found[1]].strip(), value)


def _make_entry(name: str, reference: str, tenants: Any) -> tuple[OfferedModel, str]:
    """Return an entry of the table.

    If its tenants are unreadable, it is offered to no tenant, and its settings raise the error.
    """
    try:
        limit = LLMConfig.create(model=name, tenants=tenants).tenants if tenants is not None else None
    except LLMConfigError:
        limit = ()
    return OfferedModel(name=name, tenants=limit), reference


def _find_match(entries: Iterable[tuple[OfferedModel, str]], name: str, tenant: str | None) -> str | None:
    """Return the reference of the first entry of this name for a tenant; None if there is none."""
    # A profile wins over a model of the same name, such as an LLM_MODEL that names a profile.
    for entry, reference in sorted(entries, key=lambda known: known[1] != name):
        if entry.matches(name) and (tenant is None or entry.is_for(tenant)):
            return f"{reference}#{name}" if entry.name.endswith(PATTERN_END) else reference
    return None


def find_address(config: LLMConfig) -> tuple[Any, ...]:
    """Return the owner of the settings' keys: a custom address or a provider."""
    return _find_address(config.model_dump(include=set(ADDRESS_FIELDS)))


def _find_address(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the owner of the settings' keys: a custom address or a provider."""
    if fields.get("base_url"):
        return (fields["base_url"],)
    model = fields.get("model")
    custom = fields.get("custom_llm_provider")
    provider = find_provider(str(model), custom if isinstance(custom, str) else None) if model else None
    return provider, fields.get("ollama_base_url")


def _check_pattern(fields: Mapping[str, Any], model: str) -> None:
    """Reject a pattern that could lead to several addresses, or to models without a name.

    Raises:
        LLMConfigError: the pattern could do so.
    """
    pattern = str(fields.get("model", ""))
    if not pattern.endswith(PATTERN_END):
        return
    if not model:
        raise LLMConfigError(f"{pattern!r} matches many models.", remedy="Name one of them.")
    provider = pattern.removesuffix(PATTERN_END)
    has_address = bool(fields.get("base_url")) and provider in OWN_ADDRESS_PROVIDERS
    if (provider not in PATTERN_PROVIDERS and not has_address) or fields.get("custom_llm_provider"):
        known = ", ".join(sorted(PATTERN_PROVIDERS))
        raise LLMConfigError(
            f"{pattern!r} cannot be a pattern: the address of this provider may depend on the model.",
            remedy=f"Write a profile for each model. Patterns are for {known}, and for a base_url of your own.",
        )


def _is_profile(name: str, value: Any) -> bool:
    """Return whether a sub-table is a profile, and not a setting whose value is a table."""
    return isinstance(value, dict) and name not in LLMConfig.model_fields
