"""What goes wrong in a simulation: at which boundary, and how.

A boundary lies before and after every command that a process sends to the store; they are numbered from 1 in the order
in which they are reached, whichever process reaches them.

Holds: the same seed and faults lead to the same boundaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from broker.runtime.clock import ManualClock
from broker.runtime.errors import OutcomeUnknown, StoreUnavailable
from broker.store.connection import Argument, Connection
from broker.testing.keyspace import Arguments
from broker.testing.memory_store import MemoryConnection, MemoryServer
from tests.simulation.virtual_loop import SimulatedProcess, VirtualLoop


class Fault(StrEnum):
    """How a process fails."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT when its heartbeat has long lapsed: a zombie."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT before its heartbeat has lapsed: what it has in hand may be outdated, nothing worse."""
    CUT = "cut"
    """The connection breaks: before a command, which is not carried out, or after it, and the reply is lost."""


STOPPED_SECONDS = {Fault.STOP: 4.0, Fault.PAUSE: 1.0}
"""How long; a heartbeat may be 1.7 s late."""


@dataclass
class Wire:
    """What passes between the processes and the store, and what goes wrong there.

    Attributes:
        faults: boundary → what happens there.
        passed: every boundary reached so far: `before <command>` or `after <command>`.
        struck: the faults that struck: boundary, fault, process, command.
        connections: what each process has open.
    """

    loop: VirtualLoop
    server: NotingServer
    faults: Mapping[int, Fault]
    on_kill: Callable[[SimulatedProcess], None]
    passed: list[str] = field(default_factory=list)
    struck: list[tuple[int, Fault, str, str]] = field(default_factory=list)
    connections: dict[SimulatedProcess, list[MemoryConnection]] = field(default_factory=dict)

    async def boundary(self, process: SimulatedProcess, command: Sequence[Argument], *, is_after: bool) -> None:
        """Pass a boundary, unless it is where the process fails."""
        name = command[1] if command[0] == "FCALL" else command[0]
        self.passed.append(f"{'after' if is_after else 'before'} {name}")
        fault = self.faults.get(len(self.passed))
        if fault is None:
            return
        self.struck.append((len(self.passed), fault, process.name, self.passed[-1]))
        if fault is Fault.CUT:
            raise OutcomeUnknown("The reply was lost.") if is_after else StoreUnavailable("Nothing was sent.")
        if fault in STOPPED_SECONDS:
            process.stop()
            self.loop.call_later(STOPPED_SECONDS[fault], process.go_on, context=self.loop.world.context)
            await asyncio.sleep(0)
            return
        process.kill()
        self.on_kill(process)
        await self.loop.create_future()


class NotingServer(MemoryServer):
    """A store that remembers under which fencing token each append of an owner was accepted.

    Attributes:
        tokens: of every conversation, in the order of the log.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.tokens: dict[str, list[int]] = {}

    def execute(self, command: Arguments) -> Any:
        reply = super().execute(command)
        if command[:2] == [b"FCALL", b"deck_append"] and command[6] == b"owner" and reply[0] == b"appended":
            self.tokens.setdefault(command[5].decode(), []).append(int(command[8]))
        return reply


class ProcessConnection:
    """A process's `Connection` to the store: the one in memory, with a boundary before and after each command."""

    def __init__(self, wire: Wire, process: SimulatedProcess) -> None:
        self._wire = wire
        self._process = process
        self._inner = MemoryConnection(wire.server)
        wire.connections.setdefault(process, []).append(self._inner)

    @property
    def connects(self) -> int:
        return self._inner.connects

    async def call(self, *command: Argument) -> Any:
        await self._wire.boundary(self._process, command, is_after=False)
        reply = await self._inner.call(*command)
        await self._wire.boundary(self._process, command, is_after=True)
        return reply

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        await self._wire.boundary(self._process, commands[0], is_after=False)
        replies = await self._inner.call_many(commands)
        await self._wire.boundary(self._process, commands[0], is_after=True)
        return replies

    def another(self, *, reply_timeout_seconds: float) -> Connection:
        return ProcessConnection(self._wire, self._process)

    async def aclose(self) -> None:
        await self._inner.aclose()
