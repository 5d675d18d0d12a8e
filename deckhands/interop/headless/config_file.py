"""OpenHands' `config.toml` and its variables, as one configuration of a run.

Holds: the environment overrides the file. The section that `-l` names replaces the model's variables, so that no key is
sent to a foreign address. An unknown or unsupported key is an error that names it; a key without effect is a notice. No
error shows a value of `[llm]`.
Does not: trust a `config.toml` of the working directory, which an agent or a stranger may have written, see
`deckhands.configuration`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.runtime import CONFIG_FILES_READ, UsageError, join_paths, split_paths
from deckhands.configuration import find_doubt
from deckhands.interop.headless.config_keys import (
    FILE_ONLY,
    LLM_KEYS,
    SECTIONS_WITHOUT_EFFECT,
    SUPPORTED,
    UNSUPPORTED_KEYS,
    WITHOUT_EFFECT,
    ZERO_IS_UNSET,
    Kind,
)

CONFIG_FILE = "config.toml"
VARIABLES = {
    (f"{section}_" if section != "core" else "").upper() + name.upper(): (section, name, kind)
    for section, keys in SUPPORTED.items()
    if section not in FILE_ONLY
    for name, kind in keys.items()
}
"""The variables of OpenHands that are read, in addition to `LLM_…`."""
OTHER_MODEL_VARIABLES = {"LITELLM_API_BASE": "LLM_BASE_URL"}
WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(slots=True)
class Config:
    """The configuration of a run.

    Attributes:
        values: by section and key; missing ones have their defaults.
        llm: the base settings of the model.
        named: the settings of each section `[llm.NAME]`, merged with the base.
        for_routing: the names of the sections `[llm.NAME]` that a router may choose.
        agents: the keys of each section `[agent.NAME]`, as they are in the file.
        from_variables: the values that variables have set.
        notices: keys without effect, and files that are not read.
    """

    values: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)
    llm: dict[str, Any] = field(default_factory=dict, repr=False)
    named: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    for_routing: set[str] = field(default_factory=set)
    agents: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    from_variables: set[tuple[str, str]] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)
    file: Path | None = None

    def get(self, section: str, name: str, default: Any = None) -> Any:
        """Return a value."""
        return self.values.get((section, name), default)

    def has_section(self, section: str) -> bool:
        """Return whether a section sets anything."""
        return any(found == section for found, _ in self.values)

    def select_agent(self, agent: str, known: Collection[str]) -> None:
        """Let the section `[agent.NAME]` of the run's agent override `[agent]`, but not the variables.

        Args:
            known: the existing agents, empty if unknown. Sections of other agents get a notice.

        Raises:
            UsageError: a key or a value in the section of a known agent is invalid; the text names it.
        """
        for name, table in self.agents.items():
            if known and name not in known:
                self.notices.append(f"{self.file}: [agent.{name}] is left out: there is no agent of this name.")
                continue
            for key, value in table.items():
                is_taken = _is_taken(self, f"agent.{name}", key, value, SUPPORTED["agent"])
                if is_taken:
                    _check_kind(f"{self.file}: [agent.{name}] {key}", value, SUPPORTED["agent"][key])
                if is_taken and name == agent and ("agent", key) not in self.from_variables:
                    self.values["agent", key] = value

    def find_model_section(self, name: str) -> dict[str, Any]:
        """Return the settings of `[llm.NAME]`.

        Raises:
            UsageError: there is no such section.
        """
        if name not in self.named:
            raise UsageError(
                f"There is no section [llm.{name}] in the configuration.{_nearest(name, self.named)}",
                remedy=f"Add it to {self.file or CONFIG_FILE}, or do not name it.",
            )
        return self.named[name]

    def environment(self, env: Mapping[str, str], profile: str | None) -> dict[str, str]:
        """Return the environment for the workers of a run.

        Args:
            profile: the section `[llm.NAME]` that overrides everything; None for none.

        Raises:
            UsageError: there is no such section.
        """
        section = None if profile is None else self.find_model_section(profile)
        merged = {name: text for name, text in env.items() if text.strip()}
        for other, name in OTHER_MODEL_VARIABLES.items():
            if merged.get(other):
                merged.setdefault(name, merged[other])
        if section is None:
            merged |= {
                name: text
                for name, text in _to_variables(self.llm).items()
                if not _variable_names(name) & merged.keys()
            }
        else:  # a key of the environment must not be sent to a section's address
            taken = {name for key in LLM_KEYS for name in _variable_names(f"LLM_{key.upper()}")}
            merged = {name: text for name, text in merged.items() if name not in taken}
            merged |= _to_variables(section)
        for name in ("git_user_name", "git_user_email"):
            if (value := self.get("core", name)) is not None:
                merged.setdefault(f"DECKHANDS_{name.upper()}", value)
        for name, value in self.get("sandbox", "runtime_startup_env_vars", {}).items():
            merged.setdefault(f"SANDBOX_ENV_{name}", str(value))
        if self.get("core", "disable_color"):
            merged["NO_COLOR"] = "1"
        if self.file is not None:
            files: list[Path | str] = [*split_paths(merged.get(CONFIG_FILES_READ, "")), self.file]
            merged[CONFIG_FILES_READ] = join_paths(files)
        return merged


def read_config(named: Path | None, env: Mapping[str, str], directory: Path) -> Config:
    """Read the file and the variables.

    Args:
        named: the file; None for `config.toml` in the directory, if it exists.

    Raises:
        UsageError: the file cannot be read, or a key or a value is invalid; the text names it.
    """
    config = Config()
    path = named if named is not None else directory / CONFIG_FILE
    if named is not None or path.is_file():
        reason = "" if named is not None else find_doubt(path, env)
        if reason:
            config.notices.append(f"{path} is not read: {reason}. Name it by --config-file.")
        else:
            _take_file(config, path)
    for variable, (section, name, kind) in VARIABLES.items():
        text = env.get(variable, "").strip()
        if text:
            config.values[section, name] = _parse_value(variable, text, kind)
            config.from_variables.add((section, name))
    return config


def _take_file(config: Config, path: Path) -> None:
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"The file {path} cannot be read: {what}.", remedy="Correct it, or name another.") from error
    config.file = path.absolute()
    for section, table in tables.items():
        if section not in (*SUPPORTED, *SECTIONS_WITHOUT_EFFECT, "llm") or not isinstance(table, dict):
            what = "is no section" if not isinstance(table, dict) else "is not known"
            raise UsageError(
                f"{path}: [{section}] {what}.{_nearest(section, (*SUPPORTED, 'llm'))}",
                remedy=f"Use {', '.join(f'[{name}]' for name in (*SUPPORTED, 'llm'))}.",
            )
        if section == "llm":
            _take_models(config, table)
        elif section in SUPPORTED:
            _take_section(config, section, table)
        elif table:
            config.notices.append(f"{path}: [{section}] has no effect: {SECTIONS_WITHOUT_EFFECT[section]}.")


def _take_section(config: Config, section: str, table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        if section == "agent" and isinstance(value, dict) and name not in UNSUPPORTED_KEYS["agent"]:
            config.agents[name] = value
        elif _is_taken(config, section, name, value, SUPPORTED[section]):
            _check_kind(f"{config.file}: [{section}] {name}", value, SUPPORTED[section][name])
            config.values[section, name] = value


def _take_models(config: Config, table: Mapping[str, Any]) -> None:
    sections = {name: value for name, value in table.items() if isinstance(value, dict) and name not in LLM_KEYS}
    base = {name: value for name, value in table.items() if name not in sections}
    config.llm = _take_model(config, "llm", base)
    for name, fields in sections.items():
        if fields.get("for_routing") is True:
            config.for_routing.add(name)
        own = {key: value for key, value in fields.items() if key != "for_routing"}
        config.named[name] = config.llm | _take_model(config, f"llm.{name}", own)


def _take_model(config: Config, section: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: "" if name in ZERO_IS_UNSET and value == 0 else value
        for name, value in fields.items()
        if _is_taken(config, section, name, value, LLM_KEYS)
    }


def _is_taken(config: Config, section: str, name: str, value: Any, known: Iterable[str]) -> bool:
    """Return whether a key is used, and record a key without effect; raises UsageError for any other key."""
    if name in known:
        return True
    family = section.partition(".")[0]
    is_empty = value in ("", [], {})
    if why := WITHOUT_EFFECT[family].get(name):
        if not is_empty:
            config.notices.append(f"{config.file}: [{section}] {name} has no effect: {why}.")
        return False
    if remedy := UNSUPPORTED_KEYS[family].get(name):
        if is_empty or value is False:
            return False
        raise UsageError(f"{config.file}: [{section}] {name} is not supported.", remedy=remedy)
    places = [other for other, keys in SUPPORTED.items() if name in keys]
    hint = f" Did you mean [{places[0]}] {name}?" if places else _nearest(name, known)
    raise UsageError(
        f"{config.file}: [{section}] {name} is not known.{hint}",
        remedy="Correct the key, or remove it. docs/parity.md lists the keys.",
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def _check_kind(where: str, value: Any, kind: Kind) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "text": isinstance(value, str),
        "flag": isinstance(value, bool),
        "whole": is_number and isinstance(value, int),
        "number": is_number,
        "texts": isinstance(value, list) and all(isinstance(item, str) for item in value),
        "table": isinstance(value, dict) and all(isinstance(item, str | int | float) for item in value.values()),
        "servers": isinstance(value, list) and all(isinstance(item, str | dict) for item in value),
    }
    if not fits[kind]:
        shown = "not a list" if kind == "servers" else ascii(value)[:100]  # a server's entry may hold its key
        raise UsageError(f"{where} is {shown}.", remedy=f"Write {_NAMES[kind]}.")


_NAMES: Mapping[Kind, str] = {
    "text": "a text",
    "flag": "true or false",
    "whole": "a whole number",
    "number": "a number",
    "texts": "a list of texts",
    "table": "a table of texts",
    "servers": "a list of servers",
}


def _parse_value(variable: str, text: str, kind: Kind) -> Any:
    """Parse the value of a variable."""
    try:
        match kind:
            case "text":
                return text
            case "flag":
                return WORDS[text.lower()]
            case "whole":
                return int(text)
            case "number":
                return float(text)
        value = json.loads(text)
    except (ValueError, KeyError):
        value = text
    _check_kind(variable, value, kind)
    return value


def _variable_names(variable: str) -> set[str]:
    """Return the names of a model setting in the environment of workers."""
    return {variable, variable.replace("LLM_", "LITELLM_", 1)}


def _to_variables(llm: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of a model as environment variables."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in llm.items()}
    return {f"LLM_{name.upper()}": text for name, text in texts.items() if text.strip()}
