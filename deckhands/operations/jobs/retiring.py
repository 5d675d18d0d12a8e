"""The jobs `retire` and `restore`.

`retire` applies the retention policy, which moves most conversations into the archive. `restore` brings one back, for
clients that reach Celery but not the archive.

Holds: a conversation is deleted from the store only if its file was read back and checked, or if a rule says so. If a
run is killed, each conversation is still in the store or in the archive; the next run completes the work. A
conversation is removed only if it is settled, old enough, and unchanged since its log was read, so a new message keeps
it. Delegates are removed together with their parents, never earlier, if their own log names the parent.
Does not: delete a conversation that cannot be archived, such as one with a damaged log; it stays, and the worker logs
this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from broker.contract import AgentState, ConversationCreated, Event, is_settled
from broker.log import ConversationRow, Conversations, Deletion, EventLog, NotDeleted, fold_status
from broker.runtime import (
    CorruptEntry,
    StoreRefused,
    StoreTooNew,
    UnknownConversation,
    UnknownKind,
    UsageError,
    check_conversation_id,
    failpoint,
    make_extra,
    to_millis,
)
from broker.secrets import SecretsLocked
from broker.store import WRONG_TYPE_PREFIX, Store
from deckhands.client import (
    Archive,
    ArchiveConflict,
    CorruptArchive,
    Retention,
    RetentionRule,
    TooLargeToArchive,
    delete,
    find_delegates,
    is_delegate_of,
)
from deckhands.operations.jobs.job import JobServices

PAGE = 200
AT_ONCE = 8
MAX_DELEGATES = 10_000
MAX_LISTED = 20
"""How many conversations that cannot be archived one run lists."""
OWNED_SECONDS = 60.0
"""How long the owner of a settled conversation may keep it; it releases it after 30 s."""
ABANDONED = timedelta(hours=1)
"""A draft that is unchanged for this long was left by a killed writer."""

_UNFIT = (CorruptEntry, StoreTooNew, UnknownKind, SecretsLocked, ArchiveConflict, CorruptArchive, TooLargeToArchive)

_log = logging.getLogger(__name__)


async def retire(services: JobServices) -> dict[str, int]:
    """Apply the retention policy. Returns how many conversations were archived and deleted, were kept, and failed."""
    settings = services.settings
    retention = Retention.of_setting(settings.retention)
    if warning := retention.warning(settings.archive):
        _log.warning("%s", warning)
    archive = Archive(settings.archive, services.store.encryption) if settings.archive else None
    round_ = _RetirementRun(services.store, retention, archive, settings.checkpoints)
    await round_.run()
    if archive:
        await archive.sweep(before=round_.now - ABANDONED)
    return {name: round_.done[name] for name in ("archived", "deleted", "kept", "failed")}


@dataclass(slots=True)
class _ConversationTree:
    """A conversation and its finished delegates that are still in the store, parents first."""

    logs: dict[str, list[Event]] = field(default_factory=dict)


@dataclass(slots=True)
class _RetirementRun:
    store: Store
    retention: Retention
    archive: Archive | None
    checkpoint: str
    done: Counter[str] = field(default_factory=Counter)
    log: EventLog = field(init=False)
    index: Conversations = field(init=False)
    now: datetime = field(init=False)

    def __post_init__(self) -> None:
        self.log = EventLog(self.store)
        self.index = Conversations(self.store)
        self.now = self.store.clock.now()

    async def run(self) -> None:
        """Examine every conversation that is old enough for any rule, the oldest first."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(row: ConversationRow) -> bool:
            async with limit:
                return await self._retire(row)

        async for page, gone in self._pages():
            gone.extend(await asyncio.gather(*map(one, page)))

    async def _pages(self) -> AsyncIterator[tuple[list[ConversationRow], list[bool]]]:
        youngest = self.retention.youngest
        if youngest is None:
            return
        latest = to_millis(self.now - youngest)
        for names in self.store.all_shards:
            kept = 0
            while True:
                command = ("ZRANGEBYSCORE", names.index, "-inf", latest, "LIMIT", kept, PAGE)
                found = await self.store.call(*command)
                if not found:
                    break
                rows = await self.index.load_rows([cid.decode(errors="backslashreplace") for cid in found])
                gone: list[bool] = []
                yield rows, gone
                kept += len(found) - sum(gone)

    async def _retire(self, row: ConversationRow) -> bool:
        """Return whether a conversation has left the store."""
        conversation_id = row.conversation_id
        try:
            fate = await self._fate(row)
        except (*_UNFIT, StoreRefused) as error:
            if isinstance(error, StoreRefused) and WRONG_TYPE_PREFIX not in error.message:
                raise
            fate = "failed"
            if self.done[fate] < MAX_LISTED:
                _log.error("%s stays in the store: %s", conversation_id, error, extra=make_extra(conversation_id))
        except (NotDeleted, UsageError):  # it or one of its delegates has continued, or it was retired with its parent
            fate = "kept"
        self.done[fate] += 1
        return fate in ("archived", "deleted")

    async def _fate(self, row: ConversationRow) -> str:
        conversation_id = row.conversation_id
        if not self._may_match(row):
            return "kept"
        meta = (await self.store.locate(conversation_id)).meta
        awaited, begun = await self.store.call("HMGET", meta, "awaited", "deleted")
        if begun is not None:  # deletion started by an earlier run or by a user: complete it
            await delete(self.log, conversation_id, limit_seconds=0.0)
            return "deleted"
        if awaited is not None or not self._may_go(row):
            return "kept"
        events = await self.log.read(conversation_id)
        if not events or not isinstance(events[0], ConversationCreated):
            raise CorruptEntry("Its log does not start with its creation.")
        tenancy = events[0].tenancy
        rule = self._rule_for(row, tenancy.tenant if tenancy else "")
        tree = _ConversationTree()
        if rule is None or await self._has_parent(events) or not await self._collect(tree, row, events):
            return "kept"
        if rule.then == "archive":
            if self.archive is None:
                return "kept"
            for log in reversed(tree.logs.values()):
                await self.archive.save(self.store, log, checkpoint=self.checkpoint)
        last_id = events[-1].id
        deletion = Deletion(self.store)
        if len(tree.logs) > 1:
            # Each is deleted only if unchanged since it was read, so that none is lost with a new message.
            # Delegates first: if one has continued, the others are archived, and deleted without it.
            for name, log in reversed(tree.logs.items()):
                if name != conversation_id:
                    with contextlib.suppress(UnknownConversation):  # it was deleted meanwhile
                        await deletion.close_for_deletion(name, last_id=log[-1].id, limit_seconds=0.0)
            await deletion.close_for_deletion(conversation_id, last_id=last_id, limit_seconds=0.0)
            failpoint("retire.begun")
            await delete(self.log, conversation_id, limit_seconds=0.0)
        else:
            await deletion.delete(conversation_id, last_id=last_id, limit_seconds=0.0)
        failpoint("retire.deleted")
        return "archived" if rule.then == "archive" else "deleted"

    def _may_match(self, row: ConversationRow) -> bool:
        """Return whether a rule may apply to a conversation, according to the index."""
        age = (self.now - row.updated).total_seconds()
        if row.owner and age < OWNED_SECONDS:
            return False
        rests = row.is_closed or (row.state in set(AgentState) and is_settled(AgentState(row.state)))
        return rests and self.retention.youngest is not None and age >= self.retention.youngest.total_seconds()

    def _may_go(self, row: ConversationRow) -> bool:
        """Return whether a conversation may be removed, as far as known without its log, which names its parent."""
        is_known = row.tenant or all(rule.tenant is None for rule in self.retention.rule)
        return not is_known or self._rule_for(row, row.tenant) is not None

    def _rule_for(self, row: ConversationRow, tenant: str) -> RetentionRule | None:
        """Return the rule under which a conversation of a tenant goes now."""
        rule = self.retention.rule_for(tenant=tenant, labels=row.labels, state=row.state)
        is_old = rule is not None and rule.age is not None and self.now - row.updated >= rule.age
        return rule if is_old else None

    async def _has_parent(self, events: list[Event]) -> bool:
        created = events[0]
        assert isinstance(created, ConversationCreated)
        if created.parent is None:
            return False
        meta = (await self.store.locate(created.parent.conversation_id)).meta
        return bool(await self.store.call("EXISTS", meta))

    async def _collect(self, tree: _ConversationTree, row: ConversationRow, events: list[Event]) -> bool:
        """Read the delegates; return whether all of them have settled."""
        if not (row.is_closed or fold_status(events).is_settled):
            return False
        tree.logs[row.conversation_id] = events
        for delegate_id in find_delegates(events):
            if delegate_id in tree.logs:
                continue
            try:
                delegate = await self.index.load_row(delegate_id)
                log = await self.log.read(delegate_id)
            except UnknownConversation:  # it was deleted before
                continue
            if not is_delegate_of(log, row.conversation_id):  # forks and imported logs name the delegates of others
                continue
            if len(tree.logs) > MAX_DELEGATES or not await self._collect(tree, delegate, log):
                return False
        return True


async def restore(services: JobServices, conversation_id: str) -> dict[str, str | bool]:
    """Restore a conversation; `restored` is false if it is in the store already. See `Client.restore` for the rest."""
    if not isinstance(conversation_id, str):
        raise UsageError(f"The conversation id {ascii(conversation_id)[:100]} is not a text.")
    is_new = await services.client.restore(check_conversation_id(conversation_id))
    return {"conversation_id": conversation_id, "restored": is_new}
