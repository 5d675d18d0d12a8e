"""The canonical conversation, and one simulation of it.

A task, a turn of two commands at once, a message meanwhile, a rate limit, a turn of a thought and a command, a pause
and a resume, an end. The user is a process too: after a kill it starts again and repeats no message.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.contract.actions import ChangeAgentStateAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.codec import decode
from broker.contract.events import AgentSpec, ConversationCreated, Event, EventSource, ModelReply
from broker.contract.observations import AgentStateChangedObservation, CmdOutputObservation
from broker.log.conversations import ConversationRow, Conversations
from broker.log.event_log import EventLog
from broker.log.lost_tails import tail_recording_gaps
from broker.log.status import Status
from broker.runtime.errors import EventsLost, StoreError, UnknownConversation
from broker.store.store import Store
from tests.simulation.faults import Fault
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.wire import Bug
from tool_worker.host.journal import Journal

CID = "conversation-1"
MESSAGES = ("<task>", "<and more>")
LIMIT_SECONDS = 120.0
PATIENCE_SECONDS = 8.0
"""After how long without news a person says again what was said: a store may have lost it, and nobody else knows."""
QUIET_SECONDS = 2.5
"""How long the cluster is left alone at the end: longer than the dead need to be buried."""


def bash(command: str, **arguments: str) -> dict[str, Any]:
    """A call of a model's script."""
    return {"name": "execute_bash", "arguments": {"command": command, **arguments}}


SCRIPT = {
    "latency_seconds": 0.1,
    "turns": [
        {"tool_calls": [bash("one"), bash("two")]},
        {
            "tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}, bash("three")],
            "error": {"code": "rate_limit", "retry_after_seconds": 0.4},
        },
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ],
}


@dataclass(frozen=True)
class Plan:
    """The parameters of a simulation; the same plan always gives the same run.

    Attributes:
        faults: boundary → its fault.
        is_watched_to_the_end: also wait until the dead are buried and look at what is left over.
        host_deaths: when workspace hosts are killed.
        bug: the planted one.
    """

    seed: int = 0
    faults: Mapping[int, Fault] = field(default_factory=dict)
    controllers: int = 1
    tools: int = 1
    is_watched_to_the_end: bool = True
    host_deaths: Sequence[float] = ()
    bug: Bug | None = None
    is_traced: bool = False

    def __str__(self) -> str:
        faults = ", ".join(f"{at}: Fault.{fault.name}" for at, fault in self.faults.items())
        deaths = f", host_deaths={tuple(self.host_deaths)}" if self.host_deaths else ""
        return f"Plan({self.seed}, {{{faults}}}, controllers={self.controllers}, tools={self.tools}{deaths})"


@dataclass
class Outcome:
    """The result of a simulation.

    Attributes:
        failure: why it did not come to its end, or empty.
        seen: the user's events during the run, in all its lives.
        others: the logs of the other conversations in the store, delegates of this one.
        snapshot: the one left in the store.
        leftovers: the remaining entries of the store's streams and hashes, by key.
    """

    plan: Plan
    cluster: Cluster
    failure: str = ""
    events: list[Event] = field(default_factory=list)
    seen: list[Event] = field(default_factory=list)
    others: dict[str, list[Event]] = field(default_factory=dict)
    row: ConversationRow | None = None
    snapshot: bytes | None = None
    leftovers: dict[str, Any] = field(default_factory=dict)

    @property
    def has_lost(self) -> bool:
        """Whether the store has lost its tail."""
        return any(fault is Fault.LOST_TAIL for _, fault, _, _ in self.cluster.wire.struck)

    @property
    def struck(self) -> int:
        """How many faults struck."""
        return len(self.cluster.wire.struck)


def environment(folder: Path) -> Mapping[str, str]:
    """Write the model's script and return the environment of a controller worker that uses it."""
    script = folder / "script.json"
    script.write_text(json.dumps(SCRIPT))
    return {"LLM_MODEL": f"scripted/{script}", "LLM_SCRIPTS_DIR": "/"}


Person = Callable[[Store, list[Event], asyncio.Future[None]], Awaitable[None]]
"""What a person does: given the store, where to put what is seen, and what to resolve when it is over."""


def simulate(
    plan: Plan, environment: Mapping[str, str], *, journal: type[Journal] = Journal, person: Person | None = None
) -> Outcome:
    """Run a conversation to its end, or to the limit of time.

    Args:
        journal: that of workspace hosts; another one plants a bug.
        person: the user who starts and watches it; None for that of the canonical conversation.
    """
    cluster = Cluster(plan.seed, plan.faults, {"LLM_SCRIPTS_DIR": "/"} | dict(environment), plan.is_traced, plan.bug)
    cluster.node.journal_type = journal
    outcome = Outcome(plan, cluster)
    cluster.run(_world(plan, cluster, outcome, person or _person))
    return outcome


async def _world(plan: Plan, cluster: Cluster, outcome: Outcome, person: Person) -> None:
    store = await cluster.open()
    settled = cluster.loop.create_future()
    for at in plan.host_deaths:
        cluster.loop.call_at(at, cluster.node.kill_hosts)
    cluster.start_workers(plan.controllers, plan.tools)
    cluster.start("person", lambda opened: person(opened, outcome.seen, settled))
    outcome.failure = await cluster.until(settled, LIMIT_SECONDS)
    if plan.is_watched_to_the_end and not outcome.failure:
        await cluster.at_rest(QUIET_SECONDS)
        if outcome.has_lost:  # the store may have lost a message after the person had left, who looks again
            again = cluster.loop.create_future()
            cluster.start("person again", lambda opened: person(opened, outcome.seen, again))
            outcome.failure = await cluster.until(again, LIMIT_SECONDS)
            await cluster.at_rest(QUIET_SECONDS)
        outcome.leftovers = await _leftovers(store)
    with contextlib.suppress(StoreError, UnknownConversation):
        outcome.events = await EventLog(store).read(CID)
        outcome.row = await Conversations(store).load_row(CID)
        for row in await Conversations(store).list_recent():
            if row.conversation_id != CID:
                outcome.others[row.conversation_id] = await EventLog(store).read(row.conversation_id)
        outcome.snapshot = await store.connection.call("GET", store.known_keys(CID).snapshot)


async def _person(store: Store, seen: list[Event], settled: asyncio.Future[None]) -> None:
    """Send the messages of the conversation, each under its own key, and watch until it has settled."""
    while True:
        try:
            await _talk(EventLog(store), seen)
            break
        except TimeoutError:
            continue
        except (EventsLost, UnknownConversation):
            seen.clear()
    if not settled.done():
        settled.set_result(None)


async def _talk(log: EventLog, seen: list[Event]) -> None:
    """Say what has to be said and watch to the end.

    Raises:
        EventsLost, UnknownConversation: the store has lost its tail.
        TimeoutError: there was no news for long, perhaps because the store has lost what was said last.
    """
    created = ConversationCreated(conversation_id=CID, agent=AgentSpec(tool_concurrency=2))
    await log.create(created, [said(MESSAGES[0])], key="task")
    status = Status()
    async for event in tail_patiently(log, CID):
        seen.append(event)
        status = status.apply(event)
        if isinstance(event, CmdOutputObservation):
            await log.append(CID, [said(MESSAGES[1])], key="more")
        elif isinstance(event, ModelReply) and event.iteration == 2:
            await log.append(CID, [_asked(AgentState.PAUSED)], key="pause")
        elif isinstance(event, AgentStateChangedObservation) and event.agent_state is AgentState.PAUSED:
            await log.append(CID, [_asked(AgentState.RUNNING)], key="resume")
        if status.is_terminal and event.id >= await log.load_last_id(CID):
            return


async def tail_patiently(log: EventLog, conversation_id: str) -> AsyncIterator[Event]:
    """Follow a log from its beginning, and record what it has lost."""
    tail = aiter(tail_recording_gaps(log, conversation_id, after=0, decode=decode))
    while True:
        async with asyncio.timeout(PATIENCE_SECONDS):
            event = await anext(tail)
        yield event


def said(text: str) -> MessageAction:
    """A message of the user."""
    return MessageAction(content=text, source=EventSource.USER)


def _asked(state: AgentState) -> ChangeAgentStateAction:
    return ChangeAgentStateAction(agent_state=state, source=EventSource.USER)


async def _leftovers(store: Store) -> dict[str, Any]:
    """Return remains that a cluster at rest should not have: unacknowledged entries, claims, waiting conversations."""
    call, shard, left = store.connection.call, store.all_shards[0], {}
    streams = [
        (shard.ready, "controllers"),
        (shard.actions("pool:bash"), "tools"),
        (shard.actions("node:node-1"), "tools"),
    ]
    for key, group in streams:
        left[f"{key} pending"] = (await call("XPENDING", key, group))[0]
    once = await call("HGETALL", store.known_keys(CID).once)
    left["claims"] = [name.decode() for name in once[::2] if name[:2] in (b"q:", b"w:", b"n:")]
    left["parked"] = await call("ZRANGE", shard.parked, 0, -1)
    left["unread"] = await call("ZRANGE", f"{shard.root}:unread", 0, -1)
    left["rung"] = await call("HGET", store.known_keys(CID).meta, "rung")
    return {name: found for name, found in left.items() if found}
