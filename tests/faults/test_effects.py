"""No effect twice: every role is killed while tools of every kind report their effects to a program outside.

The ledger counts what took place, the logs say what was claimed, and both are compared action by action.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from broker.contract import Action, CmdOutputObservation, Event, Observation, OutcomeUnknownObservation
from broker.contract.actions import OfferedToolAction
from broker.contract.agent_state import AgentState
from broker.contract.observations import MCPObservation, ToolCallObservation
from broker.coordination import list_members
from broker.log.conversations import Conversations
from broker.runtime import StoreError
from broker.runtime.clock import SystemClock
from broker.tools import make_idempotency_key
from deckhands.ingress.context import derive_task_conversation_id
from tests import effects_ledger
from tests.faults.harness import FaultCluster
from tests.faults.server_process import ServerProcess, free_port, server
from tests.ingress_parts import Producer
from tests.ledger_tools import TOOLS
from tests.polling import until
from tests.proof import Proof
from tests.server_parts import add_key
from tests.turns import bash, call, finish
from tool_worker.worker.steps.action_run import compute_fingerprint
from tool_worker.workspace.launch.host_folder import HostFolder

ROLES = ("controller", "tool", "host", "ingress", "jobs", "beat", "server", "store")
OFFERED = ("keyed", "plain", "checked", "ship", "ledger/mcp_keyed", "ledger/mcp_plain")
CRASHED = "crashed its worker"
SERVER_STARTS = 20
KILLING_SHARE = 0.85
"""How much of a limit of time passes with kills; the rest is for the work that is left then."""
Submit = Callable[[str, dict[str, Any]], Awaitable[str]]


@dataclass
class Count:
    """What was counted.

    Attributes:
        lost: successes that the ledger lacks; `doubled`: effects beyond the first; `unsaid`: effects whose action has
            another answer than success or an unknown outcome.
        repeated: requests that reached the ledger again under their key.
    """

    actions: int = 0
    done: int = 0
    unknown: int = 0
    other: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)
    repeated: int = 0


def count_effects(cid: str, events: list[Event], requests: effects_ledger.Requests, count: Count) -> None:
    """Compare what the log of a conversation says about its actions with the ledger."""
    answers = {event.cause: event for event in events if isinstance(event, Observation)}
    for action in events:
        if not (isinstance(action, OfferedToolAction) or action.kind == "action.run"):
            continue
        assert isinstance(action, Action)
        answer = answers[action.id]
        key = make_idempotency_key(cid, action.id, compute_fingerprint(action))
        effects = requests.effects[f"{cid}-{action.id}"]
        what = f"{cid} {action.id} {action.kind}: {effects} effects, {requests.sent[key]} requests, {answer}"
        count.actions += 1
        count.repeated += max(0, requests.sent[key] - 1)
        succeeded = is_success(answer)
        count.done += succeeded
        is_unknown = isinstance(answer, OutcomeUnknownObservation)
        count.unknown += is_unknown
        if succeeded and not effects:
            count.lost.append(what)
        if effects > 1:
            count.doubled.append(what)
        if not succeeded and not is_unknown:
            count.other[f"{answer.kind} {getattr(answer, 'error_id', '')}"] += 1
            if effects and "may have" not in answer.content:
                count.unsaid.append(what)


def is_success(answer: Observation) -> bool:
    if isinstance(answer, CmdOutputObservation):
        return answer.metadata.exit_code == 0 and answer.content.strip() in ("first", "again")
    if isinstance(answer, MCPObservation):
        return not json.loads(answer.content).get("isError")
    return isinstance(answer, ToolCallObservation)


class World:
    """A cluster with every role, three ways in, and programs outside that are never killed."""

    def __init__(self, cluster: FaultCluster, seed: int) -> None:
        self.cluster = cluster
        self.seed = seed
        self.ledger_port, self.mcp_port, self.server_port = free_port(), free_port(), free_port()
        self.ids: list[str] = []
        self.current: set[str] = set()
        self.redriven: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.deaths: dict[str, float] = {}
        self.numbers = Counter({"c": 2, "t": 2, "d": 2, "j": 1, "b": 1})
        self.http = contextlib.AsyncExitStack()
        self.process: ServerProcess

    @property
    def environment(self) -> dict[str, str]:
        return {
            "EFFECTS_PORT": str(self.ledger_port),
            "EXAMPLE_CELERY_URL": self.cluster.store.celery_url,
            "DECKHANDS_TOOLS": TOOLS,
            "DECKHANDS_MCP": str(self.cluster.root / "mcp.json"),
        }

    @contextlib.contextmanager
    def programs_outside(self) -> Iterator[None]:
        """The ledger, the MCP server, and the user's own Celery worker."""
        root = self.cluster.root
        servers = {"mcpServers": {"ledger": {"url": f"http://127.0.0.1:{self.mcp_port}/mcp"}}}
        (root / "mcp.json").write_text(json.dumps(servers))
        celery = ("celery", "-A", "tests.ledger_tools", "worker", "-Q", "shop", "--pool=solo")
        commands = [
            ("tests.ledger_mcp_server", str(self.mcp_port)),
            (*celery, "--without-gossip", "--without-mingle"),
        ]
        with effects_ledger.running(root / "ledger.jsonl", self.ledger_port), contextlib.ExitStack() as stack:
            for name, command in zip(("mcp", "celery"), commands, strict=True):
                log = stack.enter_context((root / f"{name}.log").open("wb"))
                program = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    env=os.environ | self.environment | {"TMPDIR": str(root)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                stack.callback(program.wait)
                stack.callback(program.kill)
            yield

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with self.programs_outside():
            # Tool workers that cannot reach it offer none of its tools, and a task that names one is refused.
            await until(self.is_mcp_server_open, limit=120, what="the MCP server")
            for role, count in self.numbers.items():
                for number in range(1, count + 1):
                    self.start(f"{role}{number}")
            self.key = await add_key(self.cluster.client.store)
            await self.start_server()
            self.producer = Producer(self.cluster)
            try:
                yield
            finally:
                await self.http.aclose()
                self.producer.close()

    def is_mcp_server_open(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.mcp_port), timeout=1):
            return True
        return False

    def start(self, name: str) -> None:
        starts: dict[str, Callable[..., Any]] = {
            "c": self.cluster.start_controller,
            "t": self.cluster.start_tool,
            "d": self.cluster.start_ingress,
            "j": self.cluster.start_jobs,
            "b": self.cluster.start_beat,
        }
        starts[name[0]](name, **(self.environment if name[0] == "t" else {}))

    async def start_server(self) -> None:
        """Start a server; start another, as a supervisor does, if it ends because the store is away."""
        home = self.cluster.root / "home"
        cluster = self.cluster
        environment = {"DECKHANDS_CELERY_URL": cluster.store.celery_url, "DECKHANDS_ACKS": cluster.acks}
        for left in reversed(range(SERVER_STARTS)):
            running = server(cluster.url, home, self.server_port, environment=environment)
            try:
                self.process = await self.http.enter_async_context(running)
            except AssertionError:
                if not left:
                    raise
            else:
                return

    # Work

    def task(self) -> dict[str, Any]:
        port = self.ledger_port
        turns = [
            bash(effects_ledger.make_command(port, "command_plain", "each")),
            call("keyed"),
            call("mcp_keyed"),
            bash(effects_ledger.make_command(port, "command_keyed", "once")),
            call("plain"),
            call("mcp_plain"),
            call("checked"),
            call("ship"),
        ]
        return {
            "task": "do it",
            "agent": {
                "llm": {"model": self.cluster.script(*turns, finish("all done"), latency=0.05)},
                "enable_workspace_skills": False,
            },
            "tools": list(OFFERED),
            "workspace": {"sandbox": "none"},
        }

    async def keep_lane(self, submit: Submit, name: str, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            number += 1
            cid = await self.repeat(submit, f"{name}-{number}", self.task())
            self.ids.append(cid)
            self.current.add(cid)
            await self.settle(cid)
            self.current.discard(cid)
            await self.cluster.close_workspaces([cid])

    async def repeat(self, submit: Submit, key: str, task: dict[str, Any]) -> str:
        """Repeat a submission under its key until it is acknowledged."""
        while True:
            try:
                return await submit(key, task)
            except (StoreError, httpx2.HTTPError, OSError, TimeoutError):
                pause = asyncio.Event()
                asyncio.get_running_loop().call_later(0.2, pause.set)
                await pause.wait()

    async def submit_by_client(self, key: str, task: dict[str, Any]) -> str:
        from deckhands.client.tasks.spec import TaskSpec

        return await self.cluster.client.submit(TaskSpec.model_validate(task), idempotency_key=key)

    async def submit_by_celery(self, key: str, task: dict[str, Any]) -> str:
        def send() -> None:
            llm, skills = task["agent"]["llm"], task["agent"]["enable_workspace_skills"]
            options = {"model": llm["model"], "agent": {"enable_workspace_skills": skills}}
            options |= {"tools": task["tools"], "workspace": task["workspace"]}
            self.producer.send("submit", task["task"], kwargs=options, task_id=key, ignore_result=True)

        try:
            await asyncio.to_thread(send)
        except Exception as error:
            raise TimeoutError from error  # kombu's own errors of a broker that is away
        cid = derive_task_conversation_id(key)
        await until(lambda: self.cluster.client.exists(cid), limit=120, what="the conversation of a sent task")
        return cid

    async def submit_by_server(self, key: str, task: dict[str, Any]) -> str:
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": key}
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{self.server_port}", headers=headers, timeout=60
        ) as http:
            answer = await http.post("/conversations", json=task)
            if answer.status_code >= 500:
                raise TimeoutError(answer.text)
            assert answer.is_success, answer.text
            return str(answer.json()["conversation_id"])

    async def settle(self, cid: str) -> None:
        """Wait until it rests; a dead letter is continued, as promised."""
        conversations = Conversations(self.cluster.client.store)
        while True:
            await self.cluster.settle([cid], limit=600)
            row = await self.cluster.client.row(cid)
            if row.state != AgentState.ERROR or CRASHED not in row.fields.get("last_error", ""):
                return
            self.redriven[cid] += 1
            await conversations.requeue(cid)
            await self.cluster.client.resume(cid)

    # Kills

    async def kill_all(self, kills: int, seconds: float) -> None:
        """Kill so many members of all roles, each role as often as the others and at its own pace, within a time."""
        shares = {role: len(range(number, kills, len(ROLES))) for number, role in enumerate(ROLES)}
        end = SystemClock().monotonic() + seconds
        await asyncio.gather(*(self.keep_killing(role, share, end) for role, share in shares.items()))

    async def keep_killing(self, role: str, kills: int, end: float) -> None:
        chance = random.Random(f"{self.seed} {role}")
        for _ in range(kills):
            if SystemClock().monotonic() > end:
                return
            due = SystemClock().monotonic() + chance.uniform(0.0, 2.0)
            await until(lambda due=due: SystemClock().monotonic() >= due, limit=60)  # type: ignore[misc]
            if role == "host":
                await until(self.kill_host, limit=120, what="a workspace host")
            elif role == "server":
                self.process.send_signal(signal.SIGKILL)
                await self.http.aclose()
                await self.start_server()
            elif role == "store":
                await self.cluster.restart_store()
            else:
                await self.kill_worker({"ingress": "d"}.get(role, role[0]), chance)
            self.kills[role] += 1

    def kill_host(self) -> bool:
        for cid in sorted(self.current):
            folder = HostFolder(self.cluster.root / "n", cid)
            pid = folder.read_main_pid() if folder.exists else None
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    async def kill_worker(self, initial: str, chance: random.Random) -> None:
        """Kill one of a role and start its replacement; of two, the other one has a heartbeat then."""
        names = sorted(name for name in self.cluster.workers if name[0] == initial)
        if initial in "ct":
            await until(lambda: self.are_members(names), limit=180, what=f"workers {names}")
        name = chance.choice(names)
        self.deaths[str(self.cluster.workers[name].pid)] = SystemClock().now().timestamp()
        self.cluster.kill(name)
        self.numbers[initial] += 1
        self.start(f"{initial}{self.numbers[initial]}")

    async def are_members(self, names: Sequence[str]) -> bool:
        try:
            members = await list_members(self.cluster.client.store)
        except StoreError:
            return False
        ids = [member.worker_id for member in members if member.left_seconds > 0]
        return all(any(f"-{self.cluster.workers[name].pid}-" in one for one in ids) for name in names)


def record_effects(proof: Proof, world: World, count: Count, states: Counter[str], takeovers: dict[str, float]) -> None:
    """Hand in what was counted, with each wrong action as a failure."""
    proof.record(
        "kills of every role",
        trials=world.kills.total(),
        failures=len(count.lost) + len(count.doubled) + len(count.unsaid),
        unit="kills",
        seed=world.seed,
        figures={
            "kills by role": ", ".join(f"{world.kills[role]} {role}" for role in ROLES),
            "conversations": ", ".join(f"{number:,} {state}" for state, number in sorted(states.items())),
            "actions": count.actions,
            "succeeded": count.done,
            "with an unknown outcome": count.unknown,
            "with another answer": ", ".join(f"{number} {kind}" for kind, number in sorted(count.other.items())) or 0,
            "requests sent again under their key": count.repeated,
            "lost": len(count.lost),
            "doubled": len(count.doubled),
            "unsaid": len(count.unsaid),
        }
        | {f"to the takeover, {name}": f"{seconds:.2f} s" for name, seconds in takeovers.items()},
    )


async def run_with_kills(root: Path, proof: Proof, *, kills: int, seed: int) -> None:
    began = SystemClock().monotonic()
    async with FaultCluster(root).running() as cluster:
        world = World(cluster, seed)
        async with world.running():
            over = asyncio.Event()
            lanes = {
                "client": world.submit_by_client,
                "celery": world.submit_by_celery,
                "server": world.submit_by_server,
            }
            working = [
                asyncio.create_task(world.keep_lane(submit, f"{name}-{lane}", over))
                for name, submit in lanes.items()
                for lane in range(2)
            ]
            killing = asyncio.create_task(world.kill_all(kills, proof.seconds * KILLING_SHARE))
            await asyncio.wait([killing, *working], return_when=asyncio.FIRST_COMPLETED)
            over.set()
            await killing
            await asyncio.gather(*working)
        requests = effects_ledger.Requests.read(root / "ledger.jsonl")
        count, states = Count(), Counter[str]()
        for cid in world.ids:
            events = await cluster.client.events(cid)
            assert not (await cluster.client.verify(cid)).violations
            states[(await cluster.client.row(cid)).state] += 1
            count_effects(cid, events, requests, count)
        takeovers = [
            takeover.at.timestamp() - died
            for takeover in await Conversations(cluster.client.store).list_takeovers()
            if (died := world.deaths.get(takeover.from_worker.split("-")[2])) is not None
        ]
    takeovers.sort()
    assert len(set(world.ids)) == len(world.ids) > 0
    ranks = (
        {
            name: takeovers[int((len(takeovers) - 1) * share)]
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        }
        if takeovers
        else {}
    )
    print(
        f"\nseed {seed}: {sum(world.kills.values())} kills {dict(world.kills)} in {SystemClock().monotonic() - began:.0f} s, "
        f"{len(world.ids)} conversations {dict(states)}, {world.redriven.total()} redriven; {count.actions} actions: "
        f"{count.done} succeeded, {count.unknown} unknown, other {dict(count.other)}; requests sent again under their key "
        f"{count.repeated}; lost {len(count.lost)}, doubled {len(count.doubled)}, unsaid {len(count.unsaid)}; "
        f"{len(takeovers)} takeovers { {name: round(value, 2) for name, value in ranks.items()} }; load {os.getloadavg()[0]:.1f}"
    )
    record_effects(proof, world, count, states, ranks)
    assert not count.lost, count.lost[:3]
    assert not count.doubled, count.doubled[:3]
    assert not count.unsaid, count.unsaid[:3]
    assert set(states) == {"finished"}


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(10, id="some", marks=pytest.mark.timeout(600)),
        pytest.param(500, id="five_hundred_kills", marks=[pytest.mark.slow, pytest.mark.timeout(7_200)]),
        pytest.param(10_000, id="ten_thousand_kills", marks=[pytest.mark.soak, pytest.mark.timeout(100_000)]),
    ],
)
async def test_no_effect_twice_whoever_dies(tmp_path: Path, kills: int, proof: Proof) -> None:
    usual = 2027 if kills < 10_000 else random.randrange(10**6)
    await run_with_kills(tmp_path, proof, kills=kills, seed=int(os.environ.get("FAULT_SEED", usual)))


def test_the_count_finds_what_it_is_there_to_find() -> None:
    from broker.contract import CmdRunAction, ErrorObservation

    action = CmdRunAction(id=3, command="x")
    key = make_idempotency_key("c", 3, compute_fingerprint(action))

    def judge(answer: Observation, effects: int) -> Count:
        count = Count()
        requests = effects_ledger.Requests(Counter({key: effects}), Counter({"c-3": effects}))
        count_effects("c", [action, answer], requests, count)
        return count

    ran = CmdOutputObservation(id=4, cause=3, content="first", command="x", metadata={"exit_code": 0, "pid": -1})  # type: ignore[arg-type]
    unknown = OutcomeUnknownObservation(id=4, cause=3, content="x")
    error = ErrorObservation(id=4, cause=3, content="It was not run.")
    assert judge(ran, 1).done == 1
    assert judge(ran, 0).lost
    assert judge(ran, 2).doubled
    assert judge(unknown, 1) == Count(actions=1, unknown=1)
    assert judge(unknown, 2).doubled
    assert judge(error, 1).unsaid
    assert not judge(error, 0).unsaid
