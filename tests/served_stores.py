"""Servers as containers run them, by `deploy/serve-valkey`, and the rights of their users."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import DeckhandsError
from broker.store.connection import MultiplexedConnection
from broker.store.store import open_store
from tests.forked_programs import ForkedProgram
from tests.polling import unhurried
from tests.stores import valkey_program
from tool_worker.errors import SandboxUnavailable
from tool_worker.workspace.workspaces import Workspaces

SERVE_VALKEY = Path(__file__).resolve().parents[1] / "deploy" / "serve-valkey"
LIMIT_SECONDS = 30.0
ADMIN, OPERATOR, QUEUE = "admin-0123456789", "operator-01234567", "queue-0123456789"
CONTROLLER, TOOL, METRICS = "controller-012345", "tool-0123456789ab", "metrics-012345678"
INGRESS, PRODUCER = "ingress-0123456789a", "producer-0123456789"
SHOP, MILL = "shop-0123456789a", "mill-0123456789a"
"""Of producers with a stream of their own."""
JOBS, GATEWAY = "jobs-0123456789a", "gateway-01234567"
BEAT, FLOWER = "beat-0123456789ab", "flower-0123456789"
PASSWORDS = {
    "ADMIN_PASSWORD": ADMIN,
    "OPERATOR_PASSWORD": OPERATOR,
    "CONTROLLER_PASSWORD": CONTROLLER,
    "TOOL_PASSWORD": TOOL,
    "INGRESS_PASSWORD": INGRESS,
    "JOBS_PASSWORD": JOBS,
    "GATEWAY_PASSWORD": GATEWAY,
    "METRICS_PASSWORD": METRICS,
    "QUEUE_PASSWORD": QUEUE,
    "PRODUCER_PASSWORD": PRODUCER,
    "BEAT_PASSWORD": BEAT,
    "FLOWER_PASSWORD": FLOWER,
    "PRODUCERS": f"shop={SHOP} mill={MILL}",
}


@dataclass(frozen=True)
class Server:
    """A running server of `serve-valkey`."""

    port: int
    pid: int

    def url(self, login: str) -> str:
        return f"redis://{login}@127.0.0.1:{self.port}/0"

    @property
    def admin(self) -> str:
        return self.url(f"admin:{ADMIN}")

    def role(self, name: str) -> str:
        """Return the address for the user of a role of `deploy/store.acl`."""
        return self.url(f"{name}:{PASSWORDS[f'{name.upper()}_PASSWORD']}")

    @property
    def operator(self) -> str:
        return self.role("operator")

    @property
    def controller(self) -> str:
        return self.role("controller")

    @property
    def tool(self) -> str:
        return self.role("tool")

    @property
    def ingress(self) -> str:
        return self.url(f"ingress:{INGRESS}")

    @property
    def jobs(self) -> str:
        return self.url(f"jobs:{JOBS}")

    @property
    def gateway(self) -> str:
        return self.url(f"gateway:{GATEWAY}")

    @property
    def producer(self) -> str:
        return self.url(f"producer:{PRODUCER}")

    @property
    def shop(self) -> str:
        return self.url(f"shop:{SHOP}")

    @property
    def mill(self) -> str:
        return self.url(f"mill:{MILL}")

    @property
    def queue(self) -> str:
        return self.url(f":{QUEUE}")


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment in which the server is found, as in the image."""
    return environment_with(tmp_path)


def environment_with(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the server is found by a link in a folder."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "valkey-server").symlink_to(valkey_program())
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@asynccontextmanager
async def serving(purpose: str, folder: Path, programs: dict[str, str]) -> AsyncIterator[Server]:
    """A server of `serve-valkey`, with a password for each of its users."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    folder.mkdir()
    server = await asyncio.create_subprocess_exec(
        *(SERVE_VALKEY, purpose),
        env={**programs, **PASSWORDS, "PORT": str(port)},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    reading = None
    try:
        async with asyncio.timeout(unhurried(LIMIT_SECONDS)):
            while b"Ready to accept connections" not in (line := await server.stdout.readline()):
                assert line, "the server ended"
        # The rest must be read; a full pipe would stop it.
        reading = asyncio.create_task(server.stdout.read())
        yield Server(port, server.pid)
    finally:
        server.terminate()
        await server.wait()
        if reading is not None:
            await reading


ROLES = {
    "controller_worker": "controller",
    "tool_worker": "tool",
    "deckhands.ingress": "ingress",
    "deckhands.operations.jobs": "jobs",
}
"""Of the modules of workers."""


@asynccontextmanager
async def worker(
    module: str, environment: dict[str, str], log: Server | None = None, queue: Server | None = None
) -> AsyncIterator[None]:
    """A worker, as the user of its role in `log` and in Celery's broker `queue`, if these are given."""
    if log is not None:
        environment = {**environment, "DECKHANDS_URL": log.role(ROLES[module])}
    if queue is not None:
        environment = {**environment, "DECKHANDS_CELERY_URL": queue.role(ROLES.get(module, "beat"))}
    worker = ForkedProgram(module, environment=environment, output=None, errors=2)
    try:
        yield
    finally:
        worker.terminate()
        assert await asyncio.to_thread(worker.wait, unhurried(LIMIT_SECONDS)) == 0


async def close_workspaces(node_dir: Path, ids: Iterable[str] | None = None) -> None:
    """End workspace hosts, which outlive their tool workers by design: of these conversations, or all."""
    workspaces = Workspaces(node_dir, sandbox="none")
    for conversation_id in [found.conversation_id for found in workspaces.list()] if ids is None else ids:
        with suppress(SandboxUnavailable):  # a pod, which ends with its cluster
            await workspaces.close(conversation_id)
    await workspaces.aclose()


async def refusals(server: Server) -> list[Any]:
    """Return the refused commands in the log of the server; in production they raise an alarm."""
    admin = MultiplexedConnection(server.admin)
    found: list[Any] = await admin.call("ACL", "LOG")
    await admin.aclose()
    # Our own connection asks which server it has reached; where a producer has no right to know, it does without.
    return [entry for entry in found if entry[entry.index(b"object") + 1] != b"info"]


async def allowed_of(commands: Iterable[str], url: str) -> list[str]:
    """Which of some commands are not refused to a user for want of rights."""
    connection = MultiplexedConnection(url)
    allowed = []
    for command in commands:
        try:
            await connection.call(*command.split(" "))
            allowed.append(command)
        except DeckhandsError as error:
            if "NOPERM" not in str(error) and "DEBUG command not allowed" not in str(error):
                allowed.append(f"{command}: {error}")
    await connection.aclose()
    return allowed


@asynccontextmanager
async def serving_both(folder: Path, programs: dict[str, str]) -> AsyncIterator[tuple[Server, Server, dict[str, str]]]:
    """The store of the logs with its functions, Celery's broker, and what every process of theirs needs."""
    async with serving("log", folder / "log", programs) as log, serving("queue", folder / "queue", programs) as queue:
        await (await open_store(log.admin)).aclose()
        yield (
            log,
            queue,
            {
                "PATH": os.environ["PATH"],
                "DECKHANDS_CELERY_URL": queue.queue,
                "DECKHANDS_HOME": str(folder / "home"),
            },
        )
