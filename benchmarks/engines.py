"""Trajectories per hour with four replicas of a model: `python -m benchmarks.engines`.

Trajectories with their tool times are replayed against stub engines with a prefix cache of blocks, by three policies:
FIFO to the engine with the fewest calls, consistent hashing of the id of a conversation, and the replicas of a quota
(docs/quotas.md) with the store's own functions. One tenant is there from the start; a second one with the same weight
comes when the caches are full.

Time is virtual: a clock that jumps to the next event. So the figures do not depend on the load of the machine, and the
time that the store itself takes is not among them.

`--trace FILE` replays recorded trajectories: a line for each, `{"group": NAME, "prompt": TOKENS, "turns": [[NEW_TOKENS,
REPLY_TOKENS, TOOL_SECONDS], …]}`. `--record FILE` writes such a file from the rollouts of a cluster (DECKHANDS_URL),
whose logs it still has. `--play FILE` makes trajectories to record: `--count` conversations of a separate cluster, at
the stub engine, with real shells. How long their commands take and how much they print is drawn as below; recorded are
the tokens and the times that result.

Without a trace, trajectories are drawn with a seed: prompts of 3,000 tokens that groups of eight share, 6 to 24 turns,
results of about 1,200 tokens, replies of about 200, and tools that take 2 s at the median and up to a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.cluster import running_cluster
from benchmarks.eval_figures import Line, show
from broker.contract import ModelReply
from broker.coordination import Membership
from broker.limits import CallGranted, CallOutcome, Governor, QuotaTable
from broker.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection, MemoryServer
from deckhands.client import Client, TaskSpec
from deckhands.rollouts import StubEngine, serve_stub
from tests.jumping_loop import JumpingLoop

BLOCK_TOKENS = 16
ENGINES = 4
SLOTS = 16
CACHE_TOKENS = 400_000
PREFILL_PER_SECOND = 8_000
TOKEN_SECONDS = 0.025
GROUP = 8
EARLY, LATE = "early", "late"
WORKER = "replayer"
SEED = 34
FOREVER = 1e9

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Turn:
    """A step: new tokens of its prompt, tokens of its reply, and the time of its tools."""

    new_tokens: int
    reply_tokens: int
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trajectory: the tokens of its first prompt, which its group shares, and its turns."""

    name: str
    group: str
    tenant: str
    prompt_tokens: int
    turns: tuple[Turn, ...]


def run_virtually(act: Callable[[ManualClock], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine in virtual time."""
    clock = ManualClock()
    with asyncio.Runner(loop_factory=lambda: JumpingLoop(clock)) as runner:
        return runner.run(act(clock))


class Engine:
    """A stub engine: prefills one prompt after another, decodes up to `SLOTS` replies, and keeps blocks as it can."""

    def __init__(self) -> None:
        self._cache: OrderedDict[int, None] = OrderedDict()  # hashes of blocks with all before them, oldest first
        self._pinned: Counter[int] = Counter()
        self._slots = asyncio.Semaphore(SLOTS)
        self._prefill = asyncio.Lock()
        self._freed = asyncio.Condition()
        self.prompt_blocks = self.hit_blocks = 0

    async def complete(self, prompt: Sequence[int], reply: Sequence[int], reply_tokens: int) -> None:
        """Answer a prompt: `prompt` has a number for each block, `reply` the numbers of the reply's blocks."""
        chain = _hash_chain(prompt)
        whole = _hash_chain(reply, chain[-1])
        async with self._slots:
            await self._pin([*chain, *whole])
            hits = next((at for at, block in enumerate(chain) if block not in self._cache), len(chain))
            self.prompt_blocks += len(chain)
            self.hit_blocks += hits
            async with self._prefill:
                await asyncio.sleep((len(chain) - hits) * BLOCK_TOKENS / PREFILL_PER_SECOND)
            self._keep(chain)
            await asyncio.sleep(reply_tokens * TOKEN_SECONDS)
            self._keep(whole)
            await self._unpin([*chain, *whole])

    async def _pin(self, blocks: Sequence[int]) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: len(self._pinned) + len(blocks) <= CACHE_TOKENS // BLOCK_TOKENS)
            self._pinned.update(blocks)

    async def _unpin(self, blocks: Sequence[int]) -> None:
        async with self._freed:
            for block in blocks:
                self._pinned[block] -= 1
                if not self._pinned[block]:
                    del self._pinned[block]
            self._freed.notify_all()

    def _keep(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # of one prompt, the last blocks are the first to go
            self._cache[block] = None
            self._cache.move_to_end(block)
        surplus = len(self._cache) - CACHE_TOKENS // BLOCK_TOKENS
        if surplus > 0:
            going = [block for block in self._cache if block not in self._pinned][:surplus]
            for block in going:
                del self._cache[block]


def _hash_chain(numbers: Sequence[int], before: int = 0) -> list[int]:
    found = []
    for number in numbers:
        before = hash((before, number))
        found.append(before)
    return found


def draw_turn(rng: random.Random, *, is_first: bool = False) -> Turn:
    """Draw a turn. The prompt of the first one is that of the trajectory."""
    return Turn(
        new_tokens=0 if is_first else int(min(8_000, rng.lognormvariate(7.0, 0.7))),
        reply_tokens=int(min(1_000, max(30, rng.lognormvariate(5.2, 0.6)))),
        tool_seconds=min(60.0, rng.lognormvariate(0.7, 1.2)),
    )


def draw_trajectories(count: int, late_from: int) -> list[Recorded]:
    """Return trajectories drawn with a seed; those from a number on belong to the late tenant."""
    rng = random.Random(SEED)
    found = []
    for number in range(count):
        turns = tuple(draw_turn(rng, is_first=at == 0) for at in range(rng.randint(6, 24)))
        tenant = LATE if number >= late_from else EARLY
        found.append(Recorded(f"c{number}", f"g{number // GROUP}", tenant, 3_000, turns))
    return found


def read_trajectories(path: Path, late_from: int) -> list[Recorded]:
    """Return recorded trajectories; those from a number on belong to the late tenant."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        turns = tuple(Turn(int(new), int(reply), float(seconds)) for new, reply, seconds in row["turns"])
        tenant = LATE if number >= late_from else EARLY
        found.append(Recorded(f"c{number}", str(row.get("group", number)), tenant, int(row["prompt"]), turns))
    return found


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one policy. `hits` is the part of prompt blocks from caches; `share` see `find_smallest_share`."""

    per_hour: float
    hits: float
    share: float


@dataclass(slots=True)
class Replay:
    """One policy's replay.

    Attributes:
        served: the tenant and the time of each turn.
        started: the time of the first turn of each trajectory.
    """

    engines: Mapping[str, Engine]
    choose: Callable[[Recorded, int], contextlib.AbstractAsyncContextManager[str]]
    end: Callable[[Recorded], Awaitable[None]] | None = None
    served: list[tuple[str, float]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    late_at: float = 0.0

    async def run(self, trajectories: Sequence[Recorded], late_seconds: float) -> None:
        """Replay all trajectories; the late tenant's start after `late_seconds`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.late_at = began + late_seconds
        async with asyncio.TaskGroup() as group:
            for each in trajectories:
                group.create_task(self._replay(each, late_seconds if each.tenant == LATE else 0.0))
        self.seconds = loop.time() - began

    async def _replay(self, recorded: Recorded, wait_seconds: float) -> None:
        await asyncio.sleep(wait_seconds)
        blocks = [_number(recorded.group, at) for at in range(recorded.prompt_tokens // BLOCK_TOKENS)]
        for turn in recorded.turns:
            blocks += [_number(recorded.name, len(blocks) + at) for at in range(turn.new_tokens // BLOCK_TOKENS)]
            reply = [_number(recorded.name, len(blocks) + at) for at in range(turn.reply_tokens // BLOCK_TOKENS)]
            async with self.choose(recorded, len(blocks) * BLOCK_TOKENS) as address:
                now = asyncio.get_running_loop().time()
                self.started.setdefault(recorded.name, now)
                self.served.append((recorded.tenant, now))
                await self.engines[address].complete(list(blocks), reply, turn.reply_tokens)
            blocks += reply
            await asyncio.sleep(turn.tool_seconds)
        if self.end is not None:
            await self.end(recorded)

    def find_smallest_share(self, trajectories: Sequence[Recorded]) -> float:
        """Return the part of its equal share that the poorer tenant got, while both had trajectories to start."""
        names = {tenant: [one.name for one in trajectories if one.tenant == tenant] for tenant in (EARLY, LATE)}
        until = min(max(self.started[name] for name in names[tenant]) for tenant in names)
        turns = Counter(tenant for tenant, at in self.served if self.late_at <= at <= until)
        return 2 * min(turns[tenant] for tenant in names) / max(1, turns.total())


def _number(name: str, at: int) -> int:
    return hash((name, at)) & 0xFFFFFF


def fifo(addresses: Sequence[str]) -> Callable[[Recorded, int], contextlib.AbstractAsyncContextManager[str]]:
    """Let calls go in the order of their arrival, to the engine with the fewest calls."""
    slots, in_flight = asyncio.Semaphore(SLOTS * len(addresses)), Counter[str]()

    @contextlib.asynccontextmanager
    async def choose(_recorded: Recorded, _tokens: int) -> AsyncIterator[str]:
        async with slots:
            address = min(addresses, key=lambda one: in_flight[one])
            in_flight[address] += 1
            try:
                yield address
            finally:
                in_flight[address] -= 1

    return choose


def hashing(addresses: Sequence[str]) -> Callable[[Recorded, int], contextlib.AbstractAsyncContextManager[str]]:
    """Let all calls of a conversation go to the engine that its id selects, in the order of their arrival."""
    slots = {address: asyncio.Semaphore(SLOTS) for address in addresses}

    @contextlib.asynccontextmanager
    async def choose(recorded: Recorded, _tokens: int) -> AsyncIterator[str]:
        weights = {one: hashlib.sha256(f"{recorded.name} {one}".encode()).digest() for one in addresses}
        address = max(addresses, key=lambda one: weights[one])
        async with slots[address]:
            yield address

    return choose


class Permits:
    """The calls of a replay under the replicas of a quota."""

    def __init__(self, store: Store, addresses: Sequence[str]) -> None:
        entries = (
            f'[[quota]]\nmodel = "openai/policy"\nbase_url = "{address}"\nconcurrency = {SLOTS}\n'
            f"cache_tokens = {CACHE_TOKENS}\n"
            for address in addresses
        )
        self._governor = Governor(store, QuotaTable.parse("\n".join(entries)), self._wake)
        pool = self._governor.find_pool("openai/policy", "")
        assert pool is not None
        self._pool = pool
        self._woken: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    @contextlib.asynccontextmanager
    async def choose(self, recorded: Recorded, tokens: int) -> AsyncIterator[str]:
        """Wait for the permit of a call, and give it back."""
        woken = self._woken[recorded.name]
        while True:
            woken.clear()
            answer = await self._governor.reserve(
                self._pool,
                recorded.name,
                WORKER,
                input_tokens=tokens,
                output_tokens=200,
                tenant=recorded.tenant,
                prefix=recorded.group,
            )
            if isinstance(answer, CallGranted):
                break
            await woken.wait()
        quota = self._pool.find_quota(answer.key)
        assert quota is not None
        assert quota.base_url is not None
        began = asyncio.get_running_loop().time()
        yield quota.base_url
        await self._governor.settle(
            self._pool,
            recorded.name,
            WORKER,
            CallOutcome.OK,
            input_tokens=tokens,
            output_tokens=200,
            took_seconds=asyncio.get_running_loop().time() - began,
        )

    async def end(self, recorded: Recorded) -> None:
        """Free the room of a trajectory."""
        await self._governor.withdraw(self._pool, recorded.name, WORKER, is_over=True)

    async def run_wakeups(self) -> None:
        """Wake calls as time frees capacity."""
        await self._governor.publish()
        await self._governor.run_wakeups(WORKER)

    async def _wake(self, _store: Store, ids: list[str]) -> None:
        for cid in ids:
            self._woken[cid].set()


async def replay(policy: str, trajectories: Sequence[Recorded], late_seconds: float, clock: ManualClock) -> Figures:
    """Replay by one policy."""
    addresses = [f"http://engine-{number}:8000" for number in range(ENGINES)]
    engines = {address: Engine() for address in addresses}
    if policy != "replicas":
        choose = {"fifo": fifo, "hashing": hashing}[policy](addresses)
        found = Replay(engines, choose)
        await found.run(trajectories, late_seconds)
    else:
        store = await open_store(MemoryConnection(MemoryServer(clock)), clock=clock)
        await Membership(store, WORKER, "controller", streams=[[]], ttl_seconds=FOREVER).register()
        permits = Permits(store, addresses)
        found = Replay(engines, permits.choose, permits.end)
        async with asyncio.TaskGroup() as group:
            wakeups = group.create_task(permits.run_wakeups())
            await found.run(trajectories, late_seconds)
            wakeups.cancel()
        await store.aclose()
    blocks, hits = (sum(getattr(one, name) for one in engines.values()) for name in ("prompt_blocks", "hit_blocks"))
    return Figures(
        len(trajectories) / found.seconds * 3_600, hits / max(1, blocks), found.find_smallest_share(trajectories)
    )


def measure(arguments: argparse.Namespace) -> int:
    """Replay with the three policies and print the figures; 1 if a target is missed."""
    late_from = arguments.count * 2 // 3
    if arguments.trace is None:
        trajectories = draw_trajectories(arguments.count, late_from)
    else:
        trajectories = read_trajectories(arguments.trace, late_from)[: arguments.count]
    found = {
        policy: run_virtually(lambda clock, policy=policy: replay(policy, trajectories, arguments.late, clock))
        for policy in ("replicas", "hashing", "fifo")
    }
    ours = found["replicas"].per_hour
    lines = [
        *(Line(f"{policy}: trajectories per hour", round(one.per_hour, 1)) for policy, one in found.items()),
        *(
            Line(f"{policy}: prompt tokens from the cache", round(100 * one.hits, 1), "%")
            for policy, one in found.items()
        ),
        Line("FIFO, compared with replicas", round(found["fifo"].per_hour / ours, 3), "", 0.5),
        Line(
            "consistent hashing, compared with replicas",
            round(found["hashing"].per_hour / ours, 3),
            "",
            round(1 / 1.2, 3),
        ),
        Line("lack of the poorer tenant, of its share", round(1 - found["replicas"].share, 3), "", 0.1),
    ]
    turns = sum(len(one.turns) for one in trajectories)
    show("engines", f"{len(trajectories)} trajectories, {turns:,} turns, virtual time", lines)
    return 0 if all(line.is_met for line in lines) or arguments.count < 200 else 1


class PlayedEngine(StubEngine):
    """A stub engine whose commands take their time, and which ends a trajectory after 6 to 24 turns."""

    def __init__(self) -> None:
        super().__init__(keeps_truth=False)
        self._random = random.Random(SEED)

    def write_reply(self, step: int, *, as_text: bool, key: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a step's reply; see `StubEngine.write_reply`."""
        self.turns = step if step >= 24 or (step >= 6 and self._random.random() < 1 / 9) else step + 1
        text, calls = super().write_reply(step, as_text=as_text, key=key)
        turn = draw_turn(self._random)
        work = f"sleep {turn.tool_seconds:.2f}; head -c {turn.new_tokens} /dev/zero | tr '\\0' x"
        return text.replace("echo rollouts", f"{work}; echo rollouts"), calls


async def play(directory: Path, path: Path, count: int) -> int:
    """Make trajectories with real shells, write them as a trace, and return their number."""
    async with serve_stub(PlayedEngine()) as address, running_cluster(directory / "cluster") as cluster:
        await cluster.start_controller(
            LLM_MODEL="openai/stub",
            LLM_BASE_URL=f"{address}/v1",
            LLM_API_KEY="none",
            LLM_ROLLOUT_API="completions",
            DECKHANDS_MAX_CONVERSATIONS=str(count + 10),
        )
        await cluster.start_tools(NO_CHANGE_TIMEOUT_SECONDS="120", DECKHANDS_CONCURRENCY=str(count))
        for number in range(count):
            group = f"g{number // GROUP}"
            await cluster.client.submit(TaskSpec(task=f"Find the answer of {group}.", title=group, rollout=True))
        await cluster.until_finished(count)
        return await record(path, count, url=cluster.store.url)


async def record(path: Path, limit: int, *, url: str | None = None) -> int:
    """Write the recorded rollouts of a cluster as a trace, and return their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        async with await Client.connect(url) as client:
            for row in await client.recent(limit=limit):
                events = await client.events(row.conversation_id)
                replies = [one for one in events if isinstance(one, ModelReply) and one.tokens is not None]
                if not replies:
                    continue
                ends = [*(one.timestamp for one in replies), events[-1].timestamp]
                # From a reply to the next one are the tools and the next call; the call itself is known.
                calls = [*(one.latency_seconds for one in replies[1:]), 0.0]
                waits = [(after - before).total_seconds() for before, after in pairwise(ends)]
                turns = [
                    [
                        one.tokens.prompt if at and one.tokens is not None else 0,
                        one.tokens.sampled if one.tokens is not None else 0,
                        round(max(0.0, waits[at] - calls[at]), 4),
                    ]
                    for at, one in enumerate(replies)
                ]
                assert replies[0].tokens is not None
                about = {"group": row.title, "prompt": replies[0].tokens.prompt, "turns": turns}
                file.write(json.dumps(about) + "\n")
                count += 1
    return count


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--late", type=float, default=120.0, help="when the second tenant comes, in seconds")
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write a trace of a cluster's rollouts, and no more"
    )
    parser.add_argument(
        "--play", type=Path, metavar="FILE", help="make trajectories with real shells, write their trace, and no more"
    )
    arguments = parser.parse_args()
    if arguments.play is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(asyncio.run(play(Path(folder), arguments.play, arguments.count)), "trajectories")
        return
    if arguments.record is not None:
        print(asyncio.run(record(arguments.record, arguments.count)), "trajectories")
        return
    sys.exit(measure(arguments))


if __name__ == "__main__":
    main()
