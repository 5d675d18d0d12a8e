"""A node on virtual time: the real workspace host, its journal and its protocol, around a shell that runs nothing.

Holds: the host's own `Server` answers requests, journals and queues; the tool worker's own `OpenWorkspace` calls it;
simulated are sockets, the shell, and the host's event loop. Hosts outlive tool workers; they die when a test kills
them, and their journals stay. Every execution is noted outside of the system.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from tests.simulation.virtual_loop import SimulatedProcess, VirtualLoop
from tool_worker.errors import HostLost
from tool_worker.host import protocol
from tool_worker.host.configuration import HostConfiguration
from tool_worker.host.egress import HostEgress
from tool_worker.host.journal import Journal
from tool_worker.host.server import HostServer
from tool_worker.host.shell.bash_call import BashCall
from tool_worker.sandbox.none import NoSandbox
from tool_worker.workspace.launch.host_connection import HostConnection
from tool_worker.workspace.open_workspace import OpenWorkspace

RUN_SECONDS = 0.2
FOR_EVER_SECONDS = 1e6
WORKSPACE = "/workspace"

Finish = Callable[[dict[str, Any]], None]


class Node:
    """The state of a machine that survives its tool worker.

    Attributes:
        executions: conversation and action of every execution, in order.
        journal_type: another one plants a bug.
        run_seconds: how long a command takes, unless `seconds_of` says something else.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.executions: list[tuple[str, int]] = []
        self.journal_type = Journal
        self.run_seconds = RUN_SECONDS
        self.seconds_of: Callable[[str], float] = lambda _: self.run_seconds
        self._hosts: dict[str, SimulatedHost] = {}
        self._journals: dict[str, int] = {}

    def connect(self, conversation_id: str) -> tuple[asyncio.StreamReader, Any]:
        """Connect to the host of a workspace; one is started if none lives."""
        if conversation_id not in self._hosts:
            if conversation_id not in self._journals:
                self._journals[conversation_id] = os.memfd_create(f"journal of {conversation_id}")
            journal = self.journal_type(self._journals[conversation_id], "boot")
            self._hosts[conversation_id] = SimulatedHost(self, conversation_id, journal)
        return self._hosts[conversation_id].accept()

    def kill_hosts(self) -> None:
        """End every host as SIGKILL does."""
        for host in list(self._hosts.values()):
            host.process.kill()
            self.forget(host)

    def forget(self, host: SimulatedHost) -> None:
        """Record that a host has ended; its clients see that."""
        if self._hosts.pop(host.conversation_id, None) is not None:
            for client in host.clients:
                self.loop.call_soon(client.reader.feed_eof, context=self.loop.world.context)

    def close(self) -> None:
        """Give the journals back to the machine."""
        for descriptor in self._journals.values():
            os.close(descriptor)
        self._journals.clear()


class Client:
    """One connection, as a host has it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.reader = reader
        self.is_open = True


class SimulatedHost(HostServer):
    """The host of one workspace: everything of the real one but its sockets and its shell."""

    def __init__(self, node: Node, conversation_id: str, journal: Journal) -> None:
        # The real constructor listens on a socket and starts a shell.
        self.conversation_id = conversation_id
        self.process = SimulatedProcess(f"host of {conversation_id}")
        self.clients: list[Client] = []
        self._node = node
        self._shell = SimulatedShell(self)
        host_loop: Any = HostLoop(node.loop, self.process, on_stop=lambda: node.forget(self))
        terminals: Any = SimulatedTerminals(self._shell, self)
        self._loop, self._terminals, self._journal = host_loop, terminals, journal
        self._configuration = HostConfiguration(
            workspace=WORKSPACE,
            identity=[0, 0],
            environment={},
            ttl_seconds=FOR_EVER_SECONDS,
            idle_seconds=FOR_EVER_SECONDS,
            resource_limits={},
        )
        self._egress = HostEgress(0)
        self._clients, self._executions, self._queue, self._programs = set(), {}, [], {}
        self._unattached, self._idle = host_loop.timer(host_loop.stop), host_loop.timer(host_loop.stop)
        self._next = host_loop.timer(self._start_next)

    def accept(self) -> tuple[asyncio.StreamReader, Any]:
        """Return both ends of a connection, as the client has them."""
        client = Client(asyncio.StreamReader(limit=protocol.FRAME_LIMIT_BYTES, loop=self._node.loop))
        self.clients.append(client)
        return client.reader, Writer(self, client)

    def hear(self, client: Client, line: bytes) -> None:
        """Take a request, when it gets here."""
        real: Any = client
        self._node.loop.call_soon(lambda: self._serve(real, protocol.decode(line)), context=self.process.context)

    def run_command(self, call: BashCall, finish: Finish) -> asyncio.TimerHandle:
        """Let a command take its time, and note that it was run."""
        action_id = next(execution.action_id for execution in self._executions.values() if execution.call is call)
        self._node.executions.append((self.conversation_id, action_id))
        result = result_of(f"{call.command} of {action_id}", 0)
        delay = self._node.seconds_of(call.command)
        return self._node.loop.call_later(delay, finish, result, context=self.process.context)

    def _send(self, client: Any, line: bytes) -> None:
        self._node.loop.call_soon(client.reader.feed_data, line, context=self._node.loop.world.context)


def result_of(content: str, exit_code: int) -> dict[str, Any]:
    """Return a host's answer for a command that has ended."""
    metadata = {"exit_code": exit_code, "pid": 7, "working_dir": WORKSPACE}
    return {"content": content, "state": "completed", "omitted_bytes": 0, "metadata": metadata}


class SimulatedShell:
    """The used part of `BashSession`: every command takes the same time and prints its own name."""

    working_dir = WORKSPACE
    shell_pid = 7

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host
        self._running: tuple[asyncio.TimerHandle, Finish] | None = None

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    has_running_command = is_busy

    def start(self, call: BashCall, finish: Finish) -> None:
        self._running = self._host.run_command(call, lambda result: self._ended(finish, result)), finish

    def interrupt(self) -> bool:
        if self._running is None:
            return False
        timer, finish = self._running
        timer.cancel()
        self._ended(finish, result_of("^C", 130))
        return True

    def close(self) -> None:
        return

    def _ended(self, finish: Finish, result: dict[str, Any]) -> None:
        self._running = None
        finish(result)


class SimulatedTerminals:
    """The part of `Terminals` that the host uses: one shell, and another for each static command."""

    resting_pids = frozenset({SimulatedShell.shell_pid})

    def __init__(self, main: SimulatedShell, host: SimulatedHost) -> None:
        self.main = main
        self._host = host

    def is_free(self, call: BashCall) -> bool:
        return call.is_static or not self.main.is_busy

    def start(self, call: BashCall, finish: Finish) -> SimulatedShell:
        shell = SimulatedShell(self._host) if call.is_static else self.main
        shell.start(call, finish)
        return shell

    def close(self) -> None:
        return


class HostLoop:
    """The host's event loop, on virtual time."""

    def __init__(self, loop: VirtualLoop, process: SimulatedProcess, on_stop: Callable[[], None]) -> None:
        self.now = loop.time
        self.stop = on_stop
        self._loop = loop
        self._process = process

    def timer(self, callback: Callable[[], None]) -> SimulatedTimer:
        return SimulatedTimer(self._loop, self._process, callback)


class SimulatedTimer:
    """A deadline that can be moved."""

    def __init__(self, loop: VirtualLoop, process: SimulatedProcess, callback: Callable[[], None]) -> None:
        self._loop, self._process, self._callback = loop, process, callback
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._callback, context=self._process.context)


class Writer:
    """The writing end of a connection to a host; the used part of `asyncio.StreamWriter`."""

    def __init__(self, host: SimulatedHost, client: Client) -> None:
        self._host, self._client = host, client

    def write(self, line: bytes) -> None:
        self._host.hear(self._client, line)

    def close(self) -> None:
        self._client.is_open = False

    async def wait_closed(self) -> None:
        return


class SimulatedWorkspaces:
    """A tool worker's view of a node: the part of `Workspaces` that it uses."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._opened: dict[str, OpenWorkspace] = {}

    async def open(self, conversation_id: str, *_: Any, **__: Any) -> OpenWorkspace:
        opened = self._opened.get(conversation_id)
        if opened is None or not opened.connection.is_open:
            connection = await self._connect(conversation_id)
            reopen = lambda: self._connect(conversation_id)  # noqa: E731
            opened = self._opened[conversation_id] = OpenWorkspace(
                conversation_id, connection, reopen, is_confined=True
            )
        return opened

    def take_notice(self, _: str) -> str:
        return ""

    async def interrupt(self, conversation_id: str, action_id: int) -> bool:
        try:
            return await (await self.open(conversation_id)).interrupt(action_id)
        except HostLost:
            return False

    async def close(self, conversation_id: str) -> None:
        await asyncio.sleep(0)

    async def get_demanded_sandbox(self) -> NoSandbox:
        return NoSandbox()  # for git, which nothing here needs

    async def sees_mounts(self, _: str) -> bool:
        return False

    async def detach_idle(self) -> None:
        return

    async def _connect(self, conversation_id: str) -> HostConnection:
        connection = HostConnection(conversation_id, *self._node.connect(conversation_id))
        await connection.ping()
        return connection


class JournalWithoutStarts(Journal):
    """A planted bug: started actions without a result start again."""

    def has_started(self, action_id: int) -> bool:
        return False


class JournalWithoutResults(JournalWithoutStarts):
    """A planted bug: nothing that was ever run is known."""

    def result(self, action_id: int) -> bytes | None:
        return None
