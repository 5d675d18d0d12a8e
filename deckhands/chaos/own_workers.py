"""Workers that chaos adds to a cluster, each behind its own proxy and with its own clock, so that both can fail.

Holds: the workers end with this process. A worker that ends is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from broker.coordination import list_members
from broker.runtime import CONTROLLER, TOOLS, ChildProcess, DeckhandsError, make_worker_environment
from broker.store import Store
from deckhands.chaos.fake_clock import FakeClock
from deckhands.chaos.proxy import StoreProxy
from deckhands.cluster import ANY_MODEL, ClusterSpec

OWN_POOL = "chaos"
"""The pool that they serve, so that they run no command of anyone else."""
READY_SECONDS = 120.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.1
RESTART_SECONDS = 0.5


@dataclass(slots=True)
class OwnWorker:
    """A worker, with its proxy and its clock where these are possible."""

    name: str
    role: str
    proxy: StoreProxy | None
    clock: FakeClock | None
    environment: Mapping[str, str]
    log: Path
    child: ChildProcess | None = None
    watch: asyncio.Task[None] | None = field(default=None, repr=False)

    def restore(self) -> None:
        """End the faults of its link and of its clock. Idempotent."""
        if self.proxy is not None:
            self.proxy.restore()
        if self.clock is not None:
            self.clock.restore()

    async def run(self, command: tuple[str, ...]) -> None:
        """Start the worker, and start it again whenever it ends; never returns."""
        while True:
            with contextlib.suppress(OSError):
                self.child = ChildProcess.start(command, log=self.log, env=self.environment)
                await self.child.wait()
            await asyncio.sleep(RESTART_SECONDS)


@asynccontextmanager
async def add_workers(
    store: Store, url: str, directory: Path, environment: Mapping[str, str], *, pairs: int
) -> AsyncIterator[list[OwnWorker]]:
    """Add workers of a cluster while the block runs.

    Args:
        url: the store's URL.
        directory: directory of their sockets, logs and workspaces.
        pairs: how many controller workers and how many tool workers.

    Raises:
        DeckhandsError: they have not started after two minutes.
    """
    await asyncio.to_thread(directory.mkdir, mode=0o700, parents=True, exist_ok=True)
    await asyncio.to_thread(shutil.rmtree, directory / "node", ignore_errors=True)  # workspaces of an earlier run
    commands = ClusterSpec(directory).commands
    workers = []
    async with contextlib.AsyncExitStack() as stack:
        # A socket's path may have 107 bytes.
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deckhands-chaos-")))
        for number in range(1, pairs + 1):
            for role in (CONTROLLER, TOOLS):
                name = f"chaos-{role}-{number}"
                proxy = None
                if StoreProxy.supports(url):
                    proxy = await stack.enter_async_context(StoreProxy(url, sockets / f"{role}-{number}"))
                clock = FakeClock.create(directory / f"{name}.clock")
                whole = {
                    **environment,
                    ANY_MODEL: "",
                    "DECKHANDS_URL": proxy.url if proxy else url,
                    "DECKHANDS_URL_FILE": "",
                    "DECKHANDS_POOLS": OWN_POOL,
                    "DECKHANDS_NODE": f"chaos-{socket.gethostname()}",
                    "DECKHANDS_NODE_DIR": str(directory / "node"),
                    "DECKHANDS_WORKSPACE_ENDS_WITH_WORKER": "1",
                }
                given = make_worker_environment(role, whole) | (clock.environment if clock else {})
                workers.append(OwnWorker(name, role, proxy, clock, given, directory / f"{name}.log"))
        try:
            for worker in workers:
                worker.watch = asyncio.create_task(worker.run(tuple(commands[worker.role])), name=worker.name)
            await _wait_until_ready(store, workers)
            yield workers
        finally:
            for worker in workers:
                worker.restore()
                if worker.watch is not None:
                    worker.watch.cancel()
                    await asyncio.gather(worker.watch, return_exceptions=True)
            children = [worker.child for worker in workers if worker.child is not None]
            for child in children:
                child.send(signal.SIGCONT)
            await asyncio.gather(*(child.stop(grace_seconds=STOP_SECONDS) for child in children))


async def _wait_until_ready(store: Store, workers: list[OwnWorker]) -> None:
    slow = workers
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_SECONDS):
            while True:
                ids = [member.worker_id for member in await list_members(store) if member.left_seconds > 0]
                slow = [w for w in workers if w.child is None or not any(f"-{w.child.pid}-" in one for one in ids)]
                if not slow:
                    return
                await asyncio.sleep(POLL_SECONDS)
    raise DeckhandsError(
        f"The worker {slow[0].name} has not started after {READY_SECONDS:g} s.", remedy=f"Its log is {slow[0].log}."
    )
