"""Work that arrives through the front door: entries of the inbox, a schedule, and a webhook that reports the ends.

A producer adds tasks to the inbox and waits until each was answered; a schedule starts a task each minute; a receiver
of a webhook learns of the end of every conversation. Ingress and jobs workers are the real ones; simulated is the
network to the receiver, which refuses some requests. The store loses nothing here.
"""

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from celery import Celery

from broker.contract.agent_state import is_settled
from broker.contract.events import Event
from broker.contract.observations import AgentStateChangedObservation
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from broker.runtime.errors import StoreError
from broker.runtime.settings import BrokerSettings
from broker.store.keys import INBOX, replies_key
from broker.store.store import Store
from controller_worker.loop.replay import replay
from deckhands.client import Client, TaskSpec, derive_conversation_id
from deckhands.ingress.evaluations import EvaluationTasks
from deckhands.ingress.ingress_results import TaskResults
from deckhands.ingress.service import IngressWorker
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.service import JobsService
from deckhands.operations.jobs.table import JOBS
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import Schedule
from deckhands.operations.webhooks.repository import WebhookRepository
from deckhands.operations.webhooks.sending import WebhookResponse
from deckhands.operations.webhooks.webhook import SETTLED
from tests.simulation.canonical import QUIET_SECONDS, bash
from tests.simulation.faults import Fault
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.virtual_loop import current_process
from tests.simulation.wire import Bug

TURNS = [
    {"tool_calls": [bash("one")]},
    {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
]
PRODUCER, SCHEDULE = "shop", "tidy"
ORDERS = 4
BEFORE_TICK_SECONDS = 12.0
"""How long before a minute a simulation starts."""
TICKS = 1
"""How many ticks of the schedule are waited for."""
POLL_SECONDS = 0.25
LATENCY_SECONDS = 0.05
"""The longest time that a command, and its reply, travels: what others do meanwhile comes between."""
REQUEST_SECONDS = 0.05
REFUSED_SHARE = 0.2
LIMIT_SECONDS = 300.0
"""A delivery is repeated after half a minute, and a line of a dead worker is due again after a whole one."""
MAX_LATER_FAULTS, LATER_BOUNDARIES = 2, 300
CHANGE = re.compile(r" (?:ingress|jobs)-\d (?:before|after) (?:deck_(?!tick|now|register)\w+|XADD|XACK) ")
FAULTS = tuple(fault for fault in Fault if fault not in (Fault.LOST_TAIL, Fault.CLOCK))
"""A jump of the store's clock makes ticks of a whole hour due, of which a schedule starts the latest."""


@dataclass(frozen=True)
class Arrivals:
    """The parameters of a simulation; the same ones always give the same run."""

    seed: int = 0
    faults: Mapping[int, Fault] = field(default_factory=dict)
    workers: int = 1
    """How many of each kind."""
    bug: Bug | None = None
    is_traced: bool = False


@dataclass
class ArrivalsOutcome:
    """The result of a simulation.

    Attributes:
        failure: why it did not come to its end, or empty.
        logs: of all conversations in the store.
        ticks: the conversations that the schedule started, as its status counts them, and as the index lists them.
        replies: the answers to the producer by the id of the order: its events, each with its content.
        received: the requests that the receiver accepted: conversation, event, and the delivery's id.
    """

    cluster: Cluster
    failure: str = ""
    logs: dict[str, list[Event]] = field(default_factory=dict)
    ticks: tuple[int, int] = (0, 0)
    replies: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    received: list[tuple[str, int, str]] = field(default_factory=list)


def find_arrivals(folder: Path, seeds: range, bug: Bug | None = None) -> tuple[Arrivals, list[str]] | None:
    """Return the first simulation whose checks find something, and what; None: none does."""
    for seed in seeds:
        arrivals = _draw(seed, folder, bug)
        if found := find_broken_arrivals(simulate_arrivals(arrivals, folder)):
            return arrivals, found
    return None


def _draw(seed: int, folder: Path, bug: Bug | None) -> Arrivals:
    """Return the simulation of a seed: its first fault strikes where an ingress or a jobs worker changes the store."""
    random = Random(seed)
    arrivals = Arrivals(seed, workers=random.choice([1, 2]), bug=bug)
    kinds = (Fault.KILL,) if random.random() < 0.5 else FAULTS
    trace = simulate_arrivals(replace(arrivals, is_traced=True), folder).cluster.wire.trace
    changes: dict[str, list[int]] = defaultdict(list)  # by command, of which some are much more frequent than others
    for at, line in enumerate(trace, 1):
        if found := CHANGE.search(line):
            changes[found[0]].append(at)
    first = random.choice(random.choice(list(changes.values())))
    later = random.sample(range(first + 1, first + LATER_BOUNDARIES), random.randint(0, MAX_LATER_FAULTS))
    return replace(arrivals, faults={at: random.choice(kinds) for at in (first, *later)})


def simulate_arrivals(arrivals: Arrivals, folder: Path) -> ArrivalsOutcome:
    """Run a simulation to its end, or to the limit of time."""
    script = folder / "arrivals.json"
    script.write_text(json.dumps({"latency_seconds": 0.1, "turns": TURNS}))
    environment = {"LLM_MODEL": f"scripted/{script}", "LLM_SCRIPTS_DIR": "/"}
    cluster = Cluster(arrivals.seed, arrivals.faults, environment, arrivals.is_traced, arrivals.bug)
    cluster.wire.latency_seconds, cluster.wire.random = LATENCY_SECONDS, Random(arrivals.seed)
    cluster.clock.advance(60.0 - BEFORE_TICK_SECONDS)
    outcome = ArrivalsOutcome(cluster)
    cluster.run(_world(arrivals, cluster, outcome))
    return outcome


async def _world(arrivals: Arrivals, cluster: Cluster, outcome: ArrivalsOutcome) -> None:
    store = await cluster.open()
    client = Client(store)
    receiver = _Receiver(Random(arrivals.seed), outcome)
    cluster.start_workers(arrivals.workers, arrivals.workers)
    for number in range(arrivals.workers):
        cluster.start(f"ingress-{number}", _run_ingress)
        cluster.start(f"jobs-{number}", receiver.run_jobs)
    schedules = ScheduleRepository(store, client.secrets)
    await schedules.add(Schedule(name=SCHEDULE, cron="* * * * *"), TaskSpec(task="tidy up"))
    await WebhookRepository(store, client.secrets).add("*", "http://127.0.0.1:9/", (SETTLED,))
    answered = cluster.loop.create_future()
    cluster.start("producer", lambda opened: _produce(opened, answered))
    over = cluster.loop.create_task(_wait_for_end(store, schedules, outcome, answered))
    outcome.failure = await cluster.until(over, LIMIT_SECONDS)
    if not outcome.failure:
        # No further tick: what is checked shall be at rest.
        await schedules.set_paused(SCHEDULE, is_paused=True)
        await cluster.at_rest(QUIET_SECONDS)
    outcome.logs = await _read_logs(store)
    listed = sum(row.labels.get("schedule") == SCHEDULE for row in await Conversations(store).list_recent())
    outcome.ticks = (await schedules.entry(SCHEDULE)).status.begun, listed
    for _, fields in await store.connection.call("XRANGE", replies_key(PRODUCER), "-", "+"):
        about = {name.decode(): value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
        outcome.replies[about["id"]].append((about["event"], about["conversation_id"] + about["json"]))


async def _wait_for_end(
    store: Store, schedules: ScheduleRepository, outcome: ArrivalsOutcome, answered: asyncio.Future[None]
) -> None:
    """Wait until orders are answered, ticks have started, and the end of every conversation was reported."""
    await answered
    while True:
        await asyncio.sleep(POLL_SECONDS)
        status = (await schedules.entry(SCHEDULE)).status
        logs = await _read_logs(store)
        ends = {(cid, event.id) for cid, events in logs.items() for event in _find_ends(events)}
        is_reported = ends <= {(cid, event_id) for cid, event_id, _ in outcome.received}
        if status.begun >= TICKS and len(ends) >= len(logs) and is_reported:
            return


async def _read_logs(store: Store) -> dict[str, list[Event]]:
    rows = await Conversations(store).list_recent()
    return {row.conversation_id: await EventLog(store).read(row.conversation_id) for row in rows}


def _find_ends(events: list[Event]) -> list[Event]:
    """Return the events of a log that the webhook reports."""
    return [
        event for event in events if isinstance(event, AgentStateChangedObservation) and is_settled(event.agent_state)
    ]


async def _produce(store: Store, answered: asyncio.Future[None]) -> None:
    """Add all orders, again after a kill or if it is not known whether one was added; wait until all have settled."""
    for number in range(ORDERS):
        request = json.dumps({"id": f"order-{number}", "task": f"order {number}"})
        while True:
            with suppress(StoreError):
                await store.connection.call("XADD", INBOX, "*", "v", 1, "request", request, "reply_to", PRODUCER)
                break
            await asyncio.sleep(POLL_SECONDS)
    settled: set[bytes] = set()
    while len(settled) < ORDERS:
        await asyncio.sleep(POLL_SECONDS)
        with suppress(StoreError):
            for _, fields in await store.connection.call("XRANGE", replies_key(PRODUCER), "-", "+"):
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                settled |= {about[b"id"]} if about[b"event"] == b"settled" else set()
    if not answered.done():
        answered.set_result(None)


async def _run_ingress(store: Store) -> None:
    settings = BrokerSettings()
    results = TaskResults(Celery("simulated", set_as_current=False))  # no task of Celery arrives here
    await IngressWorker(settings, results, EvaluationTasks("", settings.url)).serve(store, asyncio.Event())


class _Receiver:
    """The receiver of the webhook, and the jobs workers whose requests reach it."""

    def __init__(self, random: Random, outcome: ArrivalsOutcome) -> None:
        self._random = random
        self._received = outcome.received

    async def run_jobs(self, store: Store) -> None:
        """Be a jobs worker. A job that it sends is carried out by itself."""
        jobs = {job.name: job for job in JOBS}
        process = current_process()
        at_work: set[asyncio.Task[Any]] = set()

        def send(name: str, arguments: tuple[Any, ...]) -> None:
            task = asyncio.get_running_loop().create_task(
                jobs[name].run_within_limits(services, *arguments), context=process.context
            )
            at_work.add(task)
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

        services = JobServices(store, BrokerSettings(), send, self._request)
        await JobsService(services.settings, send, JOBS).serve(services, asyncio.Event())

    async def _request(self, _url: str, body: str, headers: dict[str, str], *_: Any) -> WebhookResponse:
        await asyncio.sleep(self._random.random() * REQUEST_SECONDS)
        if self._random.random() < REFUSED_SHARE:
            return WebhookResponse(503, "The receiver answered with status 503.")
        said = json.loads(body)["data"]
        self._received.append((said["conversation_id"], said["event_id"], headers["webhook-id"]))
        await asyncio.sleep(self._random.random() * REQUEST_SECONDS)
        return WebhookResponse(200)


def find_broken_arrivals(outcome: ArrivalsOutcome) -> list[str]:
    """Return the violations, each with the id of its invariant if it has one."""
    if outcome.failure:
        stand = {cid: str(fold_status(events).state) for cid, events in outcome.logs.items()}
        return [f"I1: {outcome.failure}; {stand}"]
    return [*_find_broken_logs(outcome), *_find_wrong_replies(outcome), *_find_wrong_deliveries(outcome)]


def _find_broken_logs(outcome: ArrivalsOutcome) -> Iterator[str]:
    for cid, events in outcome.logs.items():
        yield from (f"{each.invariant}: {cid}: {each.text}" for each in find_violations(events, conversation_id=cid))
        if (divergence := replay(events).divergence) is not None:
            yield f"I7: {cid} would be decided otherwise: {divergence.to_diff()}"
    for action, times in Counter(outcome.cluster.node.executions).items():
        if times > 1:
            yield f"I5: action {action} was executed {times} times"
    orders = {derive_conversation_id(f"inbox:{PRODUCER}:order-{number}") for number in range(ORDERS)}
    begun, listed = outcome.ticks
    if not orders <= outcome.logs.keys() or len(outcome.logs) != len(orders) + listed:
        yield f"I3: {ORDERS} orders and {listed} ticks have led to {len(outcome.logs)} conversations"
    if begun != listed:
        yield f"the schedule counts {begun} conversations, and there are {listed}"


def _find_wrong_replies(outcome: ArrivalsOutcome) -> Iterator[str]:
    for name, replies in outcome.replies.items():
        kinds = {event for event, _ in replies}
        if kinds != {"accepted", "settled"}:
            yield f"{name} was answered with {sorted(kinds)}"
        if len({content for event, content in replies if event == "settled"}) > 1:
            yield f"{name} has several outcomes: {replies}"


def _find_wrong_deliveries(outcome: ArrivalsOutcome) -> Iterator[str]:
    ids: dict[tuple[str, int], set[str]] = defaultdict(set)
    latest: dict[str, int] = {}
    for cid, event_id, delivery_id in outcome.received:
        ids[cid, event_id].add(delivery_id)
        if event_id < latest.get(cid, 0):
            yield f"event {event_id} of {cid} was delivered after event {latest[cid]}"
        latest[cid] = event_id
    for (cid, event_id), names in ids.items():
        if len(names) > 1:
            yield f"event {event_id} of {cid} was delivered as {sorted(names)}"
        if event_id not in {event.id for event in _find_ends(outcome.logs.get(cid, []))}:
            yield f"event {event_id} of {cid} was delivered and is no end of its log"
