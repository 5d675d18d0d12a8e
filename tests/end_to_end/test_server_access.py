"""Access control over HTTP: every route of the application, with every kind of key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from broker.contract.specs import Tenancy
from broker.runtime.errors import UsageError
from deckhands.server.application import make_app, routes_of, scope_of
from deckhands.server.auth.api_keys import ApiKeys, Scope
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.guard import PUBLIC
from deckhands.server.serving import check_start
from tests.polling import unhurried
from tests.server_parts import Served, served
from tests.unit.deckhands.sample_log import state

BODIES: dict[str, Any] = {
    "tickets": {"purpose": "terminal"},
    "messages": {"content": "hello"},
    "confirm": {},
    "reject": {},
    "secrets": {"secrets": {"TOKEN": "abc-123-def"}},
    "execute": {"command": "ls"},
    "PATCH": {"labels": {"team": "x"}, "reason": "test"},
    "fork": {},
    "mcp-logins": {"return_to": "http://127.0.0.1", "reason": "test"},
    "keys": {"name": "one", "tenant": "acme", "reason": "test"},
    "runs": {"task": "do it"},
    "conversations": {"task": "do it"},
    "completions": {"model": "CodeActAgent", "messages": [{"role": "user", "content": "do it"}]},
    "responses": {"model": "CodeActAgent", "input": "do it"},
    "mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
    "a2a": {"jsonrpc": "2.0", "id": 1, "method": "ListTasks"},
    "quotas": {"key": "own", "limits": {}, "reason": "test"},
    "budgets": {"limit_usd": 1, "reason": "test"},
    "webhooks": {"url": "https://192.0.0.8.invalid/", "reason": "test"},
    "rollouts": {"prompts": [{"id": "one", "task": "do it", "answer": "1"}], "model": "openai/none"},
    "groups": {"timeout_seconds": 0},
    "weights": {"version": 1},
    "schedules": {"cron": "0 6 * * *", "request": {"task": "do it"}, "reason": "test"},
}


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    options = {"quiet_seconds": 0.3, "slow_seconds": 1.0, "openhands": True}
    async with served(tmp_path / "log", programs, **options) as found:
        yield found


def path_of(route: APIRoute | APIWebSocketRoute, conversation_id: str) -> str:
    values = {
        "{conversation_id}": conversation_id,
        "{event_id}": "1",
        "{path:path}": "a.txt",
        "{evaluation}": "none",
        "{key_id}": "abcdefghij23",
        "{run}": "none",
        "{number}": "1",
        "{response_id}": f"resp_{conversation_id}_999",
    }
    values |= {"{sha256}": sha256(b"x").hexdigest()}
    values |= {"{webhook_id}": f"wh_{16 * 'a'}", "{delivery_id}": f"msg_{32 * '0'}"}
    values |= {"{trajectory_id}": conversation_id, "{sha}": 40 * "a", "{action:path}": "goal", "{name:path}": "nightly"}
    values |= {"{command_id}": str(UUID(int=1)), "{path}": "a.txt"}
    path = route.path
    if "/bash/" in path:
        values |= {"{event_id}": str(UUID(int=1))}
    for name, value in (
        values | {"{name}": "nightly", "{account:path}": "tenant:acme", "{models:path}": "none"}
    ).items():
        path = path.replace(name, value)
    assert "{" not in path
    return f"{path}?reason=test&timeout_seconds=0.01&at=1&text=hello"


def is_openhands(route: APIRoute) -> bool:
    """Return whether a route is one of OpenHands' clients or of AG-UI, whose answers have other tests."""
    return route.path.startswith(("/api/", "/ag-ui"))


async def ask(client: httpx2.AsyncClient, method: str, path: str) -> tuple[int, str]:
    """The status and the code of an answer; a stream is not read."""
    last = path.partition("?")[0].strip("/").split("/")
    named = (
        method
        if method in BODIES
        else last[-1]
        if last[-1] in BODIES
        else last[0]
        if last[0] in ("runs", "budgets", "quotas", "schedules", "webhooks", "mcp-logins")
        else ""
    )
    is_verb = method == "POST" and last[-1] not in BODIES and named not in ("runs", "mcp-logins")
    body = {"reason": "test"} if is_verb else BODIES.get(named)
    sent: dict[str, Any] = {} if body is None or method in ("GET", "DELETE") else {"json": body}
    headers = {"Accept": "application/json, text/event-stream"}
    if last[-1] == "a.txt" and method == "PUT" and last[0] != "api":
        sent = {"content": b"x"}
    elif last[0] == "uploads":
        sent, headers = {"content": b"x"}, headers | {"Idempotency-Key": "one"}
    async with client.stream(method, path, headers=headers, **sent) as answer:
        if path.startswith("/v1/") and answer.status_code >= 300:
            await answer.aread()
            return answer.status_code, answer.json()["error"]["code"]
        if answer.headers["content-type"] != "application/problem+json" if "content-type" in answer.headers else True:
            return answer.status_code, ""
        await answer.aread()
        return answer.status_code, answer.json()["code"]


async def test_every_route_with_every_kind_of_key(server: Served) -> None:
    cid = await begun(server)
    keys = ApiKeys(server.client.store)
    expired = await server.token(life=timedelta(microseconds=1))
    revoked = await server.token()
    await keys.revoke(revoked.split("_")[1])
    all_of = {scope: await server.token(scopes=set(Scope) - {scope}) for scope in Scope}
    other, right = await server.token("other"), await server.token("*")
    seen = set()
    for route in routes_of():
        if isinstance(route, APIWebSocketRoute):
            continue
        needs, path = scope_of(route), path_of(route, cid)
        for method in sorted(route.methods - {"HEAD"}):
            name = f"{method} {route.path}"
            seen.add(route.path)
            if needs is None:
                assert route.path in PUBLIC, f"{name} needs no key"
                continue
            for token, code in (
                ("", "unauthorized"),
                ("dh_nonsense", "unauthorized"),
                (expired, "key_expired"),
                (revoked, "key_revoked"),
            ):
                async with server.as_(token) as client:
                    assert await ask(client, method, path) == (401, code), name
            async with server.as_(all_of[needs.scope]) as client:
                assert await ask(client, method, path) == (403, "forbidden"), name
            async with server.as_(other) as client:
                if is_openhands(route) and "{conversation_id}" not in route.path:
                    continue
                status, code = await ask(client, method, path)
                if "{conversation_id}" in route.path:
                    assert (status, code) == (404, "unknown_conversation"), name
                elif needs.all_tenants:
                    assert (status, code) == (403, "other_tenant"), name
                else:
                    assert status < 300 or code in (
                        *(
                            "unknown_webhook",
                            "unknown_account",
                            "unknown_evaluation",
                            "unknown_rollout_run",
                            "unknown_response",
                            "unknown_conversation",
                            "usage",
                        ),
                    ), (name, status, code)
            if method != "DELETE" and not is_openhands(route):
                async with server.as_(right) as client:
                    status, code = await ask(client, method, path)
                    assert status < 300 or code in (
                        "conflict",
                        "no_master_key",
                        "no_workspace",
                        "usage",
                        "unknown_mcp_server",
                        "unknown_schedule",
                        "unknown_quota",
                        "unknown_webhook",
                        "unknown_evaluation",
                        "unknown_rollout_run",
                        "unknown_response",
                    ), (name, status, code)
    documented = make_app(server.gateway).openapi()["paths"]
    shown = {route.path for route in routes_of() if isinstance(route, APIRoute) and route.include_in_schema}
    assert seen - shown == {"/api/{path:path}", "/api/conversations/{conversation_id}/{path:path}"}
    seen = {path.replace("{name:path}", "{name}").replace("{action:path}", "{action}") for path in shown}
    for name in ("path", "account", "models"):
        documented = {path.replace(f"{{{name}}}", f"{{{name}:path}}"): each for path, each in documented.items()}
    assert seen == documented.keys()


async def begun(server: Served, tenant: str = "acme", **options: Any) -> str:
    return await server.client.submit("do it", tenancy=Tenancy(tenant=tenant), **options)


async def test_a_tenant_sees_its_own_conversations_alone(server: Served) -> None:
    own = [await begun(server, labels={"n": str(n)}) for n in range(5)]
    others = [await begun(server, "other") for _ in range(2)]
    async with server.as_(await server.token()) as client:
        first = (await client.get("/conversations?limit=2")).json()
        new = await begun(server)
        await client.post(f"/conversations/{own[2]}/cancel", json={"reason": "test"})
        found, cursor = [each["conversation_id"] for each in first["conversations"]], first["next_cursor"]
        while cursor:
            page = (await client.get("/conversations", params={"limit": 2, "cursor": cursor})).json()
            found += [each["conversation_id"] for each in page["conversations"]]
            cursor = page["next_cursor"]
        assert found == own[::-1]
        newest = (await client.get("/conversations")).json()["conversations"]
        assert [each["conversation_id"] for each in newest] == [new, *own[::-1]]
        labelled = (await client.get("/conversations?label=n=3&state=loading")).json()["conversations"]
        assert [each["conversation_id"] for each in labelled] == [own[3]]
        assert (await client.get("/conversations?tenant=other")).json()["conversations"] == []
        assert (await client.get("/conversations?cursor=!")).json()["code"] == "usage"
        missing = (await client.get(f"/conversations/{others[0]}")).json()
        absent = (await client.get(f"/conversations/{others[0][:-1]}0")).json()
        assert missing["detail"].replace(others[0], "") == absent["detail"].replace(f"{others[0][:-1]}0", "")
        refused = await client.post("/conversations", json={"task": "x", "tenant": "other"})
        assert (refused.status_code, refused.json()["code"]) == (422, "usage")
    async with server.as_(await server.token("*")) as client:
        every = (await client.get("/conversations?limit=500")).json()["conversations"]
        assert {each["conversation_id"] for each in every} == {*own, *others, new}


async def test_a_repeated_request_has_one_effect_and_one_answer(server: Served) -> None:
    async with server.as_(await server.token()) as client, server.as_(await server.token("other")) as other:
        key = {"Idempotency-Key": "k1"}
        first = await client.post("/conversations", json={"task": "do it"}, headers=key)
        again = await client.post("/conversations", json={"task": "do it"}, headers=key)
        assert (first.status_code, again.status_code, first.json()) == (201, 201, again.json())
        assert (again.headers["idempotency-replayed"], again.headers["location"]) == ("true", first.headers["location"])
        reused = await client.post("/conversations", json={"task": "do more"}, headers=key)
        assert (reused.status_code, reused.json()["code"]) == (422, "idempotency_key_reused")
        theirs = await other.post("/conversations", json={"task": "do it"}, headers=key)
        assert theirs.json() != first.json()
        path = f"/conversations/{first.json()['conversation_id']}/messages"
        for _ in range(2):
            sent = await client.post(path, json={"content": "more"}, headers={"Idempotency-Key": "k2"})
            assert sent.status_code == 202
        events = (await client.get(f"/conversations/{first.json()['conversation_id']}/events")).json()["events"]
        assert [event["kind"] for event in events].count("action.message") == 2


async def test_actions_name_their_author_and_reason(server: Served) -> None:
    cid = await begun(server)
    async with server.as_(await server.token()) as client:
        for verb in ("pause", "resume", "cancel"):
            done = await client.post(f"/conversations/{cid}/{verb}", json={"reason": f"why {verb}"})
            assert done.status_code == 202
        busy = await client.post(f"/conversations/{cid}/close", json={"reason": "over"})
        assert (busy.status_code, busy.json()["code"]) == (409, "conflict")
        await server.client.log.append(cid, [state("stopped")], fields={"state": "stopped"})
        assert (await client.post(f"/conversations/{cid}/close", json={"reason": "over"})).status_code == 202
        acted = await client.get(f"/conversations/{cid}/events?kind=conversation.operator_acted")
        shown = [(each["action"], each["reason"]) for each in acted.json()["events"]]
        assert shown == [("pause", "why pause"), ("resume", "why resume"), ("cancel", "why cancel"), ("close", "over")]
        assert all(each["author"].startswith("key ") for each in acted.json()["events"])
        single = await client.get(f"/conversations/{cid}/events/1")
        assert single.json()["kind"] == "conversation.created"
        assert (await client.get(f"/conversations/{cid}/events/99")).json()["code"] == "unknown_event"
        tag = (await client.get(f"/conversations/{cid}")).headers["etag"]
        same = await client.get(f"/conversations/{cid}", headers={"If-None-Match": tag})
        assert (same.status_code, same.content) == (304, b"")
        assert (await client.delete(f"/conversations/{cid}?reason=gone")).status_code == 204
        assert (await client.get(f"/conversations/{cid}")).status_code == 404
    async with server.as_(await server.token("*")) as client:
        latest = (await client.get("/operations?limit=1")).json()[0]
        assert (latest["action"], latest["target"], latest["reason"]) == ("delete", cid, "gone")


async def test_a_key_has_so_many_requests_a_minute(server: Served) -> None:
    token = await server.token(requests_per_minute=3)
    async with server.as_(token) as client:
        found = [(await client.get("/conversations")).status_code for _ in range(8)]
    assert found.count(200) in (3, 6)  # the minute may end meanwhile
    assert set(found) == {200, 429}
    used = [listed.used for listed in await ApiKeys(server.client.store).all() if listed.key.id in token]
    assert used[0] is not None


async def test_only_valid_tokens_count_and_revoked_ones_end_at_once(server: Served) -> None:
    token = await server.token(requests_per_minute=100)
    key_id, store = token.split("_")[1], server.client.store
    forged = f"dh_{key_id}_{'a' * 43}"
    async with server.as_(token) as client, server.as_(forged) as forger:
        assert [(await client.get("/conversations")).status_code for _ in range(2)] == [200, 200]
        assert [(await forger.get("/conversations")).status_code for _ in range(2)] == [401, 401]
        minutes = (int(store.clock.now().timestamp()) // 60 - past for past in (0, 1))
        counts = [await store.call("GET", f"{store.all_shards[0].api_keys}:rate:{key_id}:{one}") for one in minutes]
        await ApiKeys(store).revoke(key_id)
        refused = await client.get("/conversations")
    assert sum(int(count or 0) for count in counts) == 2
    assert (refused.status_code, refused.json()["code"]) == (401, "key_revoked")


async def test_it_does_not_listen_beyond_this_machine_without_keys(server: Served) -> None:
    gateway = Gateway(server.gateway.store, options=ServerOptions(host="0.0.0.0"))
    with pytest.raises(UsageError, match="there are no API keys"):
        await check_start(gateway)
    async with server.as_() as client:
        assert (await client.get("/conversations")).status_code == 401
        evil = {"Origin": "http://evil.example"}
        assert (await client.get("/conversations", headers=evil)).json()["code"] == "forbidden_origin"
        assert (await client.get("/conversations", headers={"Host": "evil.example"})).json()["code"] == "wrong_host"
    await server.token()
    await check_start(gateway)
    async with server.as_() as client:
        assert (await client.get("/conversations")).status_code == 401


async def test_a_websocket_takes_a_key_or_a_ticket_once(server: Served) -> None:
    cid, token = await begun(server), await server.token()
    url = f"ws://127.0.0.1:{server.port}/conversations/{cid}/ws"
    for options in (
        {"additional_headers": {"Authorization": f"Bearer {token}"}},
        {"subprotocols": ["deckhands", f"deckhands.key.{token}"]},
    ):
        async with connect(url, **options) as socket:
            assert '"id": 1,' in await socket.recv()
            assert token not in (socket.subprotocol or "")
    async with server.as_(token) as client:
        ticket = (await client.post("/tickets")).json()["ticket"]
    async with connect(f"{url}?after=1&ticket={ticket}") as socket:
        assert '"id": 2,' in await socket.recv()
        await ApiKeys(server.client.store).revoke(token.split("_")[1])
        async with asyncio.timeout(unhurried(30)):
            await socket.wait_closed()
        assert (socket.close_code, socket.close_reason) == (4401, "key_revoked")
    for wrong in (f"{url}?ticket={ticket}", url):
        with pytest.raises(InvalidStatus):
            await connect(wrong)
    with pytest.raises(InvalidStatus):
        await connect(f"{url}?ticket=x", origin="http://evil.example")


async def test_rubbish_in_the_place_of_keys_opens_nothing(server: Served) -> None:
    """Writers of the store can make keys; damaged keys there open nothing and end nothing."""
    token = await server.token()
    key_id, call = token.split("_")[1], server.client.store.connection.call
    root = server.client.store.all_shards[0].api_keys
    good = await call("HGET", root, key_id)
    async with server.as_(token) as client:
        for rubbish in (b"", b"\xff", b"null", b"[]", b"{}", b'{"id": 5}', b"[" * 9_000, good.replace(b"read", b"all")):
            await call("HSET", root, key_id, rubbish)
            assert (await client.get("/conversations")).status_code == 401, rubbish
        await call("HSET", root, key_id, good)
        assert (await client.get("/conversations")).status_code == 200
        for name in (root, f"{root}:used"):
            await call("RENAME", name, f"{root}:kept")
            await call("SET", name, "x")
            answer = await client.get("/conversations")
            assert answer.status_code >= 400, name
            assert answer.headers["content-type"] == "application/problem+json", answer.text
            await call("RENAME", f"{root}:kept", name)
        assert (await client.get("/conversations")).status_code == 200
