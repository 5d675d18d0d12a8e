"""The consumer of a tool worker: reads the action streams of its pools and its node, and runs their actions.

Holds: at most `concurrency` actions run at once, plus a few interactive ones (see `Slots`). When this worker's
heartbeat lapses, its unanswered deliveries go to other workers. A worker that was swept leaves its running actions to
their workspace hosts and starts over under a new name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from broker.celery import cancel_when
from broker.contract import TERMINAL_STATES, checksum_of
from broker.coordination import (
    PARSE_ERRORS,
    ActionDelivery,
    ActionQueue,
    ActionReclaimed,
    ControlDelivery,
    CrashAttribution,
    HeartbeatThread,
    Membership,
    NodeOffer,
    NotServed,
    Slots,
    StoredFiles,
    SuspectTurns,
    Terminals,
    Transfers,
)
from broker.log import Conversations, EventLog, record_gap
from broker.runtime import (
    ACTION,
    CONVERSATION,
    DataForgotten,
    DataLocked,
    DeckhandsError,
    EventsLost,
    OwnershipLost,
    StoreRefused,
    UnknownConversation,
    failpoint,
    join_paths,
    make_extra,
    new_worker_id,
)
from broker.secrets import Masker, Secrets
from broker.store import ShardKeys, Store, open_store
from broker.tools import SANDBOX, McpTokens, ToolFailure, ToolFailures, ToolOffers
from tool_worker.secret_sources import SecretSources
from tool_worker.settings import ToolSettings
from tool_worker.tools import McpServers, OfferedTools, SandboxedLaunch, TaskServers, load_tools
from tool_worker.worker.executor import Executor
from tool_worker.worker.node.disk_bounds import DiskBounds
from tool_worker.worker.node.quota import WorkspaceQuota
from tool_worker.worker.node.reaper import Reaper
from tool_worker.worker.node.usage_bounds import TERMINALS, WATCHERS, UsageBounds
from tool_worker.worker.placement import MAX_WAITING, WAIT_SECONDS, NodePlacement, build_node_offer
from tool_worker.worker.terminal_service import TerminalService
from tool_worker.worker.transfer_service import TransferService
from tool_worker.workspace import (
    BASES,
    Bindings,
    Checkpointing,
    Checkpoints,
    HostFolder,
    ResourceUsage,
    SkillInstaller,
    StoreCiphers,
    WorkspaceOpener,
    Workspaces,
    check_served_only_here,
    choose_git_sandbox,
    find_session_programs,
    read_or_create_identity,
    retire,
)

READ_AT_ONCE = 8

_log = logging.getLogger(__name__)
END_FINISHED_SECONDS = 2.0
ENDS_AT_ONCE = 16
LOCKED_SECONDS = 5.0
"""How long an action waits before this worker tries again to read it: a master key may be on its way."""


class ToolConsumer:
    """The service of a tool worker; a `LoopService`."""

    def __init__(self, settings: ToolSettings) -> None:
        self._settings = settings
        variables = settings.variables
        self._masker = Masker((*_list_secrets(settings), *settings.private_values))
        self._offered = load_tools(settings.tools, settings.pools, masker=self._masker)
        self._programs = find_session_programs(settings.pools, chromium=variables.chromium, sandbox=variables.sandbox)
        self._session: ToolWorkerSession | None = None
        self._identity = ""

    async def run(self, stop: asyncio.Event) -> None:
        """See `LoopService.run`."""
        settings = self._settings
        variables = settings.variables
        workspaces = Workspaces(
            settings.node_dir,
            sandbox=variables.sandbox,
            ttl_seconds=variables.workspace_ttl_seconds,
            idle_seconds=variables.workspace_idle_seconds,
            no_change_timeout_seconds=settings.no_change_timeout_seconds,
            environment=settings.environment,
            search_path=settings.search_path,
            programs=self._programs,
            limits=settings.limits,
            gate=settings.gate,
            containers=settings.containers,
            named=settings.named,
            git_identity=settings.git_identity,
        )
        store = await open_store(variables.url, shards=variables.shards, patience_seconds=None, opening_seconds=None)
        for warning in store.warnings:
            _log.error("%s", warning)
        self._identity = read_or_create_identity(settings.node_dir)
        await check_served_only_here(store, settings.node, self._identity)
        launch = SandboxedLaunch(
            variables.sandbox,
            settings.node_dir,
            gate=settings.gate,
            containers=settings.containers,
            search_path=settings.search_path,
            closed=settings.named.closed,
        )
        report = partial(self._report_failures, store)
        tokens = McpTokens(store, settings.secret_key)
        servers = McpServers(
            settings.mcp_servers, self._offered, launch, tokens=tokens, masker=self._masker, report=report
        )
        publish = ToolOffers(store).publish
        offering = [asyncio.create_task(task(publish), name="offer mcp") for task in (servers.offer, servers.follow)]
        announcing = asyncio.create_task(self._announce_sandbox(workspaces, report))
        offer = await asyncio.to_thread(build_node_offer, settings)
        try:
            while not stop.is_set():
                worker_session = self.start_session(store, workspaces, offer)
                with HeartbeatThread(variables.url, worker_session.membership) as heartbeat_thread:
                    async with worker_session.membership.handing_back():
                        await worker_session.run(stop, on_beat=heartbeat_thread.record_turn)
            if variables.workspace_ends_with_worker:
                await end_finished(store, workspaces, settings.node_dir)
        finally:
            for task in (announcing, *offering):
                task.cancel()
            await servers.aclose()
            await workspaces.aclose()
            await store.aclose()

    async def _report_failures(self, store: Store) -> None:
        if self._session is not None:  # without a session, the next one reports when it starts
            await ToolFailures(store).report(self._session.worker_id, self._offered.failures)

    async def _announce_sandbox(self, workspaces: Workspaces, report: Callable[[], Awaitable[None]]) -> None:
        """Log which sandbox is in force and what programs can still reach, before the first command needs it."""
        try:
            sandbox = await workspaces.get_demanded_sandbox()
        except DeckhandsError as error:
            _log.error("no sandbox is in force, so commands of agents are refused: %s", error)
            reason = self._masker.mask_text(error.message)
            self._offered.fail(ToolFailure(source=SANDBOX, reason=reason, remedy=error.remedy))
            await report()
        else:
            _log.info("the sandbox is %s; commands of agents reach %s", sandbox.name, sandbox.reach)

    def start_session(self, store: Store, workspaces: Workspaces, offer: NodeOffer | None = None) -> ToolWorkerSession:
        """Register under a new worker name; called by `run`, and by simulations with their own store and workspaces."""
        self._session = ToolWorkerSession(
            store, workspaces, self._offered, self._settings, identity=self._identity, offer=offer
        )
        return self._session

    def conversation_ids(self) -> list[str]:
        """Return the conversations whose actions are running here. Thread-safe."""
        return self._session.conversation_ids() if self._session is not None else []

    def report(self) -> Mapping[str, Any]:
        """See `LoopService.report`."""
        worker_session = self._session
        return {
            "role": "tool",
            "node": self._settings.node,
            "pools": list(self._settings.pools),
            "worker_id": worker_session.worker_id if worker_session else "",
            "running": len(worker_session.running) if worker_session else 0,
            "actions": worker_session.progress if worker_session else 0,
            "refused_by_proxies": worker_session.refusals if worker_session else 0,
        }


@dataclass(frozen=True, slots=True)
class InFlightAction:
    """An action that this worker is running, and its stream entry."""

    place: str
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class ToolWorkerSession:
    """The worker's session under one worker name, from registration until it stops or is swept."""

    def __init__(
        self,
        store: Store,
        workspaces: Workspaces,
        offered: OfferedTools,
        settings: ToolSettings,
        *,
        identity: str,
        offer: NodeOffer | None,
    ) -> None:
        self.worker_id = new_worker_id("tool")
        self.running: set[asyncio.Task[None]] = set()
        self.progress = 0
        self._in_flight: dict[tuple[str, int, str], InFlightAction] = {}
        self._connects = store.connection.connects
        self._turns = SuspectTurns()
        self._store = store
        self._settings = settings
        self._workspaces = workspaces
        self._offered = offered
        self._queues: list[ActionQueue] = []
        self.membership = Membership(
            store,
            self.worker_id,
            "tool",
            streams=[self._add_queues(names) for names in store.all_shards],
            about={
                "node": settings.node,
                "directory": identity,
                "pools": ",".join(settings.pools),
                "workspace_roots": join_paths(settings.named.roots),
                "node_patience_ms": str(int(settings.variables.node_lost_seconds * 1000)),
                **({"offer": offer.model_dump_json()} if offer is not None else {}),
            },
            ttl_seconds=settings.variables.heartbeat_ttl_seconds,
        )
        sources = SecretSources(settings.secret_sources, settings.program_environment, store.clock.monotonic)
        secrets = Secrets(store, settings.secret_key, own=_list_secrets(settings), sources=sources)
        self._log = log = EventLog(store, secrets)
        sandbox = partial(choose_git_sandbox, workspaces.get_demanded_sandbox, settings.node_dir / ".sandbox")
        limits = settings.workspace_limits
        opener = WorkspaceOpener(
            log,
            settings.node_dir,
            StoredFiles(store, settings.secret_key),
            sandbox,
            limits,
            gate=settings.gate,
            roots=settings.repository_roots,
        )
        checkpointing = _make_checkpointing(log, settings, opener)
        bindings = Bindings(settings.node_dir, settings.named)
        transfer_service = TransferService(Transfers(store), settings.node_dir, checkpointing, sandbox, bindings)
        self._terminal_service = TerminalService(Terminals(store), settings.node_dir, workspaces)
        self._usage_bounds = UsageBounds(
            settings.node_dir, ResourceUsage(limits.bytes, TERMINALS, WATCHERS), DiskBounds(limits)
        )
        names = [spec.name for spec in settings.mcp_servers]
        self._task_servers = TaskServers(settings.mcp_allowed, names, offered=offered, secrets=secrets)
        self._executor = Executor(
            log,
            workspaces,
            worker_id=self.worker_id,
            offered=offered,
            servers=self._task_servers,
            checkpointing=checkpointing,
            opener=opener,
            installer=SkillInstaller(
                settings.node_dir,
                sandbox,
                settings.skill_rules,
                bindings,
                gate=settings.gate,
                credentials=settings.skill_credentials,
            ),
            transfer_service=transfer_service,
            terminal_service=self._terminal_service,
            quota=WorkspaceQuota(settings.node_dir, limits),
            held=self._usage_bounds,
            figures=self.membership.figures,
        )
        self._reaper = Reaper(store, settings.node_dir, settings.variables.workspace_keep_seconds)
        self._slots = Slots(settings.variables.concurrency)
        self._placement = NodePlacement(store, offer, settings.named.roots)
        self._forwarding: set[asyncio.Task[None]] = set()
        self._locked: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event, *, on_beat: Callable[[int], None]) -> None:
        """Process actions until stopped or swept; `on_beat` receives the progress at each beat."""
        await self.membership.register()
        await ToolFailures(self._store).report(self.worker_id, self._offered.failures)
        offers = ToolOffers(self._store)
        await offers.publish(self._offered.offers)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._reaper.run())]
                tasks += map(
                    group.create_task, (self._usage_bounds.run(), offers.keep_published(lambda: self._offered.offers))
                )

                def read_queues(queues: Sequence[ActionQueue]) -> None:
                    tasks.extend(group.create_task(self._read(queue)) for queue in queues)

                read_queues(self._queues)
                tasks.append(group.create_task(self._beat(on_beat, read_queues)))
                group.create_task(cancel_when(stop, tasks))
        except* OwnershipLost:
            _log.warning("%s was presumed dead; starting over", self.worker_id)
            await self._check_after_reconnect()
        finally:
            for task in (*self.running, *self._forwarding, *self._locked):
                task.cancel()  # the workspace host continues; the worker that takes the action over collects the result
            await self._terminal_service.aclose()
            for queue in self._queues:
                await queue.aclose()
            await self._task_servers.aclose()
        if stop.is_set():
            await ToolFailures(self._store).report(self.worker_id, ())
            await self.membership.leave()
        else:
            await self.membership.leave_soon()

    def _add_queues(self, names: ShardKeys) -> list[str]:
        """Make the queues of a shard, and return their streams."""
        make = partial(ActionQueue, self._store, names, worker_id=self.worker_id, node=self._settings.node)
        queues = [make(pools=self._settings.pools, is_first=is_first) for is_first in (True, False)]
        self._queues += queues
        return [stream for queue in queues for stream in queue.streams]

    async def _beat(self, on_beat: Callable[[int], None], read_queues: Callable[[Sequence[ActionQueue]], None]) -> None:
        while True:
            failpoint("tool.beat")
            on_beat(self.progress)
            self.membership.figures.set(running=len(self.running), refused_hosts=self.refusals)
            if await self.membership.beat(self.progress) is None:
                raise OwnershipLost(f"{self.worker_id} was swept.")
            known = len(self._queues)
            if await self.membership.join_new_shards(self._add_queues):
                read_queues(self._queues[known:])
            await self._check_after_reconnect()
            await self._workspaces.detach_idle()
            await self.membership.wait_for_next_beat()

    async def _check_after_reconnect(self) -> None:
        """After a reconnect to the store, record in each log if it has lost an action that is in flight here."""
        connects = self._store.connection.connects
        if connects == self._connects:
            return
        self._connects = connects
        for conversation_id, action_id, checksum in list(self._in_flight):
            try:
                try:
                    await self._log.check_action(conversation_id, action_id, checksum)
                except EventsLost as lost:
                    await record_gap(self._log, lost, noticed_by="the tool worker that carries it out")
            # damaged keys affect only their own conversation
            except (UnknownConversation, StoreRefused, *PARSE_ERRORS) as error:
                _log.warning(
                    "cannot check conversation %s after a reconnect: %s",
                    conversation_id,
                    error,
                    extra=make_extra(conversation_id),
                )

    def conversation_ids(self) -> list[str]:
        """Return the conversations with actions in flight here. Thread-safe."""
        return sorted({conversation_id for conversation_id, _, _ in list(self._in_flight)})

    @property
    def refusals(self) -> int:
        """Number of times that egress proxies refused a host to a workspace."""
        return self._executor.refusals

    async def _read(self, queue: ActionQueue) -> None:
        while True:
            free = await self._slots.wait(is_first=queue.is_first)
            for delivery in await queue.read(limit=min(free, READ_AT_ONCE)):
                if isinstance(delivery, ActionDelivery) and self._placement.needs_other_node(delivery):
                    self._forward(queue, delivery)
                    continue
                await self._slots.wait(is_first=queue.is_first)
                self._slots.take(is_first=queue.is_first)
                task = asyncio.create_task(self._take(queue, delivery))
                self.running.add(task)
                task.add_done_callback(partial(self._on_done, queue))

    def _forward(self, queue: ActionQueue, delivery: ActionDelivery) -> None:
        """Forward an action in a separate task. While it waits for a node, it takes no concurrency slot."""
        wait_seconds = WAIT_SECONDS if len(self._forwarding) < MAX_WAITING else 0.0
        task = asyncio.create_task(self._find_node_and_take(queue, delivery, wait_seconds))
        self._forwarding.add(task)
        task.add_done_callback(self._on_forwarded)

    def _on_forwarded(self, task: asyncio.Task[None]) -> None:
        self._forwarding.discard(task)
        self._locked.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an action failed here and will be redelivered", exc_info=error)

    async def _find_node_and_take(self, queue: ActionQueue, delivery: ActionDelivery, wait_seconds: float) -> None:
        refusal = await self._placement.wait_for_node(delivery, wait_seconds=wait_seconds)
        async with self._slots.hold(is_first=queue.is_first):
            await self._take(queue, delivery, refusal)

    def _on_done(self, queue: ActionQueue, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        self._slots.release(is_first=queue.is_first)
        self.progress += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an action failed here and will be redelivered", exc_info=error)

    async def _take(
        self, queue: ActionQueue, delivery: ActionDelivery | ControlDelivery, refusal: NotServed | None = None
    ) -> None:
        CONVERSATION.set(delivery.conversation_id)
        ACTION.set(delivery.action_id)
        failpoint("tool.before_claim")
        if isinstance(delivery, ControlDelivery):
            await self._executor.execute_control(delivery)
            if delivery.order == "close":
                await self._reaper.mark_if_deleted(delivery.conversation_id)
            await queue.acknowledge(delivery)
            return
        action = (delivery.conversation_id, delivery.action_id, checksum_of(delivery.entry))
        while (in_hand := self._in_flight.get(action)) is not None:
            if in_hand.place == delivery.location:
                return
            # A copy: this worker may have been presumed dead. Only the claim shows whether the copy is needed.
            await in_hand.is_over.wait()
        self._in_flight[action] = in_hand = InFlightAction(delivery.location)
        try:
            try:
                # If no node serves the action, any worker may answer it, and the workspace stays bound to no node.
                claim = await queue.claim(delivery if refusal is None else replace(delivery, is_anywhere=True))
            except EventsLost as lost:
                await record_gap(self._log, lost, noticed_by="the tool worker that was to carry it out")
                return
            deaths = claim.attempt - 1 if isinstance(claim, ActionReclaimed) else 0
            attribution = CrashAttribution(self._turns, partial(queue.mark, delivery), deaths=deaths)
            free_slot = partial(self._slots.free, is_first=queue.is_first)
            await self._executor.execute(delivery, claim, attribution, refusal=refusal, free_slot=free_slot)
        except DataForgotten as error:
            _log.warning("an action is dropped, because its key was deleted: %s", error)
            await queue.acknowledge(delivery)
        except DataLocked as error:
            _log.warning("an action waits for the key of its conversation: %s", error)
            self._retry_later(queue, delivery, refusal)
        finally:
            del self._in_flight[action]
            in_hand.is_over.set()

    def _retry_later(self, queue: ActionQueue, delivery: ActionDelivery, refusal: NotServed | None) -> None:
        """Retry an action after a while, in a separate task that needs no concurrency slot until then.

        Its entry stays with this worker. If the worker stops or dies, another worker gets the entry.
        """
        task = asyncio.create_task(self._wait_and_take(queue, delivery, refusal))
        self._locked.add(task)
        task.add_done_callback(self._on_forwarded)

    async def _wait_and_take(self, queue: ActionQueue, delivery: ActionDelivery, refusal: NotServed | None) -> None:
        await asyncio.sleep(LOCKED_SECONDS)
        async with self._slots.hold(is_first=queue.is_first):
            await self._take(queue, delivery, refusal)


def _list_secrets(settings: ToolSettings) -> tuple[str, ...]:
    of_servers = [secret for server in settings.mcp_servers for secret in server.secrets]
    of_sources = [secret for source in settings.secret_sources for secret in source.secrets]
    passwords = [credential.password for credential in settings.skill_credentials if credential.password]
    return (*of_servers, *of_sources, *passwords)


def _make_checkpointing(log: EventLog, settings: ToolSettings, opener: WorkspaceOpener) -> Checkpointing:
    """Create the node's checkpointing from its settings."""
    place = settings.variables.checkpoints
    every = settings.variables.checkpoint_every
    if not place:
        return Checkpointing(log, settings.node_dir, None, every=every, opener=opener)
    clock = log.store.clock
    ciphers = StoreCiphers(log.store.encryption) if log.store.encryption.is_on else None
    return Checkpointing(
        log,
        settings.node_dir,
        Checkpoints(place, clock, limits=settings.workspace_limits, ciphers=ciphers),
        every=every,
        bases=Checkpoints(place, clock, folder=BASES, ciphers=ciphers),
        opener=opener,
    )


async def end_finished(store: Store, workspaces: Workspaces, root: Path) -> None:
    """End the idle hosts of finished conversations, when the worker stops together with its cluster.

    A host with a running command or background program is not ended; it keeps running for its usual idle time. Never
    raises; gives up after two seconds.
    """
    conversations = Conversations(store)
    room = asyncio.Semaphore(ENDS_AT_ONCE)

    async def end(conversation_id: str) -> None:
        async with room:
            try:
                row = await conversations.load_row(conversation_id)
            except UnknownConversation:
                return
            if row.is_closed or row.state in TERMINAL_STATES:
                await retire(HostFolder(root, conversation_id), may_kill=False)

    try:
        async with asyncio.timeout(END_FINISHED_SECONDS):
            living = [found.conversation_id for found in workspaces.list() if found.is_alive]
            await asyncio.gather(*(end(conversation_id) for conversation_id in living))
    except (OSError, TimeoutError, DeckhandsError) as error:
        _log.warning("cannot end all workspaces of finished conversations: %s", error or "out of time")
