"""Hours of a cluster at work: calls, commands and pauses take as long as in real life, and faults come by the clock.

A cluster has two controller and two tool workers, and four conversations. A model call takes a log-normal time with a
median of 22 s. A command takes one with a median of 15 s, whose longest are hours; now and then a model refuses for half a
minute. A person answers after minutes. A fault strikes every four minutes on average, one of the fourteen of
`faults.py`, near commands to the store. Spans in which nothing happens are left out (`leaps.py`).

Holds: the same `Hours` always give the same run. A cluster hour is an hour of its virtual time.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from broker.contract.actions import MessageAction
from broker.contract.codec import decode
from broker.contract.events import AgentSpec, ConversationCreated, Event, EventSource, LLMSpec
from broker.contract.observations import EventsLostObservation
from broker.contract.specs import Limits
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.log.lost_tails import tail_recording_gaps
from broker.log.status import Status, fold_status
from broker.runtime.errors import EventsLost, UnknownConversation
from broker.store.store import Store
from tests.simulation.canonical import bash, said
from tests.simulation.faults import LOST_BOUNDARIES, Fault
from tests.simulation.leaps import IdleSpans
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.wire import Bug

MODEL_SECONDS = (22.0, 0.5)
"""The median of a log-normal time, and the deviation of its logarithm."""
COMMAND_SECONDS = (15.0, 1.9)
THINKING_SECONDS = (120.0, 1.0)
SHORTEST_SECONDS, LONGEST_SECONDS = 2.0, 3 * 3_600.0
COMMANDS_PER_TURN, TURNS_PER_MESSAGE = (1, 1, 2), (2, 6)
REFUSED_SHARE, RETRY_AFTER_SECONDS = 0.03, 30.0
FAULT_SECONDS = 240.0
NEAR_BOUNDARIES = 40
LATENCY_SECONDS = 0.02
PATIENCE_SECONDS = 4 * 3_600.0
"""When a person says again what was said, because a store may have lost it."""
OVER_SECONDS = 24 * 3_600.0
HOUR = 3_600.0


@dataclass(frozen=True)
class Hours:
    """The parameters of a simulation.

    Attributes:
        hours: about how long the conversations are.
        leaps: whether idle spans are left out.
        workers: how many of each kind.
    """

    seed: int = 0
    hours: float = 4.0
    conversations: int = 4
    workers: int = 2
    has_faults: bool = True
    has_leaps: bool = True
    bug: Bug | None = None

    @property
    def ids(self) -> list[str]:
        """The ids of its conversations."""
        return [f"work-{number}" for number in range(self.conversations)]


@dataclass
class HoursOutcome:
    """The result of a simulation.

    Attributes:
        failure: why it did not come to its end, or empty.
        logs: by conversation.
        messages: how many each person says.
    """

    hours: Hours
    cluster: Cluster
    leaps: IdleSpans
    failure: str = ""
    logs: dict[str, list[Event]] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)

    @property
    def virtual_hours(self) -> float:
        """How long it lasted."""
        return self.cluster.clock.monotonic() / HOUR

    @property
    def has_lost(self) -> bool:
        """Whether the store has lost its tail."""
        return any(fault is Fault.LOST_TAIL for _, fault, _, _ in self.cluster.wire.struck)


@dataclass
class _Work:
    """What one conversation is about: the pauses of its person, and the turns of its model."""

    thinking: list[float] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)


def _draw_seconds(random: Random, about: tuple[float, float]) -> float:
    median, deviation = about
    return round(min(max(SHORTEST_SECONDS, median * random.lognormvariate(0.0, deviation)), LONGEST_SECONDS), 3)


def _draw_work(random: Random, hours: float) -> _Work:
    """Draw turns and pauses until they last so long."""
    work, total = _Work(), 0.0
    while total < hours * HOUR:
        work.thinking.append(_draw_seconds(random, THINKING_SECONDS) if work.thinking else SHORTEST_SECONDS)
        total += work.thinking[-1]
        for _ in range(random.randint(*TURNS_PER_MESSAGE)):
            commands = [_draw_seconds(random, COMMAND_SECONDS) for _ in range(random.choice(COMMANDS_PER_TURN))]
            latency = _draw_seconds(random, MODEL_SECONDS)
            turn: dict[str, Any] = {"tool_calls": [bash(f"work {seconds}") for seconds in commands]}
            if random.random() < REFUSED_SHARE:
                turn["error"] = {"code": "rate_limit", "retry_after_seconds": RETRY_AFTER_SECONDS}
            work.turns.append(turn | {"latency_seconds": latency})
            total += latency + sum(commands)
        finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
        work.turns.append(finish | {"latency_seconds": _draw_seconds(random, MODEL_SECONDS)})
    return work


def simulate_hours(hours: Hours, folder: Path) -> HoursOutcome:
    """Run a simulation to its end, or to the limit of time."""
    random = Random(hours.seed)
    cluster = Cluster(hours.seed, {}, {"LLM_MODEL": "scripted/none.json", "LLM_SCRIPTS_DIR": "/"}, bug=hours.bug)
    cluster.wire.latency_seconds, cluster.wire.random = LATENCY_SECONDS, Random(hours.seed)
    cluster.node.seconds_of = lambda command: float(command.removeprefix("work "))
    outcome = HoursOutcome(hours, cluster, IdleSpans(cluster))
    if hours.has_leaps:
        cluster.loop.leaps = outcome.leaps
    works = {cid: _draw_work(random, hours.hours) for cid in hours.ids}
    for cid, work in works.items():
        (folder / f"{cid}.json").write_text(json.dumps({"turns": work.turns}))
        outcome.messages[cid] = len(work.thinking)
    cluster.run(_world(hours, cluster, outcome, works, folder, random))
    return outcome


async def _world(
    hours: Hours, cluster: Cluster, outcome: HoursOutcome, works: dict[str, _Work], folder: Path, random: Random
) -> None:
    store = await cluster.open()
    cluster.start_workers(hours.workers, hours.workers)
    over = [_start_person(cluster, cid, works[cid], folder) for cid in hours.ids]
    if hours.has_faults:
        cluster.loop.create_task(_trouble(cluster, random), context=cluster.loop.world.context)
    outcome.failure = await cluster.until(asyncio.gather(*over), hours.hours * HOUR + OVER_SECONDS)
    outcome.logs = {cid: await EventLog(store).read(cid) for cid in hours.ids}


async def _trouble(cluster: Cluster, random: Random) -> None:
    """Let a fault strike from time to time, at one of the next boundaries, one after the other."""
    while True:
        await asyncio.sleep(LOST_BOUNDARIES + random.expovariate(1 / FAULT_SECONDS))
        cluster.wire.strike_after(random.randint(1, NEAR_BOUNDARIES), random.choice(tuple(Fault)))


def _start_person(cluster: Cluster, cid: str, work: _Work, folder: Path) -> asyncio.Future[None]:
    over: asyncio.Future[None] = cluster.loop.create_future()
    agent = AgentSpec(llm=LLMSpec(model=f"scripted/{folder / cid}.json"), tool_concurrency=2)
    limits = Limits(max_iterations=len(work.turns) + 100)
    created = ConversationCreated(conversation_id=cid, agent=agent, limits=limits, headless=False)

    async def person(store: Store) -> None:
        log = EventLog(store)
        while True:
            try:
                await log.create(created, [said("message 0")], key="message 0")
                await _talk(log, cid, work)
                break
            except (TimeoutError, EventsLost, UnknownConversation):
                continue
        if not over.done():
            over.set_result(None)

    cluster.start(f"person of {cid}", person)
    return over


async def _talk(log: EventLog, cid: str, work: _Work) -> None:
    """Say one message after the other, each after a pause; after a kill, continue at the end of the log."""
    status, unsaid = Status(), [f"message {number}" for number in range(len(work.thinking))]
    tail = aiter(tail_recording_gaps(log, cid, after=0, decode=decode))
    while True:
        async with asyncio.timeout(PATIENCE_SECONDS):
            event = await anext(tail)
        status = status.apply(event)
        if isinstance(event, MessageAction) and event.content in unsaid:
            unsaid.remove(event.content)
        if status.is_settled and event.id >= await log.load_last_id(cid):
            if not unsaid:
                return
            await asyncio.sleep(work.thinking[-len(unsaid)])
            await log.append(cid, [said(unsaid[0])], key=unsaid[0])


def find_broken_hours(outcome: HoursOutcome) -> list[str]:
    """Return the violations, each with the id of its invariant if it has one."""
    if outcome.failure:
        stand = {cid: (len(events), str(fold_status(events).state)) for cid, events in outcome.logs.items()}
        return [f"I1: {outcome.failure}; {stand}"]
    return list(_find_broken(outcome))


def _find_broken(outcome: HoursOutcome) -> Iterator[str]:
    actions = {(cid, event.id) for cid, events in outcome.logs.items() for event in events if event.runnable}
    for action, times in Counter(outcome.cluster.node.executions).items():
        if times > 1 or (action not in actions and not outcome.has_lost):
            yield f"I5: action {action} was executed {times} times"
    for cid, events in outcome.logs.items():
        for each in find_violations(events, conversation_id=cid, is_strict=True):
            yield f"{each.invariant}: {cid}: {each.text}"
        has_gap = any(isinstance(event, EventsLostObservation) for event in events)
        texts = Counter(e.content for e in events if isinstance(e, MessageAction) and e.source is EventSource.USER)
        if not has_gap and texts != Counter(f"message {number}" for number in range(outcome.messages[cid])):
            yield f"I3: the messages in the log of {cid} are {dict(texts)}"


@dataclass
class Total:
    """The sum of some simulations.

    Attributes:
        hours: virtual ones; `leapt`: those of them that were left out.
        failures: of each failing seed, what repeats it and what was wrong.
    """

    runs: int = 0
    hours: float = 0.0
    leapt: float = 0.0
    cpu_hours: float = 0.0
    events: int = 0
    faults: int = 0
    commands: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Total") -> None:
        """Add the simulations of another process."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def run_seeds(seconds: float, first: int, step: int) -> Total:
    """Run seeds, each with another work and other faults, until the time is over."""
    logging.disable(logging.CRITICAL)
    total, seed, until = Total(), first, time.monotonic() + seconds
    with TemporaryDirectory() as folder:
        while not total.runs or time.monotonic() < until:
            began = time.process_time()
            outcome = simulate_hours(Hours(seed), Path(folder))
            found = find_broken_hours(outcome)
            total.add(
                Total(
                    runs=1,
                    hours=outcome.virtual_hours,
                    leapt=outcome.leaps.leapt / HOUR,
                    cpu_hours=(time.process_time() - began) / HOUR,
                    events=sum(map(len, outcome.logs.values())),
                    faults=len(outcome.cluster.wire.struck),
                    commands=len(outcome.cluster.wire.passed) // 2,
                    failures=[f"{outcome.hours}: {found}"] if found else [],
                )
            )
            seed += step
    return total


def run_all_seeds(seconds: float, *, jobs: int, first: int = 0) -> Total:
    """Run seeds in several processes, and return their sum."""
    total = Total()
    with ProcessPoolExecutor(jobs) as pool:
        for part in [pool.submit(run_seeds, seconds, first + number, jobs) for number in range(jobs)]:
            total.add(part.result())
    return total
