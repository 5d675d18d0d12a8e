"""The MCP servers of tool workers: parses and validates the common `mcpServers` file.

    {"mcpServers": {
        "issues": {"url": "https://mcp.example.com/mcp", "headers": {"Authorization": "Bearer ${ISSUES_TOKEN}"}},
        "time": {"command": "mcp-server-time", "args": ["--local-timezone", "UTC"]}},
     "allow": {"tasks": ["*.example.com"], "skill_servers": ["time"]}}

Holds: a server gets only the secrets that its own entry names, and no error text contains a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from broker.contract import parse_authority, parse_host_rules
from broker.runtime import VARIABLE, UsageError

KEY_FIELD = "deckhands/idempotencyKey"
"""Field of a call's `_meta`: its idempotency key. By HTTP, the header `Idempotency-Key` has it as well."""


class OAuthSpec(BaseModel):
    """How a worker gets access to a server by OAuth 2.1.

    Attributes:
        grant: `authorization_code` after a user's login, or `client_credentials` without one.
        issuer: The authorization server to which the client belongs; others get nothing.
        client_id, client_secret: The registered client; empty: `deckhands mcp login` registers one.
        scope: Scopes to ask for, separated by spaces; empty: those that the server names.
        origins: Further origins to which the requests of a login may go, such as `https://oauth2.example.com`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    grant: Literal["authorization_code", "client_credentials"] = "authorization_code"
    issuer: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")]
    client_id: str = ""
    client_secret: str = Field(default="", repr=False)
    scope: str = ""
    origins: tuple[Annotated[str, Field(pattern=r"^https?://[^\s/]+/?$")], ...] = ()

    @model_validator(mode="after")
    def _has_a_client(self) -> Self:
        if self.grant == "client_credentials" and not (self.client_id and self.client_secret):
            raise ValueError("client_credentials needs a client_id and a client_secret")
        return self

    @property
    def needs_person(self) -> bool:
        """Whether a user has to log in."""
        return self.grant != "client_credentials"


class McpServerSpec(BaseModel):
    """One server (OpenHands 10.8: limits and defaults).

    Attributes:
        command: A program that speaks MCP on its standard input and output; it runs in a separate sandbox.
        args, env: Its arguments and its environment; it inherits nothing of the tool worker's environment.
        read_only: Further paths of this machine that it may read.
        network: Whether it may reach the network.
        allow: Hosts that it may reach without `network`, as in `broker.contract.allowed_hosts`.
        url, headers: A server reached by HTTP, and the headers of its requests.
        oauth: How to get access to such a server; None: by its headers alone.
        type: Transport of HTTP: `http` (streamable) or `sse` (the older one).
        protocol: `auto` for the newest revision that both sides speak, `legacy` for the revisions with a handshake.
        timeout: Seconds for one call.
        task_timeout: Seconds for the task that a server may make of a call.
        tools: Names or patterns of its tools to offer.
        resources, prompts: Whether to offer tools that list and read them.
        pool: Pool of the tool workers that may call it; empty for the worker that holds the conversation's workspace.
        secrets: Texts to mask in every conversation: its headers, and all values from environment variables.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    command: Annotated[str, Field(pattern=r"^\S*$")] = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    read_only: tuple[Path, ...] = ()
    network: bool = False
    allow: tuple[str, ...] = ()
    url: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = ""
    headers: dict[str, str] = Field(default_factory=dict)
    oauth: OAuthSpec | None = None
    type: Literal["http", "sse", "stdio"] | None = None
    protocol: Literal["auto", "legacy"] = "auto"
    timeout: Annotated[float, Field(ge=1, le=3600)] = 60.0
    task_timeout: Annotated[float, Field(ge=1, le=604_800)] = 86_400.0
    tools: tuple[str, ...] = ("*",)
    resources: bool = False
    prompts: bool = False
    pool: str = ""
    secrets: tuple[str, ...] = Field(default=(), repr=False)

    @model_validator(mode="after")
    def _is_reached_one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either a command or a url")
        if self.oauth is not None and (not self.url or self.type == "sse"):
            raise ValueError("oauth is for a url with the type http")
        if self.allow and (self.network or not self.command):
            raise ValueError("allow is for a command without network")
        parse_host_rules(self.allow)
        return self


class AllowedServers(BaseModel):
    """The servers that tasks and skills may use for their own conversation: `allow` in the file.

    Attributes:
        tasks: hosts, as in `broker.contract.allowed_hosts`; a task may name any server there.
        skills: hosts; a skill of a workspace may name any server there.
        skill_servers: servers of this file that a skill may ask for, by their names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: tuple[str, ...] = ()
    skills: tuple[str, ...] = ()
    skill_servers: tuple[str, ...] = ()

    @field_validator("tasks", "skills")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        parse_host_rules(hosts)
        return hosts


def is_allowed_address(url: str, hosts: Sequence[str]) -> bool:
    """Return whether a rule allows the host and the port of an address. Without a port, it is that of the scheme."""
    try:
        parts = urlsplit(url)
        host, port = parse_authority(parts.netloc, {"https": 443, "http": 80}[parts.scheme])
    except (ValueError, KeyError):
        return False
    return any(rule.allows(host, port) for rule in parse_host_rules(hosts))


def read_allowed(path: Path) -> AllowedServers:
    """Read `allow` of the file.

    Raises:
        UsageError: It cannot be used; the text names the entry.
    """
    try:
        return AllowedServers.model_validate(json.loads(path.read_text(encoding="utf-8")).get("allow", {}))
    except (OSError, ValueError, AttributeError) as error:
        first = error.errors(include_input=False)[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else "it is not an object"
        raise UsageError(f"`allow` in {path} cannot be used: {why}.", remedy="Change it.") from None


def read_servers(path: Path, environment: Mapping[str, str]) -> tuple[McpServerSpec, ...]:
    """Read the file; `${NAME}` in a text is replaced by the environment variable.

    Raises:
        UsageError: The file cannot be read or used; the text names the entry and never a value.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["mcpServers"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a list of MCP servers: {type(error).__name__}.", remedy='Write {"mcpServers": {…}}.'
        ) from error
    servers = tuple(_parse_server(name, entry, environment) for name, entry in entries)
    urls = [server.url for server in servers if server.url]
    if len(set(urls)) < len(urls):
        raise UsageError(f"Two servers in {path} have the same url.", remedy="Remove one of them.")
    return servers


def _parse_server(name: str, entry: object, environment: Mapping[str, str]) -> McpServerSpec:
    try:
        filled, secrets = _fill_variables(entry, environment)
        given = filled.get("secrets", ())
        secrets += given if isinstance(given, list) else ()
        return McpServerSpec.model_validate({**filled, "name": name, "secrets": tuple(secrets)})
    except (ValidationError, TypeError) as error:
        first = error.errors(include_input=False)[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else "it is not an object"
        # `from None`: the original's text may contain values.
        raise UsageError(f"The MCP server {name!r} cannot be used: {why}.", remedy="Change its entry.") from None


def _fill_variables(value: object, environment: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """Return an entry with its environment variables replaced, and its secret texts."""
    secrets: list[str] = []

    def variable(found: re.Match[str]) -> str:
        name = found[1]
        if name not in environment:
            raise UsageError(f"An MCP server needs the variable {name}, which is not set.", remedy=f"Set {name}.")
        secrets.append(environment[name])
        return environment[name]

    def fill(part: object) -> object:
        if isinstance(part, str):
            return VARIABLE.sub(variable, part)
        if isinstance(part, list):
            return [fill(item) for item in part]
        if isinstance(part, dict):
            return {key: fill(item) for key, item in part.items()}
        return part

    filled = fill(value)
    if not isinstance(filled, dict):
        raise TypeError("an entry is an object")
    headers = filled.get("headers")
    for text in headers.values() if isinstance(headers, dict) else ():
        secrets += [str(text), str(text).rpartition(" ")[2]]
    return filled, secrets
