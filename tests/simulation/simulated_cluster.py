"""A cluster in one simulation: real controller and tool workers, a user, and an operating system that restarts them.

Holds: the workers, the core, the shell, the log and the functions are the real ones; simulated are time, the wire,
the workspace host and the random numbers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection
from controller_worker.loop.consumer import ControllerConsumer
from controller_worker.settings import load_controller_settings
from tests.simulation.faults import Fault
from tests.simulation.sealed import sealed
from tests.simulation.simulated_host import Node, SimulatedWorkspaces
from tests.simulation.virtual_loop import SimulatedProcess, VirtualLoop, current_process
from tests.simulation.wire import DEMOTED, REFUSED, Bug, NotingServer, OtherClock, ProcessConnection, Wire
from tool_worker.settings import load_tool_settings
from tool_worker.worker.consumer import ToolConsumer

RESTART_SECONDS = 0.3
DEMOTED_SECONDS = 0.5
AWAY_SECONDS = 1.0
SLOW_SECONDS = 2.0
SLOW_LATENCY_SECONDS = 0.5
HOUR = 3_600.0

T = TypeVar("T")

Main = Callable[[Store], Awaitable[Any]]


@dataclass
class Cluster:
    """Everything that runs in one simulation.

    Attributes:
        clocks: of processes whose wall clocks are wrong, by name.
        node_dir: the directory of the node; files of an earlier simulation in it would change this one.
        worker_stores: the store of each worker, by name.
    """

    seed: int
    faults: Mapping[int, Fault]
    environment: Mapping[str, str]
    is_traced: bool = False
    bug: Bug | None = None
    crashed: asyncio.Future[None] = field(init=False)
    clocks: dict[str, OtherClock] = field(default_factory=dict)
    node_dir: str = ""
    worker_stores: dict[str, Store] = field(default_factory=dict)
    _mains: dict[SimulatedProcess, Main] = field(default_factory=dict)
    _troubled_until: float = 0.0

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.loop = VirtualLoop(self.clock, Random(self.seed))
        self.node = Node(self.loop)
        self.server = NotingServer(self.clock, self.bug)
        self.wire = Wire(self.loop, self.server, dict(self.faults), self._on_kill, self._on_trouble, self.is_traced)
        self.crashed = self.loop.create_future()

    def run(self, world: Coroutine[Any, Any, T]) -> T:
        """Run what the world does to its end, sealed off from the machine, on a node whose directory is new."""
        try:
            with TemporaryDirectory(prefix="simulated-node-") as self.node_dir, sealed(self.seed, self.clock):
                return self.loop.run(world)
        finally:
            self.node.close()

    async def open(self) -> Store:
        """Open the store for the world."""
        return await open_store(MemoryConnection(self.server), clock=self.clock)

    async def at_rest(self, quiet_seconds: float) -> None:
        """Wait until there have been no faults for so long, and no process is stopped any more."""
        struck = -1
        while struck < len(self.wire.struck) or self.is_troubled:
            struck = len(self.wire.struck)
            await asyncio.sleep(quiet_seconds)

    def start(self, name: str, main: Main) -> SimulatedProcess:
        """Start a process; after each kill it starts again."""
        process = SimulatedProcess(name)
        self._mains[process] = main
        task = self.loop.create_task(self._run(process, main), name=name, context=process.context)
        task.add_done_callback(self._check, context=self.loop.world.context)
        return process

    def start_workers(self, controllers: int, tools: int) -> None:
        """Start so many workers of each kind."""
        for number in range(controllers):
            self.start(f"controller-{number}", self.controller)
        for number in range(tools):
            self.start(f"tools-{number}", self.tools)

    @property
    def is_troubled(self) -> bool:
        """Whether a process is stopped, or a fault lasts."""
        return any(process.is_stopped for process in self._mains) or self.loop.time() < self._troubled_until

    async def until(self, over: asyncio.Future[Any], limit_seconds: float) -> str:
        """Wait until it is over; return why it did not come to that, or an empty text."""
        try:
            async with asyncio.timeout(limit_seconds):
                await asyncio.wait([over, self.crashed], return_when=asyncio.FIRST_COMPLETED)
                if self.crashed.done():
                    await self.crashed
        except TimeoutError:
            return f"not settled within {limit_seconds} s"
        except Exception as error:  # noqa: BLE001  (whatever it is, the plan that leads there must be shown)
            return f"a process failed: {error!r}"
        return ""

    async def connect(self, process: SimulatedProcess) -> Store:
        """Open the store from a process."""
        connection = ProcessConnection(self.wire, process)
        clock = self.clocks.setdefault(process.name, OtherClock(self.clock))
        return await open_store(connection, clock=clock, patience_seconds=None, opening_seconds=None)

    async def _run(self, process: SimulatedProcess, main: Main) -> None:
        await main(await self.connect(process))

    def _on_kill(self, process: SimulatedProcess) -> None:
        for connection in self.wire.connections.pop(process):
            self.loop.create_task(connection.aclose(), context=self.loop.world.context)
        self.loop.call_later(
            RESTART_SECONDS, self.start, process.name, self._mains.pop(process), context=self.loop.world.context
        )

    def _on_trouble(self, fault: Fault, process: SimulatedProcess) -> None:
        """Let something fail that is not the process at the boundary, or not only that."""
        at, server = len(self.wire.passed), self.server
        match fault:
            case Fault.SKEW:
                self.clocks[process.name].jump(HOUR)
            case Fault.HOSTS:
                self.node.kill_hosts()
            case Fault.MACHINE:
                self.node.kill_hosts()
                for each in [each for each in self._mains if each.name.startswith("tools")]:
                    self.wire.kill(each)
            case Fault.SLOW:
                if self.wire.latency_seconds != SLOW_LATENCY_SECONDS:  # else an earlier spell lasts, and ends this one
                    self._later(SLOW_SECONDS, setattr, self.wire, "latency_seconds", self.wire.latency_seconds)
                self.wire.latency_seconds = SLOW_LATENCY_SECONDS
            case Fault.BURIAL:
                server.let_heartbeats_lapse()
            case Fault.RESTART:
                server.go_away()
                self._later(AWAY_SECONDS, server.come_back)
            case Fault.FAIL_OVER:
                server.refuse_writes(DEMOTED)
                self._later(DEMOTED_SECONDS, server.go_away)
                self._later(DEMOTED_SECONDS, server.refuse_writes, "")
                self._later(DEMOTED_SECONDS + AWAY_SECONDS, server.come_back)
            case Fault.LOST_TAIL:
                server.go_away()
                self._later(AWAY_SECONDS, server.come_back_as, at)
            case Fault.REFUSAL:
                server.refuse_writes(REFUSED)
                self._later(AWAY_SECONDS, server.refuse_writes, "")
            case Fault.CLOCK:
                server.clock.jump(HOUR)

    def _later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._troubled_until = max(self._troubled_until, self.loop.time() + seconds)
        self.loop.call_later(seconds, call, *args, context=self.loop.world.context)

    def _check(self, task: asyncio.Task[None]) -> None:
        if task.exception() is not None and not self.crashed.done():
            self.crashed.set_exception(task.exception())

    async def controller(self, store: Store) -> None:
        """Be a controller worker: one life after the other, as often as it is presumed dead."""
        self.worker_stores[current_process().name] = store
        consumer = ControllerConsumer(load_controller_settings(self.environment))
        services = consumer.services(store)
        while True:
            incarnation = await consumer.start_session(services)
            await incarnation.run(asyncio.Event(), on_beat=lambda _: None)

    async def tools(self, store: Store) -> None:
        """Be a tool worker of the one node."""
        self.worker_stores[current_process().name] = store
        consumer = ToolConsumer(load_tool_settings({"DECKHANDS_NODE": "node-1", "DECKHANDS_NODE_DIR": self.node_dir}))
        workspaces: Any = SimulatedWorkspaces(self.node)
        while True:
            incarnation = consumer.start_session(store, workspaces)
            await incarnation.run(asyncio.Event(), on_beat=lambda _: None)
