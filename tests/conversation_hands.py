"""Helpers for tests of the shell: one worker's services on a real store, and the loops it holds.

Holds: nothing here decides anything; a test changes the store through the same calls as a worker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.condenser_specs import DEFAULT_CONDENSER, CondenserSpec
from broker.contract.events import AgentSpec, ConversationCreated, Event, EventSource, LLMSpec
from broker.contract.specs import SdkSpec
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from broker.store.connection import Argument, Connection, MultiplexedConnection
from broker.store.store import Store, open_store
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.loop.services import Services
from controller_worker.model.models import Models
from tests.broker_parts import lapse
from tests.controller_parts import answer, said
from tests.polling import until
from tests.stores import RealServer, emptied

CID = "conversation-1"
WORKER = "controller-1"

BASH = {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "ls"}}]}
THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}]}


class WatchedConnection:
    """A connection that counts commands and runs callbacks just before one is sent, or before its reply is read.

    Attributes:
        before: by the name of a command, a callback before it is sent, once.
        after: a callback after it has run, before its sender knows, once.
    """

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self.counts: Counter[str] = Counter()
        self.before: dict[str, Callable[[], Awaitable[Any]]] = {}
        self.after: dict[str, Callable[[], Awaitable[Any]]] = {}

    is_cluster = False

    @property
    def connects(self) -> int:
        return self._inner.connects

    async def call(self, *command: Argument) -> Any:
        await self._note(command)
        reply = await self._inner.call(*command)
        await self._let_pass(command)
        return reply

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        for command in commands:
            await self._note(command)
        replies = await self._inner.call_many(commands)
        for command in commands:
            await self._let_pass(command)
        return replies

    def another(self, *, reply_timeout_seconds: float) -> Connection:
        return self._inner.another(reply_timeout_seconds=reply_timeout_seconds)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _note(self, command: Sequence[Argument]) -> None:
        name = _name_of(command)
        self.counts[name] += 1
        if name in self.before:
            await self.before.pop(name)()

    async def _let_pass(self, command: Sequence[Argument]) -> None:
        if (name := _name_of(command)) in self.after:
            await self.after.pop(name)()


def _name_of(command: Sequence[Argument]) -> str:
    return str(command[1] if command[0] == "FCALL" else command[0])


class Hands:
    """A worker's worth of services, and the loops it holds."""

    def __init__(self, store: Store, wire: WatchedConnection, folder: Path) -> None:
        self.store = store
        self.wire = wire
        self.folder = folder
        self.log = EventLog(store)
        self.owners = Owners(store)
        self.services = Services(store, self.log, self.owners, Models({}, SystemClock(), is_open=True))
        self.gone: list[str] = []
        self.loops: list[ConversationLoop] = []

    async def begin(
        self,
        *turns: dict[str, Any],
        latency: float = 0.0,
        condensation: dict[str, Any] | None = None,
        condenser: CondenserSpec = DEFAULT_CONDENSER,
        name: str = "CodeActAgent",
        sdk: SdkSpec | None = None,
        **fields: Any,
    ) -> None:
        script = self.folder / "script.json"
        extra = {"condensation": condensation} if condensation else {}
        script.write_text(json.dumps({"turns": turns, "latency_seconds": latency, **extra}))
        agent = self.agent(condenser=condenser, name=name, sdk=sdk)
        created = ConversationCreated(conversation_id=CID, **{"agent": agent} | fields)
        await self.log.create(created, [said("task")], key="begin")

    async def claim(self, conversation_id: str = CID, *, worker: str = WORKER) -> ConversationLoop:
        claimed = await self.owners.claim(conversation_id, worker)
        assert isinstance(claimed, ClaimedConversation), claimed
        loop = ConversationLoop(claimed, self.services, on_gone=lambda gone: self.gone.append(gone.conversation_id))
        self.loops.append(loop)
        return loop

    async def go(self, conversation_id: str = CID) -> ConversationLoop:
        """Claim a conversation and let it run until it waits or leaves the worker."""
        loop = await self.claim(conversation_id)
        loop.wake(has_new_events=False)
        await self.at_rest(loop)
        return loop

    def agent(self, **fields: Any) -> AgentSpec:
        """Return an agent whose model follows the script."""
        return AgentSpec(**{"llm": LLMSpec(model=f"scripted/{self.folder / 'script.json'}")} | fields)

    async def wake(self, loop: ConversationLoop) -> None:
        """Let a conversation continue until it waits or leaves the worker."""
        loop.wake()
        await self.at_rest(loop)

    async def take_over(self) -> ConversationLoop:
        """Let the first worker die, and another one continue until the conversation waits or leaves it."""
        await lapse(self.store, WORKER)
        await Membership(self.store, "controller-2", "controller", ttl_seconds=3600.0).beat(1)
        loop = await self.claim(worker="controller-2")
        loop.wake(has_new_events=False)
        await self.at_rest(loop)
        return loop

    async def at_rest(self, loop: ConversationLoop) -> None:
        await until(lambda: loop.is_idle, what="rest")

    async def events(self) -> list[Event]:
        return await self.log.read(CID)

    async def kinds(self, *, after: int = 0) -> list[str]:
        return [event.kind for event in (await self.events())[after:]]

    async def say(self, text: str = "and this") -> None:
        await self.log.append(CID, [said(text)])

    async def ask(self, state: str) -> None:
        request = ChangeAgentStateAction(agent_state=AgentState(state), source=EventSource.USER)
        await self.log.append(CID, [request])

    async def observe(self, action_id: int, text: str = "a.txt") -> None:
        action = (await self.events())[action_id - 1]
        await self.log.append_observation(CID, answer(action, text), worker_id="tool-1")

    async def break_connections(self) -> None:
        """Let the store break every connection, as when it is started again, and connect once more."""
        connects = self.store.connection.connects
        other = self.store.connection.another(reply_timeout_seconds=5.0)
        await other.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await other.aclose()
        while self.store.connection.connects == connects:
            await self.store.retry(lambda: self.store.connection.call("EXISTS", "nothing"))

    async def owner(self) -> str:
        return (await Conversations(self.store).load_row(CID)).owner


@pytest.fixture
async def hands(valkey_server: RealServer, tmp_path: Path) -> AsyncIterator[Hands]:
    wire = WatchedConnection(MultiplexedConnection(await emptied(valkey_server.url)))
    store = await open_store(wire, patience_seconds=5.0)
    for worker in (WORKER, "controller-2"):
        await Membership(store, worker, "controller", ttl_seconds=3600.0).register()
    made = Hands(store, wire, tmp_path)
    yield made
    for loop in made.loops:
        loop.drop()
    await made.services.sdk_sessions.aclose()
    await made.services.models.aclose()
    await store.aclose()


def is_asking(loop: ConversationLoop) -> bool:
    """Whether the model is asked, and not only a question prepared, which would still read a message."""
    task = loop._call._task._task
    return task is not None and task.get_name().startswith("model ")
