"""The schedules of a store: their definitions and their progress.

Holds: users' changes and the progress written by ticks are separate, so neither overwrites the other. A schedule
advances from an observed tick only once, even if several workers observe it.
Does not: start anything; the job `schedules` does.
Keys: `deck:{k}:schedules`, `deck:{k}:schedules:standing`, `deck:{k}:schedules:due` in the shard of the schedule's name.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from broker.contract import UploadedSource, replace_surrogates
from broker.coordination import Quarantine
from broker.runtime import BrokerSettings, CorruptEntry, UsageError, from_millis, to_millis
from broker.secrets import Secrets, load_secret_key
from broker.store import Store
from deckhands.client import OFFERS_LIMIT_SECONDS, TaskSpec, find_runnable_agent
from deckhands.operations.schedules.schedule import LABEL, Schedule, ScheduleStatus

MAX_SCHEDULES = 10_000
REMEDY = "`deckhands schedule ls` lists all schedules."

ScheduleCheck = Callable[[Schedule], None]


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """A schedule in the store.

    Attributes:
        due: its next tick; None if it is paused, or if there are no more.
        known: the progress as it was written, perhaps by another version; empty if there is none.
    """

    schedule: Schedule
    status: ScheduleStatus
    due: datetime | None
    known: bytes = b""


class ScheduleConflict(UsageError):
    """A schedule cannot be added beside those that exist."""


class ScheduleRepository:
    """The schedules of a store."""

    def __init__(self, store: Store, secrets: Secrets) -> None:
        self._store = store
        self._secrets = secrets

    async def now(self) -> datetime:
        """Return the store's time, which ticks are compared with."""
        return await self._store.now(self._store.all_shards[0])

    async def add(
        self, schedule: Schedule, request: TaskSpec, *, offers_limit_seconds: float = OFFERS_LIMIT_SECONDS
    ) -> datetime | None:
        """Store a schedule, and return its first tick.

        Args:
            offers_limit_seconds: how long a tool may be missing.

        Raises:
            ScheduleConflict: the name is taken, or there are too many schedules.
            UsageError: a tick could not start the task, because a field is for a single conversation, or no running
                worker knows its agent, policy or analyzer, offers a model or one of its tools, or accepts the
                directory.
        """
        request = _prepare_request(schedule.name, request)
        await find_runnable_agent(self._store, request, request.agent_spec(), offers_limit_seconds=offers_limit_seconds)
        text = json.dumps(replace_surrogates(request.model_dump(mode="json")))
        if request.secrets:
            load_secret_key(BrokerSettings.from_env(), is_made=True)
            text = base64.b64encode(self._secrets.seal(_encryption_scope(schedule.name), text)).decode()
        kept = schedule.model_copy(update={"request": text, "is_sealed": bool(request.secrets)})
        due = None if kept.is_paused else kept.next_after(await self.now())
        sizes = await self._store.call_many([("HLEN", names.schedules) for names in self._store.all_shards])
        is_full = sum(sizes) >= MAX_SCHEDULES
        outcome = "full" if is_full else await self._put(kept.name, b"", kept.model_dump_json().encode(), due)
        if outcome == "full":
            raise ScheduleConflict(f"The limit of {MAX_SCHEDULES:,} schedules is reached.", remedy="Remove one.")
        if outcome == "other":
            raise ScheduleConflict(
                f"There is a schedule {kept.name} already.", remedy="Remove it first, or choose another name."
            )
        return due

    async def remove(self, name: str, *, check: ScheduleCheck | None = None) -> None:
        """Delete a schedule; conversations that it started continue.

        Args:
            check: raises unless the caller may remove the current version of the schedule; only that version is
                removed.

        Raises:
            UsageError: there is no schedule with this name.
        """
        while True:
            text = await self._text(name)
            if check is not None:
                check(_parse_schedule(name, text))
            if await self._put(name, text, b"", None) != "other":
                return

    async def set_paused(self, name: str, *, is_paused: bool, check: ScheduleCheck | None = None) -> datetime | None:
        """Pause or resume a schedule, and return its next tick. Idempotent.

        Args:
            check: raises unless the caller may change the current version of the schedule; only that version is
                changed.

        Raises:
            UsageError: there is no schedule with this name.
        """
        while True:
            text = await self._text(name)
            known = _parse_schedule(name, text)
            if check is not None:
                check(known)
            changed = known.model_copy(update={"is_paused": is_paused})
            due = None if is_paused else changed.next_after(await self.now())
            if await self._put(name, text, changed.model_dump_json().encode(), due) == "put":
                return due

    async def all(self) -> list[StoredSchedule]:
        """Return the readable schedules, by name."""
        each = await self._store.call_many([("HKEYS", names.schedules) for names in self._store.all_shards])
        found = []
        for raw in (raw for keys in each for raw in keys):
            with contextlib.suppress(CorruptEntry, UsageError):
                found.append(await self.entry(raw.decode(errors="backslashreplace")))
        return sorted(found, key=lambda entry: entry.schedule.name)

    async def entry(self, name: str) -> StoredSchedule:
        """Return one schedule.

        Raises:
            UsageError: there is no schedule with this name.
            CorruptEntry: its stored form cannot be read.
        """
        names = self._store.find_home(name)
        text, known, score = await self._store.call_many(
            [
                ("HGET", names.schedules, name),
                ("HGET", names.schedules_status, name),
                ("ZSCORE", names.schedules_due, name),
            ]
        )
        if text is None:
            raise _missing(name)
        try:
            due = None if score is None else from_millis(int(float(score)))
        except (ValueError, OverflowError, OSError) as error:
            raise _unreadable(name) from error
        return StoredSchedule(_parse_schedule(name, text), _parse_status(name, known), due, known or b"")

    async def due(self, now: datetime) -> list[str]:
        """Return the names of due schedules, up to `MAX_SCHEDULES`."""
        each = await self._find_due(to_millis(now), MAX_SCHEDULES)
        return [name.decode(errors="backslashreplace") for found in each for name in found][:MAX_SCHEDULES]

    async def has_work(self) -> bool:
        """Return whether a schedule is due by this process's estimate of the store's time, or has queued ticks."""
        if any(await self._find_due(to_millis(self._store.clock.now()), 1)):
            return True
        known = await self._store.call_many([("HLEN", names.schedules_status) for names in self._store.all_shards])
        return any(known) and bool((await self.waiting_and_failing())[0])

    async def waiting_and_failing(self) -> tuple[list[str], set[str]]:
        """Return the names of schedules with queued ticks, and of those that could not start one."""
        each = await self._store.call_many([("HGETALL", names.schedules_status) for names in self._store.all_shards])
        flat = [part for one in each for part in one]
        waiting, failing = [], set()
        for raw, text in zip(flat[::2], flat[1::2], strict=True):
            name = raw.decode(errors="backslashreplace")
            if b'"queued":[]' not in text:
                waiting.append(name)
            if b'"error":"' in text and b'"error":""' not in text:
                failing.add(name)
        return waiting, failing

    async def move(self, entry: StoredSchedule, standing: ScheduleStatus, due: datetime | None) -> bool:
        """Write a schedule's progress; return False if it was removed or another worker has advanced it."""
        name = entry.schedule.name
        names = self._store.find_home(name)
        reply = await self._store.call_function(
            "deck_move_schedule",
            (names.root,),
            name,
            "" if entry.due is None else to_millis(entry.due),
            "" if due is None else to_millis(due),
            entry.known,
            standing.model_dump_json(),
        )
        return bool(reply == ["moved"])

    async def quarantine(self, name: str) -> None:
        """Quarantine an unreadable schedule: it is no longer due, and stays in the store for inspection."""
        names = self._store.find_home(name)
        await self._store.call_many([("ZREM", names.schedules_due, name), ("HDEL", names.schedules_status, name)])

    def load_request(self, schedule: Schedule) -> TaskSpec:
        """Return the task that each tick submits.

        Raises:
            SecretsLocked: the task has secrets, and no key here decrypts them.
            UsageError: this version cannot use the task.
            CorruptEntry: the task cannot be read.
        """
        text = schedule.request
        try:
            if schedule.is_sealed:
                text = self._secrets.unseal(_encryption_scope(schedule.name), base64.b64decode(text))
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _unreadable(schedule.name) from error
        return TaskSpec.parse(fields)

    async def rename_foreign_keys(self) -> None:
        """Rename keys of another type that occupy the places of the schedules.

        The next ticks are recomputed if they were lost.
        """
        unreadable = Quarantine(self._store)
        places = [
            place
            for names in self._store.all_shards
            for place in ((names.schedules, "hash"), (names.schedules_status, "hash"), (names.schedules_due, "zset"))
        ]
        kinds = await self._store.call_many([("TYPE", key) for key, _ in places])
        for (key, kind), found in zip(places, kinds, strict=True):
            if _text(found) not in (kind, "none"):
                await unreadable.move_away(key, kind, ValueError(f"it was a {_text(found)}, not a {kind}"))
        now = await self.now()
        for entry in await self.all():
            due = entry.schedule.next_after(now)
            if entry.due is None and due is not None and not entry.schedule.is_paused:
                name = entry.schedule.name
                await self._store.call("ZADD", self._store.find_home(name).schedules_due, "NX", to_millis(due), name)

    async def _find_due(self, now_ms: int, limit: int) -> list[list[bytes]]:
        """Return the names of due schedules, for each shard."""
        span = ("-inf", now_ms, "LIMIT", 0, limit)
        return await self._store.call_many(
            [("ZRANGEBYSCORE", names.schedules_due, *span) for names in self._store.all_shards]
        )

    async def _text(self, name: str) -> bytes:
        """Return the stored text of a schedule.

        Raises:
            UsageError: there is no schedule with this name.
        """
        text = await self._store.call("HGET", self._store.find_home(name).schedules, name)
        if text is None:
            raise _missing(name)
        found: bytes = text
        return found

    async def _put(self, name: str, known: bytes, text: bytes, due: datetime | None) -> str:
        """Write a schedule and its next tick if it is still the known version; see `put_schedule` in Lua."""
        (outcome,) = await self._store.call_function(
            "deck_put_schedule",
            (self._store.find_home(name).root,),
            name,
            known,
            text,
            "" if due is None else to_millis(due),
            MAX_SCHEDULES,
        )
        return str(outcome)


def _parse_schedule(name: str, text: bytes) -> Schedule:
    try:
        return Schedule.model_validate_json(text)
    except ValueError as error:  # includes pydantic's errors
        raise _unreadable(name) from error


def _parse_status(name: str, text: bytes | None) -> ScheduleStatus:
    try:
        return ScheduleStatus() if text is None else ScheduleStatus.model_validate_json(text)
    except ValueError as error:  # includes pydantic's errors
        raise _unreadable(name) from error


def _missing(name: str) -> UsageError:
    return UsageError(f"There is no schedule {ascii(name)[1:-1][:100]}.", remedy=REMEDY)


def _unreadable(name: str) -> CorruptEntry:
    return CorruptEntry(
        f"The schedule {ascii(name)[1:-1][:100]} cannot be read.", remedy="Remove it, and add it again."
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _prepare_request(name: str, request: TaskSpec) -> TaskSpec:
    """Return the task of a schedule with its label.

    Raises:
        UsageError: a field is for a single conversation, so later ticks could not use it.
    """
    for field in ("not_before", "expires"):
        if isinstance(getattr(request, field), datetime):
            raise UsageError(
                f"The {field} of a schedule cannot be a time of day.", remedy="Give `delay` and `expires` as durations."
            )
    if request.idempotency_key is not None:
        raise UsageError("A schedule has no idempotency_key: each tick is a new conversation.", remedy="Leave it out.")
    if isinstance(request.workspace_spec().source, UploadedSource):
        raise UsageError(
            "A schedule cannot start its workspaces from an uploaded file, which is kept for one conversation only.",
            remedy="Name a directory or a repository.",
        )
    if request.labels.get(LABEL, name) != name:
        raise UsageError(f"The label {LABEL} is the name of the schedule.", remedy="Leave it out.")
    return request.model_copy(update={"labels": {**request.labels, LABEL: name}})


def _encryption_scope(name: str) -> str:
    return f"schedule-{name}"
