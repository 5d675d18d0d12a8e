"""The keys of encryption over HTTP: only an administrator of all tenants reaches them, and no answer shows one."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.contract.specs import Tenancy
from broker.log.event_log import EventLog
from broker.runtime.errors import DataForgotten
from broker.store.encryption import MasterKeys
from broker.store.store import open_store
from deckhands.server.auth.api_keys import Scope
from deckhands.server.terminals import TerminalRecord
from tests.polling import until
from tests.served_stores import environment_with
from tests.server_parts import Served, add_principal, served

OLD = f"old:{base64.b64encode(bytes(range(32))).decode()}"
NEW = f"new:{base64.b64encode(bytes(range(1, 33))).decode()}"
ROUTES = (
    ("GET", "/encryption/keys", None),
    ("POST", "/encryption/rotate", {"reason": "yearly"}),
    ("DELETE", "/encryption/keys?tenant=acme&reason=asked", None),
)


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setenv("DECKHANDS_MASTER_KEYS", OLD)
    async with served(tmp_path / "log", environment_with(tmp_path)) as found:
        await found.token()  # from here on, every request needs one
        yield found


async def create(server: Served, cid: str, tenant: str, masters: str = OLD) -> None:
    store = await open_store(server.log.operator, masters=MasterKeys(masters), deploys=False)
    tenancy = Tenancy(tenant=tenant) if tenant else None
    await EventLog(store).create(ConversationCreated(conversation_id=cid, tenancy=tenancy))
    await store.aclose()


async def test_administrator_lists_rotates_and_deletes_keys(server: Served, tmp_path: Path) -> None:
    for cid, tenant in (("one", "acme"), ("two", "shop"), ("three", "")):
        await create(server, cid, tenant)
    async with server.as_(await server.token("*")) as admin:
        listed = (await admin.get("/encryption/keys")).json()
        assert [(one["tenant"], one["master_key"], one["is_readable"]) for one in listed] == [
            *(("", "old", True), ("acme", "old", True), ("shop", "old", True))
        ]
        assert set(listed[0]) == {"tenant", "key", "master_key", "is_readable"}
        rotated = await admin.post("/encryption/rotate", json={"reason": "yearly"})
        assert (rotated.status_code, rotated.json()) == (200, {"changed": 0, "master_key": "old"})
        gone = await admin.delete("/encryption/keys", params={"tenant": "acme", "reason": "the contract ended"})
        assert (gone.status_code, gone.json()) == (200, {"tenant": "acme"})
        again = await admin.delete("/encryption/keys", params={"tenant": "acme", "reason": "the contract ended"})
        assert (again.status_code, again.json()["code"]) == (404, "unknown_data_key")
        assert (await admin.delete("/encryption/keys", params={"tenant": "", "reason": "all"})).status_code == 200
        assert [one["tenant"] for one in (await admin.get("/encryption/keys")).json()] == ["shop"]
        operations = (await admin.get("/operations")).json()
        assert [(one["action"], one["target"], one["reason"]) for one in operations][:4] == [
            ("encryption.forget", "", "all"),
            ("encryption.forget", "acme", "the contract ended"),
            ("encryption.forget", "acme", "the contract ended"),
            ("encryption.rotate", "old", "yearly"),
        ]
    reader = await open_store(server.log.operator, masters=MasterKeys(OLD), deploys=False)
    with pytest.raises(DataForgotten):
        await EventLog(reader).read("one")
    assert len(await EventLog(reader).read("two")) == 1
    await reader.aclose()


async def test_rotation_names_the_master_key_that_the_server_lacks(server: Served) -> None:
    await create(server, "one", "acme", NEW)
    async with server.as_(await server.token("*")) as admin:
        (listed,) = (await admin.get("/encryption/keys")).json()
        assert (listed["master_key"], listed["is_readable"]) == ("new", False)
        answer = await admin.post("/encryption/rotate", json={"reason": "yearly"})
        assert (answer.status_code, answer.json()["code"]) == (503, "data_locked")
        assert "'new'" in answer.json()["detail"]


async def test_no_other_key_reaches_the_keys(server: Served) -> None:
    await create(server, "one", "acme")
    others = [scope for scope in Scope if scope is not Scope.ADMIN]
    for token in ("", await server.token("acme"), await server.token("*", others)):
        async with server.as_(token) as client:
            for method, path, body in ROUTES:
                answer = await client.request(method, path, json=body)
                assert answer.status_code == (403 if token else 401), path
    async with server.as_(await server.token("*")) as admin:
        assert len((await admin.get("/encryption/keys")).json()) == 1


async def test_a_change_needs_a_reason_and_a_tenant(server: Served) -> None:
    async with server.as_(await server.token("*")) as admin:
        assert (await admin.post("/encryption/rotate", json={})).status_code == 422
        assert (await admin.delete("/encryption/keys", params={"tenant": "acme"})).status_code == 422
        assert (await admin.delete("/encryption/keys", params={"reason": "x"})).status_code == 422
        assert (await admin.get("/operations")).json() == []


async def test_record_of_a_terminal_goes_with_its_conversations_key(server: Served) -> None:
    await create(server, "one", "acme")
    store = server.client.store
    record = TerminalRecord(server.gateway, await add_principal(store), "one")
    await record.add_input(b"cat secret.txt\r")
    record.add_output(b"the contents\x1b[0m")
    await record.end("closed")
    stored = b"".join(await store.call("LRANGE", store.all_shards[0].operations, 0, -1))
    assert b"secret.txt" not in stored
    assert b"contents" not in stored
    async with server.as_(await server.token("*")) as admin:

        async def shown() -> dict[str, str]:
            return {one["action"]: one["reason"] for one in (await admin.get("/operations")).json()}

        assert (await shown())["terminal.input"] == r"cat secret.txt\r"
        assert (await shown())["terminal.output"] == r"the contents\x1b[0m"
        assert (await shown())["terminal.end"] == "closed; 15 bytes of input, 16 of output"
        await admin.delete("/encryption/keys", params={"tenant": "acme", "reason": "the contract ended"})

        async def is_gone() -> bool:
            found = await shown()
            return found["terminal.input"] == found["terminal.output"] == "[encrypted; its key is gone]"

        await until(is_gone, limit=30.0, what="the end of the key")
