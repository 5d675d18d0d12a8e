"""The web page in headless Chromium: a run followed live over a server that dies, a confirmation, hostile content."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sys
import urllib.request
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.async_api import Page

from broker.contract.actions import CmdRunAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import EventSource
from broker.contract.observations import CmdOutputObservation
from broker.runtime.child import ChildProcess
from broker.store.store import Store
from deckhands.client.client import Client
from tests.broker_parts import claim, enter
from tests.browser_pages import CHROMIUM, opened, scripted
from tests.integration.command_line import cluster as cluster_up
from tests.integration.command_line import deckhands, environment
from tests.polling import until
from tests.screenshots import picture
from tests.server_parts import Served, add_key, served
from tests.unit.deckhands.sample_log import output, state

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")

LIMIT_SECONDS = 180.0
HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken=1'>\x1b[31m\u202eabc\u2066"


def bash(command: str) -> dict[str, object]:
    return {"text": "Let me look.", "tool_calls": [{"name": "execute_bash", "arguments": {"command": command}}]}


@dataclass
class Cluster:
    """A store with two workers, and a server that can be killed."""

    store: Store
    client: Client
    port: int
    environment: dict[str, str]
    folder: Path
    server: ChildProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self) -> None:
        command = [sys.executable, "-P", "-m", "deckhands", "serve", "--port", str(self.port)]
        self.server = ChildProcess.start(command, log=self.folder / "server.log", env=self.environment)
        await until(self._answers, limit=LIMIT_SECONDS, what="the server")

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def kill(self) -> None:
        assert self.server is not None
        os.kill(self.server.pid, signal.SIGKILL)
        await self.server.stop(grace_seconds=1)


@pytest.fixture
async def cluster(valkey_store: Store, tmp_path: Path, valkey_server: object) -> AsyncIterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment = {
        "PATH": os.environ["PATH"],
        "DECKHANDS_URL": valkey_server.url,  # type: ignore[attr-defined]
        "LLM_SCRIPTS_DIR": "/",
        "DECKHANDS_CELERY_URL": "memory://",
        "DECKHANDS_HOME": str(tmp_path / "home"),
        "DECKHANDS_SANDBOX": "none",
        "DECKHANDS_WORKSPACE_ENDS_WITH_WORKER": "1",
    }
    made = Cluster(valkey_store, Client(valkey_store), port, environment, tmp_path)
    workers = [
        ChildProcess.start([sys.executable, "-P", "-m", module], log=tmp_path / f"{module}.log", env=environment)
        for module in ("controller_worker", "tool_worker")
    ]
    await made.serve()
    try:
        yield made
    finally:
        await made.kill()
        for worker in workers:
            await worker.stop(grace_seconds=20)


async def shown_ids(page: Page) -> set[int]:
    """The events of all cards."""
    places = await page.locator(".item[data-first]").evaluate_all(
        "items => items.map((item) => [Number(item.dataset.first), Number(item.dataset.last)])"
    )
    return {number for first, last in places for number in range(first, last + 1)}


async def test_live_run_survives_a_killed_server_and_is_confirmed(
    cluster: Cluster,
) -> None:
    finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "All is well."}}]}
    agent = scripted(cluster.folder, [bash("echo first"), bash("echo second"), finish], confirm=True)
    cid = await cluster.client.submit("look around", agent=agent, headless=False, title="Look around")
    asks = await cluster.client.wait_until_settled(cid, timeout_seconds=LIMIT_SECONDS)
    assert asks.state == "awaiting_user_confirmation", asks.last_error
    async with opened(f"{cluster.url}/#/c/{cid}", height=4_000, key=await add_key(cluster.store)) as page:
        await page.get_by_role("heading", name="Run action").wait_for()
        await page.get_by_role("button", name="Confirm").click()
        await page.get_by_text("first", exact=True).first.wait_for()
        await page.locator("#state.awaiting_user_confirmation").wait_for()
        await cluster.kill()
        await page.locator("#connection.away").wait_for()
        assert cluster.store is not None
        await cluster.client.confirm(cid)  # another client does, while the page gets no events
        summary = await cluster.client.wait_until_settled(cid, timeout_seconds=LIMIT_SECONDS)
        if summary.state == "awaiting_user_confirmation":
            await cluster.client.confirm(cid)
            summary = await cluster.client.wait_until_settled(cid, timeout_seconds=LIMIT_SECONDS)
        await cluster.serve()
        await page.locator("#state", has_text=summary.state).wait_for()
        last = await cluster.client.log.load_last_id(cid)
        await page.locator(f".item[data-last='{last}']").wait_for()
        assert await shown_ids(page) == set(range(1, last + 1))
        await page.get_by_role("textbox", name="Message").fill("Thank you")
        await page.get_by_role("button", name="Send").click()
        await page.locator(".item.user", has_text="Thank you").wait_for()
        await page.get_by_role("link", name="Conversations").click()
        await page.get_by_role("link", name="Look around").wait_for()


async def test_person_edits_sends_pictures_compares_forks_and_downloads(
    cluster: Cluster,
) -> None:
    finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "All is well."}}]}
    agent = scripted(cluster.folder, [bash("echo original"), finish, finish, finish], confirm=True)
    cid = await cluster.client.submit("look around", agent=agent, headless=False, title="Edited")
    await cluster.client.wait_until_settled(cid, timeout_seconds=LIMIT_SECONDS)
    image = cluster.folder / "point.png"
    image.write_bytes(base64.b64decode(picture(20, 10, (200, 30, 30)).partition(",")[2]))
    async with opened(f"{cluster.url}/#/c/{cid}", key=await add_key(cluster.store)) as page:
        await page.get_by_role("button", name="Edit…").click()
        await page.get_by_role("textbox", name="Command").fill("echo edited > made.txt; cat made.txt")
        await page.get_by_role("button", name="Run it so").click()
        await page.locator("#state.finished").wait_for()
        events = await cluster.client.events(cid)
        ran = [event.content for event in events if isinstance(event, CmdOutputObservation)]
        assert len(ran) == 1
        assert ran[0].rstrip().endswith("edited")
        await page.locator("#pictures").set_input_files(str(image))
        await page.get_by_role("img", name="point.png").wait_for()
        await page.get_by_role("textbox", name="Message").fill("What is this?")
        await page.get_by_role("button", name="Send").click()
        shown = page.locator(".item.user", has_text="What is this?").get_by_role("img")
        await shown.wait_for()
        assert await shown.evaluate("one => one.naturalWidth") == 20
        await cluster.client.wait_until_settled(cid, timeout_seconds=LIMIT_SECONDS)
        asked = [event for event in await cluster.client.events(cid) if isinstance(event, MessageAction)]
        assert [url[:22] for url in asked[-1].image_urls or ()] == ["data:image/png;base64,"]
        async with page.expect_download() as download:
            await page.get_by_text("More", exact=True).click()
            await page.get_by_role("button", name="Download").click()
        with zipfile.ZipFile(await (await download.value).path()) as archive:
            assert archive.testzip() is None
            lines = archive.read(f"{cid}/events.jsonl").decode().splitlines()
            assert [json.loads(line)["id"] for line in lines][:3] == [1, 2, 3]
            assert archive.read(f"{cid}/workspace/made.txt") == b"edited\n"
        fork = await cluster.client.fork(cid, at=3, title="Forked")
        await page.goto(f"{cluster.url}/#/compare/{cid}/{fork}")
        await page.get_by_text("They share their first").wait_for()
        assert await page.locator(".side").count() == 2


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", programs) as found:
        yield found


async def test_hostile_content_stays_text_and_a_key_opens_the_page(server: Served) -> None:
    """A task, a label, a command or its output is untrusted."""
    await enter(server.client.store, "controller-1")
    cid = await server.client.submit(HOSTILE, title=HOSTILE, labels={"team": "b"})
    ownership = await claim(server.client.store, "controller-1", cid)
    long = "x" * 5_000_000
    events = [
        state("running"),
        MessageAction(content=HOSTILE, source=EventSource.AGENT),
        CmdRunAction(command=HOSTILE),
        output(5, HOSTILE + "\n" + long),
        state("error", HOSTILE),
    ]
    last_id = await server.client.log.load_last_id(cid)
    await server.client.log.append_as_owner(
        ownership, events, expected_last_id=last_id, fields={"state": AgentState.ERROR.value}
    )
    token = await server.token("*")
    async with opened(f"{server.url}/", width=420, height=800, dark=True) as page:
        await page.get_by_label("Key").fill(token)
        await page.get_by_role("button", name="Enter").click()
        await page.get_by_role("link", name="<script>").wait_for()
        await page.get_by_role("link", name="<script>").click()
        await page.locator("#state.error").wait_for()
        await page.get_by_role("tab", name="About").click()
        await page.get_by_text("Why it is here").wait_for()
        await page.get_by_role("tab", name="Log").click()
        await page.locator(".item.step").wait_for()
        text = await page.locator("main").inner_text()
        assert "\\x1b[31m" in text
        assert "\\u202e" in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert await page.evaluate("window.broken") is None
        assert await page.locator("main script, main img[onerror]").count() == 0
        wide = await page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert not wide, "the page is wider than a narrow screen"


async def test_ten_thousand_conversations_are_paged_and_cancelled_in_bulk(server: Served) -> None:
    names = server.client.store.all_shards[0]
    commands: list[tuple[object, ...]] = []
    for number in range(10_000):
        cid = f"many-{number:05}"
        meta = server.client.store.known_keys(cid).meta
        facts = ("last_id", 1, "title", f"Task {number}", "state", "running", "created_ms", number + 1)
        commands += [("HSET", meta, *facts), ("ZADD", names.index, number + 1, cid)]
    for at in range(0, len(commands), 2_000):
        await server.client.store.connection.call_many(commands[at : at + 2_000])  # type: ignore[arg-type]
    real = [await server.client.submit("x", title=f"Real {number}") for number in range(3)]
    async with opened(f"{server.url}/", key=await server.token("*")) as page:
        await page.get_by_role("link", name="Real 2").wait_for()
        assert await page.locator("tbody tr").count() == 100
        older = page.get_by_role("button", name="Older")
        await older.evaluate("button => { button.click(); button.click(); }")  # before the first page has come
        await page.get_by_role("link", name="Task 9900").wait_for()
        await page.get_by_role("status").get_by_text("page 2", exact=True).wait_for(timeout=5_000)
        await older.click()
        await page.get_by_role("link", name="Task 9800").wait_for()
        await page.get_by_role("button", name="Newer").click()
        await page.get_by_role("button", name="Newer").click()
        for number in range(3):
            await page.get_by_label(f"Choose Real {number}").check()
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_label("Reason").fill("a test")
        await page.get_by_role("dialog").get_by_role("button", name="Cancel").last.click()
        await page.get_by_text("3 done.").wait_for()
    for cid in real:
        kinds = [event.kind for event in await server.client.events(cid)]
        assert kinds[-1] == "action.change_agent_state"


async def test_page_files_need_no_key_and_forbid_foreign_scripts(server: Served) -> None:
    async with server.as_("") as client:
        for path in ("/", "/web/main.js", "/web/vendored/preact.js", "/web/page.css", "/web/icon.svg"):
            answer = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "script-src 'self'; style-src 'self';" in policy
            assert "require-trusted-types-for 'script'; trusted-types dompurify" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert "<script>" not in (await client.get("/")).text
        for path in ("/web/../pages.py", "/web/pages.py", "/web/", "/web/%2e%2e/pages.py"):
            assert (await client.get(path)).status_code in (401, 404), path
        assert (await client.post("/")).status_code != 200
        assert json.loads((await client.get("/health")).text) == {"status": "ok"}


async def test_a_link_enters_once_and_a_wrong_one_never(server: Served, tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_URL=server.log.operator)
    link = ("open", "--link", "--print", "--server", server.url)
    done = await asyncio.to_thread(deckhands, *link, env=env)
    address = done.out.strip()
    assert address.startswith(f"{server.url}/#/enter/")
    async with opened(address) as page:
        await page.get_by_role("heading", name="Conversations").wait_for()
        assert "enter" not in page.url
        assert await page.evaluate("sessionStorage.getItem('deckhands.key').slice(0, 3)") == "dh_"
    ticket = address.rpartition("/")[2]
    async with server.as_("") as client:
        for sent, status in ((ticket, 401), ("x" * 43, 401), ("../" * 10, 422), (None, 422)):
            answer = await client.post("/entries", json={"ticket": sent})
            assert answer.status_code == status, sent
        assert (await client.post("/entries", content=b"x")).status_code == 415  # it is checked like every body
        entry = await server.gateway.tickets.issue_entry("dh_a_b")
        assert (await client.get(f"/conversations/x/stream?ticket={entry}")).status_code == 401


async def test_up_serves_the_page_of_its_cluster(tmp_path: Path) -> None:
    def look() -> tuple[int, str]:
        few = ("--controllers", "1", "--tools", "0", "--ingresses", "0", "--web", "--web-port", "0")
        with cluster_up(tmp_path, *few, BROWSER="/bin/true") as running:
            assert running.stderr is not None
            address = next(line for line in running.stderr if "The page is" in line).split()[-1]
            with urllib.request.urlopen(address, timeout=60) as answer:
                return answer.status, answer.read().decode()

    status, text = await asyncio.to_thread(look)
    assert (status, "<title>Deckhands</title>" in text) == (200, True)
