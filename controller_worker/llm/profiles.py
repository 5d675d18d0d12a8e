"""Named model settings: a TOML file, beside the environment.

    [llm]                                  # the base: for conversations that name no profile
    model = "anthropic/claude-sonnet-4-5"
    api_key = "${ANTHROPIC_KEY}"           # taken from the environment
    fallbacks = ["spare", {use = "long", on = ["context_window"]}]

    [llm.spare]                            # the base, merged with what stands here (OpenHands 6.1)
    api_key = "${SECOND_KEY}"

Holds: `LLM_…` variables win over `[llm]` and never reach a profile, so that no key meets an address it is not for;
the file is read once.
Differs: a bad value is an error that names it, where the original warns and uses the defaults: with another
model than the one that was asked for.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from controller_worker.llm.config import CONFIG_FILE_VARIABLE, ENV_PREFIX, LLMConfig
from controller_worker.llm.errors import LLMConfigError

SECTION = "llm"

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class Profiles:
    """The base settings and the named ones."""

    def __init__(self, base: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]], env: Mapping[str, str]) -> None:
        self._base = base
        self._named = named
        self._env = env

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read the file that LLM_CONFIG names, if it names one.

        Raises:
            LLMConfigError: the file is missing, no TOML, or has a section that cannot be meant.
        """
        path = env.get(CONFIG_FILE_VARIABLE, "").strip()
        if not path:
            return cls({}, {}, env)
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
        return cls(fields, named, env)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the profiles, in the file's order."""
        return tuple(self._named)

    def sets(self, field: str) -> bool:
        """Say whether any of the settings say something about a field."""
        is_in_env = bool(self._env.get(ENV_PREFIX + field.upper(), "").strip())
        return is_in_env or any(field in fields for fields in (self._base, *self._named.values()))

    def config(self, name: str | None = None, **overrides: Any) -> LLMConfig:
        """Return the settings of a profile, or of a model by the base settings.

        Args:
            name: a profile's name, a model's, or None for the base's model.
            overrides: fields that win over all others; None counts as unset.

        Raises:
            LLMConfigError: no model is named, or a value cannot be used.
        """
        if name is not None and name in self._named:
            fields = {**self._base, **self._named[name]}
            wanted = {field: value for field, value in overrides.items() if value is not None}
            try:
                return LLMConfig.create(**self._filled(fields), **wanted)
            except LLMConfigError as error:
                raise LLMConfigError(f"Profile {name!r}: {error.message}", remedy=error.remedy) from None
        return LLMConfig.from_env(self._env, self._filled(self._base), model=name, **overrides)

    def named(self, name: str) -> LLMConfig:
        """Return the settings of a profile that must exist.

        Raises:
            LLMConfigError: there is no such profile, or a value cannot be used.
        """
        if name not in self._named:
            near = difflib.get_close_matches(name, self._named, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(self._named) or 'none'}."
            raise LLMConfigError(f"There is no model profile {name!r}.", remedy=hint)
        return self.config(name)

    def _filled(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._value(name, value) for name, value in fields.items()}

    def _value(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for variable in _VARIABLE.findall(value):
            if not self._env.get(variable, "").strip():
                raise LLMConfigError(f"{name} needs the environment variable {variable}, which is not set.")
        return _VARIABLE.sub(lambda found: self._env[found[1]].strip(), value)


def _is_profile(name: str, value: Any) -> bool:
    """Say whether a sub-table is a profile and not a setting with a table for its value."""
    return isinstance(value, dict) and name not in LLMConfig.model_fields
