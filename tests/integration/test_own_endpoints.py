"""A conversation with its own endpoint: its calls go there, with its key, if the operator's table allows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from broker.contract import AgentSpec, ModelCallFailed, ModelReply
from broker.secrets import ENDPOINT_KEY, ENDPOINT_URL
from deckhands.rollouts import StubEngine
from tests.faults.harness import FaultCluster
from tests.polling import unhurried
from tests.rollout_parts import make_environment

AGENT = AgentSpec(enable_workspace_skills=False)
KEY = "sk-of-one-rollout-5f0c"
OPERATOR = "sk-of-the-operator-77aa"


class Endpoint:
    """A stub engine, and the headers of the calls that it got.

    Attributes:
        is_full: it refuses calls for an hour.
    """

    def __init__(self) -> None:
        self.engine = StubEngine(turns=2, tool="think")
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.address = ""
        self.is_full = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        @web.middleware
        async def note(request: web.Request, handler) -> web.StreamResponse:
            if request.method != "POST":  # a check of health
                return await handler(request)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.bodies.append(await request.json())
            if self.is_full:
                return web.Response(status=429, headers={"Retry-After": "3600"})
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

    def start(self, *allowed: str, name: str = "c1", **more: str) -> None:
        further = {"extra_headers": {"X-Operator": OPERATOR}, "extra_body": {"operator": OPERATOR}}
        environment = {
            **make_environment(self.shared.address, "chat"),
            "LLM_OWN_ENDPOINTS": json.dumps(allowed),
            "LLM_COMPLETION_KWARGS": json.dumps(further),
            **more,
        }
        self.cluster.start_controller(name, **environment)

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


async def test_calls_go_to_the_own_endpoint_or_the_entry(pair: Pair) -> None:
    pair.start("http://127.0.0.1:*")
    cid = await pair.run(**{ENDPOINT_URL: f"{pair.own.address}/v1", ENDPOINT_KEY: KEY})
    assert len(pair.own.engine.truth) == 3
    assert pair.shared.headers == []
    assert {one["authorization"] for one in pair.own.headers} == {f"Bearer {KEY}"}
    assert OPERATOR not in str(pair.own.headers + pair.own.bodies)
    events = await pair.client.events(cid)
    assert sum(isinstance(one, ModelReply) for one in events) == 3
    texts = str([one.wire() for one in events])
    assert KEY not in texts
    assert pair.own.address not in texts
    pair.own.headers.clear()
    await pair.run(**{ENDPOINT_URL: f"{pair.own.address}/v1"})  # without a key it gets none of the operator
    assert {one["authorization"] for one in pair.own.headers} == {"Bearer no-key"}
    assert pair.shared.headers == []
    pair.own.headers.clear()
    await pair.run()
    assert len(pair.shared.engine.truth) == 3
    assert pair.own.headers == []


async def test_an_endpoint_that_is_not_listed_gets_no_call(pair: Pair) -> None:
    pair.start("https://127.0.0.1:*", "http://127.0.0.1", "http://*.0.0.1.example:*")
    cid = await pair.run(**{ENDPOINT_URL: f"{pair.own.address}/v1", ENDPOINT_KEY: KEY})
    assert pair.own.headers == []
    failures = [one for one in await pair.client.events(cid) if isinstance(one, ModelCallFailed)]
    assert [one.code for one in failures] == ["llm_config"]
    assert pair.shared.headers == []


async def test_a_model_without_own_endpoints_ignores_the_secrets(pair: Pair) -> None:
    pair.start()
    await pair.run(**{ENDPOINT_URL: f"{pair.own.address}/v1", ENDPOINT_KEY: KEY})
    assert len(pair.shared.engine.truth) == 3
    assert KEY not in str(pair.shared.headers)
    assert pair.own.headers == []


async def test_a_takeover_calls_the_own_endpoint_alone(pair: Pair) -> None:
    pair.start("http://127.0.0.1:*", LLM_STREAM_REPLIES="off")
    pair.own.engine.stalls_after = 0
    cid = await pair.client.submit(
        "Do it.", agent=AGENT, secrets={ENDPOINT_URL: f"{pair.own.address}/v1", ENDPOINT_KEY: KEY}
    )
    await pair.cluster.until(lambda: pair.own.headers, what="call")
    pair.cluster.kill("c1")
    pair.own.engine.stalls_after = None
    pair.start("http://127.0.0.1:*", name="c2", LLM_STREAM_REPLIES="off")
    await pair.client.watcher.wait(cid)
    assert sum(isinstance(one, ModelReply) for one in await pair.client.events(cid)) == 3
    assert len(pair.own.headers) == 4
    assert pair.shared.headers == []


@pytest.mark.parametrize("is_reachable", [True, False])
async def test_a_failing_own_endpoint_stops_no_other_conversation(
    pair: Pair, tmp_path: Path, is_reachable: bool
) -> None:
    quotas = tmp_path / "quotas.toml"
    quotas.write_text(f'[[quota]]\nmodel = "openai/stub"\nbase_url = "{pair.shared.address}/v1"\nconcurrency = 1\n')
    pair.start("http://127.0.0.1:*", DECKHANDS_QUOTAS=str(quotas), LLM_NUM_RETRIES="1")
    pair.own.is_full = True
    address = pair.own.address if is_reachable else "http://127.0.0.1:9"
    cid = await pair.run(**{ENDPOINT_URL: f"{address}/v1"})
    assert [one.code for one in await pair.client.events(cid) if isinstance(one, ModelCallFailed)] == [
        "rate_limit" if is_reachable else "service_unavailable"
    ]
    async with asyncio.timeout(unhurried(60)):
        await pair.run()
    assert len(pair.shared.engine.truth) == 3
    assert len(pair.own.headers) == is_reachable
