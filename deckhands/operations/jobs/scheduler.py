"""The `schedules` job: starts every due run exactly once.

Holds: a tick starts a conversation under a key made of the schedule's name and the time of the tick, so repeated ticks
and several beats start nothing twice. A schedule that cannot start does not delay others, and is retried until its
ticks are too late.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

from broker.contract import AgentState, is_settled
from broker.log import EventLog
from broker.runtime import CorruptEntry, DeckhandsError, StoreRefused, StoreUnavailable, UnknownConversation, failpoint
from deckhands.client import Client, TaskSpec, derive_conversation_id, start_conversation
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.schedules.repository import ScheduleRepository, StoredSchedule
from deckhands.operations.schedules.schedule import MAX_QUEUED, find_due

TICK_SECONDS = 5.0
DUE_AT_ONCE = 256
RETRIED_AT_ONCE = 32
"""Few: each may wait for a tool."""
STRIDE = 10_007
"""A prime above the number of schedules, so that every schedule is reached even if runs of the job are skipped."""
AT_ONCE = 16
OFFERS_LIMIT_SECONDS = 2.0
"""How long a tool may be missing; the tick is retried."""

_log = logging.getLogger(__name__)


async def start_due_schedules(services: JobServices) -> dict[str, int]:
    """Start due runs. Returns how many schedules were processed."""
    repository = ScheduleRepository(services.store, services.client.secrets)
    try:
        return {"looked_at": await start_due(services.client, repository, await repository.now())}
    except StoreRefused as error:
        if "WRONGTYPE" not in error.message:
            raise
        await repository.rename_foreign_keys()
        return {"looked_at": 0}


async def has_due_schedules(services: JobServices) -> bool:
    """Return whether a schedule is due, or has ticks that wait."""
    return await ScheduleRepository(services.store, services.client.secrets).has_work()


async def start_due(client: Client, book: ScheduleRepository, now: datetime) -> int:
    """Start the runs due at a time, and return how many schedules were processed. Idempotent."""
    waiting, failing = await book.waiting_and_failing()
    due = await book.due(now)
    fresh, queued = ([name for name in found if name not in failing] for found in (due, waiting))
    tried = [name for name in dict.fromkeys([*due, *waiting]) if name in failing]
    kinds = ((fresh, DUE_AT_ONCE), (queued, DUE_AT_ONCE), (tried, RETRIED_AT_ONCE))
    names = dict.fromkeys(name for found, limit in kinds for name in _select_some(found, limit, now))
    free = asyncio.Semaphore(AT_ONCE)

    async def look(name: str) -> None:
        async with free:
            await _process_safely(client, book, name, now)

    await asyncio.gather(*map(look, names))
    return len(names)


def _select_some(names: list[str], limit: int, now: datetime) -> list[str]:
    """Return a random selection of limited size, so that all get a turn."""
    if len(names) <= limit:
        return names
    start = int(now.timestamp() / TICK_SECONDS) * STRIDE % len(names)
    return [*names[start:], *names][:limit]


async def _process_safely(client: Client, book: ScheduleRepository, name: str, now: datetime) -> None:
    try:
        await _process(client, book, await book.entry(name), now)
    except (StoreUnavailable, StoreRefused) as error:
        if isinstance(error, StoreUnavailable) or "WRONGTYPE" in error.message:
            raise
        _log.warning("the schedule %s: %s", ascii(name), error)
    except CorruptEntry as error:
        _log.error("%s It is quarantined.", error.message)
        await book.quarantine(name)
    except DeckhandsError as error:  # removed meanwhile, or the store refuses part of it
        _log.warning("the schedule %s: %s", ascii(name), error)
    except Exception:  # noqa: BLE001  (the outer edge: whatever is wrong with this one)
        _log.exception("cannot process the schedule %s", ascii(name))


async def _process(client: Client, book: ScheduleRepository, entry: StoredSchedule, now: datetime) -> None:
    """Queue a due tick, then start the first queued one if the overlap policy allows it."""
    schedule = entry.schedule
    status = entry.status
    due = entry.due
    if due is not None and due <= now and status.last_tick != due and await _is_started(client, schedule.name, due):
        # Started by a worker that died before it could record this.
        begun = {
            "last_tick": due,
            "conversation_id": derive_tick_conversation_id(schedule.name, due),
            "begun": status.begun + 1,
        }
        await book.move(entry, status.model_copy(update=begun), schedule.next_after(due))
        return
    is_at_work = await _is_working(client, status.conversation_id)
    ticks, following = list(status.queued), due
    changes: dict[str, Any] = {}
    if due is not None and due <= now:
        found = find_due(schedule, due, now)
        following = found.next
        changes["missed"] = status.missed + found.missed
        if found.tick is None:
            changes["error"] = ""
        elif (is_at_work and schedule.overlap == "skip") or len(ticks) >= MAX_QUEUED:
            changes["skipped"] = status.skipped + 1
        else:
            ticks.append(found.tick)
    if ticks and is_at_work and schedule.overlap == "cancel":
        await client.cancel(status.conversation_id)
        is_at_work = False
    if ticks and not is_at_work:
        try:
            conversation_id = await _start(client, book.load_request(schedule), entry, ticks[0])
        except DeckhandsError as error:
            text = f"{error.message} {error.remedy}".strip()[:500]
            if text != status.error:
                _log.warning("the schedule %s cannot start its run of %s: %s", schedule.name, ticks[0], text)
            if not status.queued:  # the tick stays due, and is retried until the next one is due or it is too late
                await book.move(entry, status.model_copy(update={"error": text}), due)
                return
            since = status.failing_since or now
            changes |= {"error": text, "failing_since": since}
            if (now - max(since, ticks[0])).total_seconds() > schedule.catch_up_seconds:
                changes["missed"] = changes.get("missed", status.missed) + 1
                del ticks[0]  # otherwise it would block the ticks behind it
            await book.move(entry, status.model_copy(update={**changes, "queued": tuple(ticks)}), following)
            return
        changes |= {"last_tick": ticks[0], "conversation_id": conversation_id, "error": "", "failing_since": None}
        changes["begun"] = status.begun + 1
        del ticks[0]
    failpoint("jobs.tick_begun")
    after = status.model_copy(update={**changes, "queued": tuple(ticks)})
    if after != status or following != due:
        await book.move(entry, after, following)


async def _start(client: Client, request: TaskSpec, entry: StoredSchedule, tick: datetime) -> str:
    key = derive_key(entry.schedule.name, tick)
    failpoint("jobs.before_tick")
    conversation_id = derive_conversation_id(key)
    await start_conversation(
        EventLog(client.store, client.secrets),
        client.secrets,
        request,
        conversation_id,
        key=key,
        offers_limit_seconds=OFFERS_LIMIT_SECONDS,
        role="jobs",
    )
    return conversation_id


async def _is_started(client: Client, name: str, tick: datetime) -> bool:
    try:
        await client.row(derive_tick_conversation_id(name, tick))
    except UnknownConversation:
        return False
    return True


async def _is_working(client: Client, conversation_id: str) -> bool:
    """Return whether a conversation has not settled; one that left the store has settled."""
    if not conversation_id:
        return False
    try:
        row = await client.row(conversation_id)
    except UnknownConversation:
        return False
    return not (row.is_closed or (row.state in set(AgentState) and is_settled(AgentState(row.state))))


def derive_key(name: str, tick: datetime) -> str:
    """Return the idempotency key of a tick."""
    return f"schedule:{name}:{tick.astimezone(UTC):%Y-%m-%dT%H:%MZ}"


def derive_tick_conversation_id(name: str, tick: datetime) -> str:
    """Return the id of the conversation that a tick starts."""
    return derive_conversation_id(derive_key(name, tick))
