"""A run of chaos: faults by a seeded schedule during a known workload, then a check of every log.

Holds: everything is bounded. A process gets a signal only if it is proven to be a worker of its role, see `victims`. A
fault that does not end by itself is in a journal before it takes effect. It is undone at the end of the run, or by the
next run if this process dies. If a killed worker is not replaced, its role is left alone from then on.
Does not: touch a cluster with other conversations in progress, unless the operator allows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from broker.coordination import list_members
from broker.log import ConversationQuery, Conversations, Selection
from broker.runtime import (
    SYSTEM_CLOCK,
    Clock,
    DeckhandsError,
    OutcomeUnknown,
    StoreUnavailable,
    UnknownConversation,
    UsageError,
    format_count,
    make_connection_name,
)
from broker.store import close_connections, is_cluster_url, is_sentinel_url, load_server_facts, replace_primary
from deckhands.chaos.fake_clock import FakeClock
from deckhands.chaos.own_workers import OWN_POOL, OwnWorker, add_workers
from deckhands.chaos.proxy import StoreProxy
from deckhands.chaos.report import ChaosReport, EffectCounts, Fault, Latencies
from deckhands.chaos.undo_journal import OpenFault, UndoJournal
from deckhands.chaos.victims import ProvenProcess, Victim, find_hosts, find_workers, open_store_process
from deckhands.chaos.workload import LABEL, Workload
from deckhands.client import Client

FAULTS: Mapping[str, str] = {
    "kill": "SIGKILL to a worker",
    "host": "SIGKILL to a workspace host of the run",
    "stop": "SIGSTOP to a worker for 2 to 6 s, longer than its heartbeat holds, then SIGCONT",
    "delay": "a worker's link to the store is 0.1 to 0.6 s slow each way, for 3 to 8 s",
    "partition": "a worker's link to the store passes nothing on for 2 to 8 s",
    "disconnect": "a worker's connections to the store are closed again and again for 1 to 5 s",
    "clock": "the clock of a worker that the run has added jumps by up to an hour, for 3 to 8 s",
    "pause": "the store answers no request for 0.5 to 3 s",
    "memory": "the store refuses writes, as at its memory limit, for 1 to 4 s",
    "disk": "the file system of the store is full for 1 to 4 s",
    "store": "the store ends, by SIGKILL or SHUTDOWN, and its supervisor starts it again",
    "failover": "a replica of the store is promoted",
}
"""The faults, in the order of the documentation."""
MAX_OPEN = 3
"""How many lasting faults overlap at most."""
REPLACED_SECONDS = 60.0
POLL_SECONDS = 0.05
MAX_SMALL_DISK_BYTES = 1 << 30
"""A larger file system is never filled: others may use it."""
BALLAST = "chaos-ballast"
BALLAST_STEP_BYTES = 1 << 20
UNDO_SECONDS = 60.0
CLOSING_SECONDS = 0.2
"""The pause between two closings of a worker's connections."""
CLOCK_STEPS_SECONDS = (-3_600, -30, 30, 3_600)


@dataclass(frozen=True, slots=True)
class ChaosSpec:
    """The parameters of a run.

    Attributes:
        directory: for the journal, and for logs and workspaces of own workers.
        url: the store's URL, for proxies.
        faults: names of `FAULTS`.
        every_seconds: the mean time between faults.
        duration_seconds: how long faults happen.
        settle_seconds: how long conversations may take to settle afterwards.
        conversations: how many are in progress at once.
        own_pairs: how many pairs of a controller and a tool worker are added; their links to the store may fail.
        allows_others: whether other conversations may be in progress; then no worker is added.
        shares_pids: see `find_workers`.
        store_directory: the directory of the embedded store.
        store_restarts: whether a supervisor restarts the store; otherwise it is never ended.
        environment: for own workers.
    """

    directory: Path
    url: str
    faults: tuple[str, ...] = tuple(FAULTS)
    every_seconds: float = 5.0
    duration_seconds: float = 60.0
    settle_seconds: float = 300.0
    conversations: int = 8
    own_pairs: int = 1
    seed: int = 0
    allows_others: bool = False
    shares_pids: bool = False
    store_directory: Path | None = None
    store_restarts: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


OF_OWN_WORKERS = frozenset(("delay", "partition", "clock"))
"""The faults of workers that the run has added."""
PROXY_REASON = "a proxy leads to a single store without TLS only"
CLOCK_REASON = "the library libfaketime is not installed here (Debian: apt-get install libfaketime)"


class NotPossible(Exception):
    """A fault cannot be tried; the text is the reason."""


class Chaos:
    """One run.

    Args:
        client: a client of the cluster, which should wait for the store longer than faults of the store last.
        on_notice: gets a line for the schedule, and for each fault.
    """

    def __init__(
        self,
        client: Client,
        spec: ChaosSpec,
        *,
        on_notice: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if unknown := [name for name in spec.faults if name not in FAULTS]:
            raise UsageError(f"There is no fault {unknown[0]!r}.", remedy=f"Choose from {', '.join(FAULTS)}.")
        self._client = client
        self._store = client.store
        self._spec = spec
        self._on_notice = on_notice
        self._clock = clock
        self._journal = UndoJournal(spec.directory / "open-faults.jsonl")
        self._draws = 0
        self._started = 0.0
        self._faults: list[Fault] = []
        self._not_tried: dict[str, str] = {}
        self._unreachable: dict[str, str] = {}
        self._own: list[OwnWorker] = []
        self._waiting_for: dict[str, tuple[int, float]] = {}
        self._given_up: set[str] = set()
        self._killed: set[str] = set()
        self._workload: Workload

    async def run(self, stop: asyncio.Event | None = None) -> ChaosReport:
        """Cause the faults, wait until all conversations settle, and check the logs.

        Args:
            stop: ends the faults early when it is set; the rest of the run follows.

        Raises:
            UsageError: other conversations are in progress.
            DeckhandsError: the cluster cannot be used.
        """
        spec, stop = self._spec, stop or asyncio.Event()
        for line in await self._journal.undo_all(self._store):
            self._on_notice(f"Left by an earlier run: {line}.")
        others = await self._find_others()
        if others and not spec.allows_others:
            raise UsageError(
                f"{format_count(len(others), 'conversation')} of other users may be disturbed, such as {others[0]}.",
                remedy="Wait for their end, use another cluster, or pass --others to disturb them.",
            )
        began = await self._store.now(self._store.all_shards[0])
        self._workload = Workload(
            self._client, f"{spec.seed}-{int(began.timestamp() * 1000):x}", lanes=spec.conversations
        )
        schedule = self._plan()
        self._on_notice(f"Seed {spec.seed}: {', '.join(f'{due:.1f} s {kind}' for due, kind in schedule)}.")
        over = asyncio.Event()
        async with self._own_workers():
            self._started = self._clock.monotonic()
            work = asyncio.create_task(self._workload.run(over), name="workload")
            try:
                await self._cause_all(schedule, stop, work)
            finally:
                over.set()
                await self._undo()
            unsettled = await self._wait_until_settled(work)
            seconds = self._clock.monotonic() - self._started
            # While the own workers live: some of the workspaces are theirs.
            if spec.allows_others:
                others = sorted({*others, *await self._find_others(updated_after=began)})
            return await self._report(schedule, began.timestamp(), unsettled, seconds, others, is_cut=stop.is_set())

    def _plan(self) -> list[tuple[float, str]]:
        """Draw the schedule. It repeats a random order of all faults, so that even a short run has many kinds."""
        spec, due = self._spec, 0.0
        schedule: list[tuple[float, str]] = []
        kinds: list[str] = []
        while True:
            due += spec.every_seconds * (0.5 + self._draw())
            if due >= spec.duration_seconds or not spec.faults:
                return schedule
            kinds = kinds or sorted(spec.faults, key=lambda _: self._draw())
            schedule.append((round(due, 1), kinds.pop()))

    def _draw(self) -> float:
        """Return the next number from 0 (inclusive) to 1 (exclusive); the same sequence for the same seed."""
        self._draws += 1
        return int.from_bytes(sha256(f"{self._spec.seed} {self._draws}".encode()).digest()[:6], "big") / (1 << 48)

    def _draw_between(self, least: float, most: float) -> float:
        return least + (most - least) * self._draw()

    async def _find_others(self, *, updated_after: datetime | None = None) -> list[str]:
        """Return conversations that were not started by chaos and are in progress or have new events."""
        selection = Selection(states=IN_PROGRESS if updated_after is None else frozenset())
        return [
            row.conversation_id
            async for page in ConversationQuery(self._store, selection).iterate_pages()
            for row in page
            if LABEL not in row.labels and (updated_after is None or row.updated >= updated_after)
        ]

    @contextlib.asynccontextmanager
    async def _own_workers(self) -> AsyncIterator[None]:
        spec = self._spec
        wanted = OF_OWN_WORKERS & set(spec.faults)
        can_have = {"delay", "partition"} if StoreProxy.supports(spec.url) else set[str]()
        can_have |= {"clock"} if FakeClock.find_library() else set()
        self._not_tried |= {
            kind: CLOCK_REASON if kind == "clock" else PROXY_REASON for kind in sorted(wanted - can_have)
        }
        if not spec.own_pairs:
            why = "this run adds no workers (--workers)"
        elif spec.allows_others:
            why = "no workers are added to a cluster with the work of others"
        elif not wanted & can_have:
            why = ""
        else:
            directory = spec.directory / "workers"
            async with add_workers(self._store, spec.url, directory, spec.environment, pairs=spec.own_pairs) as own:
                self._own = own
                self._workload.pools += (OWN_POOL,)
                yield
            return
        self._not_tried = {kind: why for kind in sorted(wanted) if why} | self._not_tried
        yield

    # Faults

    async def _cause_all(
        self, schedule: list[tuple[float, str]], stop: asyncio.Event, work: asyncio.Task[None]
    ) -> None:
        lasting: set[asyncio.Task[None]] = set()
        stopped = asyncio.create_task(stop.wait())
        try:
            for due, kind in schedule:
                while len(lasting) >= MAX_OPEN:
                    _, lasting = await asyncio.wait(lasting, return_when=asyncio.FIRST_COMPLETED)
                left = due - (self._clock.monotonic() - self._started)
                await asyncio.wait({stopped, work}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
                if work.done() or stop.is_set():
                    break
                try:
                    rest = await self._cause(kind, due)
                except NotPossible as reason:
                    self._not_tried.setdefault(kind, str(reason))
                except DeckhandsError as error:
                    self._not_tried.setdefault(kind, error.message)
                except OSError as error:  # the journal cannot be written, such as while the disk is full
                    self._not_tried.setdefault(kind, f"it could not be recorded or caused: {error}")
                else:
                    lasting |= {asyncio.create_task(rest)} if rest is not None else set()
                lasting = {task for task in lasting if not task.done()}
            left = self._spec.duration_seconds - (self._clock.monotonic() - self._started)
            if not stop.is_set() and not work.done():
                await asyncio.wait({stopped, work}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            for task in lasting:
                if stop.is_set():
                    task.cancel()
            await asyncio.gather(*lasting, return_exceptions=True)

    async def _cause(self, kind: str, due: float) -> Coroutine[Any, Any, None] | None:
        """Cause a fault, and return a function that ends it; None if it ends by itself.

        Raises:
            NotPossible: the fault cannot be tried.
        """
        if kind in ("kill", "stop"):
            return await self._signal_worker(kind, due)
        if kind in ("delay", "partition"):
            return await self._disturb_link(kind, due)
        if kind == "disconnect":
            return await self._disconnect(due)
        if kind == "clock":
            return await self._change_clock(due)
        causes = {
            "host": self._kill_host,
            "pause": self._pause_store,
            "memory": self._limit_memory,
            "disk": self._fill_disk,
            "store": self._kill_store,
            "failover": self._fail_over,
        }
        return await causes[kind](due)

    async def _look_at_clocks(self) -> tuple[datetime, float]:
        """Return the store's time, and the seconds since the start."""
        at = await self._store.now(self._store.all_shards[0])
        return at, self._clock.monotonic() - self._started

    def _note(
        self, moment: tuple[datetime, float], kind: str, target: str, due: float, *, pid: int = 0, lasts: float = 0.0
    ) -> None:
        """Record a fault that has taken effect just after a moment of `_look_at_clocks`."""
        at, after = moment
        self._faults.append(Fault(kind, at.isoformat(), round(after, 3), target, pid, round(lasts, 3), due))
        process = f" (pid {pid})" if pid else ""
        self._on_notice(f"{after:6.1f} s  {kind}: {target}{process}{f', for {lasts:.1f} s' if lasts else ''}")

    async def _signal_worker(self, kind: str, due: float) -> Coroutine[Any, Any, None] | None:
        members = await list_members(self._store)
        found = find_workers(members, self._clock.now(), shares_pids=self._spec.shares_pids)
        try:
            # The heartbeats of killed workers hold for a while; an own worker may have registered by a wrong clock.
            own = {f"-{worker.child.pid}-" for worker in self._own if worker.child is not None}
            self._unreachable |= {
                worker: why
                for worker, why in found.unreachable.items()
                if worker not in self._killed and not any(pid in worker for pid in own)
            }
            live = Counter(
                member.role for member in members if member.left_seconds > 0 and member.worker_id not in self._killed
            )
            choice = self._choose(found.victims, live)
            lasts = self._draw_between(2.0, 6.0) if kind == "stop" else 0.0
            moment = await self._look_at_clocks()
            if kind == "kill":
                _send(choice.process, signal.SIGKILL)
                for member in members:
                    if _shares_process(member.worker_id, choice.worker_id):
                        self._killed.add(member.worker_id)
                        self._waiting_for[member.role] = live[member.role], self._clock.monotonic()
                self._note(moment, kind, choice.worker_id, due, pid=choice.process.pid)
                return None
            fault = OpenFault("stop", choice.process.pid, choice.process.started)
            self._journal.add(fault)
            try:
                _send(choice.process, signal.SIGSTOP)
            except NotPossible:
                self._journal.remove(fault)
                raise
            self._note(moment, kind, choice.worker_id, due, pid=choice.process.pid, lasts=lasts)
            return self._end_stop(fault, lasts)
        finally:
            found.close()

    def _choose(self, victims: tuple[Victim, ...], live: Counter[str]) -> Victim:
        """Choose a role, then one of its workers. A role whose killed worker is not yet replaced is left out."""
        for role, (number, since) in list(self._waiting_for.items()):
            if live[role] >= number:
                del self._waiting_for[role]
            elif self._clock.monotonic() - since > REPLACED_SECONDS:
                del self._waiting_for[role]
                self._given_up.add(role)
                self._not_tried[f"kill of a {role} worker"] = (
                    f"no killed one was restarted within {REPLACED_SECONDS:g} s"
                )
        stopped = {fault.pid for fault in self._journal.load()}
        usable = [
            victim
            for victim in victims
            if victim.role not in self._waiting_for
            and victim.role not in self._given_up
            and victim.process.pid not in stopped
        ]
        if not usable:
            reasons = sorted(set(self._unreachable.values())) or ["killed ones have not been replaced yet"]
            raise NotPossible(f"no worker could be signalled: {'; '.join(reasons[:3])}")
        roles = sorted({victim.role for victim in usable})
        role = roles[int(self._draw() * len(roles))]
        choice = sorted((victim for victim in usable if victim.role == role), key=lambda victim: victim.worker_id)
        return choice[int(self._draw() * len(choice))]

    async def _end_stop(self, fault: OpenFault, lasts: float) -> None:
        await asyncio.sleep(lasts)
        await self._journal.undo(fault, self._store)

    async def _disturb_link(self, kind: str, due: float) -> Coroutine[Any, Any, None] | None:
        worker = self._choose_own(kind)
        if (proxy := worker.proxy) is None:
            raise NotPossible(PROXY_REASON)
        lasts = self._draw_between(3.0, 8.0) if kind == "delay" else self._draw_between(2.0, 8.0)
        moment = await self._look_at_clocks()
        if kind == "delay":
            proxy.delay_seconds = self._draw_between(0.1, 0.6)
        else:
            proxy.cut()
        self._note(moment, kind, worker.name, due, pid=worker.child.pid if worker.child else 0, lasts=lasts)

        async def restore() -> None:
            await asyncio.sleep(lasts)
            if kind == "delay":
                proxy.delay_seconds = 0.0
            else:
                proxy.join()

        return restore()

    async def _kill_host(self, due: float) -> None:
        hosts = list(find_hosts(self._workload.current))
        try:
            if not hosts:
                raise NotPossible("no workspace of the run had a process on this machine at that moment")
            hosts.sort(key=lambda found: found[0])
            conversation_id, process = hosts[int(self._draw() * len(hosts))]
            moment = await self._look_at_clocks()
            _send(process, signal.SIGKILL)
            self._note(moment, "host", f"the workspace of {conversation_id}", due, pid=process.pid)
        finally:
            for _, process in hosts:
                os.close(process.handle)

    async def _disconnect(self, due: float) -> Coroutine[Any, Any, None]:
        """Close the connections of a worker on any host, at the store."""
        members = [member for member in await list_members(self._store) if member.left_seconds > 0]
        names = sorted({name for member in members if (name := _find_connection_name(member.worker_id))})
        if not names:
            raise NotPossible("no worker was connected at that moment")
        name = names[int(self._draw() * len(names))]
        lasts = self._draw_between(1.0, 5.0)
        moment = await self._look_at_clocks()
        if not await close_connections(self._store.connection, name):
            raise NotPossible("the store lists no connection of the worker: its version may be older")
        self._note(moment, "disconnect", name, due, lasts=lasts)

        async def keep_closing() -> None:
            end = self._clock.monotonic() + lasts
            while self._clock.monotonic() < end:
                await asyncio.sleep(CLOSING_SECONDS)
                with contextlib.suppress(DeckhandsError):  # another fault has stopped the store
                    await close_connections(self._store.connection, name)

        return keep_closing()

    async def _change_clock(self, due: float) -> Coroutine[Any, Any, None]:
        worker = self._choose_own("clock")
        if (clock := worker.clock) is None:
            raise NotPossible(CLOCK_REASON)
        step = CLOCK_STEPS_SECONDS[int(self._draw() * len(CLOCK_STEPS_SECONDS))]
        lasts = self._draw_between(3.0, 8.0)
        moment = await self._look_at_clocks()
        clock.step(step)
        pid = worker.child.pid if worker.child else 0
        self._note(moment, "clock", f"{worker.name}, by {step:+,} s", due, pid=pid, lasts=lasts)

        async def step_back() -> None:
            await asyncio.sleep(lasts)
            clock.restore()

        return step_back()

    def _choose_own(self, kind: str) -> OwnWorker:
        """Choose one of the workers that the run has added.

        Raises:
            NotPossible: there are none.
        """
        if not self._own:
            raise NotPossible(self._not_tried.get(kind, "this run has added no workers"))
        return self._own[int(self._draw() * len(self._own))]

    async def _pause_store(self, due: float) -> None:
        lasts = self._draw_between(0.5, 3.0)
        moment = await self._look_at_clocks()
        await self._store.connection.call("CLIENT", "PAUSE", int(lasts * 1000), "ALL")
        self._note(moment, "pause", "the store", due, lasts=lasts)

    async def _limit_memory(self, due: float) -> Coroutine[Any, Any, None]:
        if is_cluster_url(self._spec.url):
            raise NotPossible("the limits of a cluster's nodes may differ")
        if is_sentinel_url(self._spec.url):
            raise NotPossible("a failover would leave the limit on the former primary")
        generation = self._store.generation
        if any(fault.kind == "memory" and fault.generation == generation for fault in self._journal.load()):
            raise NotPossible("the limit was still lowered by an earlier fault")
        lasts = self._draw_between(1.0, 4.0)
        _, before = await self._store.call("CONFIG", "GET", "maxmemory")
        fault = OpenFault("memory", value=before.decode(), generation=generation)
        moment = await self._look_at_clocks()
        self._journal.add(fault)
        try:
            await self._store.call("CONFIG", "SET", "maxmemory", 1)
        except DeckhandsError:
            with contextlib.suppress(DeckhandsError):
                await self._journal.undo(fault, self._store)
            raise
        self._note(moment, "memory", "the store", due, lasts=lasts)
        return self._end_stop(fault, lasts)

    async def _fill_disk(self, due: float) -> Coroutine[Any, Any, None]:
        directory = self._spec.store_directory
        if directory is None:
            raise NotPossible("the store's directory is not on this machine, or not known")
        facts = os.statvfs(directory)
        if facts.f_blocks * facts.f_frsize > MAX_SMALL_DISK_BYTES or _find_mount(directory) == Path("/"):
            raise NotPossible(f"the file system of {directory} has more than 1 GiB, so others may use it")
        lasts = self._draw_between(1.0, 4.0)
        ballast = directory / BALLAST
        fault = OpenFault("disk", value=str(ballast))
        if fault in self._journal.load():
            raise NotPossible("the disk was still full by an earlier fault")
        moment = await self._look_at_clocks()
        self._journal.add(fault)
        try:
            await asyncio.to_thread(_write_until_full, ballast)
        except OSError:
            await self._journal.undo(fault, self._store)
            raise
        self._note(moment, "disk", str(directory), due, lasts=lasts)
        return self._end_stop(fault, lasts)

    async def _kill_store(self, due: float) -> None:
        spec, directory = self._spec, self._spec.store_directory
        if directory is None and not spec.store_restarts:
            raise NotPossible("it is not known that the store is started again; `--store-restarts` states it")
        if is_sentinel_url(spec.url) or is_cluster_url(spec.url):
            raise NotPossible("a store with replicas fails over instead")
        connection = self._store.connection
        if directory is None:
            _, keeps = await connection.call("CONFIG", "GET", "appendonly")
            if keeps != b"yes":
                raise NotPossible("the store has no append-only file, so its end would lose everything")
            _, place = await connection.call("CONFIG", "GET", "dir")
            directory = Path(place.decode())
        facts = await load_server_facts(connection)
        age = float(facts.get("uptime_in_seconds", "0"))
        process = open_store_process(int(facts.get("process_id", "0")), directory, age_seconds=age)
        if process is not None:
            with process:
                moment = await self._look_at_clocks()
                _send(process, signal.SIGKILL)
                self._note(moment, "store", "the store", due, pid=process.pid)
        elif spec.store_restarts:  # it runs on another machine, in a container, or as another user
            moment = await self._look_at_clocks()
            with contextlib.suppress(OutcomeUnknown, StoreUnavailable):  # it closes the connection
                await connection.call("SHUTDOWN", "NOW", "FORCE")
            self._note(moment, "store", "the store, by SHUTDOWN", due)
        else:
            raise NotPossible(f"the store's process is not proven to be the server in {directory}")
        await self._store.now(self._store.all_shards[0])

    async def _fail_over(self, due: float) -> None:
        moment = await self._look_at_clocks()
        target = await replace_primary(self._store.connection, share=self._draw())
        self._note(moment, "failover", target, due)
        await self._store.now(self._store.all_shards[0])

    async def _undo(self) -> None:
        for worker in self._own:
            worker.restore()
        try:
            async with asyncio.timeout(UNDO_SECONDS):
                await self._journal.undo_all(self._store)
        except (TimeoutError, DeckhandsError) as error:
            why = str(error) or "the store does not answer"
            self._on_notice(f"Not undone yet: {why}. `deckhands chaos --undo` does it.")

    # The check

    async def _wait_until_settled(self, work: asyncio.Task[None]) -> list[str]:
        await asyncio.wait({work}, timeout=self._spec.settle_seconds)
        if work.done():
            await work
            return []
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return sorted(self._workload.current)

    async def _report(
        self,
        schedule: list[tuple[float, str]],
        began: float,
        unsettled: list[str],
        seconds: float,
        others: list[str],
        *,
        is_cut: bool,
    ) -> ChaosReport:
        workload, tried = self._workload, {fault.kind for fault in self._faults}
        settled = [cid for cid in workload.ids if cid not in unsettled]
        self._on_notice(f"Checking {format_count(len(workload.ids) + len(others), 'log')}.")
        effects, findings = await workload.check(settled) if settled else (EffectCounts(), [])
        logs = events = finished = 0
        for cid in [*workload.ids, *others]:
            with contextlib.suppress(UnknownConversation):  # deleted meanwhile by its owner
                verification = await self._client.verify(cid)
                logs += 1
                events += verification.events
                findings += [f"{cid}: {found.text} ({found.rule})" for found in verification.violations]
                finished += cid in settled and (await self._client.row(cid)).state == "finished"
        return ChaosReport(
            seed=self._spec.seed,
            seconds=round(seconds, 3),
            schedule=tuple(schedule),
            faults=tuple(self._faults),
            not_tried={kind: why for kind, why in self._not_tried.items() if kind not in tried},
            unreachable=self._unreachable,
            takeovers=Latencies.of(await self._measure_takeovers(began)),
            conversations=len(workload.ids),
            finished=finished,
            redriven=workload.redriven,
            unsettled=tuple(unsettled),
            logs=logs,
            events=events,
            effects=effects,
            findings=tuple(findings),
            was_interrupted=is_cut,
        )

    async def _measure_takeovers(self, began: float) -> list[float]:
        """Return the times from a worker's kill or stop to each takeover of its work, by the store's clock."""
        hits = {
            fault.target: datetime.fromisoformat(fault.at).timestamp()
            for fault in self._faults
            if fault.kind in ("kill", "stop")
        }
        return [
            max(0.0, takeover.at.timestamp() - hits[takeover.from_worker])
            for takeover in await Conversations(self._store).list_takeovers()
            if takeover.from_worker in hits and takeover.at.timestamp() >= began
        ]


IN_PROGRESS = frozenset({"loading", "running", "rate_limited", "user_confirmed", "user_rejected"})
"""The states in which a conversation needs a worker."""


def _send(process: ProvenProcess, number: signal.Signals) -> None:
    if not process.send(number):
        raise NotPossible(f"process {process.pid} had ended just before")


def _find_connection_name(worker_id: str) -> str:
    """Return the name of a worker's connections; empty if its id contains no process id."""
    try:
        return make_connection_name(worker_id)
    except ValueError:
        return ""


def _shares_process(worker_id: str, other_id: str) -> bool:
    """Return whether two ids of workers, `ROLE-HOST-PID-…`, belong to the same process."""
    return worker_id.split("-")[1:3] == other_id.split("-")[1:3]


def _find_mount(path: Path) -> Path:
    found = path.resolve()
    while not found.is_mount():
        found = found.parent
    return found


def _write_until_full(path: Path) -> None:
    """Fill a file system with one file. Only its size bounds the file, see `MAX_SMALL_DISK_BYTES`."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(MAX_SMALL_DISK_BYTES // BALLAST_STEP_BYTES):
            file.write(b"\0" * BALLAST_STEP_BYTES)
