"""A server in this process on a real store, with the rights that its user has, and clients of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.server.auth.api_keys import ApiKeys, Scope
from deckhands.server.cluster import check_readiness
from deckhands.server.gateway import Gateway, Principal, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.polling import unhurried, until
from tests.served_stores import Server, close_workspaces, environment_with, refusals, worker
from tests.served_stores import serving as store_serving
from tests.turns import script


async def add_key(
    store: Store, tenant: str = "*", scopes: Iterable[Scope] = Scope, *, life: timedelta | None = None, **limits: int
) -> str:
    return (await ApiKeys(store).add("test", tenant=tenant, scopes=scopes, life=life, **limits))[1]


async def add_principal(store: Store) -> Principal:
    """The owner of a new API key for everything."""
    key, _ = await ApiKeys(store).add("test", tenant="*", scopes=Scope)
    return Principal(key)


@dataclass
class Served:
    """A server, and the store behind it with the rights of workers."""

    log: Server
    gateway: Gateway
    client: Client
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def token(
        self, tenant: str = "acme", scopes: Iterable[Scope] = Scope, *, life: timedelta | None = None, **limits: int
    ) -> str:
        return await add_key(self.client.store, tenant, scopes, life=life, **limits)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        found = {
            "PATH": os.environ["PATH"],
            "DECKHANDS_URL": self.log.operator,
            "DECKHANDS_CELERY_URL": "memory://",
            "DECKHANDS_HOME": str(home),
            "LLM_SCRIPTS_DIR": "/",
            "DECKHANDS_SANDBOX": "none",
            "DECKHANDS_WORKSPACE_ENDS_WITH_WORKER": "1",
        }
        return found | more

    async def working(self) -> None:
        """Wait until a worker of each kind has registered; one that is ended before does not end well."""

        async def is_ready() -> bool:
            return (await check_readiness(self.gateway)).ready

        await until(is_ready, limit=60.0, what="workers")

    def as_(self, token: str = "") -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        options: dict[str, Any] = {"verify": False}  # without TLS, reading certificates would only take time
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=unhurried(30.0), **options)


@asynccontextmanager
async def served(folder: Path, programs: dict[str, str], *, archive: str = "", **options: Any) -> AsyncIterator[Served]:
    """A server whose store has users with few rights; at the end, nothing was refused to them."""
    async with store_serving("log", folder, programs) as log:
        await (await open_store(log.admin)).aclose()
        async with await Client.connect(log.operator) as client:
            store: Store = await open_store(log.gateway, patience_seconds=5)
            gateway = Gateway(store, archive, options=ServerOptions(port=0, **options))
            try:
                async with serve_in_loop(gateway) as port:
                    yield Served(log, gateway, client, port)
            finally:
                await gateway.aclose()
        assert await refusals(log) == []


@asynccontextmanager
async def served_with_workers(
    folder: Path, *, options: dict[str, Any] | None = None, **variables: str
) -> AsyncIterator[Served]:
    """A server with some options, and beside it a controller worker and a tool worker with some variables."""
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(served(folder / "log", environment_with(folder), **(options or {})))
        environment = found.environment(folder / "home", **variables)
        # A host whose conversation has not ended, such as one that waits for its user, outlives its worker.
        stack.push_async_callback(close_workspaces, folder / "home" / "node")
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment, found.log))
        await found.working()
        yield found


@asynccontextmanager
async def served_with_model(
    folder: Path, turns: Sequence[dict[str, Any]], *, options: dict[str, Any] | None = None, **variables: str
) -> AsyncIterator[Served]:
    """A server with workers whose default model follows a script, and whose home is the folder."""
    default = script(folder / "default.json", *turns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECKHANDS_HOME", str(folder))
        async with served_with_workers(folder, options=options, LLM_MODEL=default, **variables) as found:
            yield found
