"""Changes over HTTP that are made only if nothing else has changed, and once: ETags, `If-Match`, idempotency keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
import pytest_asyncio

from broker.contract.agent_state import AgentState
from broker.contract.observations import AgentStateChangedObservation
from broker.contract.specs import Tenancy
from broker.store.store import open_store
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.broker_parts import claim, command, enter
from tests.served_stores import environment_with
from tests.server_parts import Served, add_key, served
from tests.stores import LossyWire

SCHEDULE = {"cron": "0 6 * * *", "request": {"task": "do it"}, "reason": "test"}
STALE = {"If-Match": '"0123456789abcdef0123456789abcdef"'}


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("preconditions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECKHANDS_WEBHOOK_PRIVATE", "127.0.0.1")
        patch.setenv("DECKHANDS_HOME", str(folder))
        async with served(folder / "log", environment_with(folder), needs_match=True) as found:
            yield found


async def refusals_of(client: httpx2.AsyncClient, method: str, path: str, body: object) -> None:
    """Without `If-Match` and with a stale ETag nothing is changed."""
    for headers, status, code in (
        ({}, 428, "precondition_required"),
        (STALE, 412, "precondition_failed"),
        ({"If-Match": "W/" + STALE["If-Match"]}, 412, "precondition_failed"),
        ({"If-Match": "nonsense"}, 412, "precondition_failed"),
    ):
        answer = await client.request(method, path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (status, code), (path, headers)


@in_one_loop
async def test_outdated_change_is_refused(server: Served) -> None:
    cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
    async with server.as_(await server.token("*")) as client:
        assert (await client.put("/schedules/nightly", json=SCHEDULE)).status_code == 201
        for method, shown, changed, body in (
            ("PATCH", f"/conversations/{cid}", f"/conversations/{cid}", {"labels": {"a": "b"}, "reason": "test"}),
            ("POST", "/schedules/nightly", "/schedules/nightly/pause", {"reason": "test"}),
            ("PUT", "/budgets/tenant:acme", "/budgets/tenant:acme", {"limit_usd": 2, "reason": "test"}),
        ):
            read = (await client.get(shown)).headers["etag"]
            assert (await client.get(shown)).headers["etag"] == read
            await refusals_of(client, method, changed, body)
            assert (await client.get(shown)).headers["etag"] == read
            done = await client.request(method, changed, json=body, headers={"If-Match": f'"other", {read}'})
            assert done.status_code < 300, done.text
            late = await client.request(method, changed, json=body, headers={"If-Match": read})
            assert late.status_code == 412, changed
            blind = await client.request(method, changed, json=body, headers={"If-Match": "*"})
            assert blind.status_code < 300, changed
    async with server.as_(await server.token("other")) as client:
        theirs = await client.get("/budgets/tenant:acme")
        assert (theirs.status_code, theirs.json()["code"]) == (404, "unknown_account")
        assert (await client.get("/budgets/tenant:other")).json()["limit_usd"] is None


@in_one_loop
async def test_of_many_changes_at_once_one_is_made(server: Served) -> None:
    cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
    async with server.as_(await server.token("*")) as client:
        assert (await client.put("/schedules/hourly", json=SCHEDULE)).status_code == 201
        hook = {"url": "https://127.0.0.1:9/hook", "reason": "test"}
        made = await client.post("/webhooks", json=hook)
        assert made.status_code == 201, made.text
        webhook = f"/webhooks/{made.json()['id']}"
        for method, path, bodies in (
            ("PATCH", f"/conversations/{cid}", [{"labels": {"n": str(n)}, "reason": "test"} for n in range(8)]),
            ("PUT", "/budgets/tenant:shop", [{"limit_usd": n + 1, "reason": "test"} for n in range(8)]),
        ):
            read = {"If-Match": (await client.get(path)).headers["etag"]}
            answers = await asyncio.gather(*(client.request(method, path, json=body, headers=read) for body in bodies))
            statuses = sorted(answer.status_code for answer in answers)
            assert (statuses[0] < 300, statuses[1:]) == (True, [412] * 7), (path, statuses)
        for path, change in (("/schedules/hourly", "pause"), (webhook, "disable")):
            read = {"If-Match": (await client.get(path)).headers["etag"]}
            changed, removed = await asyncio.gather(
                client.post(f"{path}/{change}", json={"reason": "test"}, headers=read),
                client.delete(f"{path}?reason=test", headers=read),
            )
            statuses = (changed.status_code, removed.status_code)
            assert statuses in ((200, 412), (404, 204), (412, 204)), (path, statuses)


@in_one_loop
async def test_repeated_change_gets_the_first_answer(server: Served) -> None:
    cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
    async with server.as_(await server.token("acme")) as client:
        path, body = f"/conversations/{cid}", {"labels": {"a": "b"}, "reason": "test"}
        headers = {"If-Match": (await client.get(path)).headers["etag"], "Idempotency-Key": "once"}
        first = await client.patch(path, json=body, headers=headers)
        again = await client.patch(path, json=body, headers=headers)
        assert (first.status_code, again.status_code) == (202, 202)
        assert first.json() == again.json()
        other = await client.patch(path, json=body | {"labels": {"a": "c"}}, headers=headers)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


@in_one_loop
async def test_number_given_as_text_is_refused(server: Served) -> None:
    async with server.as_(await server.token("shop")) as client:
        for body, place, code in (
            ({"task": "do it", "limits": {"max_iterations": "3"}}, "body.limits.max_iterations", "int_type"),
            ({"task": "do it", "headless": "false"}, "body.headless", "bool_type"),
            ({"task": "do it", "delay": True}, "body.delay", "float_type"),
        ):
            answer = await client.post("/conversations", json=body)
            (error,) = answer.json()["errors"]
            assert (answer.status_code, error["in"], error["code"]) == (422, place, code)
        assert (await client.get("/conversations")).json()["conversations"] == []


@in_one_loop
async def test_other_message_under_a_used_chat_key_is_refused(server: Served) -> None:
    cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
    async with server.as_(await server.token("acme")) as client:
        statuses = []
        for text in ("one", "one", "two"):
            said = [{"role": "user", "content": text}]
            body = {"model": "CodeActAgent", "messages": said, "metadata": {"conversation_id": cid}}
            path, headers = "/v1/chat/completions?timeout_seconds=0.01", {"Idempotency-Key": "chat"}
            answer = await client.post(path, json=body, headers=headers)
            statuses.append((answer.status_code, answer.json().get("error", {}).get("code", "")))
        assert statuses == [(200, ""), (200, ""), (422, "idempotency_key_reused")]
        events = (await client.get(f"/conversations/{cid}/events?kind=action.message")).json()["events"]
        assert [event["content"] for event in events] == ["do it", "one"]


@pytest.fixture
async def gateway(lossy_wire: LossyWire) -> AsyncIterator[Gateway]:
    """A server behind a wire that loses replies, and is not patient."""
    gateway = Gateway(await open_store(lossy_wire.url, patience_seconds=0), options=ServerOptions(port=0))
    yield gateway
    await gateway.aclose()


@asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[httpx2.AsyncClient]:
    login = {"Authorization": f"Bearer {await add_key(gateway.client.store)}"}
    async with (
        serve_in_loop(gateway) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=login) as client,
    ):
        yield client


async def test_repeated_change_with_a_lost_store_reply_succeeds(gateway: Gateway, lossy_wire: LossyWire) -> None:
    cid = await gateway.client.submit("do it")
    path, body = f"/conversations/{cid}", {"labels": {"a": "b"}, "reason": "test"}
    async with client_of(gateway) as client:
        headers = {"If-Match": (await client.get(path)).headers["etag"], "Idempotency-Key": "once"}
        lossy_wire.swallow = lambda chunk: b"appended" in chunk
        lost = await client.patch(path, json=body, headers=headers)
        lossy_wire.swallow = lambda _: False
        assert (lost.status_code, lost.json()["code"], lossy_wire.swallowed) == (503, "outcome_unknown", 1)
        again = await client.patch(path, json=body, headers=headers)
        assert (again.status_code, again.text) == (202, f'{{"conversation_id":"{cid}","version":4}}')
        other = await client.patch(path, json=body, headers=headers | {"Idempotency-Key": "another"})
        assert (other.status_code, other.json()["code"]) == (412, "precondition_failed")
        kinds = [event["kind"] for event in (await client.get(f"{path}/events")).json()["events"]]
        assert kinds.count("conversation.changed") == kinds.count("conversation.operator_acted") == 1


@pytest.mark.parametrize("action", ["confirm", "reject"])
async def test_repeated_request_with_lost_reply_is_not_refused(
    gateway: Gateway, lossy_wire: LossyWire, action: str
) -> None:
    log, cid = gateway.client.log, await gateway.client.submit("do it")
    await enter(gateway.client.store, "w1")
    ownership = await claim(gateway.client.store, "w1", cid)

    async def become(state: AgentState) -> None:
        last_id = await log.load_last_id(cid)
        events = [command(), AgentStateChangedObservation(agent_state=state, action_id=last_id + 1)]
        await log.append_as_owner(ownership, events, expected_last_id=last_id, fields={"state": state.value})

    await become(AgentState.AWAITING_USER_CONFIRMATION)
    path, body = f"/conversations/{cid}/{action}", {"reason": "test"}
    async with client_of(gateway) as client:
        lossy_wire.swallow = lambda chunk: b"appended" in chunk
        lost = await client.post(path, json=body, headers={"Idempotency-Key": "once"})
        lossy_wire.swallow = lambda _: False
        assert (lost.status_code, lossy_wire.swallowed) == (503, 1)
        await become(AgentState.RUNNING)
        again = await client.post(path, json=body, headers={"Idempotency-Key": "once"})
        expected = {"conversation_id": cid, "version": await log.load_last_id(cid)}
        assert (again.status_code, again.json()) == (202, expected)
        other = await client.post(path, json=body, headers={"Idempotency-Key": "another"})
        assert (other.status_code, other.json()["code"]) == (409, "conflict")
        assert [event.kind for event in await log.read(cid)].count("conversation.operator_acted") == 1
