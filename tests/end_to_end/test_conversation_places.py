"""One program, run embedded, on a cluster's store and through a server: the same result.

Threats: the user of the program may forge the archive and the pictures of a conversation, as everywhere; a server may
forge everything, and so may others at its address unless it is `https://`, where the certificate must be of an
authority that this machine or SSL_CERT_FILE trusts.
"""

from __future__ import annotations

import base64
import os
import subprocess
import tarfile
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import BaseModel

from broker.contract.actions import MessageAction
from broker.contract.events import WorkspaceSpec
from broker.runtime.errors import UnknownConversation, UsageError
from broker.store.store import open_store
from deckhands import AsyncConversation, ConfirmationPolicy, Event, Limits, NotBegun, TransferFailed
from deckhands.client.remote.server_calls import ServerUntrusted
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.certificates import certificate_in
from tests.integration.command_line import run_command
from tests.server_parts import Served, served_with_workers
from tests.turns import finish, script

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT = 120.0
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


class Verdict(BaseModel):
    is_good: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("places")
    key = base64.b64encode(os.urandom(32)).decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECKHANDS_SECRET_KEY", key)  # of the server, which is in this process
        async with served_with_workers(folder, DECKHANDS_SECRET_KEY=key) as found:
            yield found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home of the program that runs conversations embedded."""
    for name in ("DECKHANDS_URL", "LLM_MODEL", "LLM_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DECKHANDS_SANDBOX", "none")


async def program(model: str, folder: Path, **place: Any) -> list[Any]:
    """Use every method that all places have, and return the results."""
    seen: list[Any] = []
    told: list[Event] = []
    talk = AsyncConversation(
        model=model, output=Verdict, callbacks=[told.append], confirmation="always", labels={"team": "poets"}, **place
    )
    async with talk:
        with pytest.raises(NotBegun):
            await talk.state()
        await talk.set_limits(Limits(max_iterations=30))
        streamed = [item.kind async for item in talk.stream("Look") if isinstance(item, Event)]
        seen.append((streamed[0], streamed[-1]))
        asked = await talk.state()
        seen.append((asked.state, asked.labels))
        await talk.reject(reason="Not one.")
        seen.append((await talk.wait(timeout_seconds=LIMIT)).state)
        await talk.confirm(edited={"command": "echo edited > two.txt"})
        seen.append((await talk.wait(timeout_seconds=LIMIT)).state)
        await talk.set_confirmation_policy(ConfirmationPolicy(mode="never"), by="ann", reason="trust")
        await talk.set_labels({"team": "editors"})
        await talk.confirm()
        outcome = await talk.wait(timeout_seconds=LIMIT)
        seen.append((outcome.state, outcome.message, outcome.output, outcome.summary.labels))

        seen.append(await talk.files.read("two.txt"))
        await talk.files.write("d/by hand.txt", "here")
        await talk.files.upload(folder / "up", "up")
        seen.append([(entry.name, entry.kind) for entry in await talk.files.list()])
        for path in ("d", "up/a.txt"):
            target = folder / "down"
            target.mkdir(parents=True, exist_ok=True)
            await talk.files.download(path, target)
        seen.append(sorted(str(file.relative_to(target)) for file in target.rglob("*")))
        with pytest.raises(TransferFailed):
            await talk.files.read("none.txt")
        done = await talk.execute("cat two.txt; (exit 3)", by="ann", reason="a look")
        seen.append((done.output.strip(), done.exit_code))
        with pytest.raises(UsageError, match="The command is empty"):
            await talk.execute(" ")

        await talk.send_message("Again", images=[PNG])
        seen.append((await talk.wait(timeout_seconds=LIMIT)).message)
        events = await talk.events()
        assert [event.id for event in told] == [event.id for event in events]
        shown = [event for event in events if event.kind != "conversation.operator_acted"]
        seen.append([event.kind for event in shown if event.source == "user" or event.kind.startswith("action")])
        seen.append(max(len(str(event)) for event in events) > 100_000)
        fork = await talk.fork(at=2, model=model)
        assert fork.id not in ("", talk.id)
        await fork.pause()
        await fork.cancel(wait_seconds=LIMIT)
        seen.append((await fork.state()).state)
        await talk.close()
        with pytest.raises(UsageError, match="closed"):
            await talk.send_message("Hello?")
        seen.append((await talk.metrics()).accumulated_cost)
    return seen


async def test_one_program_has_one_result_everywhere(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = finish("Good.", output={"is_good": True})
    commands = [
        run_command(command) for command in ("echo one > one.txt", "ls", "head -c 200000 /dev/zero | tr '\\0' x")
    ]
    again = finish("Again.", output={"is_good": True})
    model = script(tmp_path / "model.json", *commands, verdict, again)
    monkeypatch.setenv("DECKHANDS_API_KEY", await server.token())
    places = {"embedded": {}, "store": {"cluster": server.log.operator}, "server": {"cluster": server.url}}
    found = {}
    for name, place in places.items():
        folder = tmp_path / name
        (folder / "up").mkdir(parents=True)
        (folder / "up" / "a.txt").write_text("a")
        found[name] = await program(model, folder, **place)
    assert found["store"] == found["embedded"]
    assert found["server"] == found["embedded"]


def packed(folder: Path) -> dict[str, Path]:
    """Write an archive of each format for a workspace: each has a file `a.txt`."""
    folder.mkdir()
    (folder / "a.txt").write_text("from a file")
    found = {form: folder / f"work.{form}" for form in ("tar.gz", "zip", "bundle")}
    with tarfile.open(found["tar.gz"], "w:gz") as tar:
        tar.add(folder / "a.txt", "a.txt")
    with zipfile.ZipFile(found["zip"], "w") as archive:
        archive.write(folder / "a.txt", "a.txt")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (
        ("init", "-q", "-b", "main"),
        ("add", "a.txt"),
        (*author, "commit", "-qm", "one"),
        ("bundle", "create", "-q", str(found["bundle"]), "HEAD", "main"),
    ):
        subprocess.run(("git", "-C", str(folder), *command), check=True, capture_output=True)
    return found


async def begun_with(model: str, file: Path, **place: Any) -> list[Any]:
    """Start with a file and pictures, and return the results."""
    async with AsyncConversation(model=model, workspace=str(file), **place) as talk:
        await talk.send_message("Look", images=[PNG, "https://example.org/pond.png"])
        outcome = await talk.wait(timeout_seconds=LIMIT)
        first = next(event for event in await talk.events() if isinstance(event, MessageAction))
        return [outcome.state, outcome.message, await talk.files.read("a.txt"), first.image_urls]


async def test_a_conversation_begins_with_archives_and_pictures_everywhere(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_API_KEY", await server.token())
    model = script(tmp_path / "model.json", run_command("test -f a.txt"), finish("done"))
    files = packed(tmp_path / "files")
    expected = await begun_with(model, files["tar.gz"])
    assert expected[:3] == ["finished", "done", b"from a file"]
    assert len(expected[3]) == 2
    for file in files.values():
        for cluster in (server.log.operator, server.url):
            assert await begun_with(model, file, cluster=cluster) == expected
    torn = tmp_path / "torn.tar"
    torn.write_bytes(b"no archive")
    ends = []
    for cluster in (server.log.operator, server.url):
        async with AsyncConversation(model=model, workspace=str(torn), cluster=cluster) as talk:
            await talk.send_message("Look")
            ends.append((await talk.wait(timeout_seconds=LIMIT)).summary.error_code)
    assert ends[0] == ends[1] != ""


async def test_server_with_a_private_authority_is_trusted_by_file(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_in(tmp_path)
    options = ServerOptions(port=0, certificate=certificate, certificate_key=key)
    gateway = Gateway(await open_store(server.log.gateway), options=options)
    model = script(tmp_path / "model.json", finish("done"))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("DECKHANDS_API_KEY", await server.token())
    async with serve_in_loop(gateway) as port:
        place = {"model": model, "cluster": f"https://127.0.0.1:{port}"}
        async with AsyncConversation(**place) as talk:
            with pytest.raises(ServerUntrusted, match="self-signed") as refused:
                await talk.send_message("Look")
        assert "SSL_CERT_FILE" in refused.value.remedy
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with AsyncConversation(**place) as talk:
            await talk.send_message("Look")
            assert (await talk.wait(timeout_seconds=LIMIT)).message == "done"
    await gateway.aclose()


async def test_a_server_says_who_may_and_what_exists(server: Served) -> None:
    token = await server.token()
    async with AsyncConversation(cluster=server.url, api_key=token, conversation_id="no-such-one") as talk:
        with pytest.raises(UnknownConversation):
            await talk.send_message("Look")
    async with AsyncConversation(cluster=server.url, api_key="dh_nonsense") as talk:
        with pytest.raises(Exception, match="key") as refused:
            await talk.send_message("Look")
        assert getattr(refused.value, "code", "") == "unauthorized"


async def test_directory_no_tool_worker_takes_is_sent_as_copy(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_API_KEY", await server.token())
    project = tmp_path / "project"
    (project / "d").mkdir(parents=True)
    (project / "d" / "run").write_text("#!/bin/sh\necho here > made.txt\n")
    (project / "d" / "run").chmod(0o755)
    (project / "link").symlink_to("d/run")
    os.mkfifo(project / "pipe")
    model = script(tmp_path / "model.json", run_command("./link && rm d/run"), finish("done"))
    async with AsyncConversation(model=model, workspace=project, cluster=server.url) as talk:
        await talk.send_message("Look")
        outcome = await talk.wait(timeout_seconds=LIMIT)
        assert (outcome.state, outcome.summary.workspace) == ("finished", None)
        assert [entry.name for entry in await talk.files.list()] == ["d", "link", "made.txt"]
        assert await talk.files.read("made.txt") == b"here\n"
    assert (project / "d" / "run").exists(), "it is the caller's; the agent has worked on a copy"
    for place, code in (
        (tmp_path / "nowhere", "directory_not_taken"),
        (WorkspaceSpec(path=str(project)), "directory_not_taken"),
    ):
        async with AsyncConversation(model=model, workspace=place, cluster=server.url) as talk:
            with pytest.raises(UsageError, match="No tool worker takes the directory") as refused:
                await talk.send_message("Look")
            assert refused.value.code == code
