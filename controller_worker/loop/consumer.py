"""The consumer of a controller worker: claims conversations, wakes them, and gives them back.

Holds: about `max_conversations` at a time. Waiting conversations are released if others need a worker, those of batch
work first. A few slots are reserved for interactive ones, see `Slots`. A lost wake-up is found within seconds. A swept
worker drops everything and starts over under a new name.
Does not: decide anything about a conversation; see `conversation_loop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from broker.celery import cancel_when
from broker.contract import OFFERED_MODELS, UNPRICED_MODELS
from broker.coordination import (
    PARSE_ERRORS,
    CarriedEvent,
    ClaimedConversation,
    ClaimFailure,
    HeartbeatThread,
    Membership,
    Owners,
    ReadyStream,
    Slots,
    WorkerMailbox,
)
from broker.limits import publish_tenants
from broker.log import EventLog, expire, record_reported_gap
from broker.runtime import (
    OwnershipLost,
    StoreError,
    StoreRefused,
    failpoint,
    make_extra,
    new_worker_id,
    wait_for_tick,
)
from broker.secrets import Secrets
from broker.store import ShardKeys, Store, open_store
from controller_worker.agents import list_agents
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.loop.hooks import load_hooks
from controller_worker.loop.sdk.sessions import SdkSessions
from controller_worker.loop.services import Services
from controller_worker.model import Models
from controller_worker.providers import find_ignored_variables
from controller_worker.security import list_plugins
from controller_worker.settings import ControllerSettings

UPKEEP_SECONDS = 1.0
CHECK_NEWS_EVERY = 2
CHECK_DISPATCH_AFTER_SECONDS = 6.0
MAKE_ROOM_FOR = 256
"""Waiting conversations that a full worker releases per second: batch work first, then the longest wait."""
SHOWN_LOST = 5
QUOTAS_NAMED = 50
"""Number of quotas that a worker reports."""
IGNORED_NAMED = 10
"""Number of settings without effect that a worker reports."""
RESTORE_AT_ONCE = 32
"""Conversations that may be restoring at once; the others are left to other workers."""

_log = logging.getLogger(__name__)


class ControllerConsumer:
    """The controller worker's `LoopService`."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._session: ControllerSession | None = None
        self._is_draining = False

    async def run(self, stop: asyncio.Event) -> None:
        """See `LoopService.run`."""
        variables = self._settings.variables
        store = await open_store(variables.url, shards=variables.shards, patience_seconds=None, opening_seconds=None)
        for warning in store.warnings:
            _log.error("%s", warning)
        services = self.services(store)
        preparing = asyncio.create_task(services.models.prepare(), name="prepare the model's client")
        try:
            while not stop.is_set():
                worker_session = await self.start_session(services)
                with HeartbeatThread(variables.url, worker_session.membership) as heartbeat_thread:
                    async with worker_session.membership.handing_back():
                        await worker_session.run(stop, on_beat=heartbeat_thread.record_turn)
        finally:
            preparing.cancel()
            await services.sdk_sessions.aclose()
            await services.hooks.aclose()
            await services.permits.aclose()
            await services.keeper.aclose()
            await services.models.aclose()
            await store.aclose()

    def services(self, store: Store) -> Services:
        """Return the services that this worker's conversations share, on a store."""
        settings = self._settings
        return Services(
            store,
            EventLog(store, Secrets(store, settings.secret_key, remembered=2 * settings.variables.max_conversations)),
            Owners(store),
            Models(settings.model_env, store.clock, settings.quotas, is_open=bool(settings.variables.any_model)),
            settings.quotas,
            load_hooks(settings.variables.hooks),
            sdk_sessions=SdkSessions(settings.variables.sdk_sessions, settings.variables.sdk_sandbox),
        )

    async def start_session(self, services: Services) -> ControllerSession:
        """Start a worker session under a new name. Called by `run`, and by simulations on their own stores."""
        self._session = ControllerSession(services, self._settings)
        if self._is_draining:
            await self._session.drain()
        return self._session

    async def drain(self) -> int:
        """Stop claiming; give back each conversation as soon as it waits.

        Returns:
            Number of conversations left.
        """
        self._is_draining = True
        return await self._session.drain() if self._session is not None else 0

    def conversation_ids(self) -> list[str]:
        """Return the ids of the conversations that this worker owns."""
        return sorted(self._session.loops) if self._session is not None else []

    def report(self) -> Mapping[str, Any]:
        """See `LoopService.report`."""
        worker_session = self._session
        if worker_session is None:
            return {"role": "controller", "conversations": 0}
        return {
            "role": "controller",
            "worker_id": worker_session.worker_id,
            "conversations": len(worker_session.loops),
            "steps": worker_session.progress,
            "is_draining": worker_session.is_draining,
        }


class ControllerSession:
    """One session of the worker under one name."""

    def __init__(self, services: Services, settings: ControllerSettings) -> None:
        self.worker_id = new_worker_id("controller")
        self.loops: dict[str, ConversationLoop] = {}
        self.progress = 0
        self.is_draining = False
        self._services = services
        self._settings = settings
        self._idle_seconds = settings.variables.idle_seconds
        self.membership = Membership(
            services.store,
            self.worker_id,
            "controller",
            about={
                "agents": ",".join(list_agents()),
                "models": "\n".join(services.models.offered),
                OFFERED_MODELS: services.models.table.model_dump_json(),
                UNPRICED_MODELS: "\n".join(
                    services.models.list_unpriced(filter(None, settings.variables.priced_models.split(",")))
                ),
                "quotas": "\n".join(pool.title for pool in services.quotas.pools[:QUOTAS_NAMED]),
                "plugins": ",".join(f"{group}:{name}" for group, names in list_plugins().items() for name in names),
                "ignored_settings": "\n".join(find_ignored_variables(settings.model_env)[:IGNORED_NAMED]),
                "interactive": "1",
            },
            ttl_seconds=settings.variables.heartbeat_ttl_seconds,
            figures=services.figures,
        )
        self._places = Slots(settings.variables.max_conversations)
        self._takes_more = asyncio.Event()
        self._takes_more.set()
        self._connects = services.store.connection.connects
        self._unsure: set[str] = set()
        self._lost: list[str] = []
        self._restoring = {True: 0, False: 0}
        self._has_restored = asyncio.Event()

    async def run(self, stop: asyncio.Event, *, on_beat: Callable[[int], None]) -> None:
        """Work until stopped or swept; `on_beat` receives the progress at each heartbeat."""
        await self.membership.register()
        await self._publish_tenants()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_maintenance())]
                tasks.append(group.create_task(self._services.permits.run_maintenance(self.worker_id)))
                tasks.append(group.create_task(self._services.keeper.run_maintenance(self.worker_id)))

                def read_shards(shards: Sequence[ShardKeys]) -> None:
                    for names in shards:
                        reading = (self._read_ready(names, is_first=is_first) for is_first in (True, False))
                        tasks.extend(group.create_task(work) for work in (*reading, self._read_mailbox(names)))

                read_shards(self.membership.shards)
                tasks.append(group.create_task(self._send_heartbeats(on_beat, read_shards)))
                group.create_task(cancel_when(stop, tasks))
        except* OwnershipLost:
            self._lost += self.loops
            _log.warning("worker %s was presumed dead; it starts over under a new name", self.worker_id)
            for loop in list(self.loops.values()):
                await loop.check_lost_tail()
        finally:
            for loop in list(self.loops.values()):
                loop.drop()
            self._log_lost()
        if stop.is_set():
            await self.membership.leave()
        else:
            await self.membership.leave_soon()

    async def drain(self) -> int:
        """Stop claiming; see `ControllerConsumer.drain`."""
        self.is_draining = True
        self._takes_more.clear()
        for loop in list(self.loops.values()):
            await loop.release_idle()
        return len(self.loops)

    async def _publish_tenants(self) -> None:
        settings = self._settings
        if settings.tenants.rules or settings.admit_memory is not None:
            await publish_tenants(self._services.store, settings.tenants, settings.admit_memory)

    async def _send_heartbeats(
        self, on_beat: Callable[[int], None], read_shards: Callable[[Sequence[ShardKeys]], None]
    ) -> None:
        """Send the heartbeat from the same event loop that does this worker's work."""
        while True:
            failpoint("controller.beat")
            on_beat(self.progress)
            self.membership.figures.set(conversations=len(self.loops))
            found = await self.membership.beat(self.progress)
            if found is None:
                raise OwnershipLost(f"{self.worker_id} was swept.")
            await expire(self._services.log, found.expired)
            if new := await self.membership.join_new_shards():
                await self._publish_tenants()
                read_shards(new)
            await self.membership.wait_for_next_beat()

    async def _read_ready(self, names: ShardKeys, *, is_first: bool) -> None:
        stream = ReadyStream(self._services.store, names, self.worker_id, is_interactive=is_first)
        try:
            while True:
                await self._takes_more.wait()
                room = await self._places.wait(is_first=is_first)
                while self._restoring[is_first] >= RESTORE_AT_ONCE:
                    self._has_restored.clear()
                    await self._has_restored.wait()
                notified = await stream.read(limit=min(RESTORE_AT_ONCE - self._restoring[is_first], room))
                with self._services.steps.hurry() if notified and is_first else nullcontext():
                    await asyncio.gather(*(self._claim(cid, entry) for cid, entry in notified))
        finally:
            await stream.aclose()

    async def _claim(self, conversation_id: str, entry: str) -> None:
        failpoint("controller.before_claim")
        try:
            claimed = await self._services.owners.claim(conversation_id, self.worker_id, ready_entry=entry)
        except (StoreError, ValueError):  # damaged keys of one conversation affect no other
            _log.exception("conversation %s cannot be claimed", conversation_id, extra=make_extra(conversation_id))
            return
        if isinstance(claimed, ClaimedConversation):
            self._start_loop(claimed)
        elif claimed is ClaimFailure.SWEPT:
            raise OwnershipLost(f"{self.worker_id} was swept.")
        elif claimed is ClaimFailure.YOURS:
            await self._wake(conversation_id)

    async def _wake(self, conversation_id: str, carried: CarriedEvent | None = None) -> None:
        """Wake an owned conversation. Claim it again if it was dropped or the reply to its claim was lost.

        Args:
            carried: the event delivered with the notification.
        """
        if conversation_id not in self.loops:
            claimed = await self._resume_claim(conversation_id)
            if claimed is not None and conversation_id not in self.loops:
                self._start_loop(claimed)
                return
        loop = self.loops.get(conversation_id)
        if loop is not None:
            self.progress += 1
            loop.wake(carried=carried)

    async def _resume_claim(self, conversation_id: str) -> ClaimedConversation | None:
        try:
            return await self._services.owners.resume_claim(conversation_id, self.worker_id)
        except (StoreError, ValueError):
            _log.exception(
                "conversation %s cannot be claimed again", conversation_id, extra=make_extra(conversation_id)
            )
            return None

    def _start_loop(self, claimed: ClaimedConversation) -> None:
        cid = claimed.ownership.conversation_id
        _log.info("conversation %s is claimed", cid, extra=make_extra(cid))
        loop = ConversationLoop(claimed, self._services, on_gone=self._forget)
        self.loops[loop.conversation_id] = loop
        is_first = loop.rank == 0
        self._places.take(is_first=is_first)
        self.progress += 1
        self._restoring[is_first] += 1
        loop.start().add_done_callback(lambda _: self._note_restored(is_first=is_first))

    def _note_restored(self, *, is_first: bool) -> None:
        self._restoring[is_first] -= 1
        self._has_restored.set()

    async def _read_mailbox(self, names: ShardKeys) -> None:
        mailbox = WorkerMailbox(self._services.store, names, self.worker_id)
        try:
            while True:
                for conversation_id, carried in (await mailbox.read()).items():
                    await self._wake(conversation_id, carried)
                for conversation_id, gap in mailbox.take_gaps().items():
                    await record_reported_gap(self._services.log, conversation_id, gap)
        finally:
            await mailbox.aclose()

    async def _run_maintenance(self) -> None:
        """Find events with lost wake-ups, check slow actions, and release idle conversations."""
        round_number = 0
        checked: dict[str, float] = {}
        while True:
            await wait_for_tick(UPKEEP_SECONDS)
            round_number += 1
            self._log_lost()
            try:
                await self._rescan()
                checked = {cid: at for cid, at in checked.items() if cid in self.loops}
                await self._check_idle(checked, has_news=round_number % CHECK_NEWS_EVERY == 0)
            except (StoreRefused, *PARSE_ERRORS):  # damaged keys must not stop the worker
                _log.exception("the maintenance of %s failed", self.worker_id)

    async def _check_idle(self, checked: dict[str, float], *, has_news: bool) -> None:
        """Wake conversations with missed events; check or release the idle ones.

        Args:
            checked: when each conversation's actions were last checked, by the monotonic clock.
            has_news: whether to ask the store for new events.
        """
        idle = [loop for loop in self.loops.values() if loop.is_idle]
        if idle and has_news:
            last_ids = await self._services.owners.load_last_ids([loop.conversation_id for loop in idle])
            for loop, last_id in zip(idle, last_ids, strict=True):
                if last_id != loop.state.version:
                    loop.wake()
        now = self._services.store.clock.monotonic()
        for loop in self.loops.values():
            loop.forget_history(now)
        idle.sort(key=lambda loop: (-loop.rank, loop.waiting_since))
        surplus = self._count_surplus()
        for position, loop in enumerate(idle):
            cid = loop.conversation_id
            waited = now - loop.waiting_since
            if position < surplus or waited > self._idle_seconds:
                await loop.release_idle()
            elif waited > CHECK_DISPATCH_AFTER_SECONDS and now - checked.get(cid, 0.0) > waited / 2:
                checked[cid] = now
                loop.check_dispatch()

    async def _rescan(self) -> None:
        """After an outage, claim the conversations that the store assigns to this worker, and check all owned ones."""
        connects = self._services.store.connection.connects
        if connects != self._connects:
            self._connects = connects
            # An older state of the store may assign us conversations that we have released; no other worker claims
            # them.
            self._unsure |= set(await self._services.owners.list_owned(self.worker_id)) - self.loops.keys()
            for loop in list(self.loops.values()):
                loop.check_dispatch()
        while self._unsure:
            await self._wake(self._unsure.pop())

    def _log_lost(self) -> None:
        """Log conversations with a new owner in one line, because there may be hundreds."""
        lost, self._lost = self._lost, []
        if lost:
            more = f" and {len(lost) - SHOWN_LOST} more" if len(lost) > SHOWN_LOST else ""
            _log.warning("conversations taken over by other workers: %s%s", ", ".join(lost[:SHOWN_LOST]), more)

    def _count_surplus(self) -> int:
        """Return how many idle conversations to release at once."""
        if self.is_draining:
            return len(self.loops)
        return 0 if self._places.count_free(is_first=False) else MAKE_ROOM_FOR

    def _forget(self, loop: ConversationLoop) -> None:
        if self.loops.get(loop.conversation_id) is loop:
            del self.loops[loop.conversation_id]
            self._places.release(is_first=loop.rank == 0)
            if loop.is_lost:
                self._lost.append(loop.conversation_id)
            if loop.should_reclaim:
                self._unsure.add(loop.conversation_id)
