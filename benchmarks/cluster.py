"""A cluster of real processes to measure: a private store, workers, and a client.

Holds: every process is ended by its id when the cluster is left, and by the kernel if this process dies before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2

from benchmarks.machine import is_named_by_a_process
from benchmarks.noop_tool import POOL
from broker.contract.condenser_specs import DEFAULT_CONDENSER, CondenserSpec
from broker.contract.events import AgentSpec, Limits, LLMSpec, WorkspaceSpec
from broker.coordination.membership import list_members
from broker.log.conversations import Conversations
from broker.runtime.child import ChildProcess
from broker.store.embedded import EmbeddedValkey
from broker.store.encryption import MasterKeys
from broker.store.store import load_all_server_facts, open_store
from deckhands.client.client import Client

ROOT = Path(__file__).parents[1]
READY_LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.05
STOP_GRACE_SECONDS = 20.0
CLOSE_LIMIT_SECONDS = 20.0
MOST_LOG_CHARS = 2_000
BACKENDS = ("anthropic", "openai", "litellm")
"""The ways to a model: Anthropic's protocol, OpenAI's protocol, and OpenAI's protocol through litellm."""


class BenchCluster:
    """A store with workers that are started one by one.

    Attributes:
        client: speaks to the store, from this process.
    """

    def __init__(self, directory: Path, store: EmbeddedValkey, client: Client, *, masters: str = "") -> None:
        self.directory = directory
        self.store = store
        self.client = client
        self._masters = masters
        self._children: list[ChildProcess] = []
        self._logs: dict[int, Path] = {}

    async def start_controller(self, *, module: str = "controller_worker", **environment: str) -> int:
        """Start a controller worker and return its process id once it has reported."""
        return await self._start(module, environment)

    async def start_tools(self, **environment: str) -> int:
        """Start a tool worker and return its process id once it has reported."""
        return await self._start("tool_worker", environment)

    async def start_ingress(self, **environment: str) -> int:
        """Start an ingress and return its process id once it has reported."""
        return await self._start("deckhands.ingress", environment)

    async def start_noop_tool(self, pool: str = POOL) -> int:
        """Start a worker that answers every action of a pool at once, and return its process id."""
        return await self._start("benchmarks.noop_tool", {}, pool)

    async def start_process(self, module: str, environment: dict[str, str]) -> int:
        """Start a module that reports as a worker, and return its process id once it has."""
        return await self._start(module, environment)

    async def start_gateway(self, port: int) -> int:
        """Start a gateway on a port of this machine and return its process id once it answers."""
        return await self.start_site(port, "deckhands", "serve", "--port", str(port))

    async def start_site(self, port: int, module: str, *arguments: str) -> int:
        """Start a module that serves HTTP and return its process id once its `/health` answers."""
        child = self.launch(module, {"DECKHANDS_HOME": str(self.directory / "home")}, *arguments)
        async with asyncio.timeout(READY_LIMIT_SECONDS), httpx2.AsyncClient() as client:
            while True:
                self._check_running(child, module)
                with contextlib.suppress(httpx2.HTTPError):
                    if (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                        return child.pid
                await asyncio.sleep(POLL_SECONDS)

    async def submit(
        self,
        *,
        model: str | None = None,
        pool: str = POOL,
        workspace: Path | None = None,
        condenser: CondenserSpec = DEFAULT_CONDENSER,
    ) -> str:
        """Begin a conversation; without a model it has the controller's own."""
        return await self.client.submit(
            "Do it.",
            agent=AgentSpec(llm=LLMSpec(model=model), condenser=condenser),
            workspace=WorkspaceSpec(pool=pool, path=str(workspace) if workspace else None),
            limits=Limits(max_iterations=100_000),
        )

    async def until_finished(self, count: int) -> None:
        """Wait until the newest `count` conversations have finished.

        Raises:
            AssertionError: one of them has come to rest otherwise.
        """
        index = Conversations(self.client.store)
        while True:
            rows = await index.list_recent(limit=count)
            assert not (bad := [row for row in rows if row.state in ("error", "stopped", "rejected")]), bad[0]
            if len(rows) == count and all(row.state == "finished" for row in rows):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def until_stepping(self, conversation_id: str, *, limit_seconds: float = READY_LIMIT_SECONDS) -> None:
        """Wait until a conversation has made its first step."""
        index = Conversations(self.client.store)
        async with asyncio.timeout(limit_seconds):
            while (await index.load_row(conversation_id)).fields.get("iterations", "0") == "0":
                await asyncio.sleep(POLL_SECONDS)

    async def close(self, conversation_id: str) -> None:
        """Close a conversation and wait until its workspace host, which outlives its tool worker, has ended."""
        await Conversations(self.client.store).close(conversation_id)
        async with asyncio.timeout(CLOSE_LIMIT_SECONDS):
            while is_named_by_a_process(conversation_id):
                await asyncio.sleep(POLL_SECONDS)

    async def store_pid(self) -> int:
        """Return the process id of the store's server."""
        facts = (await self.client.store.connection.call("INFO", "server")).decode().splitlines()
        return int(next(line.partition(":")[2] for line in facts if line.startswith("process_id:")))

    async def stop_workers(self) -> None:
        """End every worker in order."""
        children, self._children = self._children, []
        await asyncio.gather(*(child.stop(grace_seconds=STOP_GRACE_SECONDS) for child in children))

    def _check_running(self, child: ChildProcess, module: str) -> None:
        """Raise what a process has written last if it has ended."""
        if child.exit_status is not None:
            raise RuntimeError(f"{module} ended:\n{self._logs[child.pid].read_text()[-MOST_LOG_CHARS:]}")

    async def _start(self, module: str, environment: dict[str, str], *arguments: str) -> int:
        child = self.launch(module, environment, *arguments)
        async with asyncio.timeout(READY_LIMIT_SECONDS):
            while not any(f"-{child.pid}-" in member.worker_id for member in await list_members(self.client.store)):
                self._check_running(child, module)
                await asyncio.sleep(POLL_SECONDS)
        return child.pid

    def launch(self, module: str, environment: dict[str, str], *arguments: str) -> ChildProcess:
        """Start a module as a process of the cluster, which ends with it."""
        url = urlsplit(environment.get("DECKHANDS_URL", self.store.url))
        log = self.directory / f"{module}-{len(self._children)}.log"
        child = ChildProcess.start(
            [sys.executable, "-m", module, *arguments],
            log=log,
            env=_without_settings()
            | {
                "DECKHANDS_URL": self.store.url,
                "DECKHANDS_ANY_MODEL": unquote(url.path) if url.scheme == "unix" else "",
                "DECKHANDS_CELERY_URL": self.store.celery_url,
                "DECKHANDS_NODE": "benchmark",
                "DECKHANDS_NODE_DIR": str(self.directory / "n"),
                "DECKHANDS_WORKSPACE_ROOTS": str(self.directory.parent.resolve()),
                "DECKHANDS_MASTER_KEYS": self._masters,
                "PYTHONPATH": str(ROOT),
            }
            | environment,
        )
        self._children.append(child)
        self._logs[child.pid] = log
        return child


@contextlib.asynccontextmanager
async def running_cluster(
    directory: Path, *, append_fsync: str = "everysec", masters: str = ""
) -> AsyncIterator[BenchCluster]:
    """Run a cluster without workers in a new directory.

    Args:
        masters: the master keys that its processes encrypt with; empty for none.
    """
    directory.mkdir(parents=True)
    store = EmbeddedValkey(directory / "v", append_fsync="always" if append_fsync == "always" else "everysec")
    await store.start()
    client = Client(await open_store(store.url, masters=MasterKeys(masters)))
    cluster = BenchCluster(directory, store, client, masters=masters)
    try:
        yield cluster
    finally:
        await cluster.stop_workers()
        await cluster.client.aclose()
        await store.stop()


def free_port() -> int:
    """Return a port of this machine that nothing listens to."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


def model_environment(backend: str, url: str) -> dict[str, str]:
    """Return the environment of a controller that asks the model server at `url` through one of `BACKENDS`."""
    if backend == "anthropic":
        return {"LLM_MODEL": "anthropic/claude-sonnet-4-5", "LLM_BASE_URL": url, "LLM_API_KEY": "none"}
    return {
        "LLM_MODEL": "openai/scripted",
        "LLM_BASE_URL": f"{url}/v1",
        "LLM_API_KEY": "none",
        "LLM_BACKEND": backend,
        "LLM_NATIVE_TOOL_CALLING": "true",
    }


def model_server_arguments(script: Path, *, latency_seconds: float, records: int = 0) -> Sequence[str]:
    """Return what the local model server is started with. It keeps so many of the last requests."""
    return ("--script", str(script), "--latency", str(latency_seconds), "--records", str(records))


def _without_settings() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(("DECKHANDS_", "LLM_", "LITELLM_"))}


async def read_used_memory(client: Client) -> int:
    """Return the bytes that the store, or all primaries of a cluster, have allocated."""
    facts = await load_all_server_facts(client.store.connection, "memory")
    return sum(int(one["used_memory"]) for one in facts)
