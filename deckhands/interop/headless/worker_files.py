"""The sections of OpenHands' `config.toml` that concern more than one model: condenser, router and MCP servers.

Holds: a variable that names a file of ours overrides the section. Only the owner of their folder can read the files,
because they may contain keys. No error shows a value of a server's entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.contract import AskingCondenserSpec, CondenserSpec
from broker.runtime import UsageError
from deckhands.interop.headless.config_file import Config

MODELS_FILE, SERVERS_FILE, ROUTER = "LLM_CONFIG", "DECKHANDS_MCP", "LLM_ROUTER"
"""The variables of the workers that the sections stand for."""
SECONDARY_MODEL = "secondary_model"
"""The section `[llm.NAME]` that OpenHands' `multimodal_router` needs."""
CONDENSERS = (
    *("noop", "observation_masking", "browser_output_masking", "recent", "llm", "amortized", "llm_attention"),
    "structured",
)
"""OpenHands' types that the section can name."""
MAX_TIMEOUT_SECONDS = 3600
"""The longest time of a call to an MCP server (OpenHands 10.8)."""
SERVER_KEYS: Mapping[str, frozenset[str]] = {
    "sse_servers": frozenset({"url", "api_key"}),
    "shttp_servers": frozenset({"url", "api_key", "timeout"}),
    "stdio_servers": frozenset({"name", "command", "args", "env"}),
}


def to_condenser(config: Config) -> CondenserSpec | None:
    """Return the condenser of the section `[condenser]`; None without one.

    Raises:
        UsageError: the type is unknown, or a value is invalid for it; the text names it.
    """
    if not config.has_section("condenser"):
        return None
    fields = {name: value for (section, name), value in config.values.items() if section == "condenser"}
    kind = fields.setdefault("type", "noop")
    if kind not in CONDENSERS:
        raise UsageError(f"[condenser] type is {ascii(kind)[:100]}.", remedy=f"Use one of {', '.join(CONDENSERS)}.")
    spec = CondenserSpec.TYPES[kind]
    if "llm_config" in fields:
        name = fields.pop("llm_config")
        if "llm" in spec.model_fields and name != "llm":  # [llm] is the conversation's own model
            _require_model(config, name)
            fields["llm"] = {"model": name}
    if unknown := sorted(fields.keys() - spec.model_fields.keys()):
        raise UsageError(
            f"[condenser] {unknown[0]} has no meaning for the type {kind}.", remedy="Remove it, or change the type."
        )
    try:
        return spec.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        what = ".".join(map(str, first["loc"])) or "keep_first"
        raise UsageError(f"[condenser] {what} cannot be used: {first['msg']}.", remedy="Correct it.") from None


def to_mcp_servers(config: Config, *, has_network: bool) -> dict[str, dict[str, Any]]:
    """Return the servers of the section `[mcp]` by name, as in a file of `mcpServers`.

    OpenHands gives names only to programs; a server with an address is called `sse_1`, `shttp_2` and so on.

    Args:
        has_network: whether programs can reach the network.

    Raises:
        UsageError: an entry is invalid; the text names it.
    """
    if config.get("agent", "enable_mcp") is False:
        return {}
    servers: dict[str, dict[str, Any]] = {}
    for name, server in _find_servers(config, has_network=has_network):
        if name in servers:
            raise UsageError(f"[mcp] has two servers called {name}.", remedy="Rename one of them.")
        servers[name] = server
    urls = [server["url"] for server in servers.values() if "url" in server]
    if len(set(urls)) < len(urls):
        raise UsageError("[mcp] has two servers with the same url.", remedy="Remove one of them.")
    return servers


def _find_servers(config: Config, *, has_network: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, known in SERVER_KEYS.items():
        for position, given in enumerate(config.get("mcp", key, ()), start=1):
            where = f"Entry {position} of [mcp] {key}"
            entry = {"url": given} if isinstance(given, str) and "url" in known else given
            if not isinstance(entry, dict):
                raise UsageError(f"{where} is a text.", remedy="Write a table with name and command.")
            if unknown := sorted(entry.keys() - known):
                raise UsageError(
                    f"{where} has the unknown key {unknown[0]}.", remedy=f"Use {', '.join(sorted(known))}."
                )
            for needed in ("url",) if "url" in known else ("name", "command"):
                if not entry.get(needed):
                    raise UsageError(f"{where} has no {needed}.", remedy=f"Add {needed}.")
            for part, value in entry.items():
                fits, form = _FORMS[part]
                if not fits(value):
                    raise UsageError(f"{where}: {part} cannot be used.", remedy=f"Write {form}.")
            if "url" not in known:
                program = {part: entry[part] for part in ("command", "args", "env") if part in entry}
                yield entry["name"], {**program, "network": has_network}
                continue
            server: dict[str, Any] = {"url": entry["url"], "type": "sse" if key == "sse_servers" else "http"}
            if api_key := entry.get("api_key"):
                server["headers"] = {"Authorization": f"Bearer {api_key}"}
            if "timeout" in entry:
                server["timeout"] = entry["timeout"]
            yield f"{key.partition('_')[0]}_{position}", server


def _is_text(value: object, pattern: str) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MAX_TIMEOUT_SECONDS


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "url": (lambda value: _is_text(value, r"https?://[^\s/]\S*"), "an http or https address"),
    "api_key": (lambda value: _is_text(value, r"[^\r\n]*"), "a text"),
    "timeout": (_is_seconds, f"seconds, 1 to {MAX_TIMEOUT_SECONDS}"),
    "name": (lambda value: _is_text(value, r"[A-Za-z0-9_-]{1,64}"), "up to 64 letters, digits, '_' and '-'"),
    "command": (lambda value: _is_text(value, r"\S+"), "a program, without arguments"),
    "args": (lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of texts"),
    "env": (
        lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
        "a table of texts",
    ),
}
"""By key of a server's entry: whether a value can be used, and its form."""


def to_router(config: Config) -> dict[str, Any] | None:
    """Return the router of the section `[model_routing]`; None without one.

    Raises:
        UsageError: the router is unknown, or has no second model.
    """
    name = config.get("model_routing", "router_name", "noop_router")
    if name == "noop_router":
        return None
    if name != "multimodal_router":
        raise UsageError(
            f"[model_routing] router_name is {ascii(name)[:100]}.", remedy="Use noop_router or multimodal_router."
        )
    if SECONDARY_MODEL not in config.for_routing:
        raise UsageError(
            f"[model_routing] multimodal_router needs a section [llm.{SECONDARY_MODEL}] with for_routing = true.",
            remedy="Add it, or use noop_router.",
        )
    _require_model(config, SECONDARY_MODEL)
    return {"kind": "multimodal", "secondary": SECONDARY_MODEL}


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files and variables that a configuration adds to the workers of a run.

    Attributes:
        models: the sections `[llm.NAME]` that the condenser or the router names.
        servers: the MCP servers by name.
        router: the value of LLM_ROUTER; None for no router.
    """

    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    servers: Mapping[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    router: dict[str, Any] | None = None

    @classmethod
    def of(cls, config: Config, environment: Mapping[str, str], *, has_network: bool) -> WorkerFiles:
        """Return the files and variables for a configuration; record a notice for a section that a variable overrides.

        Raises:
            UsageError: a value is invalid; the text names it.
        """
        servers = to_mcp_servers(config, has_network=has_network)
        if servers and environment.get(SERVERS_FILE):
            config.notices.append(f"{config.file}: [mcp] has no effect: {SERVERS_FILE} is set.")
            servers = {}
        router = to_router(config)
        if router is not None and environment.get(ROUTER):
            config.notices.append(f"{config.file}: [model_routing] has no effect: {ROUTER} is set.")
            router = None
        condenser = to_condenser(config)
        llm = condenser.llm if isinstance(condenser, AskingCondenserSpec) else None
        names = [name for name in (llm and llm.model, router and router["secondary"]) if name]
        if environment.get(MODELS_FILE):  # a file of the user's, which has to have these names
            names = []
        return cls({name: config.find_model_section(name) for name in names}, servers, router)

    def write(self, folder: Path) -> dict[str, str]:
        """Write the files into a folder, and return the variables for the workers."""
        variables: dict[str, str] = {}
        if self.models:
            path = folder / "models.toml"
            path.write_text(render_models(self.models), encoding="utf-8")
            variables[MODELS_FILE] = str(path)
        if self.servers:
            path = folder / "mcp.json"
            path.write_text(json.dumps({"mcpServers": self.servers}), encoding="utf-8")
            variables[SERVERS_FILE] = str(path)
        if self.router is not None:
            variables[ROUTER] = json.dumps(self.router)
        return variables


def render_models(named: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sections `[llm.NAME]` as a file of model profiles; empty values are left out."""
    lines = ["[llm]"]
    for name, fields in named.items():
        lines.append(f"[llm.{_to_toml(name)}]")
        lines += [f"{_to_toml(key)} = {_to_toml(value)}" for key, value in fields.items() if value not in ("", [], {})]
    return "\n".join(lines) + "\n"


def _to_toml(value: Any) -> str:
    """Return a value from TOML as TOML. JSON's form of texts is valid in TOML, except for the character DEL."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_to_toml(key)} = {_to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_toml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # numbers, dates and times


def _require_model(config: Config, name: str) -> None:
    """Refuse a section that names no model, because the run would fail when it needs the model."""
    if not config.find_model_section(name).get("model"):
        raise UsageError(f"[llm.{name}] names no model.", remedy="Add `model` to it, or to [llm].")
