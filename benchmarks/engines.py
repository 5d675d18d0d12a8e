"""Trajectories per hour with four replicas of a model: `python -m benchmarks.engines`.

Trajectories with their tool times are replayed against stub engines with a prefix cache of blocks, in another process,
by three policies: FIFO to the engine with the fewest calls, consistent hashing of the id of a conversation, and the
replicas of a quota (docs/quotas.md), with a real store. One tenant is there from the start; a second one with the same
weight comes when the caches are full.

`--trace FILE` replays recorded trajectories: a line for each, `{"prompt": TOKENS, "turns": [[NEW_TOKENS, REPLY_TOKENS,
TOOL_SECONDS], …]}`. Without it, they are drawn with a seed: prompts of 3,000 tokens that groups of eight share, 6 to 24
turns, results of about 1,200 tokens, replies of about 200, and tools that take 2 s at the median and up to a minute.
Time is scaled: `--speed 12` replays twelve seconds in one.
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
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cluster import free_port, running_cluster
from benchmarks.eval_figures import Line, show
from broker.coordination import Membership
from broker.limits import CallGranted, CallOutcome, Governor, QuotaTable
from broker.store import Store

if TYPE_CHECKING:
    from aiohttp import web

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


class Engine:
    """A stub engine: prefills one prompt after another, decodes up to `SLOTS` replies, and keeps blocks as it can."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._cache: OrderedDict[int, None] = OrderedDict()  # hashes of blocks with all before them, oldest first
        self._pinned: Counter[int] = Counter()
        self._slots = asyncio.Semaphore(SLOTS)
        self._prefill = asyncio.Lock()
        self._freed = asyncio.Condition()
        self.prompt_blocks = self.hit_blocks = 0

    async def complete(self, request: web.Request) -> web.Response:
        """Answer `/v1/completions`: `prompt` has a number for each block, `reply` the numbers of the reply's blocks."""
        from aiohttp import web

        body = await request.json()
        chain = _hash_chain(body["prompt"])
        whole = _hash_chain(body["reply"], chain[-1])
        async with self._slots:
            await self._pin([*chain, *whole])
            hits = next((at for at, block in enumerate(chain) if block not in self._cache), len(chain))
            self.prompt_blocks += len(chain)
            self.hit_blocks += hits
            async with self._prefill:
                await asyncio.sleep((len(chain) - hits) * BLOCK_TOKENS / PREFILL_PER_SECOND / self._speed)
            self._keep(chain)
            await asyncio.sleep(body["reply_tokens"] * TOKEN_SECONDS / self._speed)
            self._keep(whole)
            await self._unpin([*chain, *whole])
        return web.json_response({"cached": hits * BLOCK_TOKENS})

    async def show(self, _request: web.Request) -> web.Response:
        """Answer `/truth` with the blocks of prompts, and those that were in the cache."""
        from aiohttp import web

        return web.json_response({"blocks": self.prompt_blocks, "hits": self.hit_blocks})

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


async def serve(ports: Sequence[int], speed: float) -> None:
    """Serve an engine at each port until the process is ended."""
    from aiohttp import web

    for port in ports:
        engine = Engine(speed)
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/v1/completions", engine.complete), web.get("/truth", engine.show)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


def draw_trajectories(count: int, late_from: int) -> list[Recorded]:
    """Return trajectories drawn with a seed; those from a number on belong to the late tenant."""
    rng = random.Random(SEED)
    found = []
    for number in range(count):
        turns = tuple(
            Turn(
                new_tokens=0 if at == 0 else int(min(8_000, rng.lognormvariate(7.0, 0.7))),
                reply_tokens=int(min(1_000, max(30, rng.lognormvariate(5.2, 0.6)))),
                tool_seconds=min(60.0, rng.lognormvariate(0.7, 1.2)),
            )
            for at in range(rng.randint(6, 24))
        )
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


@dataclass(slots=True)
class Replay:
    """One policy's replay.

    Attributes:
        served: the tenant and the time of each turn.
        started: the time of the first turn of each trajectory.
    """

    addresses: Sequence[str]
    speed: float
    choose: Callable[[Recorded, int], contextlib.AbstractAsyncContextManager[str]]
    end: Callable[[Recorded], Awaitable[None]] | None = None
    served: list[tuple[str, float]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    late_at: float = 0.0
    _session: Any = None

    async def run(self, trajectories: Sequence[Recorded], late_seconds: float) -> None:
        """Replay all trajectories; the late tenant's start after `late_seconds` of replayed time."""
        import aiohttp

        began = time.monotonic()
        self.late_at = began + late_seconds / self.speed
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as self._session, asyncio.TaskGroup() as group:
            for each in trajectories:
                group.create_task(self._replay(each, late_seconds if each.tenant == LATE else 0.0))
        self.seconds = (time.monotonic() - began) * self.speed

    async def _replay(self, recorded: Recorded, wait_seconds: float) -> None:
        await asyncio.sleep(wait_seconds / self.speed)
        blocks = [_number(recorded.group, at) for at in range(recorded.prompt_tokens // BLOCK_TOKENS)]
        for turn in recorded.turns:
            blocks += [_number(recorded.name, len(blocks) + at) for at in range(turn.new_tokens // BLOCK_TOKENS)]
            reply = [_number(recorded.name, len(blocks) + at) for at in range(turn.reply_tokens // BLOCK_TOKENS)]
            async with self.choose(recorded, len(blocks) * BLOCK_TOKENS) as address:
                now = time.monotonic()
                self.started.setdefault(recorded.name, now)
                self.served.append((recorded.tenant, now))
                body = {"prompt": blocks, "reply": reply, "reply_tokens": turn.reply_tokens}
                async with self._session.post(f"{address}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            blocks += reply
            await asyncio.sleep(turn.tool_seconds / self.speed)
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
        began = time.monotonic()
        yield quota.base_url
        await self._governor.settle(
            self._pool,
            recorded.name,
            WORKER,
            CallOutcome.OK,
            input_tokens=tokens,
            output_tokens=200,
            took_seconds=time.monotonic() - began,
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


@contextlib.asynccontextmanager
async def running_engines(speed: float) -> AsyncIterator[list[str]]:
    """Run new engines in a process; yield their addresses."""
    ports = [free_port() for _ in range(ENGINES)]
    command = (sys.executable, "-m", "benchmarks.engines", "--speed", str(speed), "--serve", *map(str, ports))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).strip() == b"ready"
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        process.terminate()
        await process.wait()


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Replay with the three policies and print the figures; 1 if a target is missed."""
    late_from = arguments.count * 2 // 3
    if arguments.trace is None:
        trajectories = draw_trajectories(arguments.count, late_from)
    else:
        trajectories = read_trajectories(arguments.trace, late_from)[: arguments.count]
    per_hour: dict[str, float] = {}
    hits: dict[str, float] = {}
    share = 0.0
    async with running_cluster(directory / "cluster") as cluster:
        await Membership(cluster.client.store, WORKER, "controller", streams=[[]], ttl_seconds=3600.0).register()
        for policy in ("replicas", "hashing", "fifo"):
            async with running_engines(arguments.speed) as addresses, asyncio.TaskGroup() as group:
                permits = Permits(cluster.client.store, addresses)
                is_ours = policy == "replicas"
                wakeups = group.create_task(permits.run_wakeups()) if is_ours else None
                choose = permits.choose if is_ours else {"fifo": fifo, "hashing": hashing}[policy](addresses)
                replay = Replay(addresses, arguments.speed, choose, permits.end if is_ours else None)
                await replay.run(trajectories, arguments.late)
                if wakeups is not None:
                    wakeups.cancel()
                    share = replay.find_smallest_share(trajectories)
                per_hour[policy] = len(trajectories) / replay.seconds * 3_600
                hits[policy] = await _find_hits(addresses)
    ours = per_hour["replicas"]
    lines = [
        *(Line(f"{policy}: trajectories per hour", round(found, 1)) for policy, found in per_hour.items()),
        *(
            Line(f"{policy}: prompt tokens from the cache", round(100 * found, 1), "%")
            for policy, found in hits.items()
        ),
        Line("FIFO, compared with replicas", round(per_hour["fifo"] / ours, 3), "", 0.5),
        Line("consistent hashing, compared with replicas", round(per_hour["hashing"] / ours, 3), "", round(1 / 1.2, 3)),
        Line("lack of the poorer tenant, of its share", round(1 - share, 3), "", 0.1),
    ]
    turns = sum(len(one.turns) for one in trajectories)
    show("engines", f"{len(trajectories)} trajectories, {turns:,} turns, speed {arguments.speed:g}", lines)
    return 0 if all(line.is_met for line in lines) or arguments.count < 200 else 1


async def _find_hits(addresses: Sequence[str]) -> float:
    import aiohttp

    total: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        for address in addresses:
            async with session.get(f"{address}/truth") as answer:
                total.update(await answer.json())
    return total["hits"] / max(1, total["blocks"])


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--speed", type=float, default=12.0)
    parser.add_argument("--late", type=float, default=120.0, help="when the second tenant comes, in replayed seconds")
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--serve", type=int, nargs="+", metavar="PORT", help="serve engines at these ports, and no more"
    )
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve, arguments.speed))
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), arguments)))


if __name__ == "__main__":
    main()
