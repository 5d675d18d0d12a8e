"""What the web page needs in a large cluster, in headless Chromium: first paint, memory, and scrolling.

The cluster has 10,000 live conversations, one of them with 20,000 events, and an archive. The first paint is timed from
the start of the navigation until the last step, or the newest conversation, is drawn; the server and the browser share
the machine. Memory is the JavaScript heap after a collection, when every event has been read. A frame's time is that
between two frames while a reader scrolls without a pause, through the whole list of steps.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from playwright.async_api import CDPSession

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Result, Spread
from broker.contract.actions import CmdRunAction
from broker.contract.events import Event, ModelReply, TokenUsage
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from broker.runtime import new_conversation_id
from broker.store.connection import Argument
from broker.store.embedded import EmbeddedValkey
from broker.store.store import Store, open_store
from deckhands.client.archive.archive import Archive
from deckhands.client.client import Client
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.browser_pages import opened
from tests.server_parts import add_key

PAINT_TARGET_MS = 1_000.0
MEMORY_TARGET_MB = 150.0
SCROLL_TARGET_MS = 50.0
FRAME_TARGET_MS = 34.0
"""Two frames of a screen with 60 Hz."""
FRAMES_WATCHED = 300
LINKS_PER_FILE = 30_000
"""A file system allows at least so many names of one file."""
OUTPUT = "\n".join(f"tests/test_cart.py::test_{number} PASSED" for number in range(20))
BATCH = 500
SCROLLS = 60
LIVE, ROWS_OF_A_PAGE = 10_000, 100
TITLE = "A long conversation"
"""Of the newest one."""

DRAWN = "(last) => [...document.querySelectorAll('.item')].some((one) => Number(one.dataset.last) === last)"
READ = "(text) => [...document.querySelectorAll('.fact')].some((one) => one.textContent.trim() === text)"
ROWS = "(title) => [...document.querySelectorAll('.list tbody a')].some((one) => one.textContent === title)"
FRAMES = """async ([selector, count, pixels]) => {
  const list = selector ? document.querySelector(selector) : document.scrollingElement, times = [];
  let before = await new Promise(requestAnimationFrame), sign = list.scrollTop > 0 ? -1 : 1;
  for (let number = 0; number < count; number += 1) {
    const from = list.scrollTop;
    list.scrollTop += sign * pixels;
    if (list.scrollTop === from) sign = -sign;
    const now = await new Promise(requestAnimationFrame);
    times.push(now - before);
    before = now;
  }
  times.sort((one, other) => one - other);
  return times[Math.floor(times.length * 0.95)];
}"""
SCROLLED = """async (count) => {
  const list = document.querySelector(".timeline"), times = [];
  let gaps = 0;
  for (let number = 0; number < count; number += 1) {
    const start = performance.now();
    list.scrollTop -= list.clientHeight * (number % 10 === 9 ? 200 : 0.8);
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    times.push(performance.now() - start);
    const box = list.getBoundingClientRect(), middle = document.elementFromPoint(box.x + 200, box.y + box.height / 2);
    if (!middle?.closest(".slot")) gaps += 1;
  }
  times.sort((one, other) => one - other);
  return [times[Math.floor(times.length * 0.95)], gaps];
}"""


def steps(count: int, first: int) -> list[Event]:
    """Return events of steps with a command each."""
    found: list[Event] = []
    for number in range(count):
        usage = TokenUsage(prompt_tokens=20_000 + number, completion_tokens=80)
        found.append(ModelReply(model="acme/large", content=f"Look at part {number}.", usage=usage, cost_usd=0.01))
        found.append(CmdRunAction(command=f"python -m pytest -q tests/part_{number}.py"))
        found.append(
            CmdOutputObservation(
                cause=first + len(found), command="", content=OUTPUT, metadata=CmdOutputMetadata(exit_code=0)
            )
        )
    return found


async def look(address: str, key: str, last: int, count: int) -> dict[str, Any]:
    """Open the conversation once, and return what it took."""
    async with opened("about:blank", key="") as page:
        await page.context.add_init_script(f"try {{ sessionStorage.setItem('deckhands.key', {key!r}) }} catch {{}}")
        await page.goto(address)
        await page.wait_for_function(DRAWN, arg=last, polling="raf")
        painted = await page.evaluate("performance.now()")
        await page.wait_for_function(READ, arg=f"Steps {count}")
        whole = await page.evaluate("performance.now()")
        scroll, gaps = await page.evaluate(SCROLLED, SCROLLS)
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable", {"timeDomain": "threadTicks"})
        started = await _main_thread_ms(session)
        frame = await page.evaluate(FRAMES, [".timeline", FRAMES_WATCHED, 150])
        cpu = (await _main_thread_ms(session) - started) / FRAMES_WATCHED
        await session.send("HeapProfiler.collectGarbage")
        heap = (await session.send("Runtime.getHeapUsage"))["usedSize"]
        cards = await page.locator(".item").count()
    found = {"painted": painted, "whole": whole, "heap": heap / 1e6, "scroll": scroll, "gaps": gaps, "cards": cards}
    return found | {"frame": frame, "cpu": cpu}


async def _main_thread_ms(session: CDPSession) -> float:
    """Return the CPU that the tasks of the page's main thread have taken."""
    metrics = (await session.send("Performance.getMetrics"))["metrics"]
    return 1000.0 * next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


async def look_at_list(address: str, key: str, archived_id: str) -> dict[str, Any]:
    """Open the list of conversations once, scroll it, turn a page, and open an archived conversation."""
    async with opened("about:blank", key="") as page:
        await page.context.add_init_script(f"try {{ sessionStorage.setItem('deckhands.key', {key!r}) }} catch {{}}")
        await page.goto(f"{address}/#/")
        await page.wait_for_function(ROWS, arg=TITLE, polling="raf")
        painted = await page.evaluate("performance.now()")
        frame = await page.evaluate(FRAMES, ["", FRAMES_WATCHED, 60])
        started = await page.evaluate("performance.now()")
        await page.get_by_role("button", name="Older").click()
        await page.wait_for_function(ROWS, arg=f"Task {LIVE - ROWS_OF_A_PAGE}", polling="raf")
        turned = await page.evaluate("performance.now()") - started
        session = await page.context.new_cdp_session(page)
        await session.send("HeapProfiler.collectGarbage")
        heap = (await session.send("Runtime.getHeapUsage"))["usedSize"]
        started = await page.evaluate("performance.now()")
        await page.evaluate(f"location.hash = '#/c/{archived_id}'")
        await page.locator(".item").first.wait_for()
        found = await page.evaluate("performance.now()") - started
    return {"list": painted, "list_frame": frame, "turned": turned, "list_heap": heap / 1e6, "archived": found}


async def fill_list(store: Store) -> None:
    """Add the index entries of live conversations."""
    names = store.all_shards[0]
    for first in range(0, LIVE, BATCH):
        commands: list[tuple[Argument, ...]] = []
        for number in range(first, first + BATCH):
            cid = f"live-{number:05}"
            facts = ("last_id", 1, "title", f"Task {number}", "state", "running", "created_ms", number + 1)
            commands += [("HSET", store.known_keys(cid).meta, *facts), ("ZADD", names.index, number + 1, cid)]
        await store.call_many(commands)


async def fill_archive(directory: Path, archive: Path, count: int) -> str:
    """Fill an archive with `count` names of archived conversations, and return the id of one that can be opened."""
    directory.mkdir()
    valkey = EmbeddedValkey(directory)
    await valkey.start()
    try:
        async with await Client.connect(valkey.url) as client:
            cid = await client.submit("Count the files", title="An archived conversation")
            await client.log.append(cid, steps(3, await client.log.load_last_id(cid)))
            await Archive(f"file://{archive}").save(client.store, await client.events(cid))
    finally:
        await valkey.stop()
    (file,) = archive.rglob(f"*{cid}*")
    await asyncio.to_thread(_link_many, file, count)
    return cid


def _link_many(file: Path, count: int) -> None:
    """Give the file other names, as if each were another conversation."""
    source, root = file, file.parent.parent
    for number in range(1, count):
        other = new_conversation_id()
        name = root / hashlib.sha256(other.encode()).hexdigest()[:2] / f"{other}.zip"
        name.parent.mkdir(exist_ok=True)
        if number % LINKS_PER_FILE == 0:
            shutil.copyfile(file, name)
            source = name
        else:
            os.link(source, name)


async def measure(bench: Bench) -> Result:
    """Look several times at a conversation with 20,000 events."""
    events = bench.choose(smoke=600, short=20_000, full=20_000)
    archived = bench.choose(smoke=1_000, short=100_000, full=1_000_000)
    rounds = bench.choose(smoke=1, short=3, full=7)
    archive = bench.directory / "archive"
    archived_id = await fill_archive(bench.directory / "earlier", archive, archived)
    async with AsyncExitStack() as stack:
        valkey = EmbeddedValkey(bench.directory)
        await valkey.start()
        stack.push_async_callback(valkey.stop)
        store = await open_store(valkey.url)
        gateway = Gateway(store, f"file://{archive}", ServerOptions(port=0))
        stack.push_async_callback(gateway.aclose)
        client, made = Client(store), 0
        await fill_list(store)
        cid = await client.submit("Work for long", title=TITLE)
        last = await client.log.load_last_id(cid)
        while last < events:
            await client.log.append(cid, steps(BATCH // 3, last))
            last, made = await client.log.load_last_id(cid), made + BATCH // 3
        port = await stack.enter_async_context(serve_in_loop(gateway))
        key = await add_key(store, requests_per_minute=100_000)
        address = f"http://127.0.0.1:{port}"
        seen = [
            await look(f"{address}/#/c/{cid}", key, last, made) | await look_at_list(address, key, archived_id)
            for _ in range(rounds)
        ]

    def figure(name: str, unit: str, field: str, target: float | None = None) -> Figure:
        return Figure(name, unit, Spread.of(one[field] for one in seen), target)

    return Result(
        f"The page with {archived:,} archived and {LIVE:,} live conversations, and one of {last:,} events",
        [
            figure("its end is drawn after", "ms", "painted", PAINT_TARGET_MS),
            figure("all its events are read after", "ms", "whole"),
            figure("memory of the page's scripts, when all are read", "MB", "heap", MEMORY_TARGET_MB),
            figure("a scroll is drawn within, p95", "ms", "scroll", SCROLL_TARGET_MS),
            figure("a frame while scrolling steps, p95", "ms", "frame", FRAME_TARGET_MS),
            figure("CPU of the page for such a frame", "ms", "cpu", FRAME_TARGET_MS / 2),
            figure("scrolls that showed a gap", "", "gaps", 0),
            figure("cards that exist", "", "cards"),
            figure("the list of conversations is drawn after", "ms", "list", PAINT_TARGET_MS),
            figure("a frame while scrolling the list, p95", "ms", "list_frame", FRAME_TARGET_MS),
            figure("its next page is drawn within", "ms", "turned", PAINT_TARGET_MS),
            figure("memory of the list's scripts", "MB", "list_heap", MEMORY_TARGET_MB),
            figure("an archived conversation is drawn within", "ms", "archived", PAINT_TARGET_MS),
        ],
        "The server, its store and the browser share the machine.",
    )
