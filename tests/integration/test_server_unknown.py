"""Secrets and files over HTTP: of conversations that there are, and of nothing else, whatever the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract.specs import Tenancy
from tests.archive_parts import begin_ended, retired
from tests.server_parts import served

NEW = {"secrets": {"TOKEN": "abc-123-def"}}


async def test_nothing_is_kept_for_what_is_not_in_the_store(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path))
    place = tmp_path / "archive"
    async with served(tmp_path / "log", programs, archive=str(place)) as server:
        store, tokens = server.client.store, (await server.token("acme"), await server.token("*"))
        await begin_ended(server.client, "left-us", tenancy=Tenancy(tenant="acme"))
        await retired(store, place, tmp_path)
        cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
        for token in tokens:
            async with server.as_(token) as client:
                for name, status, code in (("none-such", 404, "unknown_conversation"), ("left-us", 409, "archived")):
                    answer = await client.put(f"/conversations/{name}/secrets", json=NEW)
                    assert (answer.status_code, answer.json()["code"]) == (status, code)
                    assert await store.connection.call("EXISTS", store.keys(name).secrets) == 0
                for method, path in (("GET", "/files"), ("GET", "/files/a"), ("PUT", "/files/a"), ("GET", "/patch")):
                    answer = await client.request(method, f"/conversations/none-such{path}")
                    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_conversation"), path
                assert (await client.put(f"/conversations/{cid}/secrets", json=NEW)).status_code == 204
        assert await store.connection.call("HKEYS", store.keys(cid).secrets) == [b"TOKEN"]
