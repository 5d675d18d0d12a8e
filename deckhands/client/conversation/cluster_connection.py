"""The place where a conversation runs: a running cluster, a server, or a private cluster started for it.

The workers of a private cluster get the program's own tools.

Holds: a private cluster ends with its place; its log and summary stay on disk in the folder of a run, so that the
command line finds them. A worker imports the module that defines the tool; only its name is sent.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from broker.contract import AgentSpec, ConversationCreated, Event, WorkspaceSpec
from broker.coordination import WorkspaceOrders
from broker.runtime import DeckhandsError, UsageError
from broker.tools import CustomTool
from deckhands.client.client import Client
from deckhands.client.named_directory import wait_for_tool_worker
from deckhands.client.protocol import ConversationClient
from deckhands.client.reading.summary import summarize
from deckhands.client.remote.remote_client import RemoteClient
from deckhands.client.runs.private_cluster import private_cluster, run_unless_broken
from deckhands.client.runs.records import RunFolder
from deckhands.client.tasks.spec import TaskSpec
from deckhands.cluster import Cluster, Home, supervise
from deckhands.settings import CliSettings

PATIENCE_SECONDS = 30.0
END_LIMIT_SECONDS = 5.0
STORES = ("redis://", "rediss://", "unix://")
SERVERS = ("https://", "http://")

T = TypeVar("T")


def check_cluster(cluster: str | None) -> None:
    """Refuse the address of a cluster that cannot be reached from here.

    Raises:
        UsageError: the address cannot be used.
    """
    if cluster is None:
        return
    if not isinstance(cluster, str) or not cluster.startswith((*STORES, *SERVERS)):
        shown = (
            ascii(cluster)[:100] if not isinstance(cluster, str) else ascii(cluster.partition("@")[2] or cluster)[:100]
        )
        raise UsageError(
            f"The cluster {shown} is neither the address of a store nor of a server.",
            remedy=f"Pass {', '.join(f'{scheme}…' for scheme in (*STORES, *SERVERS))}; or leave it out for a private "
            "cluster.",
        )
    if cluster.startswith(SERVERS) and ("@" in cluster or not _parse_host(cluster)):
        raise UsageError(
            "The address of the server has a name and password, or no host.",
            remedy="Pass the API key by api_key=, or set DECKHANDS_API_KEY.",
        )


def _parse_host(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:  # such as half of an IPv6 address
        return None


def is_server(cluster: str | None) -> bool:
    """Return whether an address is that of a server."""
    return cluster is not None and cluster.startswith(SERVERS)


class ClusterConnection:
    """An open place."""

    def __init__(self, client: ConversationClient, *, cluster: Cluster | None = None) -> None:
        self.client = client
        self._cluster = cluster
        self._closing = AsyncExitStack()
        self._folders: dict[str, RunFolder] = {}

    @property
    def is_private(self) -> bool:
        """Whether it serves only this conversation and its forks."""
        return self._cluster is not None

    async def wait_until_ready(self, task: TaskSpec) -> None:
        """Wait until the tool worker of a private cluster, which may still be starting, offers what a task needs."""
        if self.is_private and isinstance(self.client, Client):
            await self.run(wait_for_tool_worker(self.client.store, task))

    @classmethod
    async def connect(cls, url: str) -> ClusterConnection:
        """Connect to a cluster; raises the errors of `Client.connect`."""
        return cls(await Client.connect(url, patience_seconds=PATIENCE_SECONDS))

    @classmethod
    async def start_private(
        cls, conversation_id: str, agent: AgentSpec, workspace: WorkspaceSpec, environment: Mapping[str, str]
    ) -> ClusterConnection:
        """Start a private store and workers, in the folder of a run.

        Args:
            agent, workspace: for a new conversation; an existing one has its own.
            environment: environment variables for the workers, over those of this process.

        Raises:
            UsageError: the directory may not be a workspace, or another process works in the folder.
            DeckhandsError: the store cannot be started.
        """
        settings = CliSettings.from_env()
        home = Home(settings.home)
        folder = RunFolder(home.run_folder(conversation_id))
        home.prepare(folder.path)
        async with AsyncExitStack() as starting:
            starting.enter_context(supervise(folder.path, "A conversation"))
            if folder.has_events and isinstance(created := folder.events()[0], ConversationCreated):
                agent, workspace = created.agent, created.workspace
            spec = private_cluster(folder.path, agent, workspace, {**settings.environment, **environment})
            if folder.has_events:  # the log knows the model that it has now
                spec = replace(spec, checked_models=())
            cluster = Cluster(spec)
            starting.push_async_callback(cluster.stop)
            await cluster.start()
            client = await Client.connect(cluster.url, patience_seconds=PATIENCE_SECONDS)
            place = cls(client, cluster=cluster)
            place._closing = starting.pop_all()
        place._folders[conversation_id] = folder
        return place

    @classmethod
    def for_server(cls, url: str, api_key: str | None, directory: Path | None) -> ClusterConnection:
        """Return a place on a server.

        Args:
            api_key: None: DECKHANDS_API_KEY.
            directory: see `RemoteClient`.
        """
        key = CliSettings.from_env().api_key if api_key is None else api_key
        return cls(RemoteClient(url, key, directory=directory))

    async def run(self, work: Awaitable[T]) -> T:
        """Await a coroutine, unless the private cluster fails first.

        Raises:
            DeckhandsError: the failure of the cluster.
        """
        return await work if self._cluster is None else await run_unless_broken(work, self._cluster.until_broken())

    async def aclose(self) -> None:
        """Disconnect; save the log of a private cluster and end its processes. Idempotent."""
        try:
            for conversation_id, folder in self._folders.items():
                await self._write_files(conversation_id, folder)
            self._folders = {}
        finally:
            await self.client.aclose()
            await self._closing.aclose()

    async def _write_files(self, conversation_id: str, folder: RunFolder) -> None:
        """Write the files that `deckhands logs` and `show` read for a finished run."""
        if not isinstance(self.client, Client) or not await self.client.exists(conversation_id):
            return
        events = await self.client.events(conversation_id, is_whole=True, is_lenient=True)
        await asyncio.to_thread(_write_run, folder, events)
        try:
            orders = WorkspaceOrders(self.client.store)
            await orders.end_sessions(conversation_id, limit_seconds=END_LIMIT_SECONDS)
        except DeckhandsError:
            return  # their time to live ends them


def _write_run(folder: RunFolder, events: Sequence[Event]) -> None:
    with folder.recording() as recording:
        for event in events:
            recording.add(event)
    folder.finish(summarize(events))


TOOLS, PYTHON_PATH = "DECKHANDS_TOOLS", "PYTHONPATH"


def to_tool_keys(tools: Sequence[str | CustomTool]) -> tuple[str, ...]:
    """Return the keys under which tools are offered.

    Raises:
        UsageError: an item is neither a key nor a tool.
    """
    if isinstance(tools, str | CustomTool):
        raise UsageError("`tools` must be a list.", remedy="Pass a list: tools=[…].")
    for tool in tools:
        if not isinstance(tool, str | CustomTool):
            raise UsageError(
                f"{ascii(tool)[:100]} is not a tool.",
                remedy="Pass its key, or a tool that `custom_tool` returned.",
            )
    return tuple(tool if isinstance(tool, str) else tool.offer.key for tool in tools)


def build_environment(tools: Sequence[str | CustomTool], environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make tool workers offer a program's own tools.

    Args:
        environment: the variables that are set already.

    Raises:
        UsageError: a tool has no name in a module that can be imported.
    """
    own = [tool for tool in tools if isinstance(tool, CustomTool)]
    if not own:
        return {}
    named = [_name_with_folder(tool) for tool in own]
    offered = [name for name in (environment.get(TOOLS, ""), *(name for name, _ in named)) if name]
    paths = [Path(path) for path in environment.get(PYTHON_PATH, "").split(os.pathsep) if path]
    found = dict.fromkeys([*(folder for _, folder in named if folder is not None), *paths])
    return {TOOLS: ",".join(dict.fromkeys(offered)), PYTHON_PATH: os.pathsep.join(map(str, found))}


def _name_with_folder(tool: CustomTool) -> tuple[str, Path | None]:
    """Return a tool as `module:name`, and the folder that contains the module."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is not tool:
                continue
            file = getattr(module, "__file__", None)
            folder = Path(file).resolve().parent if file else None
            if module_name != "__main__":
                top = folder
                for _ in range(module_name.count(".")):
                    top = top.parent if top is not None else None
                return f"{module_name}:{name}", top
            spec = getattr(module, "__spec__", None)
            if spec is not None and spec.name:
                return f"{spec.name}:{name}", None
            if file:
                return f"{Path(file).stem}:{name}", folder
    raise UsageError(
        f"The tool {tool.offer.key} has no name in a module.",
        remedy="Define it at the top of a module, so that a worker can import it.",
    )
