"""What a tool worker reads of its environment; the only place in this package that does."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from broker.contract.allowed_hosts import host_rules
from broker.runtime.errors import UsageError
from broker.runtime.failpoints import arm
from broker.runtime.settings import HEARTBEAT_TTL_SECONDS, BrokerSettings, split_paths
from broker.secrets.private_directories import private_paths, workspace_roots
from broker.secrets.secrets import no_key, secret_key
from tool_worker.egress.addresses import AddressRules
from tool_worker.files.file_tree import TreeLimits
from tool_worker.launch.egress_gate import EgressGate
from tool_worker.mcp.config import McpServerSpec, read_servers
from tool_worker.opening.repository_roots import RepositoryRoots
from tool_worker.sandbox.docker import Containers, is_image_name
from tool_worker.sandbox.sandbox import ResourceLimits
from tool_worker.workspace.named_directories import NamedDirectories

# The names are OpenHands' own (10.1, 10.3): who has set them need not set others.
NO_CHANGE_TIMEOUT = "NO_CHANGE_TIMEOUT_SECONDS"
SHELL_VARIABLE_PREFIX = "SANDBOX_ENV_"
DEFAULT_NO_CHANGE_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Settings of one tool worker.

    Attributes:
        store_url: the log's store.
        celery_url: Celery's broker.
        node: this machine's id; workspaces are bound to it.
        node_dir: where workspaces, host sockets and journals live.
        pools: what this worker can do.
        tools: custom tools besides those of installed packages, as `module:attribute`.
        mcp_servers: whose tools are offered.
        sandbox: `auto`, `bwrap`, `docker` or `none`; a conversation may ask for less only if this is `none`.
        containers: what they may be.
        limits: of a workspace.
        gate: what of the network workspaces may be given.
        repository_roots: below which repositories of this machine may be cloned.
        concurrency: actions run at once.
        workspace_ttl_seconds: how long a workspace's processes outlive the last use.
        workspace_idle_seconds: how long they outlive it when only a shell is left that waits.
        workspace_keep_seconds: how long the directory of a closed conversation is kept after its last use.
        workspace_limits: how much a workspace may hold.
        no_change_timeout_seconds: after how much silence a command is answered; `NO_CHANGE_TIMEOUT_SECONDS`.
        environment: variables of every shell: `X` for each `SANDBOX_ENV_X`.
        workspace_ends_with_worker, heartbeat_ttl_seconds: see `BrokerSettings`.
        node_lost_seconds: after how long without a tool worker this node is given up.
        checkpoints: where workspaces are saved, as fsspec knows it; empty: nowhere.
        checkpoint_every: after how many actions that may change files.
        chromium: where Chromium is; empty: where it is usually installed.
        secret_key: returns what opens the secrets of conversations.
        named: the directories that conversations may name.
        search_path: our own `PATH`, for shells without a sandbox.
    """

    store_url: str
    celery_url: str
    shards: int
    node: str
    node_dir: Path
    pools: tuple[str, ...]
    tools: tuple[str, ...]
    mcp_servers: tuple[McpServerSpec, ...]
    sandbox: str
    concurrency: int
    workspace_ttl_seconds: float
    workspace_idle_seconds: float
    no_change_timeout_seconds: float
    environment: Mapping[str, str]
    search_path: str
    workspace_keep_seconds: float = 604_800.0
    workspace_limits: TreeLimits = field(default_factory=TreeLimits)
    workspace_ends_with_worker: bool = False
    heartbeat_ttl_seconds: float = HEARTBEAT_TTL_SECONDS
    node_lost_seconds: float = 120.0
    checkpoints: str = ""
    checkpoint_every: int = 10
    containers: Containers = field(default_factory=Containers)
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    gate: EgressGate = field(default_factory=EgressGate)
    repository_roots: RepositoryRoots = field(default_factory=RepositoryRoots)
    chromium: str = ""
    secret_key: Callable[[], bytes | None] = no_key
    named: NamedDirectories = field(default_factory=NamedDirectories)


def tool_settings(env: Mapping[str, str] = os.environ) -> ToolSettings:
    """Read the settings.

    Raises:
        UsageError: a value cannot be used.
    """
    broker = BrokerSettings.from_env(env)
    arm(broker)
    return ToolSettings(
        store_url=broker.url,
        celery_url=broker.celery_url,
        shards=broker.shards,
        node=broker.node or socket.gethostname(),
        node_dir=Path(broker.node_dir) if broker.node_dir else broker.home / "node",
        pools=_words(broker.pools),
        tools=_words(broker.tools),
        mcp_servers=read_servers(Path(broker.mcp).expanduser(), env) if broker.mcp else (),
        sandbox=broker.sandbox,
        concurrency=broker.concurrency,
        workspace_ttl_seconds=broker.workspace_ttl_seconds,
        workspace_idle_seconds=broker.workspace_idle_seconds,
        no_change_timeout_seconds=_seconds(env, NO_CHANGE_TIMEOUT, DEFAULT_NO_CHANGE_TIMEOUT_SECONDS),
        environment=_shell_variables(env),
        search_path=env.get("PATH", ""),
        workspace_keep_seconds=broker.workspace_keep_seconds,
        workspace_limits=_workspace_limits(broker),
        workspace_ends_with_worker=broker.workspace_ends_with_worker,
        heartbeat_ttl_seconds=broker.heartbeat_ttl_seconds,
        node_lost_seconds=broker.node_lost_seconds,
        checkpoints=broker.checkpoints,
        checkpoint_every=broker.checkpoint_every,
        containers=_containers(broker),
        limits=_limits(broker),
        gate=_gate(broker),
        repository_roots=_repository_roots(broker),
        chromium=broker.chromium,
        secret_key=partial(secret_key, broker),
        named=NamedDirectories(workspace_roots(split_paths(broker.workspace_roots)), private_paths(broker)),
    )


def _containers(broker: BrokerSettings) -> Containers:
    images = _words(broker.docker_images)
    if images and not is_image_name(images[0]):
        raise UsageError(
            f"DECKHANDS_DOCKER_IMAGES begins with {images[0]!r}, which is no name of an image.",
            remedy="Name first the image to use where none is asked for.",
        )
    if broker.docker_cpus < 0:
        raise UsageError(f"DECKHANDS_DOCKER_CPUS is {broker.docker_cpus:g}.", remedy="It must be above 0.")
    return Containers(images, broker.docker_host, broker.docker_cpus or None)


def _limits(broker: BrokerSettings) -> ResourceLimits:
    if broker.workspace_processes < 1 or broker.workspace_memory_bytes < 0:
        name = "MEMORY_BYTES" if broker.workspace_memory_bytes < 0 else "PROCESSES"
        raise UsageError(f"DECKHANDS_WORKSPACE_{name} is too small.", remedy="It must be above 0.")
    limits = ResourceLimits(processes=broker.workspace_processes)
    memory_bytes = broker.workspace_memory_bytes or limits.memory_bytes
    return replace(limits, memory_bytes=memory_bytes)


def _gate(broker: BrokerSettings) -> EgressGate:
    hosts, private = _words(broker.egress), _words(broker.egress_private)
    try:
        ceiling = () if hosts == ("none",) else host_rules(hosts) or None
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
    if broker.egress_bytes < 1:
        raise UsageError(f"DECKHANDS_EGRESS_BYTES is {broker.egress_bytes}.", remedy="It must be 1 or more.")
    return EgressGate(ceiling, private, broker.egress_bytes)


def _repository_roots(broker: BrokerSettings) -> RepositoryRoots:
    roots = tuple(Path(text) for text in _words(broker.repository_roots))
    for root in roots:
        if not root.is_absolute() or ".." in root.parts:
            raise UsageError(
                f"DECKHANDS_REPOSITORY_ROOTS names {str(root)!r}.", remedy="Write absolute paths without `..`."
            )
    return RepositoryRoots(roots)


def _workspace_limits(broker: BrokerSettings) -> TreeLimits:
    for name in ("workspace_bytes", "workspace_files"):
        if (value := getattr(broker, name)) < 1:
            raise UsageError(f"DECKHANDS_{name.upper()} is {value}.", remedy="It must be 1 or more.")
    return TreeLimits(files=broker.workspace_files, bytes=broker.workspace_bytes)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name} is {text!r}.", remedy="It must be a number of seconds above 0.")
    return seconds


def _shell_variables(env: Mapping[str, str]) -> dict[str, str]:
    variables = {
        name.removeprefix(SHELL_VARIABLE_PREFIX).upper(): value
        for name, value in env.items()
        if name.startswith(SHELL_VARIABLE_PREFIX)
    }
    for name in variables:
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            raise UsageError(
                f"{SHELL_VARIABLE_PREFIX}{name} would set the variable {name!r}.",
                remedy="Use letters, digits and _, and begin with a letter.",
            )
    return variables


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
