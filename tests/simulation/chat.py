"""Several conversations at once, each of some messages: a message is sent when the one before has been answered.

A conversation is released by its owner after each answer, so every message has to find a new one. Meanwhile a bell
wakes them all without news, as the governor of a quota does: a superfluous wake-up may cost time, never an answer.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from broker.contract.actions import MessageAction
from broker.contract.codec import decode
from broker.contract.events import AgentSpec, ConversationCreated, Event, EventSource, ModelReply
from broker.contract.observations import CmdOutputObservation, EventsLostObservation
from broker.contract.specs import Tenancy
from broker.coordination.wakeups import wake_conversations
from broker.limits.ledger import BudgetAccount, Ledger, make_tenant_account
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.log.lost_tails import tail_recording_gaps
from broker.log.status import Status, fold_status
from broker.runtime.errors import EventsLost, StoreError, UnknownConversation
from broker.store.store import Store
from tests.simulation.canonical import PATIENCE_SECONDS, QUIET_SECONDS, bash, said
from tests.simulation.checks import LATE
from tests.simulation.faults import Fault
from tests.simulation.recovery import longest_allowed, waits
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.troubles import Kind, Trouble, schedule
from tests.simulation.wire import Bug, OtherClock
from tool_worker.host.journal import Journal

ROUND = [
    {"tool_calls": [bash("one"), bash("two")]},
    {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
]
AFTER_TROUBLE_SECONDS = 3.0
"""How long conversations may take to continue after the store was away: pauses between attempts, and beats."""
ROUND_TRIPS = 6
"""How many round trips may lie between two events, at most."""
CALL_USD, TOP_UP_USD, TOP_UP_SECONDS = 0.25, 0.75, 0.5
"""What a model call costs, and what is added to the budget how often."""
TENANT = "team"
BELL_SECONDS = 0.2
"""How long the bell rests at most."""


@dataclass(frozen=True)
class Chat:
    """The parameters of a simulation; the same chat always gives the same run.

    Attributes:
        rounds: the number of messages of each user.
        latency_seconds: the longest time that a command, and its reply, travels.
        command_seconds: how long a command takes; the two of a turn run one after the other.
        model_seconds: how long a model call takes.
        has_bell: whether conversations are rung without news.
        has_early_bell: whether users wake them after the first command of a turn, without news.
        has_budget: whether a model call costs money of a tenant's budget, which is topped up bit by bit.
        clocks_ahead: how far the wall clocks of processes are ahead, by the process's name.
        limit_seconds: its time limit.
    """

    seed: int = 0
    faults: Mapping[int, Fault] = field(default_factory=dict)
    conversations: int = 3
    rounds: int = 4
    controllers: int = 2
    tools: int = 2
    latency_seconds: float = 0.02
    command_seconds: float = 0.2
    model_seconds: float = 0.1
    has_bell: bool = True
    has_early_bell: bool = False
    has_budget: bool = False
    troubles: Sequence[Trouble] = ()
    clocks_ahead: Mapping[str, float] = field(default_factory=dict)
    limit_seconds: float = 120.0
    bug: Bug | None = None
    journal: type[Journal] = Journal

    @property
    def ids(self) -> list[str]:
        """The ids of its conversations."""
        return [f"chat-{number}" for number in range(self.conversations)]


@dataclass
class ChatOutcome:
    """The result of a chat.

    Attributes:
        failure: why it did not come to its end, or empty.
        logs: by conversation.
        losers: conversations whose users have seen events that the store lost.
        takeovers: how often a worker took over a conversation.
        budget: the account of the tenant at the end.
    """

    chat: Chat
    cluster: Cluster
    failure: str = ""
    logs: dict[str, list[Event]] = field(default_factory=dict)
    losers: list[str] = field(default_factory=list)
    takeovers: int = 0
    budget: BudgetAccount | None = None

    @property
    def has_lost(self) -> bool:
        """Whether the store lost what was written."""
        is_planned = any(trouble.kind is Kind.LOST_TAIL for trouble in self.chat.troubles)
        return is_planned or Fault.LOST_TAIL in self.chat.faults.values()


def script(folder: Path, chat: Chat) -> Mapping[str, str]:
    """Write the model's script and return the environment of a controller worker that uses it."""
    path = folder / "chat.json"
    turns = [turn | {"cost_usd": CALL_USD} for turn in ROUND] if chat.has_budget else ROUND
    path.write_text(json.dumps({"latency_seconds": chat.model_seconds, "turns": turns * chat.rounds}))
    return {"LLM_MODEL": f"scripted/{path}"}


def simulate_chat(chat: Chat, folder: Path) -> ChatOutcome:
    """Run a chat to its end, or to the limit of time."""
    cluster = Cluster(chat.seed, chat.faults, script(folder, chat), bug=chat.bug)
    cluster.wire.latency_seconds, cluster.wire.random = chat.latency_seconds, Random(chat.seed)
    outcome = ChatOutcome(chat, cluster)
    cluster.node.journal_type = chat.journal
    cluster.node.run_seconds = chat.command_seconds
    cluster.clocks = {name: OtherClock(cluster.clock, ahead) for name, ahead in chat.clocks_ahead.items()}
    for trouble in chat.troubles:
        schedule(trouble, cluster.loop, cluster.server)
    cluster.run(_world(chat, cluster, outcome))
    return outcome


async def _world(chat: Chat, cluster: Cluster, outcome: ChatOutcome) -> None:
    store = await cluster.open()
    cluster.start_workers(chat.controllers, chat.tools)
    over = [_start_person(chat, cluster, cid, outcome) for cid in chat.ids]
    if chat.has_bell:
        cluster.loop.create_task(_ring(store, chat), context=cluster.loop.world.context)
    ledger = Ledger(store)
    if chat.has_budget:
        await ledger.set_limit(make_tenant_account(TENANT), CALL_USD)
        cluster.loop.create_task(_top_up(ledger), context=cluster.loop.world.context)
    outcome.failure = await cluster.until(asyncio.gather(*over), chat.limit_seconds)
    if chat.has_budget and not outcome.failure:
        await cluster.at_rest(QUIET_SECONDS)
        outcome.budget = await ledger.load_account(make_tenant_account(TENANT))
    log = EventLog(store)
    outcome.takeovers = await store.connection.call("XLEN", store.all_shards[0].takeovers)
    outcome.logs = {cid: await log.read(cid) for cid in chat.ids}


def _start_person(chat: Chat, cluster: Cluster, cid: str, outcome: ChatOutcome) -> asyncio.Future[None]:
    over: asyncio.Future[None] = cluster.loop.create_future()

    async def person(store: Store) -> None:
        await _talk(store, cid, chat, outcome)
        if not over.done():
            over.set_result(None)

    cluster.start(f"person of {cid}", person)
    return over


async def _talk(store: Store, cid: str, chat: Chat, outcome: ChatOutcome) -> None:
    """Send one message after the other; after a kill, continue at the end of the log."""
    log = EventLog(store)
    created = ConversationCreated(
        conversation_id=cid,
        agent=AgentSpec(tool_concurrency=2),
        headless=False,
        tenancy=Tenancy(tenant=TENANT) if chat.has_budget else None,
    )
    while True:
        try:
            await log.create(created, [said("message 1")], key="message 1")
            async with asyncio.timeout(None) as patience:
                if await _talked(log, cid, chat, patience if outcome.has_lost else None):
                    return
        except TimeoutError:
            continue
        except EventsLost as lost:
            if lost.checksum:
                outcome.losers.append(cid)
        except UnknownConversation:
            continue  # it was lost as a whole


async def _talked(log: EventLog, cid: str, chat: Chat, patience: asyncio.Timeout | None) -> bool:
    status, unsaid = Status(), [f"message {number + 1}" for number in range(chat.rounds)]
    async for event in tail_recording_gaps(log, cid, after=0, decode=decode):
        status = status.apply(event)
        if patience is not None:
            patience.reschedule(asyncio.get_running_loop().time() + PATIENCE_SECONDS)
        if isinstance(event, MessageAction) and event.content in unsaid:
            unsaid.remove(event.content)
        if chat.has_early_bell and isinstance(event, CmdOutputObservation) and event.command == "one":
            await wake_conversations(log.store, [cid])
        # A store that has come back may have fewer events than were seen, and get the very same events again.
        if status.is_settled and event.id >= await log.load_last_id(cid):
            if not unsaid:
                return True
            await log.append(cid, [said(unsaid[0])], key=unsaid[0])
    return False


async def _top_up(ledger: Ledger) -> None:
    while True:
        await asyncio.sleep(TOP_UP_SECONDS)
        with suppress(StoreError):
            await ledger.top_up(make_tenant_account(TENANT), TOP_UP_USD)


async def _ring(store: Store, chat: Chat) -> None:
    random = Random(chat.seed)
    while True:
        await asyncio.sleep(random.random() * BELL_SECONDS)
        await wake_conversations(store, [cid for cid in chat.ids if random.random() < 0.5])


def broken_chat(outcome: ChatOutcome) -> list[str]:
    """Return the violations, each with the id of its invariant if it has one."""
    if outcome.failure:
        stand = {cid: str(fold_status(events).state) for cid, events in outcome.logs.items()}
        return [f"I1: {outcome.failure}; {stand}"]
    found = [line for cid, events in outcome.logs.items() for line in _broken_log(outcome, cid, events)]
    actions = {(cid, event.id) for cid, events in outcome.logs.items() for event in events if event.runnable}
    for action, times in Counter(outcome.cluster.node.executions).items():
        if times > 1 or (action not in actions and not outcome.has_lost):
            found.append(f"I5: action {action} was executed {times} times")
    return [*found, *_late(outcome), *_find_wrong_charges(outcome)]


def _broken_log(outcome: ChatOutcome, cid: str, events: list[Event]) -> Iterator[str]:
    yield from (
        f"{each.invariant}: {cid}: {each.text}" for each in find_violations(events, conversation_id=cid, is_strict=True)
    )
    texts = Counter(e.content for e in events if isinstance(e, MessageAction) and e.source is EventSource.USER)
    expected = Counter(f"message {number + 1}" for number in range(outcome.chat.rounds))
    has_gap = any(isinstance(event, EventsLostObservation) for event in events)
    if texts != expected and not has_gap:
        yield f"I3: the messages in the log of {cid} are {dict(texts)}"


def _find_wrong_charges(outcome: ChatOutcome) -> Iterator[str]:
    """Compare the ledger with the logs; after a lost tail it may know of calls that no log has."""
    account = outcome.budget
    if account is None or outcome.has_lost:
        return
    replies = [event for events in outcome.logs.values() for event in events if isinstance(event, ModelReply)]
    cost = sum(reply.cost_usd or 0.0 for reply in replies)
    if abs(account.spent_usd - cost) > 1e-6 or account.calls != len(replies):
        yield f"I9: {account.calls} calls of {account.spent_usd} USD are charged, and {len(replies)} cost {cost}"
    if account.reserved_usd or account.waiting:
        yield f"I13: {account.reserved_usd} USD are reserved, and {account.waiting} conversations wait"


def _late(outcome: ChatOutcome) -> Iterator[str]:
    chat, struck = outcome.chat, [fault for _, fault, _, _ in outcome.cluster.wire.struck]
    away = [each for each in chat.troubles if each.kind is not Kind.CLOCK]
    lost_time = sum(each.lost_seconds + each.seconds + AFTER_TROUBLE_SECONDS for each in away)
    most = longest_allowed(struck) + lost_time + ROUND_TRIPS * 2 * chat.latency_seconds
    most += 3 * len(chat.ids) * TOP_UP_SECONDS if chat.has_budget else 0.0  # they take turns
    most += max(0.0, chat.model_seconds - 0.1, chat.command_seconds - 0.2)
    for wait in waits(outcome.cluster.server.written, outcome.logs):
        if wait.seconds > most:
            yield f"{LATE}: {wait}, not {most:.1f} s"
