"""Parked conversations: what each keeps in the store, and how soon it is found and woken.

    python -m benchmarks.parked [--count 100000]

The real client submits them, one real controller takes the first turn of each (a scripted model inside it asks the user
a question) and releases them. Then nothing but the store holds them. Its memory is `used_memory` beyond that of a store
with a thousand of them, divided by the others; the kinds of keys are those of a sample. A wake is a user's message: the
time from its submission to the reply that the model gives at once, in the log. Beside them, a PING of the same store in
the same run, because a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.cluster import BenchCluster, read_used_memory, running_cluster
from benchmarks.eval_figures import Line, percentile, show
from benchmarks.machine import cpu_seconds
from broker.contract import LLMSpec, ModelReply
from broker.contract.specs import AgentSpec
from broker.log.conversations import Conversations
from broker.log.selection import ConversationQuery, Selection

FIRST = 1_000
AT_ONCE = 200
SAMPLES = 200
PAGE = 50
IDLE_SECONDS = 1.0
POLL_SECONDS = 0.2
KINDS = ("events", "meta", "once", "snapshot", "caller", "masked")
TARGET_BYTES = 4_096
TARGET_MS = 50.0


def write_script(path: Path) -> Path:
    """Write a script whose every turn asks the user a question."""
    path.write_text(
        json.dumps({"turns": [{"text": f"Done with part {number}. Shall I continue?"} for number in range(9)]})
    )
    return path


async def park(cluster: BenchCluster, model: str, count: int) -> list[str]:
    """Submit so many conversations, and return their ids once all of them wait for a user and have no owner."""
    numbers, found = iter(range(count)), list[str]()

    async def produce() -> None:
        for number in numbers:
            agent, labels = AgentSpec(llm=LLMSpec(model=model)), {"team": f"t{number % 100}"}
            task = f"Task {number}: say what you see."
            found.append(await cluster.client.submit(task, agent=agent, headless=False, labels=labels))

    await asyncio.gather(*(produce() for _ in range(AT_ONCE)))
    index, left = Conversations(cluster.client.store), found
    while left:
        rows = await index.load_rows(left[:10_000])
        assert not (bad := [row for row in rows if row.state in ("error", "stopped")]), bad[0]
        at_rest = {row.conversation_id for row in rows if row.state == "awaiting_user_input" and not row.owner}
        left = [one for one in left if one not in at_rest]
        await asyncio.sleep(POLL_SECONDS)
    return found


async def milliseconds(count: int, call: Callable[[int], Awaitable[object]]) -> list[float]:
    """Make so many calls, one after the other, and return how long each took."""
    found = []
    for number in range(count):
        began = time.perf_counter()
        await call(number)
        found.append(1_000 * (time.perf_counter() - began))
    return found


async def measure(directory: Path, count: int, write_as: str) -> None:
    """Run once and print what was found."""
    async with running_cluster(directory / "cluster") as cluster:
        client, store = cluster.client, cluster.client.store
        held = {"DECKHANDS_IDLE_SECONDS": str(IDLE_SECONDS), "DECKHANDS_MAX_CONVERSATIONS": "2000"}
        controller, model = await cluster.start_controller(**held), f"scripted/{write_script(directory / 's.json')}"
        await park(cluster, model, FIRST)
        before, began, used = await read_used_memory(cluster.client), time.monotonic(), cpu_seconds(controller)
        ids = await park(cluster, model, count)
        seconds, used = time.monotonic() - began, cpu_seconds(controller) - used
        each = (await read_used_memory(cluster.client) - before) / count
        chosen = random.Random(0).sample(ids, min(SAMPLES, count))
        lines = [
            Line("memory of the store", round(each), "bytes each", TARGET_BYTES),
            *[await _kind(cluster, chosen, kind) for kind in KINDS],
            Line("parked a second", round(count / seconds)),
            Line("CPU of the controller", round(1_000 * used / count, 2), "ms each"),
        ]
        index = Conversations(store)
        team = ConversationQuery(store, Selection(labels={"team": "t7"}))
        waiting = ConversationQuery(store, Selection(states=frozenset({"waiting"})))

        async def wake(number: int) -> None:
            after = await client.last_id(chosen[number])
            await client.send_message(chosen[number], "Continue.")
            async for event in client.tail(chosen[number], after=after, is_endless=True):
                if isinstance(event, ModelReply):
                    return

        works: dict[str, Callable[[int], Awaitable[object]]] = {
            "PING": lambda _: store.connection.call("PING"),
            "found by its id": lambda number: index.load_row(chosen[number]),
            "a page of 50": lambda _: index.list_recent(limit=PAGE),
            "a page of 50 with a label": lambda _: team.load_page(None, limit=PAGE),
            "a page of 50 that wait": lambda _: waiting.load_page(None, limit=PAGE),
            "woken, to the model's reply": wake,
        }
        floor = 0.0
        for name, work in works.items():
            taken = await milliseconds(len(chosen), work)
            floor = floor or percentile(taken, 0.99)
            ratio = percentile(taken, 0.99) / floor
            shown = f"ms (median {percentile(taken, 0.5):.2f}; {ratio:.1f} times a PING)"
            lines.append(Line(f"{name}, p99", round(percentile(taken, 0.99), 2), shown, TARGET_MS))
    show(write_as, f"{count:,} parked conversations, and {FIRST:,} before them", lines)


async def _kind(cluster: BenchCluster, ids: list[str], kind: str) -> Line:
    names = [f"{cluster.client.store.known_keys(one).root}:{kind}" for one in ids]
    replies = await cluster.client.store.call_many([("MEMORY", "USAGE", name, "SAMPLES", 0) for name in names])
    found = [reply or 0 for reply in replies]
    return Line(f"  {kind}", round(sum(found) / len(found)), "bytes each")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parked", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--write-as", default="parked", metavar="NAME", help="the name of the file written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        asyncio.run(measure(Path(folder), arguments.count, arguments.write_as))


if __name__ == "__main__":
    main()
