"""Many short conversations through a small store: `python -m benchmarks.retiring --limit-mb 300`.

Conversations that have ended are put into a store of limited memory, as fast as the job `retire` takes them out again:
the producer waits while there are more than `--backlog`. Then every file of the archive is read and compared with its
manifest. Exits with 1 if the store refused a write, if a conversation is missing, or if a file is damaged.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from celery import Celery

from broker.contract.actions import AgentFinishAction, CmdRunAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationCreated, Event, ModelReply, TokenUsage
from broker.contract.observations import AgentStateChangedObservation, CmdOutputMetadata, CmdOutputObservation
from broker.contract.recall import RecallAction, RecallType
from broker.runtime.ids import new_conversation_id
from broker.store.store import open_store
from deckhands.client.archive.archived_file import ArchivedFile
from deckhands.client.client import Client
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec

PRODUCERS = 8
ASKING_SECONDS = 2.0
LOOK_SECONDS = 0.2
MB = 2**20


@dataclass(slots=True)
class Run:
    """One run: what was begun, and how much memory the store had in use at each look."""

    begun: int = 0
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)
    waiting: int = 0


def short_log() -> list[Event]:
    """A task, three commands and the end: 14 events."""

    def state(name: AgentState) -> Event:
        return AgentStateChangedObservation(agent_state=name)

    events: list[Event] = [
        MessageAction(content="Fix the failing test of the parser, please. " * 4, source="user"),
        RecallAction(recall_type=RecallType.WORKSPACE_CONTEXT, query="Fix the failing test."),
        state(AgentState.RUNNING),
    ]
    for number in range(3):
        usage = TokenUsage(prompt_tokens=1_000, completion_tokens=50)
        events.append(ModelReply(model="acme/large", usage=usage, cost_usd=0.01, content=f"Step {number}. " * 10))
        events.append(CmdRunAction(command=f"make test-{number}"))
        said = CmdOutputMetadata(exit_code=0)
        events.append(CmdOutputObservation(cause=len(events) + 1, command="", content="1 passed\n" * 40, metadata=said))
    return [*events, AgentFinishAction(final_thought="All tests pass."), state(AgentState.FINISHED)]


async def measure(directory: Path, count: int, limit_mb: int, backlog: int) -> int:
    """Run once, print what was found, and return the exit status."""
    archive, rules = directory / "archive", directory / "retention.toml"
    rules.write_text('[[rule]]\nage = "0s"\n')
    environment = {"DECKHANDS_ARCHIVE": str(archive), "DECKHANDS_RETENTION": str(rules)}
    cluster = Cluster(ClusterSpec(directory, controllers=0, tools=0, jobs=1, environment=environment), on_notice=print)
    await cluster.start()
    run = Run()
    try:
        await cluster.until_ready()
        async with Client(await open_store(cluster.url)) as client:
            call = client.store.connection.call
            await call("CONFIG", "SET", "maxmemory", limit_mb * MB)
            began = time.perf_counter()
            numbers, log = iter(range(count)), short_log()
            tasks = [_produce(client, numbers, run, log, backlog) for _ in range(PRODUCERS)]
            watching = asyncio.create_task(_watch(client, run))
            sending = asyncio.create_task(_retire(cluster.store.celery_url))
            await asyncio.gather(*tasks)
            while await client._conversations.count():  # noqa: SLF001
                await asyncio.sleep(LOOK_SECONDS)
            run.seconds = time.perf_counter() - began
            watching.cancel()
            sending.cancel()
            refused = [line for line in str(await call("INFO", "errorstats")).split("\\r\\n") if "OOM" in line]
    finally:
        await cluster.stop()
    return _report(run, archive, count, refused)


async def _produce(client: Client, numbers: Iterator[int], run: Run, log: list[Event], backlog: int) -> None:
    for number in numbers:
        while run.waiting > backlog:
            await asyncio.sleep(LOOK_SECONDS / 4)
        conversation_id = new_conversation_id()
        created = ConversationCreated(conversation_id=conversation_id, title=f"Task {number}")
        await client.log.create_from(created, log, key="begin")
        run.begun += 1
        run.waiting += 1


async def _watch(client: Client, run: Run) -> None:
    while True:
        memory = str(await client.store.connection.call("INFO", "memory")).split("used_memory:")[1].split("\\r")[0]
        run.memory.append(int(memory))
        run.waiting = await client._conversations.count()  # noqa: SLF001
        if len(run.memory) % 300 == 0:
            print(f"{run.begun:,} begun, {run.waiting:,} in the store, {int(memory) / MB:.1f} MB", flush=True)
        await asyncio.sleep(LOOK_SECONDS)


async def _retire(url: str) -> None:
    """Ask for the job again and again; one that is at work is not disturbed. A beat does it once a minute."""
    app = Celery(broker=url, set_as_current=False)
    while True:
        await asyncio.to_thread(app.send_task, "deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
        await asyncio.sleep(ASKING_SECONDS)


def _report(run: Run, archive: Path, count: int, refused: list[str]) -> int:
    files = [str(path) for path in archive.rglob("*.zip")]
    began = time.perf_counter()
    with ProcessPoolExecutor(2) as pool:
        damaged = sum(pool.map(_is_damaged, files, chunksize=500))
    later = run.memory[len(run.memory) // 4 :]
    print(f"{run.begun:,} conversations in {run.seconds:,.0f} s: {run.begun / run.seconds:,.0f} a second.")
    print(
        f"Memory of the store: at most {max(run.memory) / MB:.1f} MB; {min(later) / MB:.1f} to {max(later) / MB:.1f} MB"
    )
    print(f"  after the first quarter. Refused writes: {refused or 'none'}.")
    size = sum(Path(path).stat().st_size for path in files)
    print(f"In the archive: {len(files):,} files, {size / MB:,.1f} MB; damaged: {damaged}; read again in ", end="")
    print(f"{time.perf_counter() - began:,.0f} s.")
    return 0 if len(files) == count and not damaged and not refused else 1


def _is_damaged(path: str) -> int:
    file = Path(path)
    try:
        with file.open("rb") as content:
            ArchivedFile(content, file.stem, size_bytes=file.stat().st_size).check()
    except Exception as error:  # noqa: BLE001  (whatever it is, it is counted)
        print(f"{path}: {error}")
        return 1
    return 0


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retiring", description=__doc__)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--limit-mb", type=int, default=300, help="the store's maxmemory")
    parser.add_argument("--backlog", type=int, default=5_000, help="the producer waits while more are in the store")
    parser.add_argument("--directory", type=Path, help="where the store and the archive are; by default temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        sizes = arguments.conversations, arguments.limit_mb, arguments.backlog
        sys.exit(asyncio.run(measure(Path(directory), *sizes)))


if __name__ == "__main__":
    main()
