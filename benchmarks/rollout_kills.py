"""A rollout run whose workers, driver and trainer are killed: `python -m benchmarks.rollout_kills`.

The policy is the stub engine: its tokenizer is ambiguous, so that a text that is tokenized again has other tokens than
those that were sampled. It has `--slots` places for replies, and swaps its weights in the middle of replies, twice and
shortly one after the other, so that some groups become too old and are tried again. Meanwhile `--killed` of the
controllers and tool workers, the driver, and the program that reads the groups get SIGKILL. Dead workers stay dead;
driver and reader are started again. Printed: sampled tokens that the engine did not sample at that place under that
policy, trajectories that are missing or came twice, groups that were too old when the reader got them, and how busy the
engine's slots were outside of the kills.

A slot is busy from the moment at which it is free and a request waits at the engine, until the reply is complete. An
engine takes a waiting request at once; the stub, a Python process that shares the CPUs with all others, takes a
while. That time is no lack of requests, so it counts as busy; the figure without it is printed, too. Neither counts
the start and the end, when there are fewer trajectories than slots.

Full size: `--trajectories 2000 --turns 20 --slots 128 --reply-seconds 2.5`.

verifiers (installed by `benchmarks/peer/verifiers.sh`) then makes trajectories of as many turns in its usual single
process, at an engine with as many slots. That process gets SIGKILL in the middle, and is called again with `--resume`.

Exits with 1 if a token differs, or if something is missing, doubled or too old.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT, running_cluster
from benchmarks.eval_figures import Line, show
from benchmarks.peer.verifiers_kill import measure_peer
from deckhands.client import Client, Segment
from deckhands.rollouts import RolloutRun, RolloutSpec, StubEngine, serve_stub
from deckhands.rollouts.stub_engine import logprob_of

POLL_SECONDS = 0.1
PIECES = 8
"""A reply is sampled in so many pieces, and new weights apply between two of them."""
MAX_STALENESS = 1
KILL_SECONDS = 15.0
"""A kill lasts until others have taken over: the lease of a driver is ten seconds."""
RETRIES = 20


Span = tuple[float, float]
"""A beginning and an end, in seconds of the monotonic clock."""


@dataclass(slots=True)
class Slots:
    """The places for replies of an engine. A reply that is complete hands its place to the oldest waiting request.

    Attributes:
        replies: when a place was taken.
        shown: the same without the time until the stub's process used a free place for a reply.
    """

    count: int
    replies: list[Span] = field(default_factory=list)
    shown: list[Span] = field(default_factory=list)
    _taken: int = 0
    _waiting: deque[asyncio.Future[float]] = field(default_factory=deque)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[float]:
        """Wait for a place, and yield the time since which the reply has it."""
        since = await self._take()
        began = time.monotonic()
        try:
            yield since
        finally:
            ended = time.monotonic()
            self.replies.append((since, ended))
            self.shown.append((began, ended))
            self._give(ended)

    async def _take(self) -> float:
        if self._taken < self.count:
            self._taken += 1
            return time.monotonic()
        place: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given meanwhile
                self._give(time.monotonic())
            raise

    def _give(self, at: float) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(at)
                return
        self._taken -= 1


def measure_busy(spans: Sequence[Span], count: int, apart: Sequence[float] = ()) -> float:
    """Return the share of places that were taken, between the first and the last moment at which all of them were.

    The time before is that of the start; behind it, fewer trajectories are left than there are places.

    Args:
        count: the number of places.
        apart: the beginnings of spans of `KILL_SECONDS` that do not count.
    """
    changes, taken = list[tuple[float, int]](), 0
    for at, change in sorted([(since, 1) for since, _ in spans] + [(until, -1) for _, until in spans]):
        taken += change
        changes.append((at, taken))
    full = [at for at, taken in changes if taken == count]
    if not full:
        return 0.0
    busy = whole = 0.0
    for (since, taken), (until, _) in pairwise(changes):
        if since < full[0] or since > full[-1] or any(at <= since < at + KILL_SECONDS for at in apart):
            continue
        busy += taken * (until - since)
        whole += count * (until - since)
    return busy / whole if whole else 0.0


class Engine(StubEngine):
    """A stub engine with a limited number of slots, which keeps digests of what it sampled instead of the tokens."""

    def __init__(self, turns: int, slots: int, reply_seconds: float) -> None:
        super().__init__(turns=turns, keeps_truth=False)
        self.slots = Slots(slots)
        self.reply_seconds = reply_seconds
        self.sampled: Counter[str] = Counter()
        self.replies = 0
        self.mixed = 0

    async def generate(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        limit: int | None = None,
        *,
        session: str = "",  # noqa: ARG002
    ) -> tuple[list[int], list[int], bool]:
        """Sample a reply in pieces; see `StubEngine.generate`."""
        whole = list(tokens[:limit])
        versions: list[int] = []
        size = -(-len(whole) // PIECES)
        async with self.slots.hold() as since:
            for piece in range(1, PIECES + 1):
                versions += [self.policy.version] * min(size, len(whole) - len(versions))
                await asyncio.sleep(since + piece * self.reply_seconds / PIECES - time.monotonic())
        self.sampled[digest_reply(hash_tokens(prompt), whole, versions)] += 1
        self.replies += 1
        self.mixed += len(set(versions)) > 1
        return whole, versions, False


def hash_tokens(tokens: Sequence[int]) -> hashlib.blake2b:
    """Return the hash of tokens, to which more can be added."""
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=12)


def digest_reply(prompt: hashlib.blake2b, sampled: Sequence[int], versions: Sequence[int]) -> str:
    """Return the digest of a reply: its place behind its prompt, its tokens, and the version of each."""
    found = prompt.copy()
    found.update(array("i", [-1, *sampled, -2, *versions]).tobytes())
    return found.hexdigest()


def describe_segment(segment: Segment) -> dict[str, Any]:
    """Return the digest and the size of each reply of a segment, and how many of its numbers are wrong by themselves.

    Wrong by itself is a log-probability that does not follow from the token and its version, or a mask.
    """
    wrong = sum(segment.mask) - sum(reply.end - reply.start for reply in segment.replies)
    replies = []
    for reply in segment.replies:
        places = range(reply.start, reply.end)
        wrong += sum(segment.logprobs[at] != logprob_of(segment.tokens[at], segment.versions[at]) for at in places)
        wrong += sum(segment.mask[at] != 1 for at in places)
        sampled, versions = segment.tokens[reply.start : reply.end], segment.versions[reply.start : reply.end]
        replies.append([digest_reply(hash_tokens(segment.tokens[: reply.start]), sampled, versions), len(sampled)])
    return {"replies": replies, "wrong": abs(wrong)}


async def train(url: str, name: str, out: Path) -> None:
    """Read groups, write what they consist of, and acknowledge them, until the run is over: the reading client."""
    async with await Client.connect(url) as client:
        run = await RolloutRun.open(client, name)
        async for group in run.groups(drives=False):
            state = await run.load_state()
            about = {
                "id": group.id,
                "instance": group.instance,
                "age": state.version - group.min_version,
                "trajectories": [
                    {
                        "id": one.trajectory.conversation_id,
                        "segments": [*map(describe_segment, one.trajectory.segments)],
                    }
                    for one in group.rollouts
                ],
            }
            with out.open("a") as file:
                file.write(json.dumps(about) + "\n")
            await group.ack()
            with out.open("a") as file:
                file.write(json.dumps({"acknowledged": group.id}) + "\n")


class Program:
    """A process of the run that can be killed and started again."""

    def __init__(self, *command: str, environment: Mapping[str, str], log: Path) -> None:
        self._command, self._environment, self._log = command, environment, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._command, env=dict(self._environment), stdout=out, stderr=out, cwd=ROOT
            )

    async def kill(self) -> None:
        """End it by SIGKILL."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def wait(self) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: it failed.
        """
        assert self._process is not None
        if await self._process.wait():
            raise RuntimeError(f"{self._command} failed:\n{self._log.read_text()[-2_000:]}")


@dataclass(slots=True)
class Ended:
    """What the run has left behind.

    Attributes:
        lines: those of the reader: one for each group that it got, and one for each that it acknowledged.
        groups: the entries of the groups that were delivered.
        events: the events of the run.
        kills: when processes were killed.
    """

    lines: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    events: list[dict[str, Any]]
    kills: list[float]
    seconds: float


async def run(directory: Path, engine: Engine, arguments: argparse.Namespace) -> Ended:
    """Run all trajectories, and kill meanwhile."""
    count = arguments.trajectories // arguments.group_size
    prompts = [{"id": f"prompt-{n}", "task": f"Find the answer {n}.", "answer": "the answer"} for n in range(count)]
    at_once = arguments.at_once or 2 * arguments.slots
    groups_at_once = -(-at_once // arguments.group_size)
    spec = RolloutSpec(
        prompts=tuple(prompts),
        model="openai/stub",
        group_size=arguments.group_size,
        max_staleness=MAX_STALENESS,
        retries=RETRIES,
        window=3 * groups_at_once,
        waiting=4 * groups_at_once,
        at_once=at_once,
        network=False,
    )
    async with serve_stub(engine) as address, running_cluster(directory / "cluster") as cluster:
        environment = {
            "LLM_MODEL": "openai/stub",
            "LLM_BASE_URL": f"{address}/v1",
            "LLM_API_KEY": "none",
            "LLM_ROLLOUT_API": "completions",
        }
        workers = [await cluster.start_controller(**environment) for _ in range(arguments.controllers)]
        workers += [await cluster.start_noop_tool("bash") for _ in range(arguments.tools)]
        rollouts = await RolloutRun.start(cluster.client, spec, directory=directory / "run")
        out, url = directory / "groups.jsonl", cluster.store.url
        out.touch()
        own = {**os.environ, "DECKHANDS_URL": url, "DECKHANDS_HOME": str(directory / "home")}
        attach = ("-m", "deckhands", "rollouts", "attach", rollouts.name, "--directory", str(directory / "run"))
        driver = Program(*attach, environment=own, log=directory / "driver.log")
        reading = ("-m", "benchmarks.rollout_kills", "--read", url, rollouts.name, str(out))
        reader = Program(*reading, environment=own, log=directory / "reader.log")
        began = time.monotonic()
        await driver.start()
        await reader.start()
        kills = await _disturb(rollouts, engine, workers, driver, reader, arguments)
        await reader.wait()
        await driver.wait()
        seconds = time.monotonic() - began
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return Ended(lines, await rollouts.list_groups(), await rollouts.list_events(), kills, seconds)


async def _disturb(
    rollouts: RolloutRun,
    engine: Engine,
    workers: Sequence[int],
    driver: Program,
    reader: Program,
    arguments: argparse.Namespace,
) -> list[float]:
    """Kill workers of both roles, the driver and the reader, and swap weights, each at its share of the replies."""
    chance = random.Random(arguments.seed)
    roles = [workers[: arguments.controllers], workers[arguments.controllers :]]
    spared = {chance.choice(role) for role in roles}
    victims = [pid for pid in workers if pid not in spared]
    chance.shuffle(victims)
    victims = victims[: round(arguments.killed * len(workers))]
    kills: list[float] = []

    async def kill_worker(pid: int) -> None:
        kills.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    async def restart(program: Program) -> None:
        kills.append(time.monotonic())
        await program.kill()
        await program.start()

    async def swap(version: int) -> None:
        engine.policy.version = version
        await rollouts.weights_changed(version)

    # A tenth of the replies for the start, and as much for the end.
    acts = [(0.1 + 0.6 * (at + 1) / (len(victims) + 1), kill_worker(pid)) for at, pid in enumerate(victims)]
    acts += [(0.35, restart(driver)), (0.45, swap(1)), (0.46, swap(2)), (0.65, restart(reader))]
    needed = arguments.trajectories * (arguments.turns + 1)
    for share, act in sorted(acts, key=lambda one: one[0]):
        while engine.replies < share * needed:
            await asyncio.sleep(POLL_SECONDS)
        await act
    return kills


def check(engine: Engine, ended: Ended, arguments: argparse.Namespace) -> list[Line]:
    """Return the figures of a run."""
    count = arguments.trajectories // arguments.group_size
    got = [one for one in ended.lines if "id" in one]
    dropped = {one["group"] for one in ended.events if one["kind"] == "dropped"}
    valid = [one for one in ended.groups if one["id"] not in dropped]
    delivered = {one["id"]: one for one in got}  # what was not acknowledged comes again
    trajectories = [each for one in delivered.values() for each in one["trajectories"]]
    segments = [segment for one in trajectories for segment in one["segments"]]
    mismatches = sum(segment["wrong"] for segment in segments)
    mismatches += sum(
        size for segment in segments for digest, size in segment["replies"] if digest not in engine.sampled
    )
    whole = sum(sum(len(segment["replies"]) for segment in one["segments"]) > arguments.turns for one in trajectories)
    twice = Counter(one["instance"] for one in valid)
    seen: set[str] = set()
    again = 0
    for one in ended.lines:
        again += one.get("id") in seen
        seen |= {one["acknowledged"]} if "acknowledged" in one else set()
    ids = Counter(one["id"] for one in trajectories)
    doubled = sum(number - 1 for number in (*twice.values(), *ids.values())) + again
    tokens = sum(size for segment in segments for _, size in segment["replies"])
    stale = sum(one["kind"] == "dropped" and one["reason"] == "stale" for one in ended.events)
    needed = arguments.trajectories * (arguments.turns + 1)
    slots = engine.slots
    outside, all_time = (measure_busy(slots.replies, slots.count, apart) for apart in (ended.kills, ()))
    shown = measure_busy(slots.shown, slots.count, ended.kills)
    return [
        Line("sampled tokens that were checked", tokens),
        Line("mismatching tokens", mismatches, "", 0),
        Line("trajectories lost", count * arguments.group_size - whole, "", 0),
        Line("trajectories or groups doubled", doubled, "", 0),
        Line("groups too old when the reader got them", sum(one["age"] > MAX_STALENESS for one in got), "", 0),
        Line("groups too old before that, which were tried again", stale),
        Line("trajectories broken into segments", sum(len(one["segments"]) > 1 for one in trajectories)),
        Line("replies with tokens of several policies", engine.mixed),
        Line("replies that were made and not used", round(100 * (engine.replies / needed - 1), 1), "%"),
        Line("engine slots not busy, outside of the kills", round(100 * (1 - outside), 2), "%", 5),
        Line("the same, if a slot is not busy until the stub uses it", round(100 * (1 - shown), 2), "%"),
        Line("engine slots not busy, the kills included", round(100 * (1 - all_time), 2), "%"),
        Line("wall", round(ended.seconds, 1), "s"),
        Line("replies per second", round(engine.replies / ended.seconds, 1)),
    ]


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Run ours, then the peer, and print the figures.

    Returns:
        1 if a token differs, or if something is missing, doubled or too old; else 0.
    """
    engine = Engine(arguments.turns, arguments.slots, arguments.reply_seconds)
    ended = await run(directory, engine, arguments)
    lines = check(engine, ended, arguments)
    peer: list[Line] = []
    if not arguments.no_peer:
        other = Engine(arguments.turns, arguments.slots, arguments.reply_seconds)
        peer = await measure_peer(directory, other, arguments.peer or arguments.trajectories, arguments.group_size)
    workers = arguments.controllers + arguments.tools
    title = (
        f"{arguments.trajectories:,} trajectories of {arguments.turns} turns; "
        f"SIGKILL for {round(arguments.killed * workers)} of {workers} workers, the driver and the reader"
    )
    show("rollout_kills", title, [*lines, *peer])
    return 0 if all(line.is_met for line in lines if line.most == 0) else 1


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_kills", description=__doc__)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16, help="replies that the engine samples at once")
    parser.add_argument("--at-once", type=int, default=0, help="trajectories in flight; 0: two for each slot")
    parser.add_argument("--reply-seconds", type=float, default=1.0)
    parser.add_argument("--controllers", type=int, default=6)
    parser.add_argument("--tools", type=int, default=4)
    parser.add_argument("--killed", type=float, default=0.3, help="the share of workers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer", type=int, default=0, help="trajectories of verifiers; 0: as many as ours")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--read", nargs=3, metavar=("URL", "RUN", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        url, name, out = arguments.read
        asyncio.run(train(url, name, Path(out)))
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), arguments)))


if __name__ == "__main__":
    main()
