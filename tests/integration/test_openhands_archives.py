"""OpenHands' API and conversations that are archived or belong to others: ids, sockets, deletion."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from broker.contract.events import ConversationCreated, Event
from broker.contract.specs import Tenancy
from deckhands.client.client import Client
from deckhands.client.starting import is_hold
from deckhands.interop import from_uuid, to_uuid
from deckhands.server.auth.api_keys import ApiKeys
from deckhands.server.openhands import running
from deckhands.server.openhands.parts import OpenHandsParts
from deckhands.server.openhands.requests import Part, SentMessage
from deckhands.server.openhands.translated_logs import TranslatedLog, TranslatedLogs
from tests.archive_parts import begin_ended, retired
from tests.polling import unhurried
from tests.served_stores import environment_with
from tests.server_parts import Served, add_principal, served
from tests.unit.deckhands.sample_log import state, user

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/api/conversations"
ASKED = {"agent": {"kind": "Agent", "llm": {"model": "scripted/none"}}}
DERIVED = f"k{'ab' * 12}c"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("openhands")
    programs = environment_with(folder)
    async with served(
        folder / "log", programs, archive=str(folder / "archive"), openhands=True, quiet_seconds=0.2
    ) as found:
        yield found


def keyed(server: Served, token: str) -> httpx2.AsyncClient:
    client = server.as_()
    client.headers["X-Session-API-Key"] = token
    return client


async def archived(server: Served, folder: Path, tenant: str) -> str:
    """Archive a conversation of a tenant, and return its UUID."""
    uuid = uuid4()
    client = Client(server.client.store, server.gateway.archive)
    await begin_ended(client, from_uuid(uuid), tenancy=Tenancy(tenant=tenant))
    assert (await retired(server.client.store, server.gateway.archive, folder))["archived"]
    return str(uuid)


async def test_id_of_another_way_in_cannot_be_chosen(server: Served) -> None:
    async with keyed(server, await server.token()) as client:
        for name in (DERIVED, "nightly-report"):
            chosen = str(to_uuid(name))
            answer = await client.post(PATH, json=ASKED | {"conversation_id": chosen})
            assert (answer.status_code, answer.json()["code"]) == (422, "bad_id"), answer.text
    with pytest.raises(Exception, match=DERIVED):
        await server.gateway.tenant_of(DERIVED)


async def test_fork_cannot_choose_an_id_that_is_taken(server: Served, tmp_path: Path) -> None:
    other, own = await archived(server, tmp_path, "other"), uuid4()
    await begin_ended(server.client, from_uuid(own), tenancy=Tenancy(tenant="acme"))
    async with keyed(server, await server.token()) as client:
        for chosen, status in ((str(to_uuid(DERIVED)), 422), (other, 409), (str(own), 409)):
            answer = await client.post(f"{PATH}/{own}/fork", json={"id": chosen})
            assert answer.status_code == status, answer.text


async def test_archive_of_another_tenant_survives_the_choice_of_its_id(server: Served, tmp_path: Path) -> None:
    victim = await archived(server, tmp_path, "other")
    async with keyed(server, await server.token()) as client:
        answer = await client.post(PATH, json=ASKED | {"conversation_id": victim})
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict"), answer.text
        assert (await client.delete(f"{PATH}/{victim}")).status_code == 404
    async with keyed(server, await server.token("other")) as client:
        assert (await client.get(f"{PATH}/{victim}")).json()["id"] == victim


async def received(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(unhurried(30.0)):
        found: dict[str, Any] = json.loads(await socket.recv())
        return found


async def read_on(socket: ClientConnection) -> None:
    while True:
        await received(socket)


async def test_socket_of_an_archived_conversation_stays_while_its_key_lives(server: Served, tmp_path: Path) -> None:
    name, token = await archived(server, tmp_path, "acme"), await server.token()
    url = f"ws://127.0.0.1:{server.port}/sockets/events/{name}?resend_mode=all"
    async with connect(url, additional_headers={"X-Session-API-Key": token}) as socket:
        first = await received(socket)
        assert (first["key"], first["value"]["execution_status"]) == ("full_state", "finished")
        await ApiKeys(server.client.store).revoke(token.split("_")[1])
        with pytest.raises(ConnectionClosed) as closed:
            await read_on(socket)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "key_revoked")


async def test_key_of_one_stream_has_one_socket(server: Served) -> None:
    name, token = uuid4(), await server.token(streams=1)
    await begin_ended(server.client, from_uuid(name), tenancy=Tenancy(tenant="acme"))
    url = f"ws://127.0.0.1:{server.port}/sockets/events/{name}"
    headers = {"X-Session-API-Key": token}
    async with connect(url, additional_headers=headers) as socket:
        assert (await received(socket))["key"] == "full_state"
        async with connect(url, additional_headers=headers) as second:
            with pytest.raises(ConnectionClosed) as closed:
                await received(second)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "too_many_streams_of_key")


class OvertakenLogs(TranslatedLogs):
    """Logs that grow once, after a request has read one and before it writes."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._loads = 0

    async def load(self, client: Client, conversation_id: str, *, needs_events: bool = False) -> TranslatedLog:
        found = await super().load(client, conversation_id, needs_events=needs_events)
        self._loads += 1
        if self._loads == 1:
            await self._client.log.append(conversation_id, [state("finished")])
        return found


async def test_message_waits_if_the_run_ends_while_it_is_sent(server: Served) -> None:
    name, parts = from_uuid(uuid4()), OpenHandsParts()
    parts.logs = OvertakenLogs(server.client)
    first = ConversationCreated(conversation_id=name, tenancy=Tenancy(tenant="acme"))
    await server.client.log.create_from(first, [user("Do it."), state("running")], key=f"begin:{name}")
    message = SentMessage(content=[Part(text="Wait for me.")])
    await running.send_message(server.gateway, parts, await add_principal(server.client.store), name, message)
    events = await server.client.events(name)
    assert is_hold(events[-1])
    log = await parts.logs.load(server.gateway.client, name)
    assert log.run.execution_status == "idle"


async def test_first_message_names_the_conversation_in_its_own_append(server: Served) -> None:
    name, parts = from_uuid(uuid4()), OpenHandsParts()
    await server.client.log.create_from(ConversationCreated(conversation_id=name), [], key=f"begin:{name}")
    message = SentMessage(content=[Part(text="Count the files.")], run=True)
    principal = await add_principal(server.client.store)
    await running.send_message(server.gateway, parts, principal, name, message)
    kinds = [event.kind for event in await server.client.events(name)]
    assert kinds[-2:] == ["conversation.changed", "action.message"]
    assert (await server.client.row(name)).title == "Count the files."


class CountingClient(Client):
    """A client that counts the events that it has read."""

    read = 0

    async def events(self, conversation_id: str, **options: Any) -> list[Event]:
        found = await super().events(conversation_id, **options)
        self.read += len(found)
        return found


async def test_state_of_many_conversations_is_read_once(server: Served) -> None:
    client, logs = CountingClient(server.client.store), TranslatedLogs()
    names = [from_uuid(uuid4()) for _ in range(40)]
    for name in names:
        await begin_ended(client, name)
        await logs.load(client, name)
    client.read = 0
    for name in names:
        assert (await logs.load(client, name)).info()["execution_status"] == "finished"
    assert client.read == len(names), "one event each, which shows that the log has no further ones"
    assert (await logs.load(client, names[0], needs_events=True)).events
    assert client.read > len(names) + 1


async def test_log_of_the_server_has_no_key_of_a_query(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    name, token = uuid4(), await server.token()
    await begin_ended(server.client, from_uuid(name), tenancy=Tenancy(tenant="acme"))
    async with connect(f"ws://127.0.0.1:{server.port}/sockets/events/{name}?session_api_key={token}") as socket:
        assert (await received(socket))["key"] == "full_state"
    assert token not in caplog.text
