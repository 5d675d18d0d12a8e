"""The server by the routes of OpenHands' agent server: its version, tools, models as profiles, settings and skills.

A route without a meaning on a cluster answers 501 with a sentence from the table `ABSENT`.

Holds: no answer has a key or an address of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from broker.runtime import SYSTEM_CLOCK, read_version
from deckhands.server.cluster import models as list_offered_models
from deckhands.server.dependencies import GatewayOf, Reader
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.openhands.parts import Parts, ReadableId
from deckhands.server.openhands.requests import DEFAULT_TOOLS, NAMED_TOOLS, refuse
from deckhands.server.problems import Problem

routes = APIRouter(tags=["openhands-server"])
rest = APIRouter(prefix="/api", tags=["openhands-server"])
"""Every other path below `/api`; to be included last."""
SPOKEN_VERSION = "1.58.2"
"""The version of `openhands-agent-server` whose API is spoken here."""
DESCRIPTIONS: Mapping[str, str] = {
    "terminal": "Run commands in the workspace.",
    "file_editor": "View and edit files.",
    "task_tracker": "Keep a list of tasks.",
    "grep": "Search the contents of files.",
    "glob": "Find files by name.",
    "apply_patch": "Change several files by a patch.",
    "browser_tool_set": "Use a web browser.",
    "task_tool_set": "Delegate tasks to other agents.",
}
"""The tools that a client of OpenHands can name, by the SDK's names."""
ABSENT: Mapping[str, str] = {
    "acp": "list of the models of other programs; name the program as the agent of a task",
    "agent-profiles": "profile of an agent that clients keep; a task names its agent",
    "auth/workspace-session": "cookie for workspaces; send the key with each request",
    "canvas-extensions": "extension of OpenHands' web page",
    "file/home": "home directory that clients may list; a caller's files are in its workspace",
    "file/search_subdirs": "directory of the server that clients may list; list the workspace by a command",
    "git/repositories": "log-in at Git hosts; a task names its repository as the source of its workspace",
    "hooks": "hook of a client's directory; docs/agents.md has goals and checks",
    "init": "initialization by clients; operators set up the workers",
    "llm/provider-connections": "provider log-in; the operator's table of models has the keys",
    "llm/subscription": "provider log-in; the operator's table of models has the keys",
    "mcp": "log-in at MCP servers; tool workers have the servers that the operator names",
    "meta-profiles": "profile that chooses among profiles",
    "plugins": "plugin: this server loads no code of its clients",
    "profiles": "profile that clients write; profiles are the operator's models",
    "settings": "settings that clients write; operators set up the workers, and each task has its own",
    "skills": "skill that the server installs; agents read those of the workspace, and a task brings its own",
    "sub-agents": "agent that the server reads from files; agents delegate to the agents of a task",
    "vscode": "editor in the browser",
    "workspaces": "list of directories that clients keep",
}
"""What a cluster does not have, by the first parts of the path below `/api`."""
SCOPED: Mapping[str, str] = {
    "vscode": "editor in the browser",
    "runtime": "runtime for a single conversation; workers take over by themselves",
}
"""The same, by the first part of the path below a conversation."""
SCOPED_METHODS = ["GET", "PUT", "PATCH", "DELETE"]
"""Without POST, for which `conversations` has a table."""
METHODS = [*SCOPED_METHODS, "POST"]


class Alive(BaseModel):
    """The server is alive."""

    status: str = Field(default="ok", examples=["ok"])


class ServerInfo(BaseModel):
    """The server, in the fields of OpenHands' agent server."""

    title: str = Field(default="Deckhands", examples=["Deckhands"])
    uptime: float = Field(examples=[12.5], description="seconds")
    idle_time: float = Field(default=0.0, examples=[0.0], description="always 0: a cluster is not idle as a whole")
    version: str = Field(default=SPOKEN_VERSION, examples=[SPOKEN_VERSION], description="the version of the API")
    sdk_version: str = Field(default=SPOKEN_VERSION, examples=[SPOKEN_VERSION])
    tools_version: str = Field(default=SPOKEN_VERSION, examples=[SPOKEN_VERSION])
    workspace_version: str = Field(default=SPOKEN_VERSION, examples=[SPOKEN_VERSION])
    build_git_sha: str = Field(default="unknown", examples=["unknown"])
    build_git_ref: str = Field(examples=["deckhands 0.1.0"], description="the version of Deckhands")
    python_version: str = Field(default=sys.version, examples=["3.12.1"])
    usable_tools: list[str] = Field(examples=[["terminal"]])
    runtime_idle_timeout_seconds: float | None = Field(default=None, examples=[None])
    conversation_runtime: str = Field(default="local", examples=["local"])
    available_conversation_runtimes: list[str] = Field(default=[], examples=[[]])
    capabilities: list[str] = Field(
        default=["conversation_runtime_routes_v1", "idempotent_conversation_create_v1", "tool_catalog_v1"],
        examples=[["tool_catalog_v1"]],
    )
    app_backend_ingress_url: str | None = Field(default=None, examples=[None])
    max_foreground_terminal_timeout_seconds: float | None = Field(default=None, examples=[None])
    docs: str = Field(default="/openapi.json", examples=["/openapi.json"])
    redoc: str = Field(default="/openapi.json", examples=["/openapi.json"])


class CatalogTool(BaseModel):
    """A tool that an agent can have."""

    name: str = Field(examples=["terminal"])
    user_selectable: bool = Field(default=True, examples=[True])
    usable: bool = Field(default=True, examples=[True])
    description: str = Field(examples=["Run commands in the workspace."])
    in_default_set: bool = Field(examples=[True])


class ToolCatalog(BaseModel):
    """The tools that an agent can have."""

    tools: list[CatalogTool]


class SkillsRequest(JsonBody):
    """The skills that a client requests. They are ignored, because agents find their skills themselves."""

    project_dir: str | None = Field(default=None, max_length=4_096, examples=["/workspace/project"])


class FoundSkills(BaseModel):
    """Skills for a client."""

    skills: list[dict[str, Any]] = Field(default=[], examples=[[]])
    sources: dict[str, int] = Field(default={}, examples=[{}])


class Profile(BaseModel):
    """A model of the operator's table."""

    name: str = Field(examples=["long"])
    model: str = Field(examples=["anthropic/claude-sonnet-4-5"])
    base_url: str | None = Field(default=None, examples=[None])
    provider_connection_id: str | None = Field(default=None, examples=[None])
    provider_connection_broken: bool = Field(default=False, examples=[False])
    api_key_set: bool = Field(default=False, examples=[False])


class Profiles(BaseModel):
    """The models that a conversation may name."""

    profiles: list[Profile]
    active_profile: str | None = Field(examples=["long"])


class ProfileDetail(BaseModel):
    """A model as a profile; its key and its address stay with the workers."""

    name: str = Field(examples=["long"])
    config: dict[str, Any] = Field(examples=[{"model": "long"}])
    api_key_set: bool = Field(default=False, examples=[False])


class Settings(BaseModel):
    """Settings for new conversations."""

    agent_settings: dict[str, Any] = Field(examples=[{"llm": {"model": "anthropic/claude-sonnet-4-5"}}])
    conversation_settings: dict[str, Any] = Field(default={}, examples=[{}])
    llm_api_key_is_set: bool = Field(default=False, examples=[False])
    active_profile: str | None = Field(default=None, examples=["long"])
    misc_settings: dict[str, Any] = Field(default={}, examples=[{}])


class KeptSecrets(BaseModel):
    """Secrets that the server keeps for a caller: none."""

    secrets: list[dict[str, Any]] = Field(default=[], examples=[[]])


class ModelNames(BaseModel):
    """Names of models."""

    models: list[str] = Field(examples=[["anthropic/claude-sonnet-4-5"]])


class ModelsByProvider(BaseModel):
    """Names of models by their providers."""

    models: dict[str, list[str]] = Field(examples=[{"anthropic": ["claude-sonnet-4-5"]}])


class Providers(BaseModel):
    """Providers of models."""

    providers: list[str] = Field(examples=[["anthropic"]])


@routes.get("/alive", summary="Check that the server is alive, as OpenHands' clients do")
async def alive() -> Alive:
    """Report that the server is alive. Needs no key."""
    return Alive()


@routes.get("/server_info", summary="Show the server in OpenHands' form")
async def server_info(parts: Parts) -> ServerInfo:
    """Show the supported version of OpenHands' API. Needs no key."""
    return ServerInfo(
        uptime=SYSTEM_CLOCK.monotonic() - parts.started,
        usable_tools=sorted(DESCRIPTIONS),
        build_git_ref=f"deckhands {read_version()}",
    )


@routes.get("/api/tools/", summary="List tools in OpenHands' form")
async def tools(_principal: Reader) -> list[str]:
    """List the tools that an agent can have, by the SDK's names."""
    return sorted({*NAMED_TOOLS})


@routes.get("/api/tools/catalog", summary="Describe tools in OpenHands' form")
async def tool_catalog(_principal: Reader) -> ToolCatalog:
    """Describe the tools that an agent can have."""
    return ToolCatalog(
        tools=[
            CatalogTool(name=name, description=text, in_default_set=name in DEFAULT_TOOLS)
            for name, text in DESCRIPTIONS.items()
        ]
    )


@routes.post("/api/skills", summary="List skills in OpenHands' form")
async def skills(_principal: Reader, asked: SkillsRequest) -> FoundSkills:  # noqa: ARG001  (nothing depends on it)
    """List no skills: agents read those of their workspace themselves, and a task brings its own."""
    return FoundSkills()


@routes.get("/api/skills/catalog", summary="List the skills that profiles can name")
async def skill_catalog(_principal: Reader) -> FoundSkills:
    """List no skills: profiles name none."""
    return FoundSkills()


@routes.get("/api/skills/installed", summary="List installed skills")
async def list_installed_skills(_principal: Reader) -> FoundSkills:
    """List no skills: the server installs none."""
    return FoundSkills()


@routes.get("/api/settings", summary="Show settings in OpenHands' form")
async def settings(gateway: GatewayOf, principal: Reader) -> Settings:
    """Show the settings of a new conversation: the default model, never its key."""
    defaults = (await list_offered_models(gateway, principal)).defaults
    default = defaults[0] if defaults else None
    return Settings(agent_settings={"llm": {"model": default}} if default else {}, active_profile=default)


@routes.get("/api/settings/secrets", summary="List kept secrets in OpenHands' form")
async def secrets(_principal: Reader) -> KeptSecrets:
    """List no secrets: each conversation has its own."""
    return KeptSecrets()


@routes.get("/api/profiles", summary="List models as profiles")
async def profiles(gateway: GatewayOf, principal: Reader) -> Profiles:
    """List the models that a conversation of the key's tenant may name."""
    offered = await list_offered_models(gateway, principal)
    named = [name for name in offered.names if not name.endswith("/*")]
    default = offered.defaults[0] if offered.defaults else None
    return Profiles(profiles=[Profile(name=name, model=name) for name in named], active_profile=default)


@routes.get("/api/profiles/{name:path}", summary="Show a model as a profile")
async def profile(gateway: GatewayOf, principal: Reader, name: Annotated[str, Path(max_length=300)]) -> ProfileDetail:
    """Show a model that a conversation of the key's tenant may name."""
    if name not in (await list_offered_models(gateway, principal)).names:
        raise Problem(404, "unknown_profile", "There is no such profile.", remedy="List them: GET /api/profiles.")
    return ProfileDetail(name=name, config={"model": name})


@routes.get("/api/llm/models", summary="List models in OpenHands' form")
async def llm_models(
    gateway: GatewayOf,
    principal: Reader,
    provider: Annotated[str | None, Query(max_length=100, description="only models of this provider")] = None,
) -> ModelNames:
    """List the models that a conversation of the key's tenant may name."""
    offered = (await list_offered_models(gateway, principal)).names
    return ModelNames(models=[name for name in offered if provider in (None, _provider_of(name))])


@routes.get("/api/llm/models/verified", summary="List models by provider")
async def list_verified_models(gateway: GatewayOf, principal: Reader) -> ModelsByProvider:
    """List the same models by their providers."""
    found: dict[str, list[str]] = {}
    for name in (await list_offered_models(gateway, principal)).names:
        found.setdefault(_provider_of(name), []).append(name.partition("/")[2] or name)
    return ModelsByProvider(models=found)


@routes.get("/api/llm/providers", summary="List providers of models")
async def providers(gateway: GatewayOf, principal: Reader) -> Providers:
    """List the providers of those models."""
    return Providers(
        providers=sorted({_provider_of(name) for name in (await list_offered_models(gateway, principal)).names})
    )


@rest.api_route("/conversations/{conversation_id}/{path:path}", methods=SCOPED_METHODS, include_in_schema=False)
async def refuse_scoped(conversation_id: ReadableId, path: str) -> None:  # noqa: ARG001  (it is known)
    """Refuse a route of conversations that a cluster does not have."""
    _refuse(SCOPED, path)


@rest.api_route("/{path:path}", methods=METHODS, include_in_schema=False)
async def refuse_rest(_principal: Reader, path: str) -> None:
    """Refuse a route that a cluster does not have."""
    _refuse(ABSENT, path)


def _refuse(absent: Mapping[str, str], path: str) -> None:
    """Refuse a path, by the longest matching prefix in the table.

    Raises:
        Problem: always; 404 for a path that OpenHands lacks, too.
    """
    for name, what in absent.items():
        if path == name or path.startswith(f"{name}/"):
            raise refuse(f"A cluster has no {what}.")
    raise Problem(404, "not_found", "There is no such path.")


def _provider_of(model: str) -> str:
    """Return the provider of a model; that of a profile is `profiles`, because only the workers know it."""
    return model.partition("/")[0] if "/" in model else "profiles"
