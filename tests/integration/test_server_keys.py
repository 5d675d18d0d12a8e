"""API keys over HTTP: who may make which, and when they end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from deckhands.server.auth.api_keys import Scope
from tests.served_stores import environment_with
from tests.server_parts import Served, served

WANTED = {"name": "shop", "tenant": "acme", "scopes": ["read", "write"], "reason": "a new customer"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", environment_with(tmp_path)) as found:
        yield found


async def test_administrator_makes_lists_and_revokes_keys(server: Served) -> None:
    async with server.as_(await server.token("*")) as admin:
        made = (await admin.post("/keys", json=WANTED | {"days": 30})).json()
        assert (made["tenant"], made["scopes"], made["state"]) == ("acme", ["read", "write"], "good")
        async with server.as_(made["token"]) as shop:
            assert (await shop.get("/conversations")).status_code == 200
            assert (await shop.get("/keys")).status_code == 403
            (_, listed) = (await admin.get("/keys")).json()
            assert listed["used"] is not None
            assert {name: listed[name] for name in ("id", "name", "expires")} == {
                name: made[name] for name in ("id", "name", "expires")
            }
            assert made["token"].rpartition("_")[2] not in (await admin.get("/keys")).text
            gone = await admin.delete(f"/keys/{made['id']}", params={"reason": "left"})
            assert (gone.status_code, gone.json()["state"]) == (200, "revoked")
            assert (await admin.delete(f"/keys/{made['id']}", params={"reason": "left"})).status_code == 200
            assert (await shop.get("/conversations")).json()["code"] == "key_revoked"
        operations = (await admin.get("/operations")).json()
        assert [(one["action"], one["reason"]) for one in operations][1:3] == [
            ("key.revoke", "left"),
            ("key.add", "a new customer"),
        ]
        assert made["token"] not in str(operations)


async def test_key_gives_no_more_than_it_has(server: Served) -> None:
    short = await server.token("*", (Scope.READ, Scope.ADMIN), life=timedelta(days=2))
    async with server.as_(short) as admin:
        for wanted, code in (
            (WANTED, "forbidden"),
            (WANTED | {"scopes": ["read"]}, "key_would_outlive"),
            (WANTED | {"scopes": ["read"], "days": 3}, "key_would_outlive"),
        ):
            refused = await admin.post("/keys", json=wanted)
            assert (refused.status_code, refused.json()["code"]) == (403, code)
        assert (await admin.post("/keys", json=WANTED | {"scopes": ["read"], "days": 1})).status_code == 201
    for tenant, scopes in (("acme", tuple(Scope)), ("*", (Scope.READ, Scope.WRITE, Scope.OPERATE))):
        async with server.as_(await server.token(tenant, scopes)) as other:
            assert (await other.get("/keys")).status_code == 403
            assert (await other.post("/keys", json=WANTED)).status_code == 403
            assert (await other.delete("/keys/abcdefghij23?reason=x")).status_code == 403


async def test_wrong_and_unknown_keys_are_refused(server: Served) -> None:
    wrongs: list[dict[str, object]] = [
        *({"tenant": "a b"}, {"tenant": ""}, {"scopes": []}, {"scopes": ["root"]}),
        *({"days": 0}, {"name": ""}, {"reason": ""}),
    ]
    async with server.as_(await server.token("*")) as admin:
        for wrong in wrongs:
            assert (await admin.post("/keys", json=WANTED | wrong)).status_code == 422, wrong
        assert len((await admin.get("/keys")).json()) == 1
        assert (await admin.delete("/keys/abcdefghij23?reason=x")).status_code == 422
        assert (await admin.delete("/keys/..%2fx?reason=x")).status_code in (404, 422)
