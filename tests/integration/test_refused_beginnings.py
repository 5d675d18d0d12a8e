"""A conversation that may not start now: the error of each way in, and no remains of it."""

from __future__ import annotations

import io
import json
from datetime import timedelta

import pytest

from broker.contract.specs import Tenancy
from broker.limits.tenants import TenantTable, publish_tenants
from broker.log.conversations import Conversations
from broker.runtime.errors import AdmissionRefused
from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.client.task_files.submission import submit
from deckhands.client.task_files.task_file import TaskLine, open_task_file
from deckhands.client.tasks.spec import TaskSpec
from deckhands.ingress.context import IngressContext, derive_task_conversation_id
from deckhands.ingress.inbox import InboxReader
from deckhands.ingress.runs import RunMessage, Runs
from tests.inbox_parts import put, replies
from tests.integration.test_inbox_edges import NoResults, serving, until_empty, until_replies

ONE = TenantTable.load_setting("tenants = {acme = {max_open = 1}}")
ACME = Tenancy(tenant="acme")
LONG_TASK = "Read this. " + "x" * 50_000
"""Its text becomes a blob, which is stored before the event."""


@pytest.fixture
async def client(valkey_store: Store) -> Client:
    await publish_tenants(valkey_store, ONE, None)
    return Client(valkey_store)


async def keys_of(store: Store, conversation_id: str) -> list[bytes]:
    found: list[bytes] = await store.connection.call("KEYS", f"*{conversation_id}*")
    return found


async def test_a_client_is_told_and_nothing_is_kept(client: Client) -> None:
    await client.submit("Do it.", tenancy=ACME)
    with pytest.raises(AdmissionRefused):
        await client.submit(LONG_TASK, tenancy=ACME, secrets={"TOKEN": "abcdefgh"}, conversation_id="refused-1")
    assert await keys_of(client.store, "refused-1") == []


async def test_a_fork_is_a_beginning_too(client: Client) -> None:
    origin = await client.submit("Do it.", tenancy=ACME)
    with pytest.raises(AdmissionRefused):
        await client.fork(origin)
    await Conversations(client.store).close(origin)
    await client.fork(origin)


async def test_the_inbox_says_when_to_send_an_entry_again(client: Client) -> None:
    first = await client.submit("Do it.", tenancy=ACME)
    store = client.store
    desk = IngressContext(store, NoResults())  # type: ignore[arg-type]
    async with serving(InboxReader(desk, "ingress-1").read()):
        await put(store, {"task": "Do it.", "tenant": "acme", "id": "a"})
        await until_replies(store, "shop", "rejected")
        await until_empty(store)
        (reply,) = await replies(store, "shop")
        assert (reply.content["code"], reply.content["retry_after_seconds"]) == ("admission_refused", 5.0)
        assert "conversations of the tenant 'acme'" in reply.content["message"]
        assert await store.connection.call("XLEN", store.all_shards[0].quarantine) == 0
        await Conversations(client.store).close(first)
        await put(store, {"task": "Do it.", "tenant": "acme", "id": "a"})
        await until_replies(store, "shop", "rejected", "accepted")


async def test_an_entry_that_nobody_is_told_of_is_put_aside(client: Client) -> None:
    await client.submit("Do it.", tenancy=ACME)
    store = client.store
    desk = IngressContext(store, NoResults())  # type: ignore[arg-type]
    async with serving(InboxReader(desk, "ingress-1").read()):
        await store.connection.call("XADD", "deck:inbox", "*", "v", "1", "request", '{"task": "x", "tenant": "acme"}')
        await until_empty(store)
    assert await store.connection.call("XLEN", store.all_shards[0].quarantine) == 1


async def test_a_file_of_tasks_waits_and_is_submitted_whole(client: Client) -> None:
    lines = "".join(json.dumps({"id": f"t{n}", "task": "Do it.", "tenant": "acme"}) + "\n" for n in range(4))
    begun: list[str] = []
    refusals: list[AdmissionRefused] = []

    async def make_room(refused: AdmissionRefused) -> None:
        refusals.append(refused)
        await Conversations(client.store).close(begun[-1])

    def on_line(line: TaskLine, was_there: bool) -> None:
        assert not was_there
        begun.append(line.conversation_id)

    def complete(request: TaskSpec) -> TaskSpec:
        return request

    with open_task_file("-", lambda: io.BytesIO(lines.encode()), form="jsonl", batch="b", complete=complete) as tasks:
        outcome = await submit(client, tasks, on_line, wait=make_room)
    assert (outcome.submitted, len(set(begun))) == (4, 4)
    assert {refused.reason for refused in refusals} == {"open"}


@pytest.mark.parametrize("is_later", [False, True])
async def test_refused_task_fails_and_leaves_no_caller(client: Client, is_later: bool) -> None:
    await client.submit("Do it.", tenancy=ACME)
    desk = IngressContext(client.store, NoResults())  # type: ignore[arg-type]
    eta = client.store.clock.now() + timedelta(hours=1) if is_later else None
    with pytest.raises(AdmissionRefused):
        await Runs(desk).take(RunMessage("task-1", ("Do it.",), {"tenant": "acme"}, {}, eta=eta))
    assert await desk.callers.of(derive_task_conversation_id("task-1")) is None
