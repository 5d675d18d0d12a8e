"""Workspaces by the routes of OpenHands' agent server: real workers, real shells, and callers who must not meet."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
import pytest_asyncio

from broker.log import ConversationQuery, Selection
from deckhands.server.openhands.caller_workspaces import to_relative
from deckhands.server.problems import Problem
from tests.ingress_parts import saying
from tests.integration.command_line import run_command, script
from tests.polling import until
from tests.served_stores import environment_with, worker
from tests.server_parts import Served, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_SECONDS = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    (folder / "shared").mkdir()
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, roots: Path) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("openhands")
    model = script(folder / "m.json", run_command("echo made > made.txt"), *saying("done"))
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(served(folder / "log", environment_with(folder), openhands=True))
        environment = found.environment(folder / "home", LLM_MODEL=model, DECKHANDS_WORKSPACE_ROOTS=str(roots))
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment, found.log))
        await found.working()
        yield found
        await end_workspaces(found)


async def end_workspaces(server: Served) -> None:
    """Stop the conversations of the workspaces: a worker that stops only ends the shells of those that are over."""
    async for rows in ConversationQuery(server.client.store, Selection()).iterate_pages():
        for row in rows:
            await server.client.cancel(row.conversation_id, wait_seconds=LIMIT_SECONDS)


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with server.as_(await server.token()) as client:
        yield client


async def run(client: httpx2.AsyncClient, command: str, prefix: str = "/api", **fields: Any) -> dict[str, Any]:
    """Run a command as the reference client does: start it, and search for its output."""
    answer = await client.post(f"{prefix}/bash/start_bash_command", json={"command": command, "timeout": 60, **fields})
    assert answer.status_code == 200, answer.text
    started = answer.json()
    assert (started["kind"], started["command"]) == ("BashCommand", command)
    found: dict[str, Any] = {}

    async def has_output() -> bool:
        params = {"command_id__eq": started["id"], "kind__eq": "BashOutput", "order__gt": -1}
        page = (await client.get(f"{prefix}/bash/bash_events/search", params=params)).json()
        found.update(*page["items"])
        return bool(page["items"])

    await until(has_output, limit=LIMIT_SECONDS, what="the output")
    assert found["command_id"] == started["id"]
    return found


async def test_a_command_runs_and_is_found_again(client: httpx2.AsyncClient) -> None:
    output = await run(client, "echo one > a.txt; cat a.txt; exit 3")
    assert (output["exit_code"], output["stdout"].strip(), output["stderr"]) == (3, "one", None)
    again = await client.get(f"/api/bash/bash_events/{output['id']}")
    assert again.json() == output
    waited = await client.post("/api/bash/execute_bash_command", json={"command": "cat a.txt\necho two", "cwd": "."})
    assert waited.json()["stdout"].split() == ["one", "two"]
    page = (await client.get("/api/bash/bash_events/search?limit=1&sort_order=TIMESTAMP_DESC")).json()
    assert page["items"] == [waited.json()]
    assert page["next_page_id"]
    assert (await client.delete("/api/bash/bash_events")).status_code == 501


async def test_long_command_and_its_output_are_whole(client: httpx2.AsyncClient) -> None:
    command = f"printf 'é%.0s' {{1..25000}} # {'x' * 50_000}"
    output = await run(client, command)
    assert output["stdout"].strip() == "é" * 25_000
    shown = (await client.get(f"/api/bash/bash_events/{output['command_id']}")).json()
    assert shown["command"] == command
    waited = await client.post("/api/bash/execute_bash_command", json={"command": command})
    assert waited.json()["stdout"] == output["stdout"]


async def test_files_count_as_transfers_of_the_tenant(client: httpx2.AsyncClient, server: Served) -> None:
    await run(client, "echo x > small")
    held = server.gateway.transfers
    with ExitStack() as stack:
        for _ in range(server.gateway.options.max_transfers // 2):
            stack.enter_context(held.holding("acme"))
        for answer in (
            await client.post("/api/file/upload", params={"path": "y"}, files={"file": ("y", b"y")}),
            await client.get("/api/file/download", params={"path": "small"}),
            await client.get("/api/file/archive", params={"path": ".", "format": "tar.gz"}),
        ):
            assert (answer.status_code, answer.json()["code"]) == (429, "too_many_transfers_of_tenant")


async def test_form_is_read_only_after_its_conversation_is_found(server: Served) -> None:
    token, name = await server.token(), uuid4()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        f"POST /api/conversations/{name}/file/upload?path=x HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        f"Authorization: Bearer {token}",
        "Content-Type: multipart/form-data; boundary=b",
        "Content-Length: 1000000",
    )
    writer.write("\r\n".join((*head, "", "")).encode())
    assert b" 404 " in await reader.readline()
    writer.close()


async def test_form_without_one_file_is_refused(client: httpx2.AsyncClient) -> None:
    for files in ({"other": ("x", b"x")}, {"file": (None, b"x")}, [("file", ("x", b"x")), ("file", ("y", b"y"))]):
        answer = await client.post("/api/file/upload", params={"path": "x"}, files=files)
        assert answer.status_code in (400, 422), answer.text


async def test_patch_of_a_part_is_refused(client: httpx2.AsyncClient) -> None:
    await run(client, "mkdir -p part")
    answer = await client.get("/api/file/archive", params={"path": "part"})
    assert (answer.status_code, answer.json()["code"]) == (501, "not_on_a_cluster")


async def test_unknown_page_of_commands_is_refused(client: httpx2.AsyncClient) -> None:
    answer = await client.get("/api/bash/bash_events/search", params={"page_id": "x"})
    assert (answer.status_code, answer.json()["code"]) == (400, "unknown_page")


async def test_a_command_runs_in_its_directory(client: httpx2.AsyncClient) -> None:
    output = await run(client, 'basename "$PWD"', cwd="/workspace/project/it's here")
    assert output["stdout"].strip() == "it's here"
    for cwd in ("/etc", "../..", "/workspace/../etc"):
        answer = await client.post("/api/bash/start_bash_command", json={"command": "ls", "cwd": cwd})
        assert answer.status_code == 422, cwd


async def test_a_running_command_is_stopped_alone(client: httpx2.AsyncClient) -> None:
    started = (await client.post("/api/bash/start_bash_command", json={"command": "echo on; sleep 600"})).json()
    assert (await run(client, "echo beside"))["exit_code"] == 0
    params = {"command_id__eq": started["id"], "kind__eq": "BashOutput"}
    assert (await client.get("/api/bash/bash_events/search", params=params)).json()["items"] == []
    assert (await client.post(f"/api/bash/bash_commands/{started['id']}/stop")).json() == {"success": True}

    async def has_ended() -> bool:
        return bool((await client.get("/api/bash/bash_events/search", params=params)).json()["items"])

    await until(has_ended, limit=LIMIT_SECONDS, what="the end of the command")
    assert (await client.post(f"/api/bash/bash_commands/{started['id']}/stop")).status_code == 200
    assert (await client.post(f"/api/bash/bash_commands/{uuid4()}/stop")).status_code == 404


async def test_files_are_uploaded_downloaded_and_archived(client: httpx2.AsyncClient) -> None:
    content = b"\0\xff" * 200_000
    answer = await client.post(
        "/api/file/upload", params={"path": "/workspace/data/in.bin"}, files={"file": ("x.bin", content)}
    )
    assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
    assert (await client.get("/api/file/download", params={"path": "data/in.bin"})).content == content
    made = await client.post("/api/file/create_directory", params={"path": "/workspace/data/deep/er"})
    assert made.json() == {"success": True}
    blocked = await client.post("/api/file/create_directory", params={"path": "/workspace/data/in.bin/x"})
    assert blocked.status_code == 400
    await run(client, "mkdir -p data/node_modules; echo x > data/node_modules/x; echo y > data/y")
    packed = await client.get("/api/file/archive", params={"path": "/workspace/data", "format": "tar.gz"})
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        assert sorted(archive.getnames()) == ["data", "data/deep", "data/deep/er", "data/in.bin", "data/y"]
    assert (await client.get("/api/file/download", params={"path": "/workspace/data"})).status_code == 400
    assert (await client.get("/api/file/download", params={"path": "/workspace/none"})).status_code == 404


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "/workspace/../etc/passwd", "a/../../x", "a\\b", "\n"])
async def test_forged_paths_are_refused(client: httpx2.AsyncClient, path: str) -> None:
    for answer in (
        await client.get("/api/file/download", params={"path": path}),
        await client.post("/api/file/upload", params={"path": path}, files={"file": ("x", b"x")}),
        await client.post("/api/file/create_directory", params={"path": path}),
        await client.get("/api/file/archive", params={"path": path, "format": "tar.gz"}),
        await client.get("/api/git/changes", params={"path": path}),
        await client.get("/api/git/diff", params={"path": path}),
    ):
        assert (answer.status_code, answer.json()["code"] in ("bad_path", "outside_workspace")) == (422, True), path


async def test_links_out_of_the_workspace_are_not_followed(client: httpx2.AsyncClient) -> None:
    await run(client, "ln -sfn /etc out; ln -sf /etc/passwd file")
    for path in ("out/passwd", "file"):
        answer = await client.get("/api/file/download", params={"path": path})
        assert b"root:" not in answer.content
        assert answer.status_code != 200
    answer = await client.post("/api/file/upload", params={"path": "out/x"}, files={"file": ("x", b"x")})
    assert answer.status_code >= 400
    assert not Path("/etc/x").exists()


async def test_keys_do_not_share_a_workspace(client: httpx2.AsyncClient, server: Served) -> None:
    output = await run(client, "echo secret > mine.txt")
    async with server.as_(await server.token()) as same_tenant, server.as_(await server.token("other")) as other_tenant:
        for other in (same_tenant, other_tenant):
            assert (await run(other, "cat mine.txt"))["exit_code"] != 0
            assert (await other.get(f"/api/bash/bash_events/{output['id']}")).status_code == 404
            params = {"command_id__eq": output["command_id"]}
            assert (await other.get("/api/bash/bash_events/search", params=params)).status_code == 404
            assert (await other.post(f"/api/bash/bash_commands/{output['command_id']}/stop")).status_code == 404
            answer = await other.get("/api/file/download", params={"path": "mine.txt"})
            assert answer.status_code == 404


async def test_another_tenants_conversation_is_unknown(client: httpx2.AsyncClient, server: Served) -> None:
    made = await client.post("/conversations", json={"task": "make it", "headless": True})
    path = made.headers["location"]

    async def is_finished() -> bool:
        return bool((await client.get(path)).json()["is_settled"])

    await until(is_finished, limit=LIMIT_SECONDS, what="the end of the run")
    prefix = f"/api{path}"
    assert (await run(client, "cat made.txt", prefix))["stdout"].strip() == "made"
    assert (await client.get(f"{prefix}/file/download?path=/workspace/made.txt")).content == b"made\n"
    async with server.as_(await server.token("other")) as other:
        for answer in (
            await other.post(f"{prefix}/bash/start_bash_command", json={"command": "ls"}),
            await other.get(f"{prefix}/bash/bash_events/search"),
            await other.get(f"{prefix}/file/download?path=made.txt"),
            await other.post(f"{prefix}/file/upload?path=x", files={"file": ("x", b"x")}),
            await other.get(f"{prefix}/git/changes?path=."),
            await other.get(f"/api/file/download-trajectory/{path.rpartition('/')[2]}"),
        ):
            assert answer.status_code == 404


async def test_a_key_without_a_workspace_finds_nothing(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/api/bash/bash_events/search")).json() == {"items": [], "next_page_id": None}
    assert (await client.get("/api/git/changes?path=repo")).status_code == 404
    assert (await client.get("/api/file/download?path=a")).status_code == 404


async def test_a_directory_of_the_tool_workers_is_shared(client: httpx2.AsyncClient, roots: Path) -> None:
    place = str(roots / "shared")
    await run(client, "echo here > by_command.txt", cwd=place)
    assert (roots / "shared" / "by_command.txt").read_text() == "here\n"
    found = await client.get("/api/file/download", params={"path": f"{place}/by_command.txt"})
    assert found.content == b"here\n"


async def test_changes_in_git_are_listed_and_shown(client: httpx2.AsyncClient) -> None:
    await run(
        client,
        "git init -q . && git config user.email a@b && git config user.name a && printf 'one\\n' > 'a b.txt' "
        "&& echo gone > gone && git add . && git commit -qm first && printf 'two\\n' > 'a b.txt' && rm gone && echo n > n",
        cwd="repo",
    )
    changes = {one["path"]: one["status"] for one in (await client.get("/api/git/changes?path=repo")).json()}
    assert changes == {"a b.txt": "UPDATED", "gone": "DELETED", "n": "ADDED"}
    shown = (await client.get("/api/git/diff", params={"path": "/workspace/repo/a b.txt"})).json()
    assert shown == {"original": "one\n", "modified": "two\n"}
    assert (await client.get("/api/git/diff", params={"path": "repo/n"})).json() == {
        "original": None,
        "modified": "n\n",
    }
    commits = (await client.get("/api/git/commits?path=repo")).json()
    assert [one["subject"] for one in commits["commits"]] == ["first"]
    sha = commits["commits"][0]["sha"]
    of_commit = (await client.get("/api/git/diff", params={"path": "repo/gone", "commit": sha})).json()
    assert of_commit == {"original": None, "modified": "gone\n"}
    for ref in ("nowhere", "--output=/tmp/x", "$(touch pwned)", "a b"):
        answer = await client.get("/api/git/changes", params={"path": "repo", "ref": ref})
        assert answer.status_code >= 400, ref
    assert (await run(client, "ls repo/pwned"))["exit_code"] != 0


async def test_many_first_requests_make_one_workspace(server: Served) -> None:
    async with server.as_(await server.token()) as fresh:
        await asyncio.gather(*(run(fresh, f"echo {n} >> all.txt") for n in range(4)))
        assert sorted((await run(fresh, "cat all.txt"))["stdout"].split()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b", "a/b"),
        ("/workspace", "."),
        ("/workspace//a/./b/", "a/b"),
        ("/p/x", "x"),
        ("", "."),
        ("//workspace/a", "a"),
    ],
)
async def test_a_path_becomes_relative(path: str, expected: str) -> None:
    assert to_relative(path, ["/workspace", "/p"]) == expected


@pytest.mark.parametrize("path", ["/workspaces/a", "/p2", "/", "a/..", "x" * 300, "/" + "a/" * 3000])
async def test_a_path_outside_is_refused(path: str) -> None:
    with pytest.raises(Problem):
        to_relative(path, ["/workspace", "/p"])
