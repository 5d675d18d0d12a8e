"""The record of a rollout run in the store: its specification, its events, and the groups that were delivered.

Holds: the stream of groups has one entry for each delivery. An entry's number is the number of its delivery, and the
store refuses a used number, so even two simultaneous drivers deliver each group once. Entries stay after their
acknowledgement. The version of the policy never decreases.
Does not: hold tokens; a group names its conversations, whose logs have them.
Keys: `deck:{0}:rollouts`, `deck:{0}:rollout:<name>`, and its `:state`, `:events`, `:groups`, `:driver` and `:version`.
Kept for a month.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from broker.runtime import StoreRefused, UsageError, is_conversation_id, new_key
from broker.store import Store
from deckhands.rollouts.spec import RolloutSpec

KEPT_SECONDS = 30 * 86_400
LEASE_MILLISECONDS = 10_000
PAGE = 500
MAX_SCANNED = 10_000
"""How many runs, of all tenants, one page of a list looks at."""
CONSUMERS = "trainer"
"""The group of consumers whose acknowledgements bound how many groups start."""
MAX_VERSION = (1 << 31) - 1
POLICY = "policy"
SERVED_PREFIX = "h-"
"""The names of runs that servers started. Their users of the store may write the specifications of such runs alone."""
RUNNING, PAUSED, ABORTED, OVER = "running", "paused", "aborted", "over"
ENDED = frozenset({ABORTED, OVER})

Labels = tuple[str, str]
"""The tenant and the model of a run."""
_MILLISECONDS = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run.

    Attributes:
        state: `running`, `paused`, `aborted` or `over`.
        version: the version of the policy that the trainer has announced last.
        is_driven: a driver is at work.
    """

    state: str = RUNNING
    version: int = 0
    is_driven: bool = False

    @property
    def is_ended(self) -> bool:
        """Whether no further group will be delivered."""
        return self.state in ENDED


class _Trajectory(BaseModel):
    """The fields of a trajectory in an entry that a reader needs."""

    model_config = ConfigDict(extra="allow", strict=True)

    conversation_id: str
    attempt: int
    reward: float
    rewards: dict[str, float]
    step_rewards: list[float]
    outcome: str
    cause: str
    is_partial: bool
    min_version: int | None
    max_version: int | None
    delegates: list[str] = []
    unread_delegates: int = 0

    @field_validator("conversation_id")
    @classmethod
    def _is_id(cls, name: str) -> str:
        if not is_conversation_id(name):
            raise ValueError("not the id of a conversation")
        return name

    @field_validator("delegates")
    @classmethod
    def _are_ids(cls, names: list[str]) -> list[str]:
        return [cls._is_id(name) for name in names]


class _Group(BaseModel):
    """The fields of an entry that a reader needs."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str
    index: int
    instance: str
    round: int
    version: int
    min_version: int
    trajectories: list[_Trajectory]


class RunRecord:
    """The record of one run.

    Attributes:
        delivered: the groups that were delivered, in order; read by `refresh`.
        events: the events of the run so far; read by `refresh`.
    """

    def __init__(self, store: Store, name: str) -> None:
        if not is_conversation_id(name):
            raise UsageError(
                f"{name[:100]!r} cannot be the name of a rollout run.", remedy="Use letters, digits, '-' and '_'."
            )
        self.name = name
        self.delivered: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._store = store
        keys = store.all_shards[0]
        self._index = keys.rollouts
        self._hash = keys.rollout(name)
        self._state_key = keys.rollout_state(name)
        self._events_key = keys.rollout_events(name)
        self._groups_key = keys.rollout_groups(name)
        self._lease_key = keys.rollout_driver(name)
        self._version_key = keys.rollout_version(name)
        self._spec: RolloutSpec | None = None
        self._last_event = "0-0"
        self._last_group = 0
        self._ids: set[str] = set()
        self._last_of: dict[str, dict[str, Any]] = {}
        self._dropped: dict[str, set[str]] = {}

    @property
    def is_served(self) -> bool:
        """Whether a server started the run, so that its specification does not come from the operator."""
        return self.name.startswith(SERVED_PREFIX)

    async def create(self, spec: RolloutSpec) -> bool:
        """Record a specification; return whether the run is new. Idempotent.

        Raises:
            UsageError: a run with this name has another specification.
        """
        text = spec.model_dump_json()
        is_new = bool(await self._store.call("HSETNX", self._hash, "spec", text))
        if not is_new and await self.load_spec() != spec:
            raise UsageError(
                f"There is a rollout run {self.name} with another specification.",
                remedy="Choose another name, or continue that one with its specification.",
            )
        for name, value in (("tenant", spec.tenant), ("model", spec.model), ("created", self._now())):
            await self._store.call("HSETNX", self._hash, name, value)  # for lists, without the prompts
        await self._touch()
        if is_new:
            await self.add_event("started")
        return is_new

    async def load_spec(self) -> RolloutSpec:
        """Return the specification, which never changes.

        Raises:
            UsageError: there is no such run.
        """
        if self._spec is not None:
            return self._spec
        text = await self._store.call("HGET", self._hash, "spec")
        if text is None:
            raise UsageError(f"There is no rollout run {self.name}.", remedy="`deckhands rollouts ls` lists them.")
        try:
            spec = RolloutSpec.model_validate_json(text)
        except ValidationError as error:
            raise UsageError(f"The specification of the rollout run {self.name} cannot be read.") from error
        if self.is_served:
            spec.require_served()
        self._spec = spec
        return spec

    async def load_state(self) -> RunState:
        """Return the state of the run."""
        state, score, is_driven = await self._store.call_many(
            [("GET", self._state_key), ("ZSCORE", self._version_key, POLICY), ("EXISTS", self._lease_key)]
        )
        return _parse_state(state, score, is_driven)

    async def describe(self) -> dict[str, Any]:
        """Return the name, tenant, model and state, and the counts of groups. Its cost is independent of its groups.

        Raises:
            UsageError: there is no such run.
        """
        (about,) = await _describe_all(self._store, {self.name: await self._load_labels()})
        return about

    async def _load_labels(self) -> Labels:
        """Return the tenant and the model.

        Raises:
            UsageError: there is no such run.
        """
        tenant, model = await self._store.call("HMGET", self._hash, "tenant", "model")
        if tenant is None or model is None:  # it was recorded before these fields were
            spec = await self.load_spec()
            return spec.tenant, spec.model
        return tenant.decode(errors="replace"), model.decode(errors="replace")

    async def list_last_events(self, limit: int) -> list[dict[str, Any]]:
        """Return the last events, in order."""
        rows = await self._store.call("XREVRANGE", self._events_key, "+", "-", "COUNT", limit)
        return [event for _, fields in reversed(rows) for event in _parse_event(fields)]

    async def set_state(self, state: str, **fields: Any) -> None:
        """Record a new state, and an event about it."""
        await self._store.call("SET", self._state_key, state)
        await self.add_event(state, **fields)

    async def set_version(self, version: int) -> None:
        """Record the version of the policy that the engines have from now on.

        Raises:
            UsageError: it is not a version, or is older than the current one.
        """
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
            raise UsageError(f"{version!r} is not a version of the policy.", remedy="Pass 1, 2, 3 and so on.")
        await self._store.call("ZADD", self._version_key, "GT", version, POLICY)  # never decreases
        known = (await self.load_state()).version
        if version < known:
            raise UsageError(f"The policy is at version {known} already.", remedy="Pass a later version.")
        await self.add_event("weights_changed", version=version)

    async def add_event(self, kind: str, **fields: Any) -> None:
        """Append an event of the run."""
        about = json.dumps({"kind": kind, "at": self._now(), **fields})
        await self._store.call("XADD", self._events_key, "*", "event", about)
        await self._touch()

    async def note_start(self, group_id: str, version: int) -> tuple[float, int]:
        """Return the start time of a group, by the store's clock, and its policy version; record both if new."""
        about = json.dumps([self._now(), version])
        await self._store.call("HSETNX", self._hash, f"started:{group_id}", about)
        try:
            at, found = json.loads(await self._store.call("HGET", self._hash, f"started:{group_id}"))
            return float(at), int(found)
        except (TypeError, ValueError):
            return self._now(), version

    async def refresh(self) -> None:
        """Read the groups and events that are new."""
        while True:
            rows = await self._store.call("XRANGE", self._groups_key, f"({self._last_group}-0", "+", "COUNT", PAGE)
            for entry_id, fields in rows:
                self._last_group = int(entry_id.partition(b"-")[0])
                group = parse_group(fields)
                if group is not None:
                    self._ids.add(group["id"])
                    self._last_of[group["instance"]] = group
                    self.delivered.append(group)
            if len(rows) < PAGE:
                break
        while True:
            rows = await self._store.call("XRANGE", self._events_key, f"({self._last_event}", "+", "COUNT", PAGE)
            for entry_id, fields in rows:
                self._last_event = entry_id.decode()
                for event in _parse_event(fields):
                    self.events.append(event)
                    if event["kind"] == "dropped":
                        name = str(event.get("group"))
                        self._dropped.setdefault(name.rpartition("-r")[0], set()).add(name)
            if len(rows) < PAGE:
                break

    def find_last(self, instance: str) -> dict[str, Any] | None:
        """Return the last delivered group of a prompt, as of the last `refresh`."""
        return self._last_of.get(instance)

    def find_standing(self, instance: str) -> dict[str, Any] | None:
        """Return the last delivered group of a prompt unless it was dropped, as of the last `refresh`."""
        last = self._last_of.get(instance)
        return None if last is None or last["id"] in self.list_dropped(instance) else last

    def list_dropped(self, instance: str) -> frozenset[str]:
        """Return the ids of a prompt's dropped groups, as of the last `refresh`."""
        return frozenset(self._dropped.get(instance, ()))

    def measure_pauses(self, since: float, until: float) -> float:
        """Return the seconds within a period during which the run was paused, as of the last `refresh`."""
        total, paused_at = 0.0, None
        for one in self.events:
            if one["kind"] == PAUSED and paused_at is None:
                paused_at = max(one["at"], since)
            elif one["kind"] == RUNNING and paused_at is not None:
                total += max(0.0, one["at"] - paused_at)
                paused_at = None
        return total if paused_at is None else total + max(0.0, until - paused_at)

    async def deliver(self, group: Mapping[str, Any]) -> bool:
        """Add a group to the stream exactly once, even with several drivers. Idempotent.

        Returns:
            Whether the group is in the stream. It is not added if another group of its prompt was delivered and not
                dropped.
        """
        text = json.dumps(group)
        while group["id"] not in self._ids and self.find_standing(group["instance"]) is None:
            try:
                await self._store.call("XADD", self._groups_key, f"{self._last_group + 1}-0", "group", text)
            except StoreRefused:  # another driver was faster, or the reply to this call was lost
                before = self._last_group
                await self.refresh()
                if self._last_group == before:
                    raise
            else:
                await self.refresh()
        await self._touch()
        return group["id"] in self._ids

    async def count_waiting(self, consumers: str) -> int:
        """Return how many groups are delivered and not acknowledged by a group of consumers."""
        if not self._last_group:
            return 0
        readers = await self._store.call("XINFO", "GROUPS", self._groups_key)
        return _count_waiting(readers, consumers, self._last_group)

    async def join(self, consumers: str) -> None:
        """Create a group of consumers that reads from the first group on. Idempotent."""
        try:
            await self._store.call("XGROUP", "CREATE", self._groups_key, consumers, "0", "MKSTREAM")
        except StoreRefused as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read_groups(self, consumers: str, consumer: str, *, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """Return groups for a consumer, by the numbers of their deliveries. Idempotent.

        Groups without an acknowledgement come before new ones.
        """
        head = ("XREADGROUP", "GROUP", consumers, consumer, "COUNT")
        tail = ("STREAMS", self._groups_key)
        found: list[Any] = []
        await self._store.call(*head, limit, *tail, ">")  # they are pending then, and read with the earlier ones
        after = "0"
        while True:
            reply = await self._store.call(*head, PAGE, *tail, after)
            rows = reply[0][1] if reply else []
            found += rows
            if len(rows) < PAGE:
                break
            after = rows[-1][0]
        entries = []
        for entry_id, fields in found:
            group, number = parse_group(fields or []), int(entry_id.partition(b"-")[0])
            if group is None:
                await self.acknowledge(consumers, number)
            else:
                entries.append((number, group))
        return entries

    async def acknowledge(self, consumers: str, number: int) -> None:
        """Acknowledge a delivery. Idempotent."""
        await self._store.call("XACK", self._groups_key, consumers, f"{number}-0")

    async def take_lease(self) -> str:
        """Become the driver; return the lease, or an empty text if there is another driver."""
        lease = new_key()
        taken = await self._store.call("SET", self._lease_key, lease, "NX", "PX", LEASE_MILLISECONDS)
        return lease if taken is not None or await self.renew_lease(lease) else ""

    async def renew_lease(self, lease: str) -> bool:
        """Return whether the lease still holds, and extend it."""
        if await self._store.call("GET", self._lease_key) != lease.encode():
            return False
        await self._store.call("PEXPIRE", self._lease_key, LEASE_MILLISECONDS)
        return True

    async def end_lease(self, lease: str) -> None:
        """Let another driver continue at once."""
        if await self.renew_lease(lease):
            await self._store.call("DEL", self._lease_key)

    async def _touch(self) -> None:
        commands: list[tuple[str | float, ...]] = [
            ("ZADD", self._index, round(self._now() * 1_000), self.name),
            ("ZREMRANGEBYSCORE", self._index, "-inf", round((self._now() - KEPT_SECONDS) * 1_000)),
            ("EXPIRE", self._index, KEPT_SECONDS),
            *(
                ("EXPIRE", key, KEPT_SECONDS)
                for key in (self._hash, self._state_key, self._events_key, self._groups_key, self._version_key)
            ),
        ]
        await self._store.call_many(commands)

    def _now(self) -> float:
        return round(self._store.clock.now().timestamp(), 3)


async def list_runs(store: Store) -> list[str]:
    """Return the names of the runs, the latest change first."""
    names = await store.call("ZREVRANGE", store.all_shards[0].rollouts, 0, -1)
    return [name for name in (one.decode(errors="replace") for one in names) if is_conversation_id(name)]


async def describe_runs(
    store: Store, *, tenant: str | None = None, limit: int, after: str = ""
) -> tuple[list[dict[str, Any]], str]:
    """Return descriptions of runs, the latest change first, and the cursor of the next page; see `RunRecord.describe`.

    A run that changes while pages are read may be missing from them, because it is before the first one then. No other
    run is missing or repeated. The cursor is empty if there are no further runs.

    Args:
        tenant: whose; None for all.
        limit: how many.
        after: the cursor of the page before.

    Raises:
        UsageError: it is not a cursor.
    """
    keys = store.all_shards[0]
    wanted: dict[str, Labels] = {}
    top, last, skipped = *_parse_cursor(after), 0
    for _ in range(MAX_SCANNED // PAGE):
        rows = await store.call(
            *("ZREVRANGEBYSCORE", keys.rollouts, top if last else "(+inf", 0, "WITHSCORES"),
            *("LIMIT", skipped, PAGE),
        )
        found = {name.decode(errors="replace"): int(float(rows[n + 1])) for n, name in enumerate(rows) if n % 2 == 0}
        page = {name: at for name, at in found.items() if is_conversation_id(name)}
        names = [name for name, at in page.items() if not (last and at == top and name >= last)]
        for place, (name, labels) in enumerate(zip(names, await _load_all_labels(store, names), strict=True)):
            if labels is not None and tenant in (None, labels[0]):
                wanted[name] = labels
                if len(wanted) == limit:
                    is_last = len(found) < PAGE and place == len(names) - 1
                    return await _describe_all(store, wanted), "" if is_last else _make_cursor(page[name], name)
        if len(found) < PAGE:
            return await _describe_all(store, wanted), ""
        oldest = next(reversed(page), last)
        if page.get(oldest, top) == top:  # runs of one moment are told apart by their names
            skipped, last = skipped + PAGE, min(last or oldest, oldest)
        else:
            skipped, top, last = 0, page[oldest], oldest
    return await _describe_all(store, wanted), _make_cursor(top, last) if last else ""


def _make_cursor(changed: int, name: str) -> str:
    return f"{changed}.{name}"


def _parse_cursor(text: str) -> tuple[int, str]:
    """Return the time and the name in a cursor; zero and an empty text if there is none."""
    if not text:
        return 0, ""
    changed, _, name = text.partition(".")
    if not (_MILLISECONDS.fullmatch(changed) and is_conversation_id(name)):
        raise UsageError(f"{text[:100]!r} is not a cursor.", remedy="Pass the one that came with the page before.")
    return int(changed), name


async def _load_all_labels(store: Store, names: list[str]) -> list[Labels | None]:
    """Return the tenants and models of runs; None for each that has expired or cannot be read."""
    keys = store.all_shards[0]
    rows = await store.call_many([("HMGET", keys.rollout(name), "tenant", "model") for name in names]) if names else []
    found: list[Labels | None] = []
    for name, (tenant, model) in zip(names, rows, strict=True):
        if tenant is not None and model is not None:
            found.append((tenant.decode(errors="replace"), model.decode(errors="replace")))
            continue
        try:
            spec = await RunRecord(store, name).load_spec()
        except UsageError:
            found.append(None)
        else:
            found.append((spec.tenant, spec.model))
    return found


async def _describe_all(store: Store, runs: Mapping[str, Labels]) -> list[dict[str, Any]]:
    """Return the descriptions of runs, in two round trips."""
    keys = store.all_shards[0]
    commands: list[tuple[str | float, ...]] = []
    for name in runs:
        commands += [("GET", keys.rollout_state(name)), ("ZSCORE", keys.rollout_version(name), POLICY)]
        commands += [("EXISTS", keys.rollout_driver(name)), ("XLEN", keys.rollout_groups(name))]
        commands += [("XREVRANGE", keys.rollout_groups(name), "+", "-", "COUNT", 1)]
    parts = await store.call_many(commands) if commands else []
    rows = {name: parts[n * 5 : n * 5 + 5] for n, name in enumerate(runs)}
    delivered = [name for name, row in rows.items() if row[-1]]
    asked = [("XINFO", "GROUPS", keys.rollout_groups(name)) for name in delivered]
    readers = dict(zip(delivered, await store.call_many(asked) if asked else (), strict=True))
    found = []
    for name, (tenant, model) in runs.items():
        state, score, is_driven, groups, last = rows[name]
        of = _parse_state(state, score, is_driven)
        number = int(last[0][0].partition(b"-")[0]) if last else 0
        about = {"name": name, "tenant": tenant, "model": model, "state": of.state, "version": of.version}
        waiting = _count_waiting(readers.get(name, ()), CONSUMERS, number)
        found.append({**about, "is_driven": of.is_driven, "groups": int(groups), "waiting": waiting})
    return found


def _parse_state(state: bytes | None, score: bytes | None, is_driven: int) -> RunState:
    named = (state or b"").decode(errors="replace")
    version = float(score or 0)
    return RunState(
        named if named in (RUNNING, PAUSED, *ENDED) else RUNNING,
        int(version) if 0 <= version <= MAX_VERSION else 0,
        bool(is_driven),
    )


def _count_waiting(readers: Sequence[Sequence[Any]], consumers: str, last_group: int) -> int:
    """Return how many of the deliveries up to a number are not acknowledged by a group of consumers."""
    for row in readers:
        about = dict(zip(row[::2], row[1::2], strict=True))
        if about[b"name"] == consumers.encode():
            read = int(about[b"last-delivered-id"].partition(b"-")[0])
            return int(about[b"pending"]) + last_group - read
    return last_group


def parse_group(fields: list[bytes]) -> dict[str, Any] | None:
    """Return the group of an entry; None if it is invalid."""
    try:
        return _Group.model_validate_json(dict(zip(fields[::2], fields[1::2], strict=True))[b"group"]).model_dump()
    except (KeyError, ValueError):
        return None


def _parse_event(fields: list[bytes]) -> list[dict[str, Any]]:
    try:
        found = json.loads(dict(zip(fields[::2], fields[1::2], strict=True))[b"event"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return []
    is_event = isinstance(found, dict) and isinstance(found.get("kind"), str)
    return [found] if is_event and isinstance(found.get("at"), int | float) else []
