"""Settings beside conversations: budgets, schedules, archives, and the address of a server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from broker.contract.specs import Tenancy
from broker.log.live_text import LivePiece, LiveText
from broker.runtime.settings import BrokerSettings
from broker.secrets.references import SecretReference
from broker.secrets.secrets import Secrets, load_secret_key
from broker.store.store import open_store
from deckhands.client.remote.remote_client import RemoteClient
from deckhands.server.application import with_guard
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.archive_parts import begin_ended, retired
from tests.certificates import certificate_in
from tests.polling import until
from tests.served_stores import environment_with
from tests.server_parts import Served, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
ORIGIN = "https://app.example"
SCHEDULE = {"cron": "0 6 * * *", "request": {"task": "do it"}, "reason": "asked for"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("settings")
    async with served(folder / "log", environment_with(folder), archive=str(folder / "archive")) as found:
        await found.token()  # from here on, every request needs one
        yield found


async def test_limit_is_shown_only_to_its_tenant_and_recorded(server: Served) -> None:
    async with server.as_(await server.token("*")) as admin:
        put = await admin.put("/budgets/tenant:acme", json={"limit_usd": 2.5, "reason": "the contract"})
        assert (put.status_code, put.json()["limit_usd"], put.json()["left_usd"]) == (200, 2.5, 2.5)
        await admin.put("/budgets/tenant:acme2", json={"limit_usd": 1, "reason": "the contract"})
        assert (await admin.put("/budgets/nonsense", json={"limit_usd": 1, "reason": "x"})).status_code == 422
        assert (await admin.put("/budgets/tenant:acme", json={"limit_usd": -1, "reason": "x"})).status_code == 422
        latest = (await admin.get("/operations?limit=10")).json()
        done = [each["reason"] for each in latest if (each["action"], each["target"]) == ("budget.set", "tenant:acme")]
        assert done == ["2.5 USD: the contract"]
    for tenant, seen in (("acme", ["tenant:acme"]), ("acme3", [])):
        async with server.as_(await server.token(tenant)) as client:
            assert [each["account"] for each in (await client.get("/budgets")).json()] == seen


async def test_a_schedule_is_changed_only_as_it_was_read(server: Served) -> None:
    async with server.as_(await server.token("*")) as client:
        added = await client.put("/schedules/nightly", json=SCHEDULE)
        assert (added.status_code, added.json()["next"] is not None) == (201, True)
        assert (await client.put("/schedules/nightly", json={**SCHEDULE, "cron": "0 7 * * *"})).status_code == 409
        assert (await client.put("/schedules/other", json={**SCHEDULE, "cron": "never"})).status_code == 422
        for field, value in (
            ("expires", "2150-01-01T00:00:00Z"),
            ("labels", {"schedule": "nightly"}),
            ("tools", ["no-such-tool"]),
        ):
            task = {**SCHEDULE["request"], field: value}
            refused = await client.put("/schedules/other", json={**SCHEDULE, "request": task})
            assert (refused.status_code, refused.json()["code"]) == (422, "usage")
        read = {"If-Match": added.headers["etag"]}
        paused = await client.post("/schedules/nightly/pause", json={"reason": "x"}, headers=read)
        assert (paused.status_code, paused.json()["is_paused"]) == (200, True)
        stale = await client.delete("/schedules/nightly?reason=x", headers=read)
        assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
        now = {"If-Match": (await client.get("/schedules/nightly")).headers["etag"]}
        removed = await client.delete("/schedules/nightly?reason=x", headers=now)
        assert removed.status_code == 204
        assert (await client.get("/schedules/nightly")).json()["code"] == "unknown_schedule"
        assert (await client.get("/schedules")).json() == []


async def test_an_archived_conversation_is_shown_and_restored(server: Served, tmp_path: Path) -> None:
    await begin_ended(server.client, "old-one", tenancy=Tenancy(tenant="acme"))
    store = await open_store(server.log.jobs)
    done = await retired(store, server.gateway.archive, tmp_path)
    assert done["archived"] == 1, done
    await store.aclose()
    async with server.as_(await server.token()) as client:
        path = "/conversations/old-one"
        assert (await client.get(path)).json()["summary"]["state"] == "finished"
        refused = await client.post(f"{path}/messages", json={"content": "more"})
        assert (refused.status_code, refused.json()["code"]) == (409, "archived")
        assert (await client.get("/conversations")).json()["conversations"] == []
        async with server.as_(await server.token("other")) as other:
            assert (await other.post(f"{path}/restore", json={"reason": "mine"})).status_code == 404
        for _ in range(2):
            assert (await client.post(f"{path}/restore", json={"reason": "needed"})).status_code == 202
        assert (await client.post(f"{path}/messages", json={"content": "more"})).status_code == 202
        listed = (await client.get("/conversations")).json()["conversations"]
        assert [each["conversation_id"] for each in listed] == ["old-one"]


async def test_a_piece_of_a_reply_arrives_before_the_reply(server: Served) -> None:
    cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
    live = LiveText(server.client.store, cid)
    watched = server.client.store.known_keys(cid).watcher_mark
    async with (
        server.as_(await server.token()) as client,
        client.stream("GET", f"/conversations/{cid}/stream?deltas=true") as stream,
    ):

        async def is_watched() -> bool:
            return bool(await server.client.store.connection.call("EXISTS", watched))

        await until(is_watched, what="somebody who watches")
        await live.add([LivePiece("1.1", "text", "Hel", 0)])
        name, found = "", {}
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            if line.startswith("data: ") and name == "delta":
                found = httpx2.Response(200, content=line[6:]).json()
                break
    assert found == {"call": "1.1", "kind": "text", "text": "Hel", "at": 0}


async def test_each_key_has_its_own_size_of_bodies(server: Served) -> None:
    body = {"task": "x" * 2_000}
    for size, status in ((1_024, 413), (4_096, 201)):
        async with server.as_(await server.token(body_bytes=size)) as client:
            answer = await client.post("/conversations", json=body)
            assert answer.status_code == status

            async def parts() -> AsyncIterator[bytes]:
                yield b'{"task": "'
                yield b"x" * 2_000
                yield b'"}'

            chunked = await client.post("/runs/wait?timeout_seconds=0.01", content=parts(), headers=JSON)
            assert chunked.status_code == {413: 413, 201: 202}[status]


JSON = {"Content-Type": "application/json"}


async def test_positions_outside_the_log_are_refused_or_empty(server: Served) -> None:
    cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
    path = f"/conversations/{cid}"
    async with server.as_(await server.token()) as client:
        for far in (2**53, 2**64, 10**30):
            for place in (f"/events?after={far}", f"/events/{far}", f"/stream?after={far}&until=settled"):
                assert (await client.get(path + place)).status_code == 422, place
            resumed = await client.get(f"{path}/stream", headers={"Last-Event-ID": str(far)})
            assert resumed.status_code == 422
            for verb, body in (("fork", {"at": far}), ("confirm", {"action_id": far}), ("reject", {"action_id": far})):
                assert (await client.post(f"{path}/{verb}", json=body)).status_code == 422, verb
        assert (await client.get(f"{path}/events?after={2**53 - 1}")).status_code in (200, 409)
        assert (await client.get(f"{path}/events/{2**53 - 1}")).status_code == 404
    async with server.as_(await server.token("*")) as admin:
        await admin.put("/budgets/tenant:acme", json={"limit_usd": 2.5, "reason": "the contract"})
        assert (await admin.get("/operations?before=0-0")).json() == []
        assert len((await admin.get(f"/operations?before={10**15 - 1}-0")).json()) >= 1


async def gateway_with(server: Served, **options: Any) -> Gateway:
    return Gateway(await open_store(server.log.gateway), options=ServerOptions(port=0, **options))


async def test_it_speaks_tls_by_its_flags(server: Served, tmp_path: Path) -> None:
    certificate, key = certificate_in(tmp_path)
    gateway = await gateway_with(server, certificate=certificate, certificate_key=key)
    trusted = ssl.create_default_context(cafile=str(certificate))
    async with serve_in_loop(gateway) as port:
        async with httpx2.AsyncClient(verify=trusted) as client:
            assert (await client.get(f"https://127.0.0.1:{port}/health")).json() == {"status": "ok"}
        async with httpx2.AsyncClient() as client:
            with pytest.raises(httpx2.TransportError):
                await client.get(f"https://127.0.0.1:{port}/health")
            with pytest.raises(httpx2.TransportError):
                await client.get(f"http://127.0.0.1:{port}/health")
    await gateway.aclose()


async def test_only_a_named_proxy_is_believed(server: Served) -> None:
    token = await server.token("*")
    headers = {"Authorization": f"Bearer {token}", "X-Forwarded-Proto": "https"}
    for proxies, scheme in (((), "http"), (("127.0.0.9",), "http"), (("127.0.0.1",), "https")):
        gateway = await gateway_with(server, proxies=proxies)
        async with serve_in_loop(gateway) as port, httpx2.AsyncClient(headers=headers) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/schedules/")
        assert answer.headers["location"].partition("://")[0] == scheme
        await gateway.aclose()


async def test_only_named_origins_may_call_the_server(server: Served) -> None:
    token = await server.token()
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "PATCH"}
    for origins in ((), (ORIGIN,)):
        gateway = await gateway_with(server, origins=origins)
        async with serve_in_loop(gateway) as port, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            preflight = await client.options("/conversations", headers=asked)
            answer = await client.get("/conversations", headers={"Origin": ORIGIN, "Authorization": f"Bearer {token}"})
        found = (preflight.status_code, answer.status_code)
        assert found == ((200, 200) if origins else (403, 403))
        allowed = [each.headers.get("access-control-allow-origin") for each in (preflight, answer)]
        assert allowed == [ORIGIN if origins else None] * 2
        await gateway.aclose()


class SlowReader:
    """A connection that takes nothing for the first events, and all that comes afterwards."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.is_given_up = asyncio.Event()
        self._has_begun = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self._has_begun.is_set():
            self._has_begun.set()
            return {"type": "websocket.connect"}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: dict[str, Any]) -> None:
        has_events = b'"id":1,' in message.get("body", b"") or '"id": 1,' in message.get("text", "")
        if has_events and not self.is_given_up.is_set():
            try:
                await asyncio.Event().wait()
            finally:
                self.is_given_up.set()
        self.messages.append(message)


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_slow_reader_is_dropped_with_its_code_and_resumes(server: Served, kind: str) -> None:
    cid, token = await server.client.submit("do it", tenancy=Tenancy(tenant="acme")), await server.token()
    gateway = await gateway_with(server, slow_seconds=0.05)
    verb = "stream" if kind == "http" else "ws"
    scope = {
        "type": kind,
        "method": "GET",
        "path": f"/conversations/{cid}/{verb}",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"authorization", f"Bearer {token}".encode())],
        "subprotocols": [],
    }
    reader = SlowReader()
    if kind == "http":
        await asyncio.wait_for(with_guard(gateway)(scope, Waiting().receive, reader.send), 30)
        last = reader.messages[-1]
        assert b"event: problem" in last["body"]
        assert b'"code":"slow_reader","retryable":true' in last["body"]
    else:
        await asyncio.wait_for(with_guard(gateway)(scope, reader.receive, reader.send), 30)
        last = reader.messages[-1]
        assert (last["type"], last["code"], last["reason"]) == ("websocket.close", 1013, "slow_reader")
    assert not gateway.streams
    await gateway.aclose()
    async with (
        server.as_(token) as client,
        client.stream("GET", f"/conversations/{cid}/stream", headers={"Last-Event-ID": "0"}) as resumed,
    ):
        ids = []
        async for line in resumed.aiter_lines():
            if line.startswith("id: "):
                ids.append(int(line[4:]))
            if ids == [1, 2]:
                return


class Waiting:
    """A connection that stays open."""

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError


async def test_nothing_is_kept_for_conversations_outside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path))
    place = tmp_path / "archive"
    async with served(tmp_path / "log", environment_with(tmp_path), archive=str(place)) as server:
        store, tokens = server.client.store, (await server.token("acme"), await server.token("*"))
        await begin_ended(server.client, "left-us", tenancy=Tenancy(tenant="acme"))
        await retired(store, place, tmp_path)
        cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
        for token in tokens:
            async with server.as_(token) as client:
                for name, status, code in (("none-such", 404, "unknown_conversation"), ("left-us", 409, "archived")):
                    answer = await client.put(
                        f"/conversations/{name}/secrets", json={"secrets": {"TOKEN": "abc-123-def"}}
                    )
                    assert (answer.status_code, answer.json()["code"]) == (status, code)
                    assert await store.connection.call("EXISTS", store.known_keys(name).secrets) == 0
                for method, path in (("GET", "/files"), ("GET", "/files/a"), ("PUT", "/files/a"), ("GET", "/patch")):
                    answer = await client.request(method, f"/conversations/none-such{path}")
                    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_conversation"), path
                assert (
                    await client.put(f"/conversations/{cid}/secrets", json={"secrets": {"TOKEN": "abc-123-def"}})
                ).status_code == 204
        assert await store.connection.call("HKEYS", store.known_keys(cid).secrets) == [b"TOKEN"]


async def test_secrets_of_a_request_may_be_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path))

    class Source:
        async def look_up(self, reference: SecretReference, *, tenant: str) -> str:
            return f"value-of-{reference}-for-{tenant}"

    async with served(tmp_path / "log", environment_with(tmp_path)) as server:
        cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
        async with server.as_(await server.token("acme")) as client:
            path = f"/conversations/{cid}/secrets"
            named = {"source": "vault", "path": "team/api", "field": "token"}
            assert (await client.put(path, json={"secrets": {"TOKEN": named}})).status_code == 204
            for wrong in ({**named, "path": "../etc"}, {**named, "url": "https://x"}, {"path": "a"}):
                refused = await client.put(path, json={"secrets": {"TOKEN": wrong}})
                assert refused.status_code == 422
                assert "TOKEN" in refused.text
        secrets = Secrets(server.client.store, lambda: load_secret_key(BrokerSettings.from_env()), sources=Source())
        remote = RemoteClient(server.url, await server.token("acme"))
        await remote.set_secrets(cid, {"OTHER": SecretReference(source="vault"), "PLAIN": "abc-123-def"})
        await remote.aclose()
        found = {"TOKEN": "value-of-vault:team/api#token-for-acme", "OTHER": "value-of-vault-for-acme"}
        assert await secrets.find_named(cid, "echo $TOKEN $OTHER $PLAIN") == {**found, "PLAIN": "abc-123-def"}
