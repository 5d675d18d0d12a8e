"""Webhooks: registered over HTTP; events reach them in order, signed, and are repeated until they answer."""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from standardwebhooks import Webhook as Checker

from broker.contract.actions import MessageAction
from broker.contract.events import EventSource
from broker.contract.interventions import ConfirmationReminder
from broker.contract.specs import Tenancy
from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.webhook_jobs import deliver, has_news, notify, open_repository
from deckhands.operations.webhooks.repository import MAX_WAITING
from deckhands.operations.webhooks.sending import (
    AddressRefused,
    WebhookResponse,
    parse_networks,
    resolve_address,
    send_request,
)
from deckhands.operations.webhooks.webhook import RETRY_SECONDS
from tests.certificates import certificate_in
from tests.polling import unhurried
from tests.served_stores import environment_with
from tests.server_parts import Served, served
from tests.unit.deckhands.sample_log import state
from tests.webhook_parts import Receiver, begin_worked, receiving

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOOK = {"reason": "asked for"}
PRIVATE = "127.0.0.1"
ALL = ["conversation.state_changed", "conversation.settled"]


class Jobs:
    """The jobs of a cluster, done in this process."""

    def __init__(self, server: Served) -> None:
        self.sent: list[tuple[str, ...]] = []
        settings = BrokerSettings(webhook_private=PRIVATE)
        self.bench = JobServices(server.client.store, settings, lambda _, arguments: self.sent.append(arguments))

    async def work(self) -> int:
        """Plan, and make the deliveries that are due; returns how many requests were made."""
        await notify(self.bench)
        sent, self.sent = self.sent, []
        return sum(await asyncio.gather(*(deliver(self.bench, *arguments) for arguments in sent)))

    async def make_due(self) -> None:
        """Let the time of every line have come."""
        store = self.bench.store
        due = f"{store.all_shards[0].webhooks}:due"
        for line in await store.connection.call("ZRANGE", due, 0, -1):
            await store.connection.call("ZADD", due, 1, line)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("webhooks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECKHANDS_WEBHOOK_PRIVATE", PRIVATE)
        patch.setenv("DECKHANDS_HOME", str(folder))
        async with served(folder / "log", environment_with(folder)) as found:
            await found.token()
            yield found


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


@pytest.fixture
def jobs(server: Served) -> Jobs:
    return Jobs(server)


async def added(server: Served, receiver: Receiver, tenant: str, **fields: Any) -> dict[str, Any]:
    async with server.as_(await server.token(tenant)) as client:
        answer = await client.post("/webhooks", json={"url": receiver.url, **HOOK, **fields})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())


async def begun(server: Served, name: str, tenant: str) -> None:
    await begin_worked(server.client, name, tenancy=Tenancy(tenant=tenant))


async def test_settled_conversation_is_notified_once_and_signed(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    assert not await has_news(jobs.bench)
    hook = await added(server, receiver, "one")
    assert await has_news(jobs.bench)
    await begun(server, "one-a", "one")
    await begun(server, "one-b", "another")
    assert await jobs.work() == 1
    assert await jobs.work() == 0
    (headers, body), (told,) = receiver.requests[0], receiver.bodies
    assert Checker(hook["secret"]).verify(body, headers) == told
    wanted = {"conversation_id": "one-a", "state": "finished", "tenant": "one", "title": "Title of one-a"}
    assert told["type"] == "conversation.settled"
    assert told["data"] | wanted | {"is_over": True} == told["data"]
    async with server.as_(await server.token("one")) as client:
        (shown,) = (await client.get("/webhooks")).json()
        (logged,) = (await client.get(f"/webhooks/{hook['id']}/deliveries")).json()
        assert "secret" not in shown
        assert hook["secret"] not in (await client.get(f"/webhooks/{hook['id']}")).text
    assert (logged["id"], logged["state"], logged["status"]) == (headers["webhook-id"], "delivered", 204)
    stored = await server.client.store.connection.call("HGET", server.client.store.all_shards[0].webhooks, hook["id"])
    assert hook["secret"].removeprefix("whsec_").encode() not in stored


async def test_refused_delivery_is_retried_in_order_then_given_up(
    server: Served, receiver: Receiver, jobs: Jobs
) -> None:
    hook = await added(server, receiver, "two", events=ALL)
    await begun(server, "two-a", "two")
    receiver.answer = lambda body: 302 if body["data"]["state"] == "running" else 200  # no redirect is followed
    for number in range(len(RETRY_SECONDS)):
        assert await jobs.work() == 1, number
        assert await jobs.work() == 0  # not before its time
        await jobs.make_due()
    assert receiver.states("two-a") == ["running"]
    await jobs.work()
    assert receiver.states("two-a") == ["running", "finished"]
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 2
    receiver.answer = lambda _: 200
    async with server.as_(await server.token("two")) as client:
        found = (await client.get(f"/webhooks/{hook['id']}/deliveries")).json()
        last, first = sorted(found, key=lambda delivery: -delivery["event_id"])
        assert (first["state"], first["attempts"], first["status"]) == ("failed", len(RETRY_SECONDS) + 1, 302)
        assert last["state"] == "delivered"
        path = f"/webhooks/{hook['id']}/deliveries/{first['id']}/redeliver"
        again = await client.post(path, json=HOOK)
        assert (again.status_code, again.json()["state"]) == (200, "waiting")
    assert await jobs.work() == 1
    assert receiver.requests[-1][0]["webhook-id"] == first["id"]
    assert receiver.requests[-1][1] == receiver.requests[0][1]


async def test_reminder_of_a_question_is_sent_by_its_name(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    name = "conversation.confirmation_reminder"
    await added(server, receiver, "reminded", events=[name])
    await begun(server, "reminded-a", "reminded")
    assert await jobs.work() == 0
    await server.client.log.append("reminded-a", [ConfirmationReminder(action_id=4)], key="reminder")
    assert await jobs.work() == 1
    assert await jobs.work() == 0
    (told,) = receiver.bodies
    assert (told["data"]["kind"], told["data"]["conversation_id"]) == (name, "reminded-a")
    assert told["data"]["event"]["action_id"] == 4


async def test_disabled_or_removed_webhook_is_not_notified(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    hook = await added(server, receiver, "three", events=["conversation.settled", "action.run"])
    async with server.as_(await server.token("three")) as client:
        await client.post(f"/webhooks/{hook['id']}/disable", json=HOOK)
        await begun(server, "three-a", "three")
        assert await jobs.work() == 0
        await client.post(f"/webhooks/{hook['id']}/enable", json=HOOK)
        await begun(server, "three-b", "three")
        assert await jobs.work() == 2
        command, settled = receiver.bodies
        assert (command["type"], command["data"]["event"]["command"]) == ("conversation.event", "make test")
        assert settled["type"] == "conversation.settled"
        receiver.answer = lambda _: 410
        await begun(server, "three-c", "three")
        await jobs.work()
        found = (await client.get(f"/webhooks/{hook['id']}")).json()
        assert (found["is_enabled"], found["why_off"]) == (False, "its receiver has answered 410 Gone")
        assert (await client.delete(f"/webhooks/{hook['id']}?reason=over")).status_code == 204
        assert (await client.get(f"/webhooks/{hook['id']}")).json()["code"] == "unknown_webhook"
        await begun(server, "three-d", "three")
        assert await jobs.work() == 0


async def test_of_a_webhook_that_is_removed_no_line_stays(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    hook = await added(server, receiver, "removed")
    await begun(server, "removed-a", "removed")
    receiver.answer = lambda _: 500
    assert await jobs.work() == 1
    async with server.as_(await server.token("removed")) as client:
        assert (await client.delete(f"/webhooks/{hook['id']}?reason=over")).status_code == 204
    await jobs.make_due()
    assert await jobs.work() == 0
    store, names = server.client.store, server.client.store.all_shards[0]
    lines = await store.connection.call("ZRANGE", f"{names.webhooks}:due", 0, -1)
    assert [line for line in lines if hook["id"].encode() in line] == []
    assert await store.connection.call("EXISTS", names.webhook_deliveries(hook["id"], "line:removed-a")) == 0


async def test_a_webhook_of_one_conversation_and_one_of_all_tenants(
    server: Served, receiver: Receiver, jobs: Jobs
) -> None:
    await begun(server, "four-a", "four")
    await added(server, receiver, "four", conversation_id="four-a")
    everybodys = await added(server, receiver, "*", events=["conversation.waiting"])
    await begun(server, "four-b", "four")
    waiting = state("awaiting_user_input")
    await server.client.log.append("four-a", [waiting], key="waits")
    await jobs.work()
    told = sorted((body["data"]["conversation_id"], body["type"]) for body in receiver.bodies)
    assert told == [("four-a", "conversation.settled"), ("four-a", "conversation.waiting")]
    async with server.as_(await server.token("*")) as client:
        await client.delete(f"/webhooks/{everybodys['id']}?reason=over")
    async with server.as_(await server.token("five")) as client:
        refused = await client.post("/webhooks", json={"url": receiver.url, "conversation_id": "four-a", **HOOK})
        assert refused.json()["code"] == "unknown_conversation"


async def test_another_tenant_never_learns_of_a_webhook(server: Served, receiver: Receiver) -> None:
    hook = await added(server, receiver, "six")
    async with server.as_(await server.token("seven")) as client:
        assert (await client.get("/webhooks")).json() == []
        for method, path in (("GET", ""), ("GET", "/deliveries"), ("POST", "/disable"), ("DELETE", "?reason=x")):
            sent = {"json": HOOK} if method == "POST" else {}
            answer = await client.request(method, f"/webhooks/{hook['id']}{path}", **sent)
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_webhook"), path


@pytest.mark.parametrize(
    "url",
    [
        "https://10.0.0.1/",
        "https://169.254.169.254/latest",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://0x7f000002/",
        "https://127.2/",
        "ftp://127.0.0.1/",
        "https://user:word@127.0.0.1/",
        "https://127.0.0.1:0/",
        "https://127.0.0.1/#a",
        "https://nowhere.invalid/",
        "http:///x",
        "https://a b/",
        "https://[::1/",
    ],
)
async def test_private_addresses_and_what_is_no_address_are_refused(server: Served, url: str) -> None:
    async with server.as_(await server.token("eight")) as client:
        answer = await client.post("/webhooks", json={"url": url, **HOOK})
        assert (answer.status_code, answer.json()["code"]) in ((422, "usage"), (422, "invalid_request")), answer.text
        assert (await client.get("/webhooks")).json() == []


async def test_an_address_that_has_become_private_is_not_connected_to(
    server: Served, receiver: Receiver, jobs: Jobs
) -> None:
    hook = await added(server, receiver, "nine")
    jobs.bench = JobServices(server.client.store, BrokerSettings(), lambda _, arguments: jobs.sent.append(arguments))
    await begun(server, "nine-a", "nine")
    assert await jobs.work() == 1
    assert receiver.requests == []
    (found,) = await open_repository(jobs.bench).deliveries(hook["id"], limit=5)
    assert (found.state, found.status, "not public" in found.error) == ("waiting", None, True)
    async with server.as_(await server.token("nine")) as client:  # or it would be tried again in a later test
        await client.delete(f"/webhooks/{hook['id']}?reason=over")


async def test_a_name_is_judged_by_its_addresses() -> None:
    none = parse_networks("")
    with pytest.raises(AddressRefused, match="not public"):
        await resolve_address("https://localhost/", none)
    with pytest.raises(UsageError, match="DECKHANDS_WEBHOOK_PRIVATE"):
        parse_networks("10.0.0.0/33")
    assert await resolve_address("https://1.1.1.1/", none) == "1.1.1.1"
    with pytest.raises(AddressRefused, match="TLS"):
        await resolve_address("http://1.1.1.1/", none)


async def test_certificate_is_checked_for_the_name_not_the_address(tmp_path: Path) -> None:
    answers = []
    for names in (("localhost",), ()):  # both are for the address, too
        certificate, key = certificate_in(tmp_path, *names)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        trust = ssl.create_default_context(cafile=str(certificate))
        async with receiving(context) as receiver:
            url = f"https://localhost:{receiver.port}/"
            answers.append(await send_request(url, "{}", {}, parse_networks("127.0.0.0/8,::1"), trust))
            hosts = [headers["host"] for headers, _ in receiver.requests]
            assert hosts == [f"localhost:{receiver.port}" for _ in names]
    right, wrong = answers
    assert right == WebhookResponse(204)
    assert (wrong.status, "CERTIFICATE" in wrong.error.upper()) == (None, True)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-Padding: "])
async def test_a_receiver_that_does_not_answer_is_left_in_time(head: bytes) -> None:
    """One takes the request and is silent; one starts an answer whose head never ends."""
    limit_seconds = inspect.signature(send_request).parameters["limit_seconds"].default
    assert limit_seconds == 15.0  # as docs/producing-work.md#webhooks says

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        until_gone = asyncio.create_task(reader.read())
        while head and not until_gone.done():  # slowly: a head that is too long would end it
            writer.write(b"x")
            await asyncio.wait((until_gone,), timeout=0.01)
        await until_gone
        writer.close()

    receiver = await asyncio.start_server(trickle, "127.0.0.1", 0)
    url, trust = f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}/", ssl.create_default_context()
    async with asyncio.timeout(unhurried(10)):
        answer = await send_request(url, "{}", {}, parse_networks(PRIVATE), trust, limit_seconds=0.5)
    receiver.close()
    assert answer == WebhookResponse(None, "The receiver has not answered within 0.5 s.")


async def test_webhook_with_too_many_waiting_deliveries_is_disabled(
    server: Served, receiver: Receiver, jobs: Jobs
) -> None:
    hook = await added(server, receiver, "fifteen", events=ALL)
    store = server.client.store
    sent = store.all_shards[0].webhook_deliveries(hook["id"], "sent")
    waiting = [part for number in range(MAX_WAITING - 1) for part in (f"msg_{number:032x}", "{}")]
    await store.connection.call("HSET", sent, *waiting)
    await begun(server, "fifteen-a", "fifteen")  # leads to two deliveries, and there is room for one
    await begun(server, "fifteen-b", "fifteen")
    await jobs.work()
    async with server.as_(await server.token("fifteen")) as client:
        found = (await client.get(f"/webhooks/{hook['id']}")).json()
        assert (found["is_enabled"], found["why_off"]) == (False, "too many deliveries are waiting")
        assert await store.connection.call("HLEN", sent) == MAX_WAITING
        assert await jobs.work() == 0
        await store.connection.call("HDEL", sent, *waiting[::2])
        assert (await client.post(f"/webhooks/{hook['id']}/enable", json=HOOK)).json()["why_off"] == ""
    await begun(server, "fifteen-c", "fifteen")
    await jobs.work()
    assert receiver.states("fifteen-c") == ["running", "finished"]


async def test_a_chosen_event_has_to_exist(server: Served, receiver: Receiver) -> None:
    async with server.as_(await server.token("ten")) as client:
        answer = await client.post("/webhooks", json={"url": receiver.url, "events": ["settled"], **HOOK})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_tail_lost_by_the_store_is_notified_again(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    await added(server, receiver, "eleven")
    store = server.client.store
    await begun(server, "eleven-a", "eleven")
    names = store.known_keys("eleven-a")
    await jobs.work()
    await store.connection.call("ZADD", names.shard.webhook_news, 1_000, "eleven-a")  # behind the end of its log
    message = MessageAction(content="and", source=EventSource.USER)
    await server.client.log.append("eleven-a", [message, state("finished")], key="more")
    assert await jobs.work() == 1
    assert receiver.states("eleven-a") == ["finished", "finished"]


async def test_events_copied_from_another_log_are_not_notified(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    await added(server, receiver, "fourteen", events=["conversation.created", *ALL])
    client = server.client
    await begun(server, "fourteen-a", "fourteen")
    assert await jobs.work() == 3
    fork = await client.fork("fourteen-a")
    restored = await client.log.read("fourteen-a")
    first = restored[0].model_copy(update={"conversation_id": "fourteen-b"})
    await client.log.create_from(first, restored[1:], key="restore")
    assert await jobs.work() == 1
    told = receiver.bodies[-1]["data"]
    assert (told["kind"], told["conversation_id"]) == ("conversation.created", fork)
    for name in (fork, "fourteen-b"):
        await client.log.append(name, [state("running")], key="more")
    assert await jobs.work() == 2
    assert receiver.states("fourteen-b") == ["running"]
    assert await jobs.work() == 0


async def test_what_is_planned_again_is_known(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    await added(server, receiver, "thirteen", events=ALL)
    store = server.client.store
    await begun(server, "thirteen-a", "thirteen")
    await notify(jobs.bench)
    news = store.known_keys("thirteen-a").shard.webhook_news
    await store.connection.call("ZADD", news, 1, "thirteen-a")  # it died before its end
    await jobs.work()
    await jobs.make_due()
    await jobs.work()
    assert [body["data"]["state"] for body in receiver.bodies] == ["running", "finished"]


async def test_unreadable_delivery_delays_no_other(server: Served, receiver: Receiver, jobs: Jobs) -> None:
    hook = await added(server, receiver, "twelve", events=ALL)
    store = server.client.store
    await begun(server, "twelve-a", "twelve")
    await notify(jobs.bench)
    names, call = store.all_shards[0], store.connection.call
    first, *_ = await call("ZRANGE", f"{names.root}:webhook:{hook['id']}:line:twelve-a", 0, 0)
    await call("HSET", names.webhook_deliveries(hook["id"], "sent"), first, "{forged")
    await call("HSET", names.webhooks, "forged", "{}")
    await call("ZADD", names.webhook_news, 1, b"\xff no conversation")
    await call("ZADD", f"{names.webhooks}:due", 1, b"\xff x")
    await call("ZADD", names.webhook_news, "inf", "twelve-z")
    for arguments in jobs.sent:
        await deliver(jobs.bench, *arguments)
    jobs.sent.clear()
    assert await jobs.work() == 0
    await call("DEL", names.webhook_news)
    await call("SET", names.webhook_news, "forged")
    await jobs.work()
    assert await call("EXISTS", names.webhook_news) == 0
    assert receiver.states("twelve-a") == ["finished"]
    await call("HDEL", names.webhooks, "forged")
