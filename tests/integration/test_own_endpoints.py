"""A conversation with its own endpoint: its calls go there, with its key, if the operator's table allows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from broker.contract import AgentSpec, ModelCallFailed, ModelReply
from broker.secrets import ENDPOINT_KEY, ENDPOINT_URL
from deckhands.rollouts import StubEngine
from tests.faults.harness import FaultCluster
from tests.rollout_parts import make_environment

AGENT = AgentSpec(enable_workspace_skills=False)
KEY = "sk-of-one-rollout-5f0c"
OPERATOR = "sk-of-the-operator-77aa"


class Endpoint:
    """A stub engine, and the headers of the calls that it got."""

    def __init__(self) -> None:
        self.engine = StubEngine(turns=2, tool="think")
        self.headers: list[dict[str, str]] = []
        self.address = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        @web.middleware
        async def note(request: web.Request, handler) -> web.StreamResponse:
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            return await handler(request)

        app = self.engine.app()
        app.middlewares.append(note)
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


class Pair:
    """A cluster whose model is at one endpoint, and another endpoint that a conversation may name."""

    def __init__(self, cluster: FaultCluster, shared: Endpoint, own: Endpoint) -> None:
        self.cluster, self.client, self.shared, self.own = cluster, cluster.client, shared, own

    def start(self, *allowed: str) -> None:
        patterns = ", ".join(f'"{one}"' for one in allowed)
        self.cluster.start_controller(
            "c1",
            **make_environment(self.shared.address, "chat"),
            LLM_OWN_ENDPOINTS=f"[{patterns}]",
            LLM_COMPLETION_KWARGS=f'{{"extra_headers": {{"X-Operator": "{OPERATOR}"}}}}',
        )

    async def run(self, **secrets: str) -> str:
        cid = await self.client.submit("Do it.", agent=AGENT, secrets=secrets)
        await self.client.watcher.wait(cid)
        return cid


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    shared, own = Endpoint(), Endpoint()
    async with AsyncExitStack() as stack:
        for one in (shared, own):
            await stack.enter_async_context(one.serving())
        cluster = await stack.enter_async_context(FaultCluster(tmp_path).running())
        yield Pair(cluster, shared, own)


async def test_calls_go_to_the_own_endpoint_with_its_key(pair: Pair) -> None:
    pair.start("http://127.0.0.1:*")
    cid = await pair.run(**{ENDPOINT_URL: f"{pair.own.address}/v1", ENDPOINT_KEY: KEY})
    assert len(pair.own.engine.truth) == 3
    assert pair.shared.headers == []
    assert {one["authorization"] for one in pair.own.headers} == {f"Bearer {KEY}"}
    assert not any(OPERATOR in str(one) for one in pair.own.headers)
    events = await pair.client.events(cid)
    assert sum(isinstance(one, ModelReply) for one in events) == 3
    texts = str([one.wire() for one in events])
    assert KEY not in texts
    assert pair.own.address not in texts


async def test_an_endpoint_without_key_gets_no_key_of_the_operator(pair: Pair) -> None:
    pair.start("http://127.0.0.1:*")
    await pair.run(**{ENDPOINT_URL: f"{pair.own.address}/v1"})
    assert {one["authorization"] for one in pair.own.headers} == {"Bearer no-key"}


async def test_conversations_without_own_endpoint_use_the_entry(pair: Pair) -> None:
    pair.start("http://127.0.0.1:*")
    await pair.run()
    assert len(pair.shared.engine.truth) == 3
    assert pair.own.headers == []


@pytest.mark.parametrize(
    "allowed", [(), ("https://127.0.0.1:*",), ("http://127.0.0.1",), ("http://*.0.0.1.example:*",)]
)
async def test_an_endpoint_that_is_not_listed_gets_no_call(pair: Pair, allowed: tuple[str, ...]) -> None:
    pair.start(*allowed)
    cid = await pair.run(**{ENDPOINT_URL: f"{pair.own.address}/v1", ENDPOINT_KEY: KEY})
    assert pair.own.headers == []
    failures = [one for one in await pair.client.events(cid) if isinstance(one, ModelCallFailed)]
    assert [one.code for one in failures] == ["llm_config"]
    assert pair.shared.headers == []
