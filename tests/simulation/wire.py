"""The traffic between the simulated processes and the store, and its faults.

Holds: the same seed and faults lead to the same boundaries.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any
from zlib import crc32

import msgpack
from hiredis import ReplyError

from broker.coordination.membership import QUIET_HEARTBEAT_SECONDS
from broker.runtime.errors import OutcomeUnknown, StoreUnavailable
from broker.runtime.settings import HEARTBEAT_TTL_SECONDS
from broker.store.connection import Argument, Connection, check_reply
from broker.testing.keyspace import Arguments
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection, MemoryServer
from broker.testing.streams import StreamRead
from tests.simulation.faults import LOST_BOUNDARIES, STOPPED_SECONDS, Fault
from tests.simulation.virtual_loop import SimulatedProcess, VirtualLoop

Commands = Sequence[Sequence[Argument]]
Execute = Callable[[Arguments], Any]
StoreBug = Callable[[Execute, Arguments], Any]
"""Answers a command in the store's place, in one step; it may use the right store."""
Send = Callable[[Commands], Awaitable[list[Any]]]
PortBug = Callable[[Send, Commands], Awaitable[list[Any]]]
"""Sends commands in a connection's place; it may send others."""


@dataclass(frozen=True)
class Bug:
    """A planted bug: a wrapper of the store, or of each process's connection to it."""

    on_store: StoreBug | None = None
    on_port: PortBug | None = None


@dataclass
class Wire:
    """The traffic between the processes and the store, and its faults.

    Attributes:
        faults: boundary → its fault.
        latency_seconds: the longest time that a command, and its reply, travels; each time drawn by `random`.
        trace: if `is_traced`, a line for each boundary: time, process, number, and a checksum of the data.
        passed: every boundary reached so far: `before <command>` or `after <command>`.
        struck: the faults that struck: boundary, fault, process, command.
        stopped: for how many seconds each process was stopped since its last beat.
        lapsed: how often each was stopped for so long that its heartbeat lapsed.
        connections: the open ones of each process.
    """

    loop: VirtualLoop
    server: NotingServer
    faults: dict[int, Fault]
    on_kill: Callable[[SimulatedProcess], None]
    on_trouble: Callable[[Fault, SimulatedProcess], None]
    is_traced: bool = False
    latency_seconds: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    passed: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    struck: list[tuple[int, Fault, str, str]] = field(default_factory=list)
    stopped: dict[str, float] = field(default_factory=dict)
    lapsed: Counter[str] = field(default_factory=Counter)
    connections: dict[SimulatedProcess, list[MemoryConnection]] = field(default_factory=dict)
    _copied_at: dict[int, int] = field(init=False)
    """Boundary → the boundary of a lost tail that leaves the store as it was here."""

    def __post_init__(self) -> None:
        lost = [at for at, fault in self.faults.items() if fault is Fault.LOST_TAIL]
        self._copied_at = {max(1, at - LOST_BOUNDARIES): at for at in lost}

    def strike_after(self, boundaries: int, fault: Fault) -> None:
        """Let a fault strike so many boundaries from now on."""
        at = len(self.passed) + max(boundaries, LOST_BOUNDARIES + 1)
        self.faults[at] = fault
        if fault is Fault.LOST_TAIL:
            self._copied_at[at - LOST_BOUNDARIES] = at

    async def boundary(self, process: SimulatedProcess, commands: Commands, *, replies: Any = None) -> None:
        """Pass a boundary, unless it is where the process fails.

        Args:
            replies: for the boundary after the commands.
        """
        is_after, command = replies is not None, commands[0]
        name = command[1] if command[0] == "FCALL" else command[0]
        self.passed.append(f"{'after' if is_after else 'before'} {name}")
        if self.is_traced:
            what = crc32(repr(replies if is_after else commands).encode())
            self.trace.append(f"{self.loop.time():.6f} {process.name} {self.passed[-1]} {what:08x}")
        if is_after and name in BEATS and replies[0][0] != b"swept":
            self.stopped[process.name] = 0.0
        if len(self.passed) in self._copied_at:
            self.server.keep_copy(self._copied_at[len(self.passed)])
        fault = self.faults.get(len(self.passed))
        if fault is None:
            return
        self.struck.append((len(self.passed), fault, process.name, self.passed[-1]))
        if fault is Fault.CUT:
            raise OutcomeUnknown("The reply was lost.") if is_after else StoreUnavailable("Nothing was sent.")
        if fault in STOPPED_SECONDS:
            process.stop()
            self._note_stop(process.name, STOPPED_SECONDS[fault])
            self.loop.call_later(STOPPED_SECONDS[fault], process.resume, context=self.loop.world.context)
            await asyncio.sleep(0)
            return
        if fault is Fault.KILL:
            self.kill(process)
        else:
            self.on_trouble(fault, process)
        if process.is_dead:
            await self.loop.create_future()

    def kill(self, process: SimulatedProcess) -> None:
        """End a process as SIGKILL does."""
        process.kill()
        self.stopped[process.name] = 0.0
        self.on_kill(process)

    def _note_stop(self, name: str, seconds: float) -> None:
        before = self.stopped.get(name, 0.0)
        self.stopped[name] = before + seconds
        if before <= LONGEST_STOP_SECONDS < self.stopped[name]:
            self.lapsed[name] += 1


BEATS = ("deck_tick", "deck_register")
LONGEST_STOP_SECONDS = HEARTBEAT_TTL_SECONDS - QUIET_HEARTBEAT_SECONDS
"""For how long a process may be stopped, at once or bit by bit between two beats, before it is taken for dead."""
DEMOTED = "READONLY You can't write against a read only replica."
REFUSED = "MISCONF Errors writing to the AOF file: No space left on device"
READS = frozenset(
    b"HGET HMGET HGETALL HLEN SMEMBERS SISMEMBER SCARD ZRANGE ZREVRANGE ZRANGEBYSCORE ZCARD ZRANK ZSCORE GET EXISTS TYPE TIME INFO "
    b"XRANGE XREVRANGE XREAD XLEN XINFO XPENDING".split()
)

MOVED_BY_BEATS = frozenset((b"monotonic", b"beat_ms", b"wall", b"now", b"quiet"))
"""What beats keep up to date: of a worker, and of the clock of a shard."""


class OtherClock:
    """A wall clock that is `ahead_seconds` ahead of the simulation's; its monotonic time is right."""

    def __init__(self, true: ManualClock, ahead_seconds: float = 0.0) -> None:
        self.ahead_seconds = ahead_seconds
        self._true = true

    def now(self) -> datetime:
        return self._true.now() + timedelta(seconds=self.ahead_seconds)

    def monotonic(self) -> float:
        return self._true.monotonic()

    def jump(self, seconds: float) -> None:
        """Be so much further ahead from now on."""
        self.ahead_seconds += seconds


@dataclass(frozen=True)
class Written:
    """One accepted append: when, to which conversation, and the ids of its first and last event."""

    at: float
    conversation_id: str
    first_id: int
    last_id: int


class NotingServer(MemoryServer):
    """A store that notes what it accepts.

    Attributes:
        written: every append that is not lost, in order.
        changed_at: when something other than beats and reads came last, and `beats`: when each worker's last beat did.
        tokens: of every conversation, under which fencing token each append of an owner was accepted, and whose it was.
    """

    def __init__(self, clock: ManualClock, bug: Bug | None = None) -> None:
        self.clock = OtherClock(clock)
        super().__init__(self.clock)
        self.bug = bug or Bug()
        self.is_away = False
        self.breaks = 0
        self._refusal = ""
        self._copies: dict[int, tuple[dict[bytes, Any], int]] = {}
        self.written: list[Written] = []
        self.tokens: dict[str, list[tuple[int, str]]] = {}
        self.changed_at = 0.0
        self.beats: dict[bytes, float] = {}
        self._true_clock = clock
        if self.bug.on_store is not None:
            on_store, perform = self.bug.on_store, self._perform
            self._perform = lambda command: on_store(perform, command)  # type: ignore[method-assign]

    def go_away(self) -> None:
        """Refuse all clients; every connection breaks."""
        self.is_away = True
        self.breaks += 1
        for blocked in list(self._blocked):
            if not blocked.done():
                blocked.set_exception(OutcomeUnknown("The connection to the store was lost before the reply."))

    def come_back(self, values: dict[bytes, Any] | None = None, written: int = 0) -> None:
        """Serve again, with the old content, or with `values` instead, of which so many appends are known."""
        if values is not None:
            self.keys.values = values
            del self.written[written:]
            for name in self._copies:  # what is lost does not come back
                self.keep_copy(name)
        self.restarts += 1
        self.is_away = False

    def keep_copy(self, name: int) -> None:
        """Keep the present content under a name."""
        self._copies[name] = copy.deepcopy(self.keys.values), len(self.written)

    def come_back_as(self, name: int) -> None:
        """Serve again, with the content that was kept under this name."""
        self.come_back(*self._copies.pop(name))
        self.tokens.clear()  # they may be given again

    def let_heartbeats_lapse(self) -> None:
        """Make every worker look dead."""
        for key in [key for key in self.keys.values if key.endswith(b":workers")]:
            for worker in self.keys.values[key]:
                self.keys.values[key][worker] = 1.0
            self.keys.values.get(key.removesuffix(b":workers") + b":clock", {}).pop(b"quiet", None)

    def refuse_writes(self, refusal: str) -> None:
        """Refuse to change anything, with this error; empty: no longer."""
        self._refusal = refusal

    def start_read(self, read: StreamRead) -> asyncio.Future[Any]:
        if self._refusal and read.group:
            refused = asyncio.get_running_loop().create_future()
            refused.set_result(ReplyError(self._refusal))
            return refused
        return super().start_read(read)

    @property
    def is_serving(self) -> bool:
        """Whether it is there and accepts writes."""
        return not self.is_away and not self._refusal

    def pass_over(self, seconds: float) -> None:
        """Leave out a span in which all workers only beat: their beats are so much later."""
        millis = round(seconds * 1_000)
        for key, value in self.keys.values.items():
            if key.endswith((b":workers", b":nodes")):
                value.update({name: due + millis for name, due in value.items() if due > 1.0})
            elif key.endswith((b":about", b":clock")):
                for name in MOVED_BY_BEATS & value.keys():
                    before = value[name]
                    value[name] = (
                        b"%.3f" % (float(before) + millis) if b"." in before else b"%d" % (int(before) + millis)
                    )
        self.beats = {worker: at + seconds for worker, at in self.beats.items()}

    def _note_change(self, command: Arguments, reply: Any) -> None:
        """Note the time unless a command was a beat that found nothing, or a look."""
        now, function = self._true_clock.monotonic(), command[1] if command[0] == b"FCALL" else b""
        if function in (b"deck_register", b"deck_tick") and reply[0] != b"swept":
            self.beats[command[4]] = now
        is_look = {
            b"deck_tick": function == b"deck_tick" and reply[1:5] == [0, 0, 0, []],
            b"deck_dispatch": function == b"deck_dispatch" and reply[0] in (b"queued", b"running"),
            b"deck_now": True,
            b"": command[0] in (b"XREADGROUP", b"XTRIM") or (command[0] == b"HDEL" and not reply),
        }
        if not is_look.get(function, False):
            self.changed_at = now

    def execute(self, command: Arguments) -> Any:
        if self._refusal and command[0] not in READS and command[:2] != [b"FCALL", b"deck_now"]:
            raise ReplyError(self._refusal)
        reply = super().execute(command)
        if command[0] not in READS:
            self._note_change(command, reply)
        if command[:2] == [b"FCALL", b"deck_append"] and reply[0] == b"appended" and reply[2] >= reply[1]:
            conversation_id = command[5].decode()
            self.written.append(Written(self._true_clock.monotonic(), conversation_id, reply[1], reply[2]))
            writer = msgpack.unpackb(command[6], unicode_errors="surrogateescape")
            if writer["by"] == "owner":
                self.tokens.setdefault(conversation_id, []).append((int(writer["token"]), writer["worker"]))
        return reply


class ProcessConnection:
    """A process's `Connection` to the store: the one in memory, with a boundary before and after each command."""

    def __init__(self, wire: Wire, process: SimulatedProcess) -> None:
        self._wire = wire
        self._process = process
        self._inner = MemoryConnection(wire.server)
        self._arrivals = [0.0, 0.0]
        """When the latest command, and the latest reply, arrives."""
        wire.connections.setdefault(process, []).append(self._inner)

    is_cluster = False

    @property
    def connects(self) -> int:
        return self._inner.connects

    async def _send(self, commands: Commands) -> list[Any]:
        """Carry commands to the store and the replies back, unless the store goes away meanwhile."""
        server = self._wire.server
        if server.is_away:
            raise StoreUnavailable("Cannot connect to the store: connection refused.")
        breaks = server.breaks
        await self.travel(0)
        if server.breaks != breaks:
            raise OutcomeUnknown("The connection to the store was lost before the reply.")
        refusal: Exception | None = None
        replies: list[Any] = []
        try:
            replies = [await self._inner.reply_to(command) for command in commands]
        except OutcomeUnknown as error:  # it travels back like any other reply
            refusal = error
        await self.travel(1)
        if server.breaks != breaks:
            raise OutcomeUnknown("The connection to the store was lost before the reply.")
        if refusal is not None:
            raise refusal
        return [check_reply(reply) for reply in replies]

    async def travel(self, way: int) -> None:
        """Travel to the store (0) or back (1); earlier messages on the same connection are not overtaken."""
        wire = self._wire
        if not wire.latency_seconds:
            await asyncio.sleep(0)
            return
        now = wire.loop.time()
        arrival = self._arrivals[way] = max(now + wire.random.random() * wire.latency_seconds, self._arrivals[way])
        await wire.loop.start_travel(arrival - now)

    async def call(self, *command: Argument) -> Any:
        await self._wire.boundary(self._process, [command])
        replies = await self._send([command])
        await self._wire.boundary(self._process, [command], replies=replies)
        return replies[0]

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        await self._wire.boundary(self._process, commands)
        bug = self._wire.server.bug.on_port
        replies = await (self._send(commands) if bug is None else bug(self._send, commands))
        await self._wire.boundary(self._process, commands, replies=replies)
        return replies

    def another(self, *, reply_timeout_seconds: float) -> Connection:
        return ProcessConnection(self._wire, self._process)

    async def aclose(self) -> None:
        await self._inner.aclose()
