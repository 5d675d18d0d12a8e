"""An embedded cluster: a private store and worker processes on this machine, restarted when they die.

Holds: a dead worker or store is replaced within a second, except a worker whose store was emptied. No process outlives
the cluster, except workspace hosts with running programs or an unfinished conversation.
Does not: decide anything about conversations; the workers do, and they find each other through the store.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from broker.coordination import list_members
from broker.runtime import (
    BEAT,
    CONTROLLER,
    EXIT_STORE_REPLACED,
    EXIT_USAGE,
    INGRESS,
    JOBS,
    SERVICES,
    SYSTEM_CLOCK,
    TOOLS,
    ChildProcess,
    Clock,
    DeckhandsError,
    StoreReplaced,
    UsageError,
    join_paths,
    make_worker_environment,
    read_last_lines,
    rotate_log,
)
from broker.store import SPACE_FOR_LOG_BYTES, EmbeddedValkey, Store, open_store
from deckhands.cluster.home import make_disk_full_error
from deckhands.cluster.model_check import check_models

QUICK_END_SECONDS = 10.0
"""A worker that ends sooner than this after its start counts as failed to start."""
QUICK_ENDS_LIMIT = 3
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
STOP_GRACE_SECONDS = 5.0
LATE_POLL_SECONDS = 1.0
LAST_WORDS_LINES = 3
DISK_CHECK_SECONDS = 1.0

MODULES = {
    CONTROLLER: "controller_worker",
    TOOLS: "tool_worker",
    SERVICES: "deckhands.services",
    INGRESS: "deckhands.ingress",
    JOBS: "deckhands.operations.jobs",
    BEAT: "deckhands.operations.jobs.beat",
}

ANY_MODEL = "DECKHANDS_ANY_MODEL"
"""Variable that gives a controller worker the socket of its private store."""

Notice = Callable[[str], None]


class WorkerKeepsFailing(DeckhandsError):
    """A worker keeps ending right after its start."""

    code = "worker_keeps_failing"


@dataclass(slots=True)
class ClusterWorker:
    """A worker slot of the cluster, filled by one process at a time.

    Attributes:
        replaced: How often its process was replaced.
        quick_ends: How often in a row its process ended right after its start.
    """

    name: str
    role: str
    log: Path
    child: ChildProcess | None = None
    log_begins: int = 0
    replaced: int = 0
    quick_ends: int = 0
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The specification of a cluster.

    An ingress, a jobs worker and a beat share a process, see `deckhands.services`; each other worker has its own.

    Attributes:
        directory: Directory of its store, logs and workspaces.
        environment: Variables passed to its workers besides those set here, see `make_worker_environment`.
        port: Port of 127.0.0.1 where the store also listens; None for none.
        workspace_roots: Directories below which conversations may name their workspace.
        ready_seconds: How long to wait for workers before slow ones are reported.
        is_private: Whether all conversations belong to its starting user, with access to any model and any script.
            False for a cluster that accepts work from elsewhere.
        checked_models: Models to check before anything starts; an empty name is the default one, if there is one.
        gives_up: Whether a worker that keeps failing ends the cluster; otherwise it is retried forever.
        commands: Command line of a worker, by role.
    """

    directory: Path
    controllers: int = 1
    tools: int = 1
    ingresses: int = 0
    jobs: int = 0
    beats: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    workspace_roots: tuple[Path, ...] = ()
    ready_seconds: float = 60.0
    is_private: bool = False
    checked_models: Sequence[str] = ()
    gives_up: bool = True
    commands: Mapping[str, Sequence[str]] = field(
        # -P: prevents importing a user's folder that has the name of one of our packages.
        default_factory=lambda: {role: (sys.executable, "-P", "-m", module) for role, module in MODULES.items()}
    )


class Cluster:
    """A running cluster."""

    def __init__(self, spec: ClusterSpec, *, on_notice: Notice = lambda _: None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.spec = spec
        self.logs = spec.directory / "logs"
        self.store = EmbeddedValkey(spec.directory / "valkey", port=spec.port)
        self.workers = {worker.name: worker for worker in self._make_workers()}
        self._on_notice = on_notice
        self._clock = clock
        self._watches: list[asyncio.Task[None]] = []
        self._failed = asyncio.Event()
        self._failure: DeckhandsError | None = None
        self._was_ready = False

    @property
    def url(self) -> str:
        """URL of its store."""
        return self.store.url

    async def start(self) -> None:
        """Start the store, and the workers without waiting for them.

        Raises:
            UsageError: The quota table or a model cannot be used; nothing has started.
            DeckhandsError: See `EmbeddedValkey.start`.
        """
        if self.spec.controllers:
            await self._check_settings()
        await self.store.start()
        self.logs.mkdir(exist_ok=True)
        (self.spec.directory / "node").mkdir(exist_ok=True)
        for worker in self.workers.values():
            self._start_worker(worker)
        self._watches = [
            asyncio.create_task(self._supervise_store(), name="watch store"),
            asyncio.create_task(self._watch_disk(), name="watch disk"),
        ]
        self._watches += [
            asyncio.create_task(self._supervise(worker), name=f"watch {worker.name}")
            for worker in self.workers.values()
        ]

    async def _check_settings(self) -> None:
        environment = make_worker_environment(CONTROLLER, dict(self.spec.environment))
        if (quotas := environment.get("DECKHANDS_QUOTAS", "")).strip():
            from broker.limits import QuotaTable  # most clusters have no quotas, and need not import it

            await asyncio.to_thread(QuotaTable.load_setting, quotas)
        if self.spec.checked_models:
            is_open = {ANY_MODEL: "1" if self.spec.is_private else ""}
            await check_models(self.spec.checked_models, {**environment, **is_open})

    async def stop(self) -> None:
        """Stop the workers in order, then the store. Idempotent."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        children = [worker.child for worker in self.workers.values() if worker.child is not None]
        await asyncio.gather(*(child.stop(grace_seconds=STOP_GRACE_SECONDS) for child in children))
        await self.store.stop()

    def kill_all(self) -> None:
        """Kill every process at once; the store keeps acknowledged writes."""
        for watch in self._watches:
            watch.cancel()
        for worker in self.workers.values():
            if worker.child is not None:
                worker.child.send(signal.SIGKILL)

    async def until_broken(self) -> None:
        """Wait until the cluster has failed permanently.

        Raises:
            UsageError: A worker cannot use its settings.
            WorkerKeepsFailing: A worker keeps ending.
            StoreError: The disk is full, or the store cannot be restarted.
        """
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def until_ready(self) -> None:
        """Wait until every worker has a heartbeat in the store, at most `ready_seconds`; beats have none.

        A slow worker is reported, and again when it is ready; the cluster starts without it.

        Raises:
            UsageError: A worker cannot use its settings.
            WorkerKeepsFailing: A worker cannot be started.
        """
        store = await open_store(self.url, deploys=False)
        try:
            deadline = self._clock.monotonic() + self.spec.ready_seconds
            while (slow := await self._find_unready(store)) and self._clock.monotonic() < deadline:
                if self._failure is not None:
                    raise self._failure
                await asyncio.sleep(0.05)
        finally:
            await store.aclose()
        self._was_ready = True
        for worker in slow:
            self._on_notice(
                f"{worker.name} has not started after {self.spec.ready_seconds:g} s; it joins when it is ready. Its "
                f"log is {worker.log}{_read_last_words(worker)}"
            )
        if slow:
            self._watches.append(asyncio.create_task(self._report_late(slow), name="watch late workers"))

    async def _find_unready(self, store: Store) -> list[ClusterWorker]:
        """Return the workers without a heartbeat. Heartbeats of an earlier cluster may still exist."""
        members = [member for member in await list_members(store) if member.left_seconds > 0]
        alive = Counter(member.worker_id.split("-")[-2] for member in members)
        expected = {SERVICES: 2, BEAT: 0}
        return [
            worker
            for worker in self.workers.values()
            if alive[str(worker.child.pid) if worker.child else ""] < expected.get(worker.role, 1)
        ]

    async def _report_late(self, slow: list[ClusterWorker]) -> None:
        """Report each slow worker once it is ready."""
        store = await open_store(self.url, patience_seconds=None, opening_seconds=None, deploys=False)
        try:
            while slow:
                await asyncio.sleep(LATE_POLL_SECONDS)
                unready = await self._find_unready(store)
                for worker in slow:
                    if worker not in unready:
                        self._on_notice(f"{worker.name} is ready")
                slow = [worker for worker in slow if worker in unready]
        finally:
            await store.aclose()

    def _make_workers(self) -> list[ClusterWorker]:
        spec = self.spec
        shared = min(spec.ingresses, spec.jobs, spec.beats)
        counts = {
            CONTROLLER: spec.controllers,
            TOOLS: spec.tools,
            SERVICES: shared,
            INGRESS: spec.ingresses - shared,
            JOBS: spec.jobs - shared,
            BEAT: spec.beats - shared,
        }
        names = [(role, f"{role}-{number}") for role, count in counts.items() for number in range(1, count + 1)]
        return [ClusterWorker(name, role, self.logs / f"{name}.log") for role, name in names]

    def _start_worker(self, worker: ClusterWorker) -> None:
        rotate_log(worker.log)
        worker.log_begins = worker.log.stat().st_size if worker.log.exists() else 0
        worker.started = self._clock.monotonic()
        worker.child = ChildProcess.start(
            self.spec.commands[worker.role], log=worker.log, env=self._environment(worker.role)
        )

    def _environment(self, role: str) -> dict[str, str]:
        directory = self.spec.directory
        whole = {
            **self.spec.environment,
            ANY_MODEL: str(self.store.socket) if self.spec.is_private else "",
            "DECKHANDS_URL": self.store.url,
            "DECKHANDS_CELERY_URL": self.store.celery_url,
            "DECKHANDS_URL_FILE": "",
            "DECKHANDS_CELERY_URL_FILE": "",
            "DECKHANDS_NODE": node_name(directory),
            "DECKHANDS_NODE_DIR": str(directory / "node"),
            "DECKHANDS_WORKSPACE_ENDS_WITH_WORKER": "1",
            "DECKHANDS_WORKSPACE_ROOTS": join_paths(self.spec.workspace_roots),
        }
        return make_worker_environment(role, whole)

    async def _supervise(self, worker: ClusterWorker) -> None:
        while True:
            assert worker.child is not None
            status = await worker.child.wait()
            if status == EXIT_STORE_REPLACED:
                self._report_stopped(worker)
                return
            is_quick = self._clock.monotonic() - worker.started < QUICK_END_SECONDS
            worker.quick_ends = worker.quick_ends + 1 if is_quick else 0
            if status == EXIT_USAGE and (self.spec.gives_up or not self._was_ready):
                self._fail(_make_usage_error(worker))
                return
            if self.spec.gives_up and worker.quick_ends >= QUICK_ENDS_LIMIT:
                self._fail(_make_failure(worker, status))
                return
            ending = _read_last_words(worker) if is_quick else ""
            self._on_notice(f"{worker.name} ended with {_status_name(status)}; starting it again{ending}")
            await self._pause(worker.quick_ends)
            with suppress(OSError):  # temporarily out of memory or disk: counted as another quick end
                self._start_worker(worker)
                worker.replaced += 1

    def _report_stopped(self, worker: ClusterWorker) -> None:
        """Report a worker that stopped because its store was replaced.

        A restart would repeat conversations from their start.
        """
        error = StoreReplaced(
            f"The worker {worker.name} stopped and stays down: the store was emptied or replaced while it worked.",
            remedy=f"Restore its append-only file in {self.spec.directory}, or start the cluster again without it.",
        )
        self._on_notice(str(error))
        if self.spec.gives_up:
            self._fail(error)

    async def _supervise_store(self) -> None:
        failures = 0
        while True:
            status = await self.store.child.wait()
            self._on_notice(f"the store ended with {_status_name(status)}; starting it again")
            try:
                await self.store.start()
                failures = 0
            except DeckhandsError as error:
                if not error.retryable and self.spec.gives_up:
                    self._fail(error)
                    return
                failures += 1
                self._on_notice(str(error))
                await self._pause(failures + 1)

    async def _watch_disk(self) -> None:
        """Report a full disk before the store refuses writes and blocks the workers."""
        was_full = False
        while True:
            is_full = shutil.disk_usage(self.spec.directory).free < SPACE_FOR_LOG_BYTES
            if is_full and not was_full:
                error = make_disk_full_error(self.spec.directory)
                if self.spec.gives_up:
                    self._fail(error)
                    return
                self._on_notice(str(error))
            was_full = is_full
            await asyncio.sleep(DISK_CHECK_SECONDS)

    async def _pause(self, failures: int) -> None:
        """Wait before the next start: not at all after the first failure, then for a growing time."""
        if failures > 1:
            await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (failures - 2), LONGEST_PAUSE_SECONDS))

    def _fail(self, error: DeckhandsError) -> None:
        self._failure = self._failure or error
        self._failed.set()


def node_name(directory: Path) -> str:
    """Return the stable node id for the workspaces in a directory of this machine."""
    return f"{socket.gethostname()}-{sha256(str(directory).encode()).hexdigest()[:8]}"


def _status_name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _read_last_words(worker: ClusterWorker) -> str:
    """Return the end of a worker's log as a suffix for a sentence, or "" if it is empty."""
    ending = read_last_lines(worker.log, after=worker.log_begins, limit=LAST_WORDS_LINES).strip()
    return f": {ending}" if ending else ""


def _make_usage_error(worker: ClusterWorker) -> UsageError:
    last = read_last_lines(worker.log, after=worker.log_begins, limit=1).strip()
    return UsageError(last or f"{worker.name} cannot use its settings.", remedy=f"Its log is {worker.log}.")


def _make_failure(worker: ClusterWorker, status: int) -> WorkerKeepsFailing:
    last = read_last_lines(worker.log, after=worker.log_begins, limit=1).strip()
    return WorkerKeepsFailing(
        f"The worker {worker.name} keeps ending right after its start ({_status_name(status)}): {last or 'no message'}",
        remedy=f"Its log is {worker.log}.",
    )
