"""The private cluster of one conversation: its workers and their environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from broker.contract import AgentSpec, GitSource, WorkspaceSpec
from deckhands.client.named_directory import check_directory
from deckhands.cluster import ClusterSpec
from deckhands.settings import MODEL_VARIABLES, PROFILES_VARIABLE


def private_cluster(
    folder: Path, agent: AgentSpec, workspace: WorkspaceSpec, environment: Mapping[str, str]
) -> ClusterSpec:
    """Return the cluster for a new conversation: a store and one worker of each kind that it needs.

    The tool worker requires the conversation's sandbox, because it serves no other conversation.

    Args:
        folder: the folder for its store, logs and workspaces.
        environment: the environment variables of the user who starts it.

    Raises:
        UsageError: the directory may not be a workspace.
    """
    pools = ",".join(_own_pools(workspace, agent, environment))
    sandbox = workspace.sandbox if workspace.sandbox != "auto" else environment.get("DECKHANDS_SANDBOX", "auto")
    demanded = {"DECKHANDS_SANDBOX": sandbox, "DECKHANDS_POOLS": pools, **_own_repository(workspace, environment)}
    directories = () if workspace.path is None else (Path(workspace.path),)
    for directory in directories:
        check_directory(directory, environment)
    known = {**_own_model(agent.llm.model, environment), **environment, **demanded}
    return ClusterSpec(folder, environment=known, workspace_roots=directories, is_private=True)


def _own_repository(workspace: WorkspaceSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Allow the private tool worker to clone the task's local repository, and no other."""
    name = "DECKHANDS_REPOSITORY_ROOTS"
    parts = urlsplit(workspace.source.url) if isinstance(workspace.source, GitSource) else None
    return {name: parts.path} if parts and parts.scheme == "file" and not environment.get(name) else {}


def _own_pools(workspace: WorkspaceSpec, agent: AgentSpec, environment: Mapping[str, str]) -> list[str]:
    """Return the pools of the private tool worker: the configured ones, and those that this conversation needs."""
    needed = [workspace.pool, *(["ipython"] if agent.enable_jupyter else [])]
    return list(dict.fromkeys([*environment.get("DECKHANDS_POOLS", "bash").split(","), *needed]))


def _own_model(model: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Make the agent's model the default of the private controller worker, which prepares for it at start."""
    is_configured = any(environment.get(name) for name in (*MODEL_VARIABLES, PROFILES_VARIABLE))
    return {MODEL_VARIABLES[0]: model} if model and not is_configured else {}
