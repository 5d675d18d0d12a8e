"""The settings of a tool worker; the only module of this package that reads the environment."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from broker.contract import LABEL_PATTERN, SkillSourceRule, parse_host_rules
from broker.runtime import AddressRules, BrokerSettings, Count, Seconds, UsageError, arm, split_paths
from broker.secrets import find_private_paths, load_secret_key, parse_workspace_roots
from broker.tools import AllowedServers, McpServerSpec, read_allowed, read_servers
from tool_worker.sandbox import ClusterAccess, ContainerSettings, KubernetesSettings, ResourceLimits, is_image_name
from tool_worker.secret_sources import SecretSourceSpec, read_secret_sources
from tool_worker.workspace import (
    EgressGate,
    GitIdentity,
    NamedDirectories,
    RepositoryRoots,
    SkillCredential,
    TreeLimits,
    read_skill_credentials,
)

# OpenHands' own names (10.1, 10.3), so that existing settings work.
NO_CHANGE_TIMEOUT = "NO_CHANGE_TIMEOUT_SECONDS"
SHELL_VARIABLE_PREFIX = "SANDBOX_ENV_"
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""Matches names of variables whose values are probably secret."""
DEFAULT_NO_CHANGE_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ToolVariables(BrokerSettings):
    """The variables that only tool workers read."""

    node: Annotated[
        str, Field(description="id of this machine for workspaces, the same across restarts; empty: the host's name")
    ] = ""
    pools: Annotated[str, Field(description="pools that this worker serves, separated by commas")] = "bash"
    labels: Annotated[str, Field(description="further features of this node, such as `gpu`, separated by commas")] = ""
    tools: Annotated[str, Field(description="tools that it offers, `module:attribute`, separated by commas")] = ""
    pass_env: Annotated[
        str, Field(description="names or patterns of further variables that tool workers get, separated by commas")
    ] = ""
    mcp: Annotated[str, Field(description="a file that names the MCP servers whose tools it offers")] = ""
    secret_sources: Annotated[
        str, Field(description="a file with the sources where secrets of tasks may be looked up")
    ] = ""
    concurrency: Annotated[Count, Field(description="actions that it runs at once")] = 64
    docker_images: Annotated[
        str, Field(description="patterns of images for containers, separated by commas; the first is the default")
    ] = ""
    docker_host: Annotated[str, Field(description="address of the engine; empty: the default one")] = ""
    docker_cpus: Annotated[Seconds, Field(description="CPUs that a container may use; 0: all")] = 0.0
    kubernetes_config: Annotated[
        str, Field(description="a kubeconfig for the sandbox `kubernetes`; empty: the service account of this pod")
    ] = ""
    kubernetes_pod: Annotated[
        str, Field(description="the pod of this worker, whose node and volume its pods share; empty: the host's name")
    ] = ""
    kubernetes_template: Annotated[str, Field(description="a file with a pod template for these pods; empty: none")] = (
        ""
    )
    kubernetes_pending_seconds: Annotated[
        Seconds, Field(description="how long such a pod may take to start, the download of its image included")
    ] = 120.0
    workspace_memory_bytes: Annotated[
        int, Field(ge=0, description="limit for all programs of a workspace together; 0: half of the machine's")
    ] = 0
    workspace_processes: Annotated[Count, Field(description="processes that a workspace may have at once")] = 4096
    egress: Annotated[
        str, Field(description="hosts that workspaces may reach, separated by commas; `none`; empty: any")
    ] = ""
    egress_private: Annotated[str, Field(description="private networks that workspaces may reach by name")] = ""
    egress_bytes: Annotated[
        Count, Field(description="traffic limit of a workspace with a list of hosts, both directions together")
    ] = 20 * 2**30
    repository_roots: Annotated[
        str, Field(description="directories below which `git+file://` may clone, separated by commas; empty: none")
    ] = ""
    skill_sources: Annotated[
        str,
        Field(
            description="places that tasks may name skills from: `HOST/PATH`, `/FOLDER`, or `TENANT=` before it, "
            "separated by commas; empty: none"
        ),
    ] = ""
    skill_credentials: Annotated[str, Field(description="a file with passwords for private places of skills")] = ""
    chromium: Annotated[str, Field(description="path of Chromium; empty: the usual places")] = ""
    git_user_name: Annotated[
        str, Field(description="git's author name in workspaces that configure none; empty: none")
    ] = GitIdentity().name
    git_user_email: Annotated[str, Field(description="email address of that author")] = GitIdentity().email
    workspace_ttl_seconds: Annotated[
        Seconds, Field(description="how long a workspace's processes outlive the last use")
    ] = 3_600.0
    workspace_idle_seconds: Annotated[
        Seconds, Field(description="how long they outlive it when only an idle shell is left")
    ] = 300.0
    workspace_ends_with_worker: Annotated[
        bool, Field(description="whether a stopping tool worker ends the idle processes of finished conversations")
    ] = False
    workspace_keep_seconds: Annotated[
        Seconds, Field(description="how long the directory of a closed conversation is kept after its last use")
    ] = 604_800.0
    workspace_bytes: Annotated[Count, Field(description="size limit of all regular files of a workspace")] = 4 * 2**30
    workspace_files: Annotated[Count, Field(description="limit of files, directories and links in a workspace")] = (
        200_000
    )
    node_lost_seconds: Annotated[
        Seconds, Field(description="how long a node without a tool worker waits before its conversations move")
    ] = 120.0
    checkpoint_every: Annotated[
        int, Field(description="number of actions with possible file changes between two checkpoints")
    ] = 10


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Settings of one tool worker.

    Attributes:
        variables: The environment's variables.
        node: This machine's id; workspaces are bound to it.
        node_dir: Directory of workspaces, host sockets and journals.
        pools: The pools that this worker serves.
        labels: Further features of this node, which conversations may require.
        tools: Custom tools besides those of installed packages, as `module:attribute`.
        mcp_servers: Servers whose tools are offered.
        mcp_allowed: The servers that tasks and skills may use for their own conversation.
        secret_sources: Sources where secrets of tasks may be looked up.
        containers: Settings of the sandboxes `docker` and `kubernetes`.
        limits: Resource limits of a workspace.
        gate: Network access that workspaces may get.
        repository_roots: Directories below which local repositories may be cloned.
        skill_rules: Sources of skills that tasks may name.
        skill_credentials: Passwords for those that are private.
        workspace_limits: Size limits of a workspace.
        no_change_timeout_seconds: A command is answered after this long without output; `NO_CHANGE_TIMEOUT_SECONDS`.
        environment: Variables of every shell: `X` for each `SANDBOX_ENV_X`.
        secret_key: Returns the key to the secrets of conversations.
        named: Directories that conversations may name.
        git_identity: Git's author in workspaces where no other one is configured.
        search_path: Our own `PATH`, for shells without a sandbox and for programs of MCP servers.
        program_environment: The environment without our own variables, for programs of secret sources.
        private_values: Probably secret values of the environment, masked in the worker's own texts.
    """

    variables: ToolVariables
    node: str
    node_dir: Path
    pools: tuple[str, ...]
    labels: tuple[str, ...]
    tools: tuple[str, ...]
    mcp_servers: tuple[McpServerSpec, ...]
    mcp_allowed: AllowedServers
    secret_sources: tuple[SecretSourceSpec, ...]
    no_change_timeout_seconds: float
    environment: Mapping[str, str]
    search_path: str
    workspace_limits: TreeLimits
    containers: ContainerSettings
    limits: ResourceLimits
    gate: EgressGate
    repository_roots: RepositoryRoots
    skill_rules: tuple[SkillSourceRule, ...]
    skill_credentials: tuple[SkillCredential, ...]
    secret_key: Callable[[], bytes | None]
    named: NamedDirectories
    git_identity: GitIdentity
    program_environment: Mapping[str, str] = field(repr=False)
    private_values: tuple[str, ...] = field(default=(), repr=False)


def load_tool_settings(env: Mapping[str, str] = os.environ) -> ToolSettings:
    """Read the settings.

    Raises:
        UsageError: A value is invalid.
    """
    variables = ToolVariables.from_env(env)
    arm(variables)
    skill_rules = _make_skill_rules(variables)
    skill_credentials: tuple[SkillCredential, ...] = ()
    if variables.skill_credentials:
        skill_credentials = read_skill_credentials(Path(variables.skill_credentials).expanduser(), skill_rules, env)
    return ToolSettings(
        variables=variables,
        node=variables.node or socket.gethostname(),
        node_dir=Path(variables.node_dir) if variables.node_dir else variables.home / "node",
        pools=_split_words(variables.pools),
        labels=_parse_labels(variables.labels),
        tools=_split_words(variables.tools),
        mcp_servers=read_servers(Path(variables.mcp).expanduser(), env) if variables.mcp else (),
        mcp_allowed=read_allowed(Path(variables.mcp).expanduser()) if variables.mcp else AllowedServers(),
        secret_sources=(
            read_secret_sources(Path(variables.secret_sources).expanduser(), env) if variables.secret_sources else ()
        ),
        no_change_timeout_seconds=_parse_seconds(env, NO_CHANGE_TIMEOUT, DEFAULT_NO_CHANGE_TIMEOUT_SECONDS),
        environment=_select_shell_variables(env),
        search_path=env.get("PATH", ""),
        workspace_limits=TreeLimits(files=variables.workspace_files, bytes=variables.workspace_bytes),
        containers=_make_containers(variables, env),
        limits=_make_limits(variables),
        gate=_make_gate(variables),
        repository_roots=_make_repository_roots(variables),
        skill_rules=skill_rules,
        skill_credentials=skill_credentials,
        secret_key=partial(load_secret_key, variables),
        named=NamedDirectories(
            parse_workspace_roots(split_paths(variables.workspace_roots)),
            (*find_private_paths(variables), *(one.password_file for one in skill_credentials if one.password_file)),
        ),
        git_identity=_make_git_identity(variables),
        program_environment={name: value for name, value in env.items() if not name.startswith("DECKHANDS_")},
        private_values=_find_private_values(env, variables),
    )


def _find_private_values(env: Mapping[str, str], variables: ToolVariables) -> tuple[str, ...]:
    passed_on = _split_words(variables.pass_env)
    found = [
        value
        for name, value in env.items()
        if name.startswith(SHELL_VARIABLE_PREFIX)
        or SECRET_NAME.search(name)
        or any(fnmatchcase(name, pattern) for pattern in passed_on)
    ]
    passwords = [urlsplit(url).password for url in (variables.url, variables.celery_url)]
    return (*found, *(password for password in passwords if password))


def _make_git_identity(variables: ToolVariables) -> GitIdentity:
    try:
        return GitIdentity(variables.git_user_name, variables.git_user_email)
    except ValueError as error:
        raise UsageError(f"DECKHANDS_GIT_USER_NAME or DECKHANDS_GIT_USER_EMAIL cannot be used: {error}.") from error


def _make_containers(variables: ToolVariables, env: Mapping[str, str]) -> ContainerSettings:
    images = _split_words(variables.docker_images)
    if images and not is_image_name(images[0]):
        raise UsageError(
            f"The first image of DECKHANDS_DOCKER_IMAGES, {images[0]!r}, is not a valid name of an image.",
            remedy="Name the default image first.",
        )
    # Kubernetes gives these to every pod.
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    kubernetes = KubernetesSettings(
        ClusterAccess(
            config=str(Path(variables.kubernetes_config).expanduser()) if variables.kubernetes_config else "",
            address=f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else "",
        ),
        pod=variables.kubernetes_pod,
        template=str(Path(variables.kubernetes_template).expanduser()) if variables.kubernetes_template else "",
        pending_seconds=variables.kubernetes_pending_seconds,
    )
    return ContainerSettings(images, variables.docker_host, variables.docker_cpus or None, kubernetes)


def _make_limits(variables: ToolVariables) -> ResourceLimits:
    limits = ResourceLimits(processes=variables.workspace_processes)
    memory_bytes = variables.workspace_memory_bytes or limits.memory_bytes
    return replace(limits, memory_bytes=memory_bytes)


def _make_gate(variables: ToolVariables) -> EgressGate:
    hosts = _split_words(variables.egress)
    private = _split_words(variables.egress_private)
    try:
        ceiling = () if hosts == ("none",) else parse_host_rules(hosts) or None
    except ValueError as error:
        raise UsageError(
            f"DECKHANDS_EGRESS cannot be used: {error}.", remedy="Write hosts such as example.com or *.example.com:443."
        ) from error
    try:
        AddressRules.parse(private)
    except ValueError as error:
        raise UsageError(
            f"DECKHANDS_EGRESS_PRIVATE cannot be used: {error}.", remedy="Write networks such as 10.2.0.0/16."
        ) from error
    return EgressGate(ceiling, private, variables.egress_bytes)


def _make_skill_rules(variables: ToolVariables) -> tuple[SkillSourceRule, ...]:
    try:
        return tuple(map(SkillSourceRule.parse, _split_words(variables.skill_sources)))
    except ValueError as error:
        raise UsageError(
            f"DECKHANDS_SKILL_SOURCES cannot be used: {error}.",
            remedy="Write places such as git.example.com/team, acme=git.example.com/acme or /srv/skills.",
        ) from error


def _make_repository_roots(variables: ToolVariables) -> RepositoryRoots:
    roots = tuple(Path(text) for text in _split_words(variables.repository_roots))
    for root in roots:
        if not root.is_absolute() or ".." in root.parts:
            raise UsageError(
                f"DECKHANDS_REPOSITORY_ROOTS names {str(root)!r}.", remedy="Write absolute paths without `..`."
            )
    return RepositoryRoots(roots)


def _parse_seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name} is {text!r}.", remedy="It must be a number of seconds above 0.")
    return seconds


def _select_shell_variables(env: Mapping[str, str]) -> dict[str, str]:
    variables = {
        name.removeprefix(SHELL_VARIABLE_PREFIX).upper(): value
        for name, value in env.items()
        if name.startswith(SHELL_VARIABLE_PREFIX)
    }
    for name in variables:
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            raise UsageError(
                f"{SHELL_VARIABLE_PREFIX}{name} would set the variable {name!r}.",
                remedy="Use letters, digits and _, and start with a letter.",
            )
    return variables


def _parse_labels(text: str) -> tuple[str, ...]:
    labels = _split_words(text)
    for label in labels:
        if not re.fullmatch(LABEL_PATTERN, label):
            raise UsageError(
                f"DECKHANDS_LABELS names {label!r}.", remedy="Use up to 64 letters, digits, '.', '_' and '-' for each."
            )
    return labels


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
