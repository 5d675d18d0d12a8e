"""What the web page needs for one long conversation, in headless Chromium: time to its end, memory, and scrolling.

The first paint is timed from the start of the navigation until the last step is drawn; the server and the browser share
the machine. Memory is the JavaScript heap after a collection, when every event has been read.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Result, Spread
from broker.contract.actions import CmdRunAction
from broker.contract.events import Event, ModelReply, TokenUsage
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store
from deckhands.client.client import Client
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.browser_pages import opened
from tests.server_parts import add_key

PAINT_TARGET_MS = 1_000.0
MEMORY_TARGET_MB = 150.0
FRAME_TARGET_MS = 50.0
OUTPUT = "\n".join(f"tests/test_cart.py::test_{number} PASSED" for number in range(20))
BATCH = 500
SCROLLS = 60

DRAWN = "(last) => [...document.querySelectorAll('.item')].some((one) => Number(one.dataset.last) === last)"
READ = "(text) => [...document.querySelectorAll('.fact')].some((one) => one.textContent.trim() === text)"
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
        frame, gaps = await page.evaluate(SCROLLED, SCROLLS)
        session = await page.context.new_cdp_session(page)
        await session.send("HeapProfiler.collectGarbage")
        heap = (await session.send("Runtime.getHeapUsage"))["usedSize"]
        cards = await page.locator(".item").count()
    return {"painted": painted, "whole": whole, "heap": heap / 1e6, "frame": frame, "gaps": gaps, "cards": cards}


async def measure(bench: Bench) -> Result:
    """Look several times at a conversation with 20,000 events."""
    events = bench.choose(smoke=600, short=20_000, full=20_000)
    rounds = bench.choose(smoke=1, short=3, full=7)
    async with AsyncExitStack() as stack:
        valkey = EmbeddedValkey(bench.directory)
        await valkey.start()
        stack.push_async_callback(valkey.stop)
        store = await open_store(valkey.url)
        gateway = Gateway(store, options=ServerOptions(port=0))
        stack.push_async_callback(gateway.aclose)
        client, made = Client(store), 0
        cid = await client.submit("Work for long", title="A long conversation")
        last = await client.log.load_last_id(cid)
        while last < events:
            await client.log.append(cid, steps(BATCH // 3, last))
            last, made = await client.log.load_last_id(cid), made + BATCH // 3
        port = await stack.enter_async_context(serve_in_loop(gateway))
        key = await add_key(store, requests_per_minute=100_000)
        seen = [await look(f"http://127.0.0.1:{port}/#/c/{cid}", key, last, made) for _ in range(rounds)]

    def figure(name: str, unit: str, field: str, target: float | None = None) -> Figure:
        return Figure(name, unit, Spread.of(one[field] for one in seen), target)

    return Result(
        f"The page with a conversation of {last:,} events",
        [
            figure("its end is drawn after", "ms", "painted", PAINT_TARGET_MS),
            figure("all its events are read after", "ms", "whole"),
            figure("memory of the page's scripts, when all are read", "MB", "heap", MEMORY_TARGET_MB),
            figure("a scroll is drawn within, p95", "ms", "frame", FRAME_TARGET_MS),
            figure("scrolls that showed a gap", "", "gaps", 0),
            figure("cards that exist", "", "cards"),
        ],
        "The server, its store and the browser share the machine.",
    )
