"""The server by the routes of OpenHands' agent server: what it tells, and that it refuses the rest with a sentence."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from deckhands.server.auth.api_keys import Scope
from tests.ingress_parts import saying
from tests.integration.command_line import script
from tests.polling import until
from tests.sdk_peer import IS_INSTALLED, ask_sdk
from tests.served_stores import environment_with, worker
from tests.server_parts import Served, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPERATIONS = [
    tuple(line.split()) for line in Path(__file__).with_name("openhands_operations.txt").read_text().splitlines()
]
"""Every operation of the OpenAPI document of openhands-agent-server 1.58.2 below /api, and those of the server."""
LIMIT_SECONDS = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("openhands")
    async with served(folder / "log", environment_with(folder), openhands=True) as found:
        environment = found.environment(folder / "home", LLM_MODEL=script(folder / "m.json", *saying("done")))
        async with (
            worker("controller_worker", environment, found.log),
            worker("tool_worker", environment, found.log),
        ):
            await found.working()
            yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with server.as_(await server.token()) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def finished(server: Served) -> str:
    async with server.as_(await server.token()) as client:
        path = (await client.post("/conversations", json={"task": "say it"})).headers["location"]

        async def is_settled() -> bool:
            return bool((await client.get(path)).json()["is_settled"])

        await until(is_settled, limit=LIMIT_SECONDS, what="the end of the run")
        return str(path.rpartition("/")[2])


async def test_every_operation_is_served_or_refused_with_a_sentence(
    client: httpx2.AsyncClient, server: Served, finished: str
) -> None:
    unserved, refused = [], []
    for method, path in OPERATIONS:
        url = path.replace("{conversation_id}", finished).replace("{runtime_conversation_id}", finished)
        url = url.replace("{sha}", "0" * 40).replace("{event_id}", "8c0a7f1e-0000-8000-8000-000000000001")
        url = url.replace("{command_id}", "8c0a7f1e-0000-8000-8000-000000000001").replace("{", "").replace("}", "")
        if method == "DELETE" and path == "/api/conversations/{conversation_id}":
            continue  # served: it would end this test's conversation
        answer = await client.request(method, url, json={} if method in ("POST", "PUT", "PATCH") else None)
        code = answer.json().get("code", "") if answer.status_code >= 400 else ""
        if code in ("not_found", "method_not_allowed"):
            unserved.append((method, path, answer.status_code, code))
        elif answer.status_code == 501:
            refused.append(path)
            assert answer.json()["detail"].endswith("."), path
            assert len(answer.json()["detail"]) > 20, path
        elif answer.status_code >= 500 and code != "command_failed":
            unserved.append((method, path, answer.status_code, code))
    assert unserved == []
    assert {path.split("/")[2] for path in refused} >= {"vscode", "plugins", "canvas-extensions", "mcp", "hooks"}
    assert not any(path.startswith(("/api/tools", "/api/llm/models")) for path in refused)
    assert len(OPERATIONS) > 160
    async with server.as_() as nobody:
        assert (await nobody.get("/api/vscode/url")).status_code == 401
    assert (await client.get("/api/nothing/of/that/name")).status_code == 404


async def test_the_server_tells_what_it_is(client: httpx2.AsyncClient, server: Served) -> None:
    async with server.as_() as nobody:
        assert (await nobody.get("/alive")).json() == {"status": "ok"}
        info = (await nobody.get("/server_info")).json()
        assert (await nobody.get("/health")).status_code == 200
    assert info["version"].startswith("1.58.")
    assert "terminal" in info["usable_tools"]
    catalog = (await client.get("/api/tools/catalog")).json()["tools"]
    assert {one["name"] for one in catalog} <= set((await client.get("/api/tools/")).json())


async def test_models_are_profiles_without_keys(client: httpx2.AsyncClient) -> None:
    listed = (await client.get("/api/profiles")).json()
    named = (await client.get("/models")).json()
    assert [one["name"] for one in listed["profiles"]] == [n for n in named["names"] if not n.endswith("/*")]
    assert all(not one["api_key_set"] and one["base_url"] is None for one in listed["profiles"])
    settings = (await client.get("/api/settings", headers={"X-Expose-Secrets": "plaintext"})).json()
    assert settings["llm_api_key_is_set"] is False
    assert "api_key" not in json.dumps(settings["agent_settings"])
    assert (await client.get("/api/profiles/unknown")).json()["code"] == "unknown_profile"
    for name in named["names"]:
        assert (await client.get(f"/api/profiles/{name}")).json()["config"] == {"model": name}
    assert (await client.get("/api/llm/models")).json() == {"models": named["names"]}


async def test_a_key_that_cannot_read_is_refused(server: Served) -> None:
    async with server.as_(await server.token(scopes=[Scope.WRITE])) as writer:
        for path in ("/api/tools/", "/api/profiles", "/api/settings", "/api/vscode/url"):
            assert (await writer.get(path)).status_code == 403


async def test_another_tenant_sees_no_other_models(server: Served) -> None:
    async with server.as_(await server.token("other")) as other, server.as_(await server.token()) as client:
        assert (await other.get("/api/llm/models")).json() == {"models": (await other.get("/models")).json()["names"]}
        assert (await client.get("/api/llm/models")).json() == {"models": (await client.get("/models")).json()["names"]}


async def test_a_trajectory_is_a_directory_of_the_sdk(
    client: httpx2.AsyncClient, finished: str, tmp_path: Path
) -> None:
    answer = await client.get(f"/api/file/download-trajectory/{finished}")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        names = archive.namelist()
        events = [json.loads(archive.read(name)) for name in sorted(names) if "/events/" in name]
    assert sum(name.endswith("/base_state.json") for name in names) == 1
    assert [one["kind"] for one in events][:2] == ["SystemPromptEvent", "MessageEvent"]
    results = [one["observation"] for one in events if one["kind"] == "ObservationEvent"]
    assert results == [{"kind": "FinishObservation", "content": [{"type": "text", "text": "done"}]}]
    if IS_INSTALLED:
        assert ask_sdk("judge_events", conversations={"it": events})["problems"] == []


async def test_nothing_is_served_without_the_switch(tmp_path: Path) -> None:
    async with served(tmp_path / "log", environment_with(tmp_path)) as plain, plain.as_(await plain.token()) as client:
        for path in ("/api/tools/", "/alive", "/server_info", "/api/bash/bash_events/search"):
            assert (await client.get(path)).status_code == 404
