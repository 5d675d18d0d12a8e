"""Files of a workspace as they were at an event: over HTTP, from the store, on the command line and on the page."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from broker.runtime.errors import DeckhandsError
from deckhands.client.client import Client
from deckhands.client.remote.remote_client import RemoteClient
from tests.browser_pages import CHROMIUM, opened
from tests.polling import until
from tests.server_parts import Served, served_with_model
from tests.turns import bash, finish

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_SECONDS = 120.0
TURNS = [
    bash("echo one > a.txt; mkdir deep; echo low > deep/b.txt; ln -s /etc/passwd away"),
    bash("echo two > a.txt; rm -r deep away"),
    finish("done"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("files")
    saving = {"DECKHANDS_CHECKPOINTS": f"file://{folder}/checkpoints", "DECKHANDS_CHECKPOINT_EVERY": "1"}
    async with served_with_model(folder, TURNS, **saving) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def changed(server: Served) -> tuple[str, int, int]:
    """A conversation with two commands, and the events of the checkpoints after each."""
    cid = await server.client.submit("Change files.")
    found: list[int] = []

    async def are_saved() -> bool:
        if (await server.client.summary(cid)).state == "finished":
            found[:] = await server.client.files.checkpoints(cid)
        return len(found) >= 2

    await until(are_saved, limit=LIMIT_SECONDS, what="two checkpoints")
    return cid, found[-2], found[-1]


@pytest.mark.parametrize("way", ["store", "server"])
async def test_clients_read_files_at_an_event(
    server: Served, changed: tuple[str, int, int], way: str, tmp_path: Path
) -> None:
    cid, first, last = changed
    client: Client | RemoteClient = server.client
    if way == "server":
        client = RemoteClient(server.url, await server.token("*"))
    try:
        assert list(await client.files.checkpoints(cid))[-2:] == [first, last]
        for at, text in ((first, b"one\n"), (last - 1, b"one\n"), (last, b"two\n"), (last + 999, b"two\n")):
            assert await client.files.read(cid, "a.txt", at=at) == text
        assert await client.files.read(cid, "a.txt") == b"two\n"
        assert [entry.name for entry in await client.files.list(cid, at=first)] == ["a.txt", "away", "deep"]
        assert [(entry.name, entry.size_bytes) for entry in await client.files.list(cid, "deep", at=first)] == [
            ("b.txt", 4)
        ]
        assert [entry.name for entry in await client.files.list(cid, at=last)] == ["a.txt"]
        await client.files.download(cid, ".", tmp_path / "then", at=first)
        assert (tmp_path / "then" / "deep" / "b.txt").read_text() == "low\n"
        assert not (tmp_path / "then" / "away").exists(), "a link that leads out is skipped"
        for path, at in (("deep", last), ("away/shadow", first), ("a.txt/b", first)):
            with pytest.raises(DeckhandsError, match=r"(?i)no such|not a directory"):
                await client.files.list(cid, path, at=at)
        with pytest.raises(DeckhandsError, match="no files as of event 1: the first are saved after event"):
            await client.files.list(cid, at=1)
    finally:
        if isinstance(client, RemoteClient):
            await client.aclose()


async def test_wrong_events_and_paths_are_refused(server: Served, changed: tuple[str, int, int]) -> None:
    cid, first, _ = changed
    place = f"/conversations/{cid}/files"
    async with server.as_(await server.token("*")) as client, server.as_(await server.token("other")) as stranger:
        for wrong in ("0", "-1", "x", str(10**12)):
            assert (await client.get(f"{place}?at={wrong}")).status_code == 422, wrong
        assert (await client.get(f"{place}?path=../..&at={first}")).json()["code"] == "bad_path"
        assert (await client.get(f"{place}/none?at={first}")).status_code == 404
        assert (await stranger.get(f"{place}?at={first}")).status_code == 404
        assert (await stranger.get(f"/conversations/{cid}/checkpoints")).status_code == 404


async def test_command_copies_files_of_an_event(server: Served, changed: tuple[str, int, int], tmp_path: Path) -> None:
    cid, first, last = changed

    async def run(*arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deckhands", *arguments),
            env=server.environment(tmp_path / "home"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        return process.returncode or 0, printed.decode()

    code, printed = await run("checkpoint", cid, "--list", "--json")
    assert (code, json.loads(printed)["events"][-2:]) == (0, [first, last])
    assert (await run("cp", f"{cid}:a.txt", str(tmp_path), "--at", str(first)))[0] == 0
    assert (tmp_path / "a.txt").read_text() == "one\n"
    code, printed = await run("cp", str(tmp_path / "a.txt"), f"{cid}:b.txt", "--at", str(first))
    assert (code, "A checkpoint cannot be changed" in printed) == (2, True)


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
async def test_page_shows_files_at_a_step(server: Served, changed: tuple[str, int, int]) -> None:
    cid, first, last = changed
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        await page.get_by_role("button", name="Files then").first.click()
        files, shown = page.get_by_label("Files", exact=True), page.get_by_label("The chosen file")
        await files.get_by_role("button", name="deep/").wait_for()
        chooser = page.get_by_label("Files as of")
        assert await chooser.input_value() == str(first)
        await files.get_by_role("button", name="a.txt").click()
        await shown.get_by_text("one").wait_for()
        await chooser.select_option(str(last))
        await files.get_by_role("button", name="deep/").wait_for(state="detached")
        await files.get_by_role("button", name="a.txt").click()
        await shown.get_by_text("two").wait_for()
        await page.get_by_role("tab", name="Files").click()
        await files.get_by_role("button", name="All changes").wait_for()
        assert await chooser.input_value() == "0"
