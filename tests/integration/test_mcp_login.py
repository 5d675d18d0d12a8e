"""Logins at MCP servers: by credentials, by a person, refreshed, kept encrypted, and led nowhere else."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import httpx2
import pytest

from broker.runtime.errors import UsageError
from broker.store.keys import ShardKeys
from broker.store.store import Store
from broker.tools.mcp_config import McpServerSpec, read_servers
from broker.tools.mcp_login import LoginNeeded, McpTokens, is_allowed, make_auth
from tests.faults.harness import FaultCluster
from tests.faults.test_mcp_tasks import text_of
from tests.oauth_mcp_server import CLIENT_ID, CLIENT_SECRET, OAuthServer, oauth_server
from tests.polling import until
from tests.scripted_mcp_server import served
from tests.served_stores import environment_with
from tests.server_parts import Served
from tests.server_parts import served as server_with_rights
from tests.turns import call, finish

KEY = base64.b64encode(b"k" * 32).decode()
CREDENTIALS = {"grant": "client_credentials", "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}


@pytest.fixture
async def remote() -> AsyncIterator[OAuthServer]:
    async with oauth_server() as server:
        yield server


def settings(cluster: FaultCluster, remote: OAuthServer, **oauth: Any) -> dict[str, str]:
    path = cluster.root / "mcp.json"
    entry = {"url": remote.url, "oauth": {"issuer": remote.base, **oauth}}
    path.write_text(json.dumps({"mcpServers": {"remote": entry}}))
    return {"DECKHANDS_MCP": str(path), "DECKHANDS_SECRET_KEY": KEY}


async def run_job(cluster: FaultCluster) -> str:
    (cid,) = await cluster.submit([call("job", name="one", seconds=0), finish()], tools=["remote/*"])
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    return text_of(answer)


async def until_offered(cluster: FaultCluster) -> None:
    async def is_offered() -> bool:
        return bool(await cluster.client.store.call("HEXISTS", "deck:tools", "remote/job"))

    await until(is_offered, limit=120, what="the tools")


async def login(cluster: FaultCluster, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Log in by the command line, with a browser that follows every address; return the exit code and the output."""
    env = {**os.environ, **environment, "DECKHANDS_URL": cluster.store.url}
    command = [sys.executable, "-m", "deckhands", "mcp", "login", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    shown = ""
    while line := (await process.stdout.readline()).decode():
        shown += line
        if address := re.search(r"http\S+/authorize\?\S+", line):
            async with httpx.AsyncClient(follow_redirects=True) as browser:
                assert (await browser.get(address[0])).status_code == 200
    return await process.wait(), shown


async def test_client_credentials_give_access(cluster: FaultCluster, remote: OAuthServer) -> None:
    cluster.start(**settings(cluster, remote, **CREDENTIALS))
    await until_offered(cluster)
    remote.tokens.clear()  # as if all had been revoked
    remote.tokens.append("another")
    assert await run_job(cluster) == "one is done"
    assert remote.asked["client_credentials"] >= 2
    assert remote.asked["/register"] == remote.asked["/authorize"] == 0
    kept = await cluster.client.store.call("HGETALL", ShardKeys(0).mcp_tokens)
    assert b"remote" in kept
    assert b"access-token" not in b"".join(kept)
    assert "access-token" not in cluster.log_of("t1") + cluster.log_of("c1")


async def test_needed_login_is_reported_before_a_conversation(cluster: FaultCluster, remote: OAuthServer) -> None:
    environment = settings(cluster, remote)
    remote.expires_in = 1  # each use refreshes the token
    cluster.start(**environment)

    async def is_reported() -> bool:
        return bool(await cluster.client.store.call("HLEN", "deck:tools:failed"))

    await until(is_reported, limit=60, what="the report")
    with pytest.raises(UsageError, match=r"needs a login") as refused:
        await cluster.submit([finish()], tools=["remote/job"])
    assert "deckhands mcp login remote" in str(refused.value)
    assert remote.asked["/register"] == 0  # a worker starts no login
    code, shown = await login(cluster, environment, "remote")
    assert code == 0, shown
    await until_offered(cluster)
    assert await run_job(cluster) == "one is done"
    assert remote.asked["authorization_code"] == 1
    assert remote.asked["refresh_token"] >= 1
    kept = b"".join(await cluster.client.store.call("HGETALL", ShardKeys(0).mcp_tokens))
    assert b"token-" not in kept


@asynccontextmanager
async def serving(
    tmp_path: Path, remote: OAuthServer, **oauth: Any
) -> AsyncIterator[tuple[Served, httpx2.AsyncClient]]:
    """A server of a cluster that knows the MCP server, and a client of an operator."""
    entry = {"url": remote.url, "oauth": {"issuer": remote.base, **oauth}}
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"remote": entry}}))
    known = read_servers(path, {})
    async with (
        server_with_rights(tmp_path / "server", environment_with(tmp_path), mcp_servers=known) as server,
        server.as_(await server.token("*")) as client,
    ):
        yield server, client


@pytest.fixture
def secret_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", KEY)


@pytest.mark.usefixtures("secret_key")
async def test_operator_logs_in_over_http(tmp_path: Path, remote: OAuthServer) -> None:
    async with serving(tmp_path, remote) as (server, client), httpx.AsyncClient(follow_redirects=True) as browser:
        new = {"return_to": server.url, "reason": "a new tracker"}
        assert [one["is_logged_in"] for one in (await client.get("/mcp-logins")).json()] == [False]
        asked = await client.post("/mcp-logins/remote", json=new)
        assert asked.status_code == 202, asked.text
        answer = await browser.get(asked.json()["address"])
        assert answer.text == "You may close this page.\n"

        async def is_logged_in() -> bool:
            (found,) = (await client.get("/mcp-logins")).json()
            assert not found["problem"]
            return bool(found["is_logged_in"])

        await until(is_logged_in, limit=60, what="the login")
        assert (await browser.get(str(answer.url))).status_code == 404, "an answer counts once"
        key = base64.b64decode(KEY)
        (spec,) = server.gateway.options.mcp_servers
        assert (await McpTokens(server.client.store, lambda: key).load(spec)).tokens is not None
        assert (await client.delete("/mcp-logins/remote?reason=left")).json() == {"is_forgotten": True}
        assert not await server.client.store.call("HEXISTS", ShardKeys(0).mcp_tokens, "remote")
        done = [(one["action"], one["target"]) for one in (await client.get("/operations")).json()]
        assert {("mcp.login", "remote"), ("mcp.logout", "remote")} <= set(done)


@pytest.mark.usefixtures("secret_key")
async def test_only_the_browser_of_a_waiting_login_is_heard(tmp_path: Path, remote: OAuthServer) -> None:
    async with serving(tmp_path, remote) as (server, client), server.as_() as stranger:
        path = "/mcp-callback"
        for query in ("", "?code=c", "?code=c&state=guessed-0123456789", "?code=c&state=*", "?code=c&error=e&state=s"):
            assert (await stranger.get(f"{path}{query}")).json()["code"] == "no_login", query
        assert (await stranger.get("/mcp-logins")).status_code == 401
        assert (
            await client.post("/mcp-logins/other", json={"return_to": server.url, "reason": "r"})
        ).status_code == 404
        for wrong in ("javascript:alert(1)", f"{server.url}/elsewhere", "https://me@evil.example"):
            refused = await client.post("/mcp-logins/remote", json={"return_to": wrong, "reason": "r"})
            assert refused.status_code == 422, wrong
        async with server.as_(await server.token("acme")) as tenant:
            assert (await tenant.get("/mcp-logins")).status_code == 403
        asked = await client.post("/mcp-logins/remote", json={"return_to": server.url, "reason": "r"})
        state = parse_qs(urlsplit(asked.json()["address"]).query)["state"][0]
        assert (await stranger.get(path, params={"error": "access_denied", "state": state})).status_code == 200

        async def is_told() -> bool:
            (found,) = (await client.get("/mcp-logins")).json()
            return "access_denied" in found["problem"] and not found["is_logged_in"]

        await until(is_told, limit=60, what="the refusal")


@pytest.mark.parametrize("grant", ["client_credentials", "authorization_code"])
async def test_metadata_leads_a_login_nowhere_else(cluster: FaultCluster, remote: OAuthServer, grant: str) -> None:
    seen: list[str] = []

    async def note(request: Any) -> Any:
        seen.append(request.path)
        return httpx.Response(404)

    async with served(note) as elsewhere:
        remote.issuer = elsewhere.removesuffix("/mcp")
        oauth = CREDENTIALS if grant == "client_credentials" else {}
        environment = settings(cluster, remote, **oauth)
        if grant == "client_credentials":
            cluster.start(**environment)
            await until(lambda: "is not allowed" in cluster.log_of("t1"), limit=60, what="the refusal")
        else:
            code, shown = await login(cluster, environment, "remote")
            assert code != 0
            assert "which its entry does not name" in shown
    assert seen == []
    assert remote.asked["/token"] == 0


@pytest.mark.parametrize(
    ("oauth", "words"),
    [
        ({"grant": "client_credentials", "issuer": "https://a.test"}, "needs a client_id"),
        ({}, "issuer: Field required"),
        ({"issuer": "file:///etc"}, "issuer"),
        ({"issuer": "https://a.test", "origins": ["https://b.test/path"]}, "origins"),
    ],
)
def test_invalid_entry_is_refused(tmp_path: Path, oauth: dict[str, Any], words: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"a": {"url": "https://m.test/mcp", "oauth": oauth}}}))
    with pytest.raises(UsageError, match=words):
        read_servers(path, {})


def test_login_may_ask_only_named_origins() -> None:
    oauth = {"issuer": "https://auth.test/tenant", "origins": ["https://token.test"]}
    server = McpServerSpec.model_validate({"name": "a", "url": "https://m.test/mcp", "oauth": oauth})
    allowed = ["https://m.test/.well-known/x", "https://auth.test/token", "https://token.test:443/token"]
    refused = ["http://auth.test/", "https://auth.test:8443/", "https://auth.test.evil.test/", "http://127.0.0.1/"]
    assert [is_allowed(server, url) for url in allowed] == [True] * 3
    assert [is_allowed(server, url) for url in refused] == [False] * 4


PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@asynccontextmanager
async def worker_of(store: Store, remote: OAuthServer) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """One worker's requests to the server; each returns its status."""
    server = McpServerSpec.model_validate({"name": "remote", "url": remote.url, "oauth": {"issuer": remote.base}})
    async with httpx2.AsyncClient(auth=make_auth(server, McpTokens(store, lambda: b"k" * 32))) as client:

        async def post() -> int:
            return (await client.post(remote.url, json=PING)).status_code

        yield post


async def test_two_workers_refresh_one_after_the_other(cluster: FaultCluster, remote: OAuthServer) -> None:
    environment = settings(cluster, remote)
    remote.expires_in = 1  # each use refreshes the token, and a refresh token is valid once
    code, shown = await login(cluster, environment, "remote")
    assert code == 0, shown
    store = cluster.client.store
    async with worker_of(store, remote) as first, worker_of(store, remote) as second:
        for _ in range(5):
            assert await asyncio.gather(first(), second()) == [200, 200]
    assert remote.asked["refresh_token"] >= 2
    assert await store.call("HKEYS", ShardKeys(0).mcp_tokens) == [b"remote"]


async def test_logout_is_not_undone_by_a_refresh(cluster: FaultCluster, remote: OAuthServer) -> None:
    remote.expires_in = 1
    code, shown = await login(cluster, settings(cluster, remote), "remote")
    assert code == 0, shown
    store = cluster.client.store
    async with worker_of(store, remote) as post:
        assert await post() == 200
        assert await McpTokens(store, lambda: None).remove("remote")
        with pytest.raises(LoginNeeded):
            await post()
    assert not await store.call("EXISTS", ShardKeys(0).mcp_tokens)
    assert remote.asked["/register"] == 1


async def test_failed_login_keeps_the_old_one(cluster: FaultCluster, remote: OAuthServer) -> None:
    environment = settings(cluster, remote)
    assert (await login(cluster, environment, "remote"))[0] == 0
    before = await cluster.client.store.call("HGETALL", ShardKeys(0).mcp_tokens)
    remote.issuer = "https://elsewhere.test"
    assert (await login(cluster, environment, "remote"))[0] != 0
    assert await cluster.client.store.call("HGETALL", ShardKeys(0).mcp_tokens) == before


async def test_login_makes_no_key(cluster: FaultCluster, remote: OAuthServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = {**settings(cluster, remote), "DECKHANDS_SECRET_KEY": "", "DECKHANDS_HOME": str(home)}
    code, shown = await login(cluster, environment, "remote")
    assert code != 0
    assert "DECKHANDS_SECRET_KEY" in shown
    assert not list(home.glob("**/secret.key"))
    assert remote.asked["/authorize"] == 0
