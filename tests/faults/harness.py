"""A cluster of real processes that a test may damage, and the check of the invariants afterwards.

Holds: at its end, every log in its store holds, also those that the test did not look at.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pytest
from redis import Redis

from broker.contract.events import AgentSpec, Event, LLMSpec, Observation, WorkspaceSpec
from broker.contract.observations import OutcomeUnknownObservation
from broker.contract.specs import Tenancy
from broker.log.invariants import find_violations
from broker.runtime import Acks
from broker.store.cluster import ClusterConnection
from broker.store.embedded import EmbeddedValkey
from broker.store.routing import find_slot
from broker.store.store import open_store
from controller_worker.core.controller import fold
from controller_worker.core.state import State, parse_snapshot
from deckhands.client.client import Client
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from tests.clusters import Cluster, SlotGroup
from tests.forked_programs import ForkedProgram
from tests.left_logs import verify_left_logs
from tests.polling import unhurried, until
from tests.served_stores import close_workspaces
from tests.stores import server_program
from tests.turns import bash, finish, script

STORE = os.environ.get("STORE", "server")
"""Where the conversations of fault tests are: `server`, or `cluster` for three primaries with a replica each."""
SHARDS = 8
Worker = subprocess.Popen[bytes] | ForkedProgram
NOTHING: Mapping[str, Any] = {}


def steps(count: int, *, seconds: float = 0.0) -> list[dict[str, Any]]:
    """Turns of a script: `count` commands that leave a trace of their beginning and their end, then finish."""
    turns: list[dict[str, Any]] = []
    for n in range(count):
        pause = f"sleep {seconds}; " if seconds else ""
        command = f"echo begin-{n} >> effects; {pause}echo end-{n} >> effects; echo done {n}"
        turns.append({"text": f"step {n}", **bash(command)})
    return [*turns, finish("all done")]


def make_due(broker: Redis, name: str) -> None:
    """Let a periodic job look as if no beat had ever sent it."""
    broker.hset(f"{BEAT_KEYS}{name}", "meta", json.dumps({"last_run_at": None}))
    broker.zadd(f"{BEAT_KEYS}:schedule", {f"{BEAT_KEYS}{name}": 0})


class FaultCluster:
    """A store, workers by name, and conversations whose effects can be counted."""

    def __init__(
        self, root: Path, *, append_fsync: Literal["everysec", "always"] = "everysec", port: int | None = None
    ) -> None:
        self.root = root
        self.store = EmbeddedValkey(root / "valkey", append_fsync=append_fsync, port=port)
        self.workers: dict[str, Worker] = {}
        self.client: Client
        self.url_for_workers = ""
        self.nodes: Cluster | None = None  # the servers of a cluster that has the conversations
        self.acks: Acks = "local"
        self.started_by: tuple[str, ...] = ()  # starts workers by their commands; else they are forked
        self.is_verified = True  # a test that damages the store says no
        self.forged: set[str] = set()  # conversations in whose logs the test wrote what no correct cluster writes
        self._scripts = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultCluster]:
        if STORE == "cluster":
            self.root.mkdir(parents=True, exist_ok=True)
            nodes = Cluster(server_program("valkey"), self.root)
            async with nodes.running(), self.running_on(nodes, SHARDS, acks="replica"):
                yield self
            return
        await self.store.start()
        self.client = Client(await open_store(self.store.url, patience_seconds=60))
        try:
            yield self
        finally:
            try:
                await self.end_workers()
            finally:
                await self.store.stop()

    @contextlib.asynccontextmanager
    async def running_on(self, nodes: Cluster, shards: int, *, acks: Acks = "local") -> AsyncIterator[Self]:
        """Keep the conversations in a cluster of servers; Celery's broker is a server beside it."""
        self.nodes = nodes
        await self.store.start()
        self.url_for_workers = nodes.url
        self.acks = acks
        self.client = Client(await open_store(nodes.url, shards=shards, patience_seconds=unhurried(60), acks=acks))
        try:
            yield self
        finally:
            try:
                await self.end_workers()
            finally:
                await self.store.stop()

    async def end_workers(self) -> None:
        """Kill the workers, close their workspaces, verify what all have written, and close the client."""
        for name in list(self.workers):
            self.signal(name, signal.SIGCONT)
            self.kill(name)
        await self.close_workspaces()
        try:
            if self.has_lost_its_store:
                await self.store.start()  # its files have the logs
            if self.is_verified:
                await verify_left_logs(self.client, forged=self.forged)
        finally:
            await self.client.aclose()

    @property
    def has_lost_its_store(self) -> bool:
        """Whether its only server is dead."""
        return not self.url_for_workers and self.store.child.exit_status is not None

    def check_that_all_live(self) -> None:
        ends = {name: self.log_of(name) for name, worker in self.workers.items() if worker.poll() is not None}
        assert not ends

    def start(self, **environment: str) -> None:
        self.start_controller(**environment)
        self.start_tool(**environment)

    def start_controller(self, name: str = "c1", **environment: str) -> Worker:
        return self._start(name, "controller_worker", environment)

    def start_tool(self, name: str = "t1", **environment: str) -> Worker:
        return self._start(name, "tool_worker", environment)

    def start_ingress(self, name: str = "d1", **environment: str) -> Worker:
        return self._start(name, "deckhands.ingress", environment)

    def start_jobs(self, name: str = "j1", **environment: str) -> Worker:
        return self._start(name, "deckhands.operations.jobs", environment)

    def start_services(self, name: str = "s1", **environment: str) -> Worker:
        """Start an ingress, a jobs worker and a beat in one process."""
        return self._start(name, "deckhands.services", environment)

    def start_beat(self, name: str = "b1", **environment: str) -> Worker:
        return self._start(name, "deckhands.operations.jobs.beat", environment)

    def kill(self, name: str) -> None:
        worker = self.workers.pop(name)
        worker.kill()
        worker.wait()

    async def find_keys(self, pattern: str) -> list[bytes]:
        """Return the keys of the store that match a pattern."""
        cursor, found = b"0", list[bytes]()
        while True:
            cursor, some = await self.client.store.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1_000)
            found += some
            if cursor == b"0":
                return found

    def signal(self, name: str, number: signal.Signals) -> None:
        self.workers[name].send_signal(number)

    @property
    def url(self) -> str:
        """The store's URL."""
        return self.url_for_workers or self.store.url

    def require_one_server(self) -> None:
        """Skip a test on a cluster because it needs the only server of a store."""
        if self.nodes is not None:
            pytest.skip("it is about the only server of a store")

    async def call_each(self, *command: str) -> None:
        """Send a command to the store's server, or to each primary of a cluster."""
        connection = self.client.store.connection
        await (connection.call_each if isinstance(connection, ClusterConnection) else connection.call)(*command)

    async def restart_store(self) -> None:
        """Kill the store and start it again; of a cluster, the primary of the first shard, which its replica replaces."""
        self.store.child.send(signal.SIGKILL)  # Celery's broker, too
        await self.store.child.wait()
        if self.nodes is not None:
            group = SlotGroup(self.nodes, find_slot(self.client.store.all_shards[0].root))
            old = await group.primary()
            old.kill()
            group.restart(old, await group.until_promoted(other_than=old))
            await group.until_whole()
        await self.store.start()
        await self.client.store.now(self.client.store.all_shards[0])

    async def kill_store(self) -> None:
        self.require_one_server()
        self.store.child.send(signal.SIGKILL)
        await self.store.child.wait()

    def log_of(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def script(self, *turns: dict[str, Any], latency: float = 0.0) -> str:
        """Write the script of a model and return the model's name."""
        self._scripts += 1
        return script(self.root / f"script-{self._scripts}.json", *turns, latency_seconds=latency)

    def folder_of(self, conversation_id: str) -> Path:
        return Path((self.root / f"{conversation_id}.where").read_text())

    async def submit(
        self,
        turns: Sequence[dict[str, Any]],
        *,
        count: int = 1,
        latency: float = 0.0,
        tools: Sequence[str] = (),
        sandbox: Literal["docker", "kubernetes", "none"] = "none",
        tenancy: Tenancy | None = None,
        task: Mapping[str, Any] = NOTHING,
        **spec: Any,
    ) -> list[str]:
        """Start conversations that each follow the script in a separate workspace.

        Args:
            sandbox: the sandbox of its commands.
            tenancy: their tenant and experiment.
            task: further fields of the task.
            spec: further fields of the agent.
        """
        spec.setdefault("enable_workspace_skills", False)
        agent = AgentSpec(llm=LLMSpec(model=self.script(*turns, latency=latency)), **spec)
        ids = []
        for _ in range(count):
            folder = self.root / "work" / f"{self._scripts}-{len(ids)}"
            folder.mkdir(parents=True)
            if sandbox != "none" and os.getuid() == 0:
                os.chown(folder, 1000, 1000)  # containers do not run as root
            workspace = WorkspaceSpec(path=str(folder), sandbox=sandbox)
            request = {"agent": agent, "workspace": workspace, "tools": tools, "tenancy": tenancy, **task}
            ids.append(await self.client.submit("do it", **request))
            (self.root / f"{ids[-1]}.where").write_text(str(folder))
        return ids

    async def until(self, condition: Callable[[], Any], *, limit: float = 30.0, what: str = "condition") -> None:
        await until(condition, limit=limit, what=what)

    async def until_ended(self, name: str, *, limit: float = 30.0) -> int:
        """Wait for a worker that is about to die by itself."""
        worker = self.workers[name]
        await self.until(lambda: worker.poll() is not None, limit=limit)
        del self.workers[name]
        return worker.wait()

    async def until_kind(self, conversation_id: str, kind: str, *, count: int = 1, limit: float = 30.0) -> None:
        """Wait until a log holds `count` events of a kind."""

        async def there() -> bool:
            events = await self.client.events(conversation_id)
            return sum(event.kind == kind for event in events) >= count

        await self.until(there, limit=limit, what=kind)

    async def settle(self, ids: Sequence[str], *, limit: float = 60.0) -> None:
        async with asyncio.timeout(unhurried(limit)):
            for conversation_id in ids:
                await self.client.wait_until_settled(conversation_id)

    async def check(
        self, ids: Sequence[str], *, commands: int, state: str = "finished", unknown: int = 0, limit: float = 60.0
    ) -> None:
        """Wait until all have come to rest; check every log, its snapshot, and that each command ran exactly once.

        Args:
            unknown: how many commands of all conversations may have an unknown outcome.
        """
        await self.settle(ids, limit=limit)
        unknown_found = 0
        for conversation_id in ids:
            events = await self.check_log(conversation_id)
            row = await self.client.row(conversation_id)
            assert row.state == state, (row, [event.sentence for event in events[-5:]])
            await self._check_fold(conversation_id, events)
            here = sum(isinstance(event, OutcomeUnknownObservation) for event in events)
            unknown_found += here
            effects = self.effects(conversation_id)
            begun = [line for line in effects if line.startswith("begin-")]
            ended = [line for line in effects if line.startswith("end-")]
            assert len(begun) == len(set(begun)), f"run twice: {effects}"
            assert len(ended) >= commands - here, f"not run: {effects}"
        assert unknown_found <= unknown, f"{unknown_found} unknown outcomes, at most {unknown} expected"

    async def check_log(self, conversation_id: str) -> Sequence[Event]:
        """Check the log of a conversation, and what the index says about it; return its events.

        A log can still grow after its conversation has come to rest: a party reports that it has stopped.
        """
        row = None
        while row != (row := await self.client.row(conversation_id)):
            events = await self.client.events(conversation_id)
        known = {"conversation_id": conversation_id, "last_event_id": row.last_event_id}
        found = find_violations(events, **known, is_strict=True)
        found += (await self.client.verify(conversation_id)).violations
        assert not found, [item.text for item in found]
        return events

    async def _check_fold(self, conversation_id: str, events: Sequence[Event]) -> None:
        keys = await self.client.store.locate(conversation_id)
        snapshot = parse_snapshot(await self.client.store.connection.call("GET", keys.snapshot))
        whole = fold(State(), events)
        if snapshot is not None:
            assert fold(snapshot, events[snapshot.version :]) == whole

    async def answers(self, conversation_id: str, kind: str = "") -> list[Any]:
        """The one answer of each action of a kind; without a kind, of each that runs in a workspace."""
        events = await self.client.events(conversation_id)
        found = []
        for action in [event for event in events if (event.kind == kind if kind else event.runnable)]:
            (answer,) = [event for event in events if isinstance(event, Observation) and event.cause == action.id]
            found.append(answer)
        return found

    def effects(self, conversation_id: str) -> list[str]:
        """Return the effects of a conversation's commands, in order."""
        path = self.folder_of(conversation_id) / "effects"
        return path.read_text().split() if path.exists() else []

    def _start(self, name: str, module: str, environment: dict[str, str]) -> Worker:
        assert name not in self.workers, name
        (self.root / "work").mkdir(exist_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("DECKHANDS_", "LLM_"))}
        path = self.url.rpartition("@")[2].removeprefix("unix://")
        env |= {
            "DECKHANDS_URL": self.url,
            "DECKHANDS_ACKS": self.acks,
            "DECKHANDS_CELERY_URL": self.store.celery_url,
            "DECKHANDS_NODE": "node1",
            "LLM_SCRIPTS_DIR": "/",  # tests write scripts where they like
            "DECKHANDS_ANY_MODEL": path if path.startswith("/") else "",
            "DECKHANDS_SANDBOX": "none",
            "DECKHANDS_NODE_DIR": str(self.root / "n"),
            "DECKHANDS_WORKSPACE_ROOTS": str(self.root / "work"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        path = self.root / f"{name}.log"
        worker: Worker
        with path.open("ab") as log:
            if self.started_by:
                worker = subprocess.Popen(
                    [*self.started_by, sys.executable, "-m", module],
                    env=env | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            else:
                worker = ForkedProgram(module, environment=env | environment, output=log.fileno())
        self.workers[name] = worker
        return worker

    async def close_workspaces(self, ids: Iterable[str] | None = None) -> None:
        """End workspace hosts, which outlive their tool workers by design: of these conversations, or all."""
        await close_workspaces(self.root / "n", ids)
