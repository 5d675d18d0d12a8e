"""The demo: many agents repair real projects at once while their workers are killed with SIGKILL and replaced.

Holds: only the model is simulated. The workers are processes, the projects are on disk, the tests really run, and the
logs are compared event by event with the events seen while they were written.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from broker.contract import AgentSpec, AgentState, ErrorObservation, Event, LLMSpec, ModelReply, WorkspaceSpec
from broker.coordination import WorkspaceOrders
from broker.log import Conversations, Takeover, count_duplicate_observations, count_lost_events, find_violations
from broker.runtime import CONTROLLER, SYSTEM_CLOCK, TOOLS, ChildProcess, Clock
from deckhands.client import Client, Tally, follow
from deckhands.cluster import TASK, Cluster, ClusterSpec, ClusterWorker, Example, load_examples

TIME_LIMIT_SECONDS = 600.0
TEST_LIMIT_SECONDS = 60.0
TESTS_AT_ONCE = 2
END_LIMIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class DemoSpec:
    """The parameters of the demo.

    Attributes:
        directory: an empty directory for the store, the logs and the projects.
        kills: how many workers are killed, controllers and tool workers in turn.
        seed: determines which workers are killed, and when.
    """

    directory: Path
    conversations: int = 20
    controllers: int = 2
    tools: int = 2
    kills: int = 2
    seed: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed."""

    worker: str
    pid: int
    at: datetime

    def takeover_seconds(self, takeover: Takeover) -> float | None:
        """Return the time from the kill to a takeover; None if it took over another worker's work."""
        pid = takeover.from_worker.split("-")[-2]  # see `broker.runtime.ids.new_worker_id`
        return (takeover.at - self.at).total_seconds() if pid == str(self.pid) else None


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of the demo.

    Attributes:
        violations: invariants that a log breaks.
        failures: one line for each project whose tests fail.
    """

    conversations: int
    finished: int
    tests_passing: int
    events: int
    events_lost: int
    observations_doubled: int
    violations: list[str]
    failures: list[str]
    kills: list[str]
    takeovers: int
    takeover_median_seconds: float | None
    takeover_longest_seconds: float | None
    wall_seconds: float
    seed: int

    @property
    def is_whole(self) -> bool:
        """Whether all conversations finished, all tests pass, and every log is intact."""
        return self.finished == self.tests_passing == self.conversations and not (
            self.events_lost or self.observations_doubled or self.violations
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"is_whole": self.is_whole}


@dataclass(slots=True)
class DemoProgress:
    """The progress of the demo."""

    conversations: int
    replies_expected: int
    finished: int = 0
    events: int = 0
    replies: int = 0
    killed: int = 0


@dataclass(slots=True)
class _DemoCase:
    """One conversation, its copy of a project, and the events seen of its log."""

    example: Example
    directory: Path
    conversation_id: str = ""
    seen: list[Event] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def what_failed(self) -> str:
        """Return one line on why the project's tests may fail."""
        errors = (event.content for event in self.seen if isinstance(event, ErrorObservation))
        error = next(errors, "").partition("\n")[0]
        return f"its agent's first error: {error}" if error else "its tests fail, though its agent saw no error"


class Demo:
    """One run of the demo."""

    def __init__(
        self,
        spec: DemoSpec,
        *,
        on_notice: Callable[[str], None] = lambda _: None,
        on_progress: Callable[[DemoProgress], None] = lambda _: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._spec = spec
        self._on_notice = on_notice
        self._on_progress = on_progress
        self._clock = clock
        choice = load_examples()
        projects = (spec.directory / "projects").resolve()  # no link may lead to a workspace
        self._cases = [
            _DemoCase(example := choice[number % len(choice)], projects / f"{number:02}-{example.name}")
            for number in range(spec.conversations)
        ]
        turns = {example.name: example.turns for example in choice}
        self.progress = DemoProgress(spec.conversations, sum(turns[case.example.name] for case in self._cases))
        self._moved = asyncio.Condition()
        self._kills: list[Kill] = []
        # The demo chooses the model, and its scripts need no key, so the user's settings are left out.
        environment = {
            name: value for name, value in spec.environment.items() if not name.startswith(("LLM_", "LITELLM_"))
        }
        self.cluster = Cluster(
            ClusterSpec(
                spec.directory,
                controllers=spec.controllers,
                tools=spec.tools,
                environment=environment,
                workspace_roots=(projects,),
                is_private=True,
            ),
            on_notice=on_notice,
        )

    async def run(self) -> DemoReport:
        """Run to the end.

        Raises:
            DeckhandsError: the cluster cannot be started or kept running.
        """
        started = self._clock.monotonic()
        (self._spec.directory / "projects").mkdir(parents=True)
        for case in self._cases:
            case.example.copy_to(case.directory)
        try:
            await self.cluster.start()
            await self.cluster.until_ready()
            async with await Client.connect(self.cluster.url) as client:
                try:
                    await self._follow_all(client)
                    wall_seconds = self._clock.monotonic() - started
                    failing = await self._failing()
                    return await self._report(client, failing, wall_seconds)
                finally:
                    await self._end_sessions(client)
        finally:
            await self.cluster.stop()

    async def _follow_all(self, client: Client) -> None:
        """Follow every conversation to its end, and kill workers meanwhile."""
        broken = asyncio.ensure_future(self.cluster.until_broken())
        killing = asyncio.ensure_future(self._kill_workers())
        following = asyncio.gather(*(self._follow(client, case) for case in self._cases))
        tasks: tuple[asyncio.Future[Any], ...] = (broken, following)
        try:
            await asyncio.wait(tasks, timeout=TIME_LIMIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    await task
        finally:
            for task in (*tasks, killing):
                task.cancel()
            await asyncio.gather(*tasks, killing, return_exceptions=True)

    async def _follow(self, client: Client, case: _DemoCase) -> None:
        case.conversation_id = await client.submit(
            TASK,
            agent=AgentSpec(llm=LLMSpec(model=case.example.model)),
            workspace=WorkspaceSpec(path=str(case.directory)),
            title=case.directory.name,
        )
        async with contextlib.aclosing(follow(client, case.conversation_id, case.tally)) as events:
            async for event in events:
                case.seen.append(event)
                is_over = case.tally.status.is_settled
                async with self._moved:
                    self.progress.events += 1
                    self.progress.replies += isinstance(event, ModelReply)
                    self.progress.finished += is_over and case.tally.status.state is AgentState.FINISHED
                    self._moved.notify_all()
                self._on_progress(self.progress)

    async def _kill_workers(self) -> None:
        for number in range(self._spec.kills):
            share = (number + 0.5 + 0.5 * self._draw(f"moment {number}")) / (self._spec.kills + 0.5)
            due = int(share * self.progress.replies_expected)
            async with self._moved:
                await self._moved.wait_for(lambda: self.progress.replies >= due)  # noqa: B023  (awaited at once)
            role = (CONTROLLER, TOOLS)[number % 2]
            places = [worker for worker in self.cluster.workers.values() if worker.role == role]
            self._kill(places[int(self._draw(f"victim {number}") * len(places))])

    def _kill(self, worker: ClusterWorker) -> None:
        assert worker.child is not None
        pid = worker.child.pid
        self._kills.append(Kill(worker.name, pid, self._clock.now()))
        worker.child.send(signal.SIGKILL)
        self.progress.killed += 1
        self._on_notice(f"killed {worker.name} (pid {pid}) with SIGKILL")

    def _draw(self, purpose: str) -> float:
        """Return a number from 0 (inclusive) to 1 (exclusive), the same for the same seed and purpose."""
        return int.from_bytes(sha256(f"{self._spec.seed} {purpose}".encode()).digest()[:6], "big") / (1 << 48)

    async def _failing(self) -> list[_DemoCase]:
        """Run every project's tests on this machine, and return the cases that fail."""
        slots = asyncio.Semaphore(TESTS_AT_ONCE)

        async def passes(case: _DemoCase) -> bool:
            async with slots:
                log = self._spec.directory / "logs" / f"tests-{case.directory.name}.log"
                command = (sys.executable, "-m", "unittest", "-q")
                tests = ChildProcess.start(command, log=log, directory=case.directory)
                try:
                    async with asyncio.timeout(TEST_LIMIT_SECONDS):
                        return await tests.wait() == 0
                except TimeoutError:
                    tests.send(signal.SIGKILL)
                    return False

        passed = await asyncio.gather(*(passes(case) for case in self._cases))
        return [case for case, has_passed in zip(self._cases, passed, strict=True) if not has_passed]

    async def _end_sessions(self, client: Client) -> None:
        orders = WorkspaceOrders(client.store)
        ids = [case.conversation_id for case in self._cases if case.conversation_id]
        await asyncio.gather(*(orders.end_sessions(cid, limit_seconds=END_LIMIT_SECONDS) for cid in ids))

    async def _report(self, client: Client, failing: list[_DemoCase], wall_seconds: float) -> DemoReport:
        events = lost = doubled = 0
        broken: list[str] = []
        conversations = Conversations(client.store)
        for case in self._cases:
            log = await client.events(case.conversation_id)
            row = await conversations.load_row(case.conversation_id)
            events += len(log)
            lost += count_lost_events(log, case.seen)
            doubled += count_duplicate_observations(log)
            found = find_violations(
                log, conversation_id=case.conversation_id, last_event_id=row.last_event_id, seen=case.seen
            )
            broken += [f"{case.conversation_id}: {item.invariant}: {item.text}" for item in found]
        takeovers = await conversations.list_takeovers()
        found_seconds = [kill.takeover_seconds(takeover) for kill in self._kills for takeover in takeovers]
        seconds = [second for second in found_seconds if second is not None]
        return DemoReport(
            conversations=self._spec.conversations,
            finished=self.progress.finished,
            tests_passing=len(self._cases) - len(failing),
            events=events,
            events_lost=lost,
            observations_doubled=doubled,
            violations=broken,
            failures=[f"{case.directory.name}: {case.what_failed()}" for case in failing],
            kills=[kill.worker for kill in self._kills],
            takeovers=len(seconds),
            takeover_median_seconds=round(statistics.median(seconds), 3) if seconds else None,
            takeover_longest_seconds=round(max(seconds), 3) if seconds else None,
            wall_seconds=round(wall_seconds, 3),
            seed=self._spec.seed,
        )
