"""What one workspace's flood costs the others: a hundred megabytes, a million lines, ten thousand pieces a second; and
what the starts of hundreds of workspaces cost them, by two workers of the node.

    python benchmarks/neighbours.py [--seconds 5] [--quiet 4] [--starts 200] [--sandbox bwrap|none] [--pairs 0]

One tool worker's part in one process: real workspaces, a real store, the executor. While one conversation floods,
others run `true` without a pause; what is printed is how long they waited, without a flood and with each, how long the
process's loop was held up at most, and the memory of this process and of the host that was flooded. Times are wall
clock: on two processors the flood itself, the shell that reads it and the neighbours share them. With `--pairs 5`, only
starts are measured, in turns with as many seconds without any, and the ratios are printed: the load of a machine that
is used otherwise is in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import psutil

from broker.contract import codec
from broker.contract.actions import MessageAction, ToolCallAction
from broker.contract.events import ConversationCreated, EventSource, WorkspaceSpec, with_id
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.event_log import EventLog
from broker.store.embedded import EmbeddedValkey
from broker.store.store import Store, open_store
from broker.tools.custom_tools import custom_tool
from tool_worker.tools.offered import OfferedTools
from tool_worker.worker.executor import Executor
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.open_workspace import OpenWorkspace
from tool_worker.workspace.workspaces import Workspaces

FLOOD, CALLER = "flooding", "caller"
ALWAYS = {"timeout": 600, "blocking": True}
PIECES = "import time\nfor n in range({count}):\n print(n, flush=True)\n if n % 100 == 99: time.sleep(0.01)"
LOOK_SECONDS = 0.001


@cache
def long_text(megabytes: int) -> str:
    return "abcdefgh" * (megabytes << 17)


@custom_tool
def pour(megabytes: int) -> str:
    """Return a long text, which is there already: to make one holds up the interpreter, and is not part of ours."""
    return long_text(megabytes)


class Waits:
    """How long neighbours and the loop waited while something happened."""

    def __init__(self) -> None:
        self.each: list[float] = []
        self.held = 0.0
        self.host_bytes = 0
        self.own_bytes = 0

    def report(self) -> dict[str, float]:
        ranked = sorted(self.each)
        return {
            "commands": len(ranked),
            "p50_ms": round(ranked[len(ranked) // 2] * 1000, 2),
            "p99_ms": round(ranked[int(len(ranked) * 0.99)] * 1000, 2),
            "loop_held_ms": round(self.held * 1000, 1),
            "host_mb": round(self.host_bytes / 2**20, 1),
            "own_mb": round(self.own_bytes / 2**20, 1),
        }


async def watched(flood: Awaitable[object], quiet: Sequence[OpenWorkspace], ids: list[int], host: int) -> Waits:
    """Let neighbours run commands for as long as a flood lasts."""
    waits = Waits()
    task = asyncio.ensure_future(flood)

    async def run(workspace: OpenWorkspace) -> None:
        while not task.done():
            ids[0] += 1
            began = perf_counter()
            await workspace.run(ids[0], "bash", {"command": "true"})
            waits.each.append(perf_counter() - began)

    async def look() -> None:
        own, flooded = psutil.Process(), psutil.Process(host)
        while not task.done():
            began = perf_counter()
            await asyncio.sleep(LOOK_SECONDS)
            waits.held = max(waits.held, perf_counter() - began - LOOK_SECONDS)
            if int(began * 10) % 2:
                waits.host_bytes = max(waits.host_bytes, flooded.memory_info().rss)
                waits.own_bytes = max(waits.own_bytes, own.memory_info().rss)

    await asyncio.gather(look(), *map(run, quiet))
    await task
    return waits


async def measure(
    root: Path, store: Store, *, seconds: float, quiet: int, starts: int, sandbox: str, pairs: int
) -> dict[str, object]:
    workspaces, other = (Workspaces(root, sandbox=sandbox) for _ in range(2))
    log = EventLog(store)
    executor = Executor(log, workspaces, worker_id="bench", offered=OfferedTools([pour]))
    ids = [1]
    long_text(100)
    try:
        flooded = await workspaces.open(FLOOD)
        host = HostFolder(root, FLOOD).read_main_pid() or 0
        calm = [await workspaces.open(f"quiet-{number}") for number in range(quiet)]
        for name in (FLOOD, CALLER):
            await log.create(ConversationCreated(conversation_id=name))

        def command(text: str) -> Callable[[], Awaitable[object]]:
            ids[0] += 1
            return lambda number=ids[0]: flooded.run(number, "bash", {"command": text, **ALWAYS})

        async def call() -> None:
            await log.append(CALLER, [ToolCallAction(name="pour", arguments={"megabytes": 100})])
            action = with_id((await log.read(CALLER))[-1], await log.load_last_id(CALLER))
            delivery = ActionDelivery(CALLER, action.id, codec.encode(action.wire()), WorkspaceSpec(), "")
            await executor.execute(delivery, ActionClaimed(1))

        async def append() -> None:
            ends = perf_counter() + seconds
            while perf_counter() < ends:
                events = [MessageAction(content=f"piece {n}", source=EventSource.AGENT) for n in range(100)]
                await asyncio.gather(log.append(FLOOD, events), asyncio.sleep(0.01))

        async def start() -> None:
            workers = (workspaces, other)
            names = [f"started-{number}" for number in range(starts)]
            await asyncio.gather(*(workers[number % 2].open(name) for number, name in enumerate(names)))

        async def close() -> None:
            for number in range(starts):
                await (workspaces, other)[number % 2].close(f"started-{number}")

        pieces = PIECES.format(count=int(seconds * 10_000))
        floods: dict[str, Callable[[], Awaitable[object]]] = {
            "nothing": lambda: asyncio.sleep(seconds),
            "100 MB": command("yes abcdefg | head -c 100000000"),
            "a million lines": command("seq 1000000"),
            "10,000 pieces a second": command(f"python3 -c '{pieces}'"),
            "10,000 events a second": append,
            "a tool's answer of 100 MB": call,
            f"{starts} starts": start,
        }
        if pairs:
            found = []
            for _ in range(pairs):
                began = perf_counter()
                with_starts = (await watched(start(), calm, ids, host)).report()
                took = perf_counter() - began
                await close()
                without = (await watched(asyncio.sleep(took), calm, ids, host)).report()
                found.append((with_starts, without, took))
            return {"pairs": found, "ratios": _compare(found), "load": os.getloadavg()[0]}
        return {name: (await watched(flood(), calm, ids, host)).report() for name, flood in floods.items()}
    finally:
        await other.aclose()
        for state in workspaces.list():
            await workspaces.close(state.conversation_id)
        await workspaces.aclose()


def _compare(found: Sequence[tuple[dict[str, float], dict[str, float], float]]) -> dict[str, float]:
    """Return the medians of the pairs' ratios, and of the seconds that the starts took."""
    names = ("p50_ms", "p99_ms")
    ratios = {name: median(busy[name] / calm[name] for busy, calm, _ in found) for name in names}
    return {**ratios, "starts_seconds": median(took for *_, took in found)}


async def _main(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedValkey(Path(folder, "store"))
        await server.start()
        store = await open_store(server.url)
        try:
            own = {
                "seconds": options.seconds,
                "quiet": options.quiet,
                "starts": options.starts,
                "sandbox": options.sandbox,
                "pairs": options.pairs,
            }
            return await measure(Path(folder, "node"), store, **own)
        finally:
            await store.aclose()
            await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", choices=["bwrap", "none"], default="bwrap")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--quiet", type=int, default=4)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=0)
    print(json.dumps(asyncio.run(_main(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
