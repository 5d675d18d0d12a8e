"""A program that fails a group of servers over again and again while owners and producers append to its conversations.

`python -m tests.fail_over_run PROGRAM FOLDER COUNT SEED store|conversation KIND SECONDS` writes FOLDER/history.json
and FOLDER/logs.json, and prints a line for each fail-over. `run_side_by_side` runs several of them and checks them all.

Holds: whether an event was acknowledged is recorded from the replies of the public calls, before anything is checked.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import math
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.contract import ConversationCreated
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.append_call import Appended, Conflict, Duplicate
from broker.log.event_log import EventLog
from broker.runtime import Acks, EventsLost
from broker.store.keys import ShardKeys
from broker.store.routing import find_slot
from broker.store.store import Store, open_store
from tests.broker_parts import enter, message
from tests.clusters import Cluster, SlotGroup
from tests.fail_over_history import PRODUCER, History, describe_times, find_faults, unpack
from tests.polling import unhurried, until
from tests.sentinels import Fault, Group, SentinelGroup, Server, begin_fail_over, end_fail_over

CONVERSATIONS = 6
EVENTS_PER_OWNER = 40
PAUSE_SECONDS = 0.05
DOWN_AFTER_MS = 1_000
LIMIT_SECONDS = 120.0
RARE: tuple[Fault, ...] = ("stop", "cut")
"""Faults after which Sentinel takes ten seconds to turn the stale primary into a replica."""
RARE_SHARE = 0.1


class Workload:
    """Owners that follow each other in every conversation, and a producer for each."""

    def __init__(self, store: Store, history: History, acks: Acks | None) -> None:
        self.store, self.history, self.acks = store, history, acks
        self.log = EventLog(store)
        self.ids = [f"conv-{number}" for number in range(CONVERSATIONS)]
        self.is_over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def create(self) -> None:
        for conversation_id in self.ids:
            created = ConversationCreated(conversation_id=conversation_id, acks=self.acks)
            await self.log.create(created, [message("start")], key="create")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for conversation_id in self.ids:
                group.create_task(self._own(conversation_id))
                group.create_task(self._produce(conversation_id))

    async def pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.is_over.wait(), PAUSE_SECONDS)

    async def _own(self, conversation_id: str) -> None:
        number = 0
        while not self.is_over.is_set():
            number += 1
            worker = f"{conversation_id}-w{number}"
            membership = await enter(self.store, worker)
            await self._work(conversation_id, worker)
            await membership.leave()

    async def _work(self, conversation_id: str, worker: str) -> None:
        """Append as one owner, until another one is to follow or the conversation has slipped away."""
        claimed = await Owners(self.store).claim(conversation_id, worker)
        if not isinstance(claimed, ClaimedConversation):
            await self.pause()
            return
        last, checksum = claimed.last_id, ""
        for _ in range(EVENTS_PER_OWNER):
            number, mark = self.history.call(conversation_id, worker, int(claimed.ownership.token))
            try:
                outcome = await self.log.append_as_owner(
                    claimed.ownership, [message(mark)], expected_last_id=last, checksum=checksum
                )
                while isinstance(outcome, Conflict):
                    last, checksum = outcome.last_id, ""
                    outcome = await self.log.append_as_owner(claimed.ownership, [message(mark)], expected_last_id=last)
            except EventsLost:  # it has seen an event that had not been acknowledged yet; the checker knows if it had
                return
            if not isinstance(outcome, Appended | Duplicate):  # another primary does not know the claim
                return
            self.history.acknowledge(number, outcome.first_id, self._loop.time())
            last, checksum = outcome.last_id, outcome.checksum
            await self.pause()
            if self.is_over.is_set():
                return

    async def _produce(self, conversation_id: str) -> None:
        while not self.is_over.is_set():
            number, mark = self.history.call(conversation_id, PRODUCER, 0)
            outcome = await self.log.append(conversation_id, [message(mark)], quiet=True)
            assert isinstance(outcome, Appended | Duplicate), outcome
            self.history.acknowledge(number, outcome.first_id, self._loop.time())
            for _ in range(4):
                await self.pause()


@contextlib.asynccontextmanager
async def running_group(program: str, folder: Path, kind: str) -> AsyncIterator[Group]:
    """Run a group under Sentinels (`plain`), which may reach its servers by links (`linked`), or one of a `cluster`."""
    if kind == "cluster":
        folder.mkdir()
        async with Cluster(program, folder, replicas=2, node_timeout_ms=DOWN_AFTER_MS).running() as cluster:
            yield SlotGroup(cluster, find_slot(ShardKeys(0).root))
    else:
        sentinels = SentinelGroup(program, folder, down_after_ms=DOWN_AFTER_MS, is_linked=kind == "linked")
        async with sentinels.running() as group:
            yield group


async def run(
    program: str, folder: Path, *, count: int, seed: int, of_conversation: bool, kind: str, seconds: float
) -> None:
    """Fail a group over `count` times under load, and save the history and the logs.

    Args:
        seconds: after this time, no further fail-over begins.
        of_conversation: the conversations demand the confirmation by a replica; otherwise the store does.
        kind: see `running_group`.
    """
    chance, history, loop = random.Random(seed), History(), asyncio.get_running_loop()
    end = loop.time() + seconds
    async with running_group(program, folder / "group", kind) as group:
        acks: Acks = "local" if of_conversation else "replica"
        store = await open_store(group.url, shards=1, patience_seconds=unhurried(LIMIT_SECONDS), acks=acks)
        workload = Workload(store, history, "replica" if of_conversation else None)
        await workload.create()
        working = asyncio.create_task(workload.run())
        for number in range(count):
            can_order = "valkey" in program or kind == "cluster"
            fault = choose_fault(chance, is_linked=kind == "linked", can_order=can_order)
            old = await group.primary()
            new = await begin_fail_over(group, old, fault)
            history.promotions.append(loop.time())
            await until_all_continue(workload, history.promotions[-1])
            if new not in await group.find_primaries():
                history.replaced.append(history.promotions[-1])
            await end_fail_over(group, old, new, fault)
            sys.stdout.write(f"{number + 1} {fault} {history.count_acknowledged()}\n")
            sys.stdout.flush()
            if working.done() or loop.time() > end:
                break
        workload.is_over.set()
        await working
        await store.aclose()
        await save(folder, history, await group.primary(), workload)


def choose_fault(chance: random.Random, *, is_linked: bool, can_order: bool) -> Fault:
    """Choose a fault: a rare one seldom, because the group needs long to be whole after it."""
    if chance.random() < RARE_SHARE:
        return chance.choice(RARE) if is_linked else "stop"
    return chance.choice(("kill", "kill", "order")) if can_order else "kill"


async def until_all_continue(workload: Workload, promoted: float) -> None:
    """Wait until each conversation has an event that was acknowledged after a promotion."""

    def all_have() -> bool:
        return all(workload.history.latest.get(conversation_id, 0.0) >= promoted for conversation_id in workload.ids)

    await until(all_have, limit=LIMIT_SECONDS, what="event of each conversation after the promotion")


async def save(folder: Path, history: History, primary: Server, workload: Workload) -> None:
    logs = {}
    for conversation_id in workload.ids:
        entries = await primary.call("XRANGE", workload.store.known_keys(conversation_id).events, "-", "+")
        logs[conversation_id] = [
            [entry.decode(), base64.b64encode(unpack(fields)).decode()] for entry, fields in entries
        ]
    (folder / "logs.json").write_text(json.dumps(logs))
    history.save(folder / "history.json")


@dataclass(frozen=True)
class Result:
    """What several runs have shown together."""

    fail_overs: int
    acknowledged: int
    unknown: int
    faults: list[str]
    takeover_seconds: list[float]
    replaced: int
    kinds: dict[str, int]

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return (
            f"{self.fail_overs} fail-overs ({kinds}), {self.acknowledged} events acknowledged, {self.unknown} not, "
            f"{len(self.faults)} contradictions; {self.replaced} promoted servers were replaced at once; from the other promotions to the next "
            f"event of each conversation: "
            f"{describe_times(self.takeover_seconds)}"
        )


async def run_side_by_side(
    programs: Sequence[str], folder: Path, *, count: int, seed: int, is_cluster: bool = False, seconds: float = math.inf
) -> Result:
    """Run one group of servers for each program at the same time, `count` fail-overs together, and check all of them."""
    each = -(-count // len(programs))
    kinds_of_groups = (
        itertools.repeat("cluster") if is_cluster else itertools.chain(["linked"], itertools.repeat("plain"))
    )
    runs = [
        asyncio.create_task(_run_one(program, folder / str(number), each, seed + number, number, kind, seconds))
        for number, (program, kind) in enumerate(zip(programs, kinds_of_groups, strict=False))
    ]
    outputs = await asyncio.gather(*runs)
    histories = [History.load(folder / str(number) / "history.json") for number in range(len(programs))]
    kinds: dict[str, int] = {}
    for line in "".join(outputs).splitlines():
        kinds[line.split()[1]] = kinds.get(line.split()[1], 0) + 1
    faults = []
    for number, history in enumerate(histories):
        raw = json.loads((folder / str(number) / "logs.json").read_text())
        logs = {name: [(entry.encode(), base64.b64decode(text)) for entry, text in log] for name, log in raw.items()}
        faults += [f"group {number}: {fault}" for fault in find_faults(history, logs)]
    acknowledged = sum(history.count_acknowledged() for history in histories)
    return Result(
        fail_overs=sum(len(history.promotions) for history in histories),
        acknowledged=acknowledged,
        unknown=sum(len(history.calls) for history in histories) - acknowledged,
        faults=faults,
        takeover_seconds=[seconds for history in histories for seconds in history.takeover_seconds()],
        replaced=sum(len(history.replaced) for history in histories),
        kinds=kinds,
    )


async def _run_one(program: str, folder: Path, count: int, seed: int, number: int, kind: str, seconds: float) -> str:
    """Run one group in a separate process, half of them with the demand of the conversations."""
    folder.mkdir(parents=True)
    demand = ("store", "conversation")[number % 2]
    arguments = [program, str(folder), str(count), str(seed), demand, kind, str(seconds)]
    command = [sys.executable, "-m", "tests.fail_over_run", *arguments]
    with (folder / "errors").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)  # it ends its servers
                await process.wait()
    assert process.returncode == 0, f"group {number}: {(folder / 'errors').read_text()[-2_000:]}"
    return output.decode()


if __name__ == "__main__":
    name, place, times, start, demand, which, limit = sys.argv[1:]
    asyncio.run(
        run(
            name,
            Path(place),
            count=int(times),
            seed=int(start),
            of_conversation=demand == "conversation",
            kind=which,
            seconds=float(limit),
        )
    )
