"""The store as a whole: it deploys the functions, checks the server, and calls functions.

Holds: no process works on a store that evicts keys, was written by a newer version, or was replaced since it was
opened.
Keys: `deck:store`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from broker.contract import SCHEMA_VERSION
from broker.runtime import (
    SYSTEM_CLOCK,
    Acks,
    BrokerSettings,
    Clock,
    OutcomeUnknown,
    ShardsRaised,
    SharedClock,
    StoreMisconfigured,
    StoreRefused,
    StoreReplaced,
    StoreTooNew,
    StoreUnavailable,
    draw_jitter,
    from_millis,
    new_key,
)
from broker.store import keys
from broker.store.cluster import ClusterConnection, connect
from broker.store.confirmation import NO_REPLICA_REMEDY, find_demand
from broker.store.connection import (
    CLUSTER,
    NEEDED_COMMANDS,
    WRONG_TYPE_PREFIX,
    Argument,
    Connection,
    decode_fields,
    make_missing_command,
)
from broker.store.encryption import NO_MASTER_KEYS, SETTINGS, Encryption, MasterKeys
from broker.store.function_library import UNCHANGING_FUNCTIONS, StoreFunctions, deploy
from broker.store.keys import ConversationKeys, ShardKeys
from broker.store.layout import FIELD, READ_LAYOUT, REFRESH_SECONDS, ShardLayout, parse_numbers
from broker.store.routing import CLUSTER_REMEDY
from broker.store.sentinel import REMEDY as SENTINEL_REMEDY
from broker.store.server_checks import (
    APPEND_ONLY_REMEDY,
    describe_missing_replica,
    describe_volatility,
    find_vulnerability,
)

MINIMUM_SERVER_VERSION = (7, 0)
DEFAULT_SHARDS, DEFAULT_CLUSTER_SHARDS = 1, 64
"""The number of shards of a new store on a server, and on a cluster."""
NUMBER = re.compile("[0-9]{1,9}")
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0
SHORTEST_LONG_PAUSE_SECONDS = 0.1
PAUSE_PER_WAITING_CALL_SECONDS = 0.05
"""The calls that wait in a process repeat themselves about twenty times a second together, however many they are."""
MAX_RAISES = 3
"""How often the creation of a conversation is repeated because the number of shards was raised."""
LOGGED_AFTER_SECONDS = 0.5
"""A shorter outage is not logged."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Outage:
    """The calls of a process that wait for the store. The first one that succeeds wakes the others.

    Logs one line when an outage starts, and one when it ends, however many calls wait.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._news: asyncio.Event | None = None
        self._started = 0.0
        self._is_logged = False

    def start(self, clock: Clock) -> None:
        """Record that a call must be repeated."""
        if not self._waiting:
            self._started = clock.monotonic()
            self._is_logged = False
        self._waiting += 1

    def record_failure(self, clock: Clock, error: Exception) -> None:
        """Record that the repeated call has failed as well."""
        if not self._is_logged and clock.monotonic() - self._started >= LOGGED_AFTER_SECONDS:
            self._is_logged = True
            _log.warning("the store is unavailable, conversations wait: %s", error)

    async def pause(self, seconds: float) -> bool:
        """Wait before the next attempt: this long at most, and less if few calls wait or another one succeeds.

        Returns:
            Whether another one has succeeded.
        """
        longest = max(SHORTEST_LONG_PAUSE_SECONDS, PAUSE_PER_WAITING_CALL_SECONDS * self._waiting)
        news = self._news = self._news or asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, longest) * draw_jitter()):
                await news.wait()
        return news.is_set()

    def report_success(self) -> None:
        """Wake the calls that wait, because another one has succeeded."""
        if self._news is not None:
            self._news.set()
            self._news = None

    def end(self, clock: Clock) -> None:
        """Record that a call no longer waits: it succeeded or was given up."""
        self._waiting -= 1
        if not self._waiting and self._is_logged:
            self._is_logged = False
            _log.warning("the store is available again after %.1f s", clock.monotonic() - self._started)


@dataclass(frozen=True)
class Store:
    """An open store.

    Attributes:
        connection: the process's multiplexed connection.
        layout: how many shards the store has and had, and where conversations are.
        generation: created with the store; a different value means another store, or an emptied one.
        clock: the shared time of all workers of this store; in other processes, the machine's time.
        patience_seconds: how long to repeat an idempotent call while the store does not answer; None for no limit.
        outage: logs outages.
        functions: the functions in the store, and whether this process may call them.
        warnings: problems of a working server, each with a remedy: a possible vulnerability, no append-only file, no
            replica although DECKHANDS_ACKS waits for one.
        masters: the master keys of this process.
        is_encrypted: it has data keys, so new conversations are encrypted.
    """

    connection: Connection
    layout: ShardLayout
    generation: str
    clock: SharedClock = field(default_factory=lambda: SharedClock(SYSTEM_CLOCK))
    patience_seconds: float | None = 30.0
    outage: Outage = field(default_factory=Outage)
    functions: StoreFunctions = field(default_factory=StoreFunctions)
    warnings: tuple[str, ...] = ()
    masters: MasterKeys = NO_MASTER_KEYS
    is_encrypted: bool = False
    _refreshed: list[float] = field(default_factory=lambda: [-math.inf])
    _may_repair: list[bool] = field(default_factory=lambda: [True])

    @property
    def shards(self) -> int:
        """The number of shards, which can be raised; see `layout`."""
        return self.layout.count

    @property
    def all_shards(self) -> list[ShardKeys]:
        """The keys of each shard."""
        return [ShardKeys(shard) for shard in range(self.shards)]

    @cached_property
    def encryption(self) -> Encryption:
        """The ciphers of its conversations."""
        return Encryption(self, self.masters, is_required=self.is_encrypted)

    def known_keys(self, conversation_id: str) -> ConversationKeys:
        """Return the keys of a conversation, if its shard is known without asking the store; see `locate`.

        Raises:
            LookupError: the store must be asked, because the number of shards was raised.
        """
        if (found := self.layout.find(conversation_id)) is None:
            raise LookupError(f"Only `locate` finds the conversation {conversation_id!r} of a store with more shards.")
        return found

    async def locate(self, conversation_id: str, *, seen_in: ShardKeys | None = None) -> ConversationKeys:
        """Return the keys of a conversation. Asks the store only if the number of shards was raised.

        Args:
            seen_in: the shard that named it. It is used if the conversation does not exist, because it was deleted or
                only its caller was stored.
        """
        await self.refresh(max_age_seconds=REFRESH_SECONDS)
        if (found := self.layout.find(conversation_id)) is not None:
            return found
        if (located := (await self._look_up([conversation_id]))[conversation_id]) is not None:
            return located
        return self.layout.guess(conversation_id, seen_in)

    async def locate_all(self, conversation_ids: Sequence[str]) -> list[ConversationKeys]:
        """Return the keys of conversations, with one round trip at most."""
        await self.refresh(max_age_seconds=REFRESH_SECONDS)
        known = {cid: self.layout.find(cid) for cid in conversation_ids}
        if unknown := [cid for cid, found in known.items() if found is None]:
            known |= await self._look_up(unknown)
        return [known[cid] or self.layout.guess(cid) for cid in conversation_ids]

    async def _look_up(self, conversation_ids: Sequence[str]) -> dict[str, ConversationKeys | None]:
        """Find the shards of conversations and remember them; None for one that does not exist."""
        places = [ConversationKeys(one, cid) for cid in conversation_ids for one in self.layout.list_shards(cid)]
        found = await self._find_created(places)
        located: dict[str, ConversationKeys | None] = dict.fromkeys(conversation_ids)
        for one, is_there in zip(places, found, strict=True):
            if is_there and located[one.conversation_id] is None:  # the newest place counts
                located[one.conversation_id] = one
                self.layout.remember(one)
        return located

    async def _find_created(self, places: Sequence[ConversationKeys]) -> list[Any]:
        """Return for each place whether a conversation exists there. A key of another type is not a conversation."""
        commands = [("HEXISTS", one.meta, "last_id") for one in places]
        try:
            return await self.call_many(commands)
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message:
                raise
            return [False] if len(places) == 1 else [(await self._find_created([one]))[0] for one in places]

    async def has_moved(self, names: ConversationKeys) -> bool:
        """Return whether a conversation that is missing here was created again in another shard."""
        if len(self.layout.numbers) == 1:
            return False
        self.layout.forget(names.conversation_id)
        return await self.locate(names.conversation_id) != names

    async def place(self, conversation_id: str) -> ConversationKeys:
        """Return the keys of a conversation that is to be created; those of the existing one if it exists.

        Afterwards, a process that knows fewer shards cannot create it in another one; see `deck_place`.
        """
        self.layout.forget(conversation_id)
        shards = self.layout.list_shards(conversation_id)
        for names in shards[1:]:
            if await self.call_function("deck_place", (names.root,), conversation_id, self.shards) == ["here"]:
                found = ConversationKeys(names, conversation_id)
                break
        else:
            found = ConversationKeys(shards[0], conversation_id)
        self.layout.plan(found)
        return found

    async def refresh(self, *, max_age_seconds: float = 0.0) -> None:
        """Read the number of shards, unless it was read within `max_age_seconds`."""
        if self.clock.monotonic() - self._refreshed[0] < max_age_seconds:
            return
        self._refreshed[0] = self.clock.monotonic()  # the calls of the meantime rely on what is known
        if not max_age_seconds:
            self.compare_layout(await self.call(*READ_LAYOUT))
            return
        with suppress(StoreUnavailable, OutcomeUnknown):  # the next call says so, or is served from elsewhere
            self.compare_layout(await self.connection.call(*READ_LAYOUT))

    def compare_layout(self, found: bytes | None) -> None:
        """Like `refresh`, for a field that was already read."""
        self._refreshed[0] = self.clock.monotonic()
        with suppress(ValueError):  # damaged: whatever opens the store says so
            self.layout.update(parse_numbers((found or b"").decode(errors="backslashreplace")))

    async def repair_layout(self, found: bytes | None) -> None:
        """Restore the numbers of shards that the store has lost in a fail-over, as found by `compare_layout`.

        Does nothing if this process may not write them. Then `raise_shards` reads the number from the facts of the
        workers.
        """
        text, known = (found or b"").decode(errors="backslashreplace"), ",".join(map(str, self.layout.numbers))
        with suppress(ValueError, StoreRefused, StoreMisconfigured):
            if self._may_repair[0] and set(parse_numbers(text)) < set(self.layout.numbers):
                self._may_repair[0] = False  # until it has worked
                await self.call_function("deck_raise_shards", (keys.STORE,), text, known)
                self._may_repair[0] = True

    async def repeat_if_raised(self, conversation_id: str, create: Callable[[int], Awaitable[T]]) -> T:
        """Create a conversation; repeat it if the number of shards is raised meanwhile.

        The shard is chosen first, so `create` stores everything in it.

        Args:
            create: stores the conversation's data, and then creates it with this number of shards.
        """
        for _ in range(MAX_RAISES):
            await self.refresh(max_age_seconds=REFRESH_SECONDS)
            try:
                return await self._place_and_create(conversation_id, create)
            except ShardsRaised:
                await self.refresh()
        return await self._place_and_create(conversation_id, create)

    async def _place_and_create(self, conversation_id: str, create: Callable[[int], Awaitable[T]]) -> T:
        shards = self.shards
        if len(self.layout.numbers) > 1:
            await self.place(conversation_id)
        return await create(shards)

    def find_home(self, name: str) -> ShardKeys:
        """Return the shard of a name's state, not a conversation's: a pool's quota, a tenant's budgets."""
        return ShardKeys(keys.shard_of(name, self.layout.numbers[0]))

    async def load_shards(self) -> list[ShardKeys]:
        """Return the keys of each shard, including recently added ones; see `refresh`."""
        await self.refresh(max_age_seconds=REFRESH_SECONDS)
        return self.all_shards

    async def call_function(self, name: str, key_names: tuple[str, ...], *arguments: Argument) -> list[Any]:
        """Call a function of the library until its outcome is known.

        Idempotent: every function of the library may be repeated.

        Returns:
            The reply; its first element, the outcome, as str.

        Raises:
            StoreUnavailable, OutcomeUnknown: no reply within `patience_seconds`.
            StoreTooNew, FunctionsTooOld, FunctionsReplaced: the functions are those of another version.
        """

        async def call() -> list[Any]:
            command = ("FCALL", name, len(key_names), *key_names, *arguments)
            reply: list[Any] = await self.connection.call(*command)
            if find_demand(command, reply) is not None:
                reply.pop()  # the connection has met it
            reply[0] = reply[0].decode()
            return reply

        if name in UNCHANGING_FUNCTIONS:
            return await self.retry(call)
        await self.functions.require(self.connection, self.clock)
        try:
            return await self.retry(call)
        except StoreRefused:
            await self.functions.check(self.connection)  # raises the clearer error if another version is the cause
            raise

    async def now(self, names: ShardKeys) -> datetime:
        """Return a shard's time: the store's own, without the jumps of its clock."""
        try:
            _, now_ms = await self.call_function("deck_now", (names.root,))
        except StoreRefused as error:
            if "Function not found" not in str(error):
                raise
            seconds, microseconds = await self.call("TIME")  # without functions, the shard has no separate time
            now_ms = int(seconds) * 1_000 + int(microseconds) // 1_000
        return from_millis(int(now_ms))

    async def call(self, *command: Argument) -> Any:
        """Send an idempotent command until its outcome is known; see `persist`."""
        return await _retry(lambda: self.connection.call(*command), *self._patience)

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send idempotent commands together until their outcome is known; see `persist`."""
        return await _retry(lambda: self.connection.call_many(commands), *self._patience)

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent call while the store cannot be reached, with growing, jittered pauses.

        Raises:
            StoreUnavailable, OutcomeUnknown: no reply within `patience_seconds`.
        """
        return await _retry(call, *self._patience)

    @property
    def _patience(self) -> tuple[Clock, float | None, Outage]:
        return self.clock, self.patience_seconds, self.outage

    async def check_generation(self) -> None:
        """Check that the store is still the one that was opened.

        Raises:
            StoreReplaced: it was emptied or replaced; continuing would restart its conversations at event 1.
        """
        self.compare_generation(await self.call("HGET", keys.STORE, "generation"))

    def compare_generation(self, found: bytes | None) -> None:
        """Like `check_generation`, for a generation that was already read."""
        if found is None or found.decode(errors="backslashreplace") != self.generation:
            raise StoreReplaced(
                "The store is not the one this process started with: it was emptied or replaced.",
                remedy="Restore its append-only file, or restart every worker to accept the new store.",
            )

    async def aclose(self) -> None:
        """Close the connection."""
        await self.connection.aclose()


async def open_store(
    url: str | Connection,
    *,
    shards: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
    patience_seconds: float | None = 30.0,
    opening_seconds: float | None = 0.0,
    deploys: bool = True,
    acks: Acks | None = None,
    masters: MasterKeys | None = None,
) -> Store:
    """Connect to a store, deploy missing or older functions, and check the store.

    Args:
        url: `redis://…`, `rediss://…`, `unix://…`, `redis+sentinel://…`, `redis+cluster://…`, or a connection.
        shards: the number for a new store; None for 1, and for 64 on a cluster. An existing store keeps its own.
        patience_seconds: see `Store`.
        opening_seconds: how long to retry while the store does not answer; 0 for one attempt, None for no limit.
        deploys: False for clients, which read with any version of the functions. Before a write, a client checks the
            version, and deploys only if the store has no functions.
        acks: when a write counts; by default, as DECKHANDS_ACKS says.
        masters: the master keys; by default, those of the settings.

    Raises:
        StoreUnavailable: cannot connect.
        StoreMisconfigured: the server is too old, vulnerable or evicts keys, or it refuses the login; or the store
            encrypts conversations, and this worker has no master key, or a wrong one.
        StoreTooNew: a newer version of Deckhands wrote the store, or its functions no longer serve this version.
        FunctionsTooOld: its functions are older and are kept for now, see `deploy`.
    """
    settings = BrokerSettings.from_env()
    acks = acks or settings.acks
    masters = MasterKeys.load(settings) if masters is None else masters
    connection = connect(url, acks=acks) if isinstance(url, str) else url
    clock = SharedClock(clock)

    async def open_it() -> tuple[tuple[str, ...], dict[str, str], bool]:
        warnings = await _check_server(connection, acks)
        try:
            if deploys:
                await deploy(connection)
            number = shards or (DEFAULT_CLUSTER_SHARDS if connection.is_cluster else DEFAULT_SHARDS)
            about, is_encrypted = await asyncio.gather(  # one round trip
                _load_or_create_facts(connection, number), _is_encrypted(connection)
            )
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message:
                raise
            raise StoreMisconfigured(
                f"The key {keys.STORE} is not a hash of the facts about a store.",
                remedy="Another program overwrote it. Restore the store's append-only file, or use an empty store.",
            ) from error
        _require_masters(masters, is_required=is_encrypted and deploys)
        return warnings, about, is_encrypted

    try:
        warnings, about, is_encrypted = await _retry(open_it, clock, opening_seconds, Outage())
    except BaseException:
        await connection.aclose()
        raise
    store = Store(
        connection=connection,
        layout=ShardLayout(*parse_numbers(about[FIELD])),
        generation=about["generation"],
        clock=clock,
        patience_seconds=patience_seconds,
        functions=StoreFunctions(about, is_worker=deploys, now=clock.monotonic()),
        warnings=warnings,
        masters=masters,
        is_encrypted=is_encrypted,
        _refreshed=[clock.monotonic()],
    )
    if deploys and is_encrypted:
        try:
            await store.encryption.check_masters()
        except BaseException:
            await store.aclose()
            raise
    return store


async def load_server_facts(connection: Connection) -> dict[str, str]:
    """Return the fields of the server's INFO; for a cluster, the fields of one node."""
    return (await load_all_server_facts(connection))[0]


async def load_all_server_facts(connection: Connection, *sections: str) -> list[dict[str, str]]:
    """Return the fields of INFO of the server, or of each primary of a cluster."""
    if isinstance(connection, ClusterConnection):
        replies = list((await connection.call_each("INFO", *sections)).values())
    else:
        replies = [await connection.call("INFO", *sections)]
    return [dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line) for reply in replies]


async def _retry(call: Callable[[], Awaitable[T]], clock: Clock, patience_seconds: float | None, outage: Outage) -> T:
    try:
        return await call()
    except (OutcomeUnknown, StoreUnavailable):
        if patience_seconds is not None and patience_seconds < FIRST_PAUSE_SECONDS:
            raise
    started = clock.monotonic()
    pause = FIRST_PAUSE_SECONDS
    outage.start(clock)
    try:
        while True:
            # The store is back, although perhaps not yet each node of a cluster: a failure now is worth a short pause.
            has_news = await outage.pause(pause)
            pause = FIRST_PAUSE_SECONDS if has_news else min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                reply = await call()
            except (OutcomeUnknown, StoreUnavailable) as error:
                outage.record_failure(clock, error)
                waited = clock.monotonic() - started
                if patience_seconds is not None and waited + pause > patience_seconds:
                    raise
            else:
                outage.report_success()
                return reply
    finally:
        outage.end(clock)


async def _check_server(connection: Connection, acks: Acks) -> tuple[str, ...]:
    """Check the server, or each primary of the cluster, and return warnings without duplicates."""
    each, known = await asyncio.gather(  # one round trip
        load_all_server_facts(connection), _require_commands(connection, acks), return_exceptions=True
    )
    if isinstance(each, BaseException):
        raise each
    # First, because a Sentinel has its own remedy, and lacks these commands, too.
    warnings = [one for facts in each for one in _check_facts(facts, acks, is_cluster=connection.is_cluster)]
    if isinstance(known, BaseException):
        raise known
    return tuple(dict.fromkeys(warnings))


async def _require_commands(connection: Connection, acks: Acks) -> None:
    """Raise StoreMisconfigured if the server lacks a command.

    A server that does not report its commands is trusted.
    """
    confirming = {"local": (), "disk": ("WAITAOF",), "replica": ("WAIT",)}[acks]
    needed = (*NEEDED_COMMANDS, *confirming)
    try:
        known = await connection.call("COMMAND", "INFO", *needed)
    except StoreRefused:
        return
    except StoreMisconfigured as error:
        if "NOPERM" not in error.message:
            raise
        return
    if isinstance(known, list) and len(known) == len(needed):
        for name, about in zip(needed, known, strict=True):
            if not about:
                raise make_missing_command(name, f"does not have this command, according to `COMMAND INFO {name}`")


def _check_facts(facts: dict[str, str], acks: Acks, *, is_cluster: bool) -> tuple[str, ...]:
    mode = facts.get("server_mode") or facts.get("redis_mode")
    if mode == "sentinel":
        raise StoreMisconfigured("DECKHANDS_URL names a Sentinel as if it were a store.", remedy=SENTINEL_REMEDY)
    if not is_cluster and (mode == "cluster" or facts.get("cluster_enabled") == "1"):
        raise StoreMisconfigured(CLUSTER, remedy=CLUSTER_REMEDY)
    version = facts.get("valkey_version") or facts.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_SERVER_VERSION:
        raise StoreMisconfigured(
            f"The store's server is version {version}.", remedy="Use Valkey, or Redis 7.0 or newer."
        )
    if facts.get("maxmemory", "0") != "0" and facts.get("maxmemory_policy") != "noeviction":
        raise StoreMisconfigured(
            f"The store would evict keys when full (maxmemory-policy {facts.get('maxmemory_policy')}).",
            remedy="Set `maxmemory-policy noeviction` on it.",
        )
    weakness = find_vulnerability(facts)
    lost = describe_volatility(facts)
    alone = describe_missing_replica(facts) if acks == "replica" else ""
    warnings = ((f"{lost} {APPEND_ONLY_REMEDY}",) if lost else ()) + (
        (f"{alone} {NO_REPLICA_REMEDY}",) if alone else ()
    )
    if weakness is None or BrokerSettings.from_env().store_patched:
        return warnings
    if weakness.is_certain:
        raise StoreMisconfigured(weakness.text, remedy=weakness.remedy)
    return (f"{weakness.text} {weakness.remedy}", *warnings)


def _check_facts_of_store(about: dict[str, str]) -> None:
    with suppress(ValueError):
        name = FIELD
        parse_numbers(about[name])
        name = "schema"
        if NUMBER.fullmatch(about[name]):
            return
    raise StoreMisconfigured(
        f"The field {name} of {keys.STORE} is {ascii(about[name])[:100]}, which is not a number written by Deckhands.",
        remedy="Another program changed it. Restore the store's append-only file, or use an empty store.",
    )


async def _load_or_create_facts(connection: Connection, shards: int) -> dict[str, str]:
    about = await _load_facts(connection)
    facts: dict[str, str | int] = {"generation": new_key(), FIELD: shards, "schema": SCHEMA_VERSION}
    missing = [name for name in facts if name not in about]
    if missing:  # without a write, a store on a full disk can still be read
        await connection.call_many([("HSETNX", keys.STORE, name, facts[name]) for name in missing])
        about = await _load_facts(connection)
    _check_facts_of_store(about)
    if int(about["schema"]) > SCHEMA_VERSION:
        raise StoreTooNew(
            f"The store has schema version {about['schema']}; this version of Deckhands reads up to {SCHEMA_VERSION}.",
            remedy="Upgrade Deckhands on this machine.",
        )
    return about


def _require_masters(masters: MasterKeys, *, is_required: bool) -> None:
    if is_required and not masters:
        raise StoreMisconfigured(
            "The store encrypts conversations, and this worker has no master key.",
            remedy=f"Set {SETTINGS}, as for the other workers.",
        )


async def _is_encrypted(connection: Connection) -> bool:
    """Return whether the store has data keys. A store user of an older version has no right to ask."""
    try:
        return bool(await connection.call("EXISTS", ShardKeys(0).data_keys))
    except StoreMisconfigured as error:
        if "NOPERM" not in error.message:
            raise
        return False


async def _load_facts(connection: Connection) -> dict[str, str]:
    return decode_fields(await connection.call("HGETALL", keys.STORE))
