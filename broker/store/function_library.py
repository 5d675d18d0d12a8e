"""The function library of the store: its source, its version, and how it is deployed.

The version of the functions is the hash of their source and an order: `VERSIONS` has a line for each. A test requires a
new line with a higher order for every change of the Lua. The line also defines which workers the functions still serve.

Holds: functions are replaced only by a known, newer version, and only if that version serves all live workers. Only
workers and `deckhands setup` deploy; a client deploys, with its first write, only into a store without functions. If
the new functions do not serve a worker, it hands back its work and stops. It always can, because `deck_now` and
`deck_leave` never change their arguments. An announcement expires, so a killed setup stops workers for a limited time
only. After a rollback, newer workers wait instead of loading their functions again, until an operator runs `setup` or
`upgrade` of their version.
Does not: order two versions that are deployed in the same millisecond. Start them one after the other.
Keys: the fields `functions`, `functions:announced`, `functions:announced_until` (seconds of
the server's clock) and `functions:held` (the version of a rollback) of `deck:store`; reads the workers of shard 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, Self

from broker.runtime import Clock, FunctionsReplaced, FunctionsTooOld, StoreMisconfigured, StoreTooNew
from broker.store import keys
from broker.store.connection import Connection, decode_fields
from broker.store.layout import FIELD as SHARDS_FIELD

LIBRARY = "deckhands"
FOLDERS = ("store", "limits", "log/lua")
"""Where the Lua of the library is, in the package `broker`: each file is a module, which registers its functions."""
VERSION_FIELD, ANNOUNCED_FIELD, ANNOUNCED_UNTIL_FIELD = "functions", "functions:announced", "functions:announced_until"
HELD_FIELD = "functions:held"
READ_FACTS = ("HMGET", keys.STORE, "generation", VERSION_FIELD, ANNOUNCED_FIELD, ANNOUNCED_UNTIL_FIELD, SHARDS_FIELD)
"""Asks for what `compare` needs, but for the server's time; before it the generation, behind it the shards."""
UNCHANGING_FUNCTIONS = frozenset(("deck_now", "deck_leave"))
"""Functions that every version has, with the same arguments: an older or newer process may call them."""
WORKER_FIELD = "version"
"""What a worker says of itself: its version of Deckhands, and that of the functions it was made for."""
MAX_DIGITS = 11
SHOWN_WORKERS = 5
UNKNOWN_ORDER = 0
POLL_SECONDS = 0.2
CHECK_SECONDS = 5.0
"""How long a client that lives long relies on what it has seen; a worker looks at each beat."""

logger = logging.getLogger(__name__)


@cache
def build_source() -> str:
    """Return the source of the function library: every Lua file as a module that others load by `require`."""
    files = {
        f"{folder}/{file.name.removesuffix('.lua')}": file.read_text(encoding="utf-8")
        for folder in FOLDERS
        for file in resources.files("broker").joinpath(folder).iterdir()
        if file.name.endswith(".lua")
    }
    modules = (f"sources['{name}'] = function()\n{text}end\n" for name, text in sorted(files.items()))
    loads = (f"require('{name}')\n" for name in sorted(files))
    return "".join((f"#!lua name={LIBRARY}\n", _REQUIRE, *modules, *loads))


# While a library is loaded, the servers offer nothing but `redis`: no `pairs`, no `string`.
_REQUIRE = """\
local sources, modules = {}, {}
local function require(name)
  if not modules[name] then modules[name] = sources[name]() or true end
  return modules[name]
end
"""


@dataclass(frozen=True, slots=True)
class FunctionsVersion:
    """A version of the functions.

    Attributes:
        order: newer versions have a higher one; `UNKNOWN_ORDER`: the Lua of the build is not in `VERSIONS`, or there is
            no version.
        code: identifies the source.
        oldest: the lowest order of the workers that these functions serve.
    """

    order: int
    code: str
    oldest: int

    @classmethod
    def parse(cls, stamp: str) -> Self:
        """Read what `stamp` wrote; anything else has an unknown order."""
        order, _, rest = stamp.partition(":")
        code, _, oldest = rest.partition(":")
        return cls(_parse_number(order), code, _parse_number(oldest))

    @property
    def stamp(self) -> str:
        """The version as the store and the workers record it."""
        return f"{self.order}:{self.code}:{self.oldest}"

    def serves(self, caller: FunctionsVersion) -> bool:
        """Return whether a process that was made for the version `caller` may call these functions."""
        return self.code == caller.code or 0 < self.oldest <= caller.order < self.order

    def __str__(self) -> str:
        return f"{self.order or 'unknown'} ({ascii(self.code[:8])[1:-1] or 'without a hash'})"


VERSIONS = (
    # order, hash of the source, the lowest order of the workers that these functions serve
    FunctionsVersion(1, "ed6afe1baef5af6c", 1),
    FunctionsVersion(2, "93c86933d3db1848", 1),
    FunctionsVersion(3, "195ffe544531924f", 1),
    FunctionsVersion(4, "0b43adbde550698c", 1),
    FunctionsVersion(5, "a86db397f360f32c", 1),
    FunctionsVersion(6, "2fc4539b68bf6148", 1),
    FunctionsVersion(7, "25766599f1e2844b", 1),
    FunctionsVersion(8, "db726d3c5296b535", 1),
)
"""All versions there have been. Add a line at the end with the next order; never change or remove one."""


@cache
def own_version() -> FunctionsVersion:
    """Return the version of the functions that this build brings."""
    code = hashlib.sha256(build_source().encode()).hexdigest()[:16]
    unknown = FunctionsVersion(UNKNOWN_ORDER, code, UNKNOWN_ORDER)
    return next((version for version in VERSIONS if version.code == code), unknown)


def find_refusal(stamp: str, announced: str = "") -> StoreTooNew | FunctionsTooOld | None:
    """Return why this process may not use the functions of a store; None: it may.

    Args:
        stamp: the field `functions` of the store.
        announced: the field `functions:announced`: the version that will soon replace it.
    """
    own = own_version()
    for text in (stamp, announced):
        there = FunctionsVersion.parse(text)
        if not text or there.serves(own):
            continue
        if there.order < own.order:
            return FunctionsTooOld(
                f"The functions in the store have version {there}, which is older than that of this build, {own}.",
                remedy="Run `deckhands setup` of this version with a store user that may load functions, or use the "
                "older version of Deckhands.",
            )
        return StoreTooNew(
            f"The functions in the store {'have' if text is stamp else 'are about to have'} version {there}; "
            f"this build is made for version {own}.",
            remedy="Upgrade Deckhands on this machine."
            if own.order
            else "Its Lua differs from every released version: add its hash to VERSIONS, or use another store.",
        )
    return None


class StoreFunctions:
    """The latest known functions of a store, and whether this process may call them.

    Args:
        facts: the fields of `deck:store`; None to check nothing.
        is_worker: whether this process is a worker: it has deployed the functions and checks them at each beat.
    """

    def __init__(self, facts: Mapping[str, str] | None = None, *, is_worker: bool = True, now: float = 0.0) -> None:
        self._stamp, self._announced = ((facts or {}).get(name, "") for name in (VERSION_FIELD, ANNOUNCED_FIELD))
        self._is_worker = is_worker
        self._checked = now if not self._announced else -math.inf  # it may have ended

    async def require(self, connection: Connection, clock: Clock) -> None:
        """Check the functions before a call that writes. A client deploys them if the store has none.

        Raises:
            StoreTooNew, FunctionsTooOld: this client may not call them.
        """
        if self._is_worker:
            return
        now = clock.monotonic()
        if not self._stamp:
            await self.check(connection)  # a worker may have deployed since
        if not self._stamp:
            await deploy(connection)
        if not self._stamp or now - self._checked > CHECK_SECONDS:
            self._checked = now
            await self.check(connection)
        elif (refused := find_refusal(self._stamp, self._announced)) is not None:
            raise refused

    async def check(self, connection: Connection) -> None:
        """Read the fields of the store and compare them; raises the errors of `compare`."""
        (_, *facts, _), time = await connection.call_many([READ_FACTS, ("TIME",)])
        self.compare(*facts, time=time)

    def compare(
        self, stamp: bytes | None, announced: bytes | None, until: bytes | None, *, time: Sequence[bytes]
    ) -> None:
        """Check the fields of the store, at its server's time.

        Raises:
            FunctionsReplaced: this worker may not call the functions any more.
            StoreTooNew, FunctionsTooOld: this client may not.
        """
        self._stamp, self._announced = ((text or b"").decode(errors="replace") for text in (stamp, announced))
        if until is not None and _parse_number(until.decode(errors="replace")) < int(time[0]):
            self._announced = ""
        refused = find_refusal(self._stamp, self._announced)
        if refused is not None:
            raise FunctionsReplaced(refused.message, remedy=refused.remedy) if self._is_worker else refused


@dataclass(frozen=True, slots=True)
class UpgradePlan:
    """The effect that `deploy` would have for an operator.

    Attributes:
        effect: `none`: the store has these functions; `load`: it has none; `upgrade`: they replace older ones;
            `roll_back`: they replace newer ones; `use_newer`: the newer ones stay, and serve this version; `refuse`:
            the newer ones stay and do not serve this version, or one of the two versions is unknown.
        there: the version in the store.
        stopping: the live workers that would have to stop, each with its version.
        is_held: newer workers do not load their functions, because the store was rolled back.
    """

    effect: Literal["none", "load", "upgrade", "roll_back", "use_newer", "refuse"]
    there: FunctionsVersion
    own: FunctionsVersion
    stopping: tuple[str, ...] = ()
    is_held: bool = False


async def plan_upgrade(connection: Connection, *, rolls_back: bool = False) -> UpgradePlan:
    """Return what `deploy` would do now, without changing anything.

    Args:
        rolls_back: as for `deploy`.
    """
    own = own_version()
    facts = decode_fields(await connection.call("HGETALL", keys.STORE))
    there, is_held = FunctionsVersion.parse(facts.get(VERSION_FIELD, "")), HELD_FIELD in facts
    if VERSION_FIELD not in facts:
        return UpgradePlan("load", there, own, is_held=is_held)
    if there.code == own.code:
        return UpgradePlan("none", there, own, is_held=is_held)
    if _is_older(there, own) or (rolls_back and 0 < own.order < there.order):
        stopping = tuple(await _find_unserved_workers(connection, own))
        return UpgradePlan("upgrade" if _is_older(there, own) else "roll_back", there, own, stopping, is_held)
    return UpgradePlan("use_newer" if there.serves(own) else "refuse", there, own, is_held=is_held)


def _is_older(there: FunctionsVersion, own: FunctionsVersion) -> bool:
    return there.order < own.order or there.order == own.order == UNKNOWN_ORDER


async def deploy(
    connection: Connection, *, stop_seconds: float = 0.0, is_setup: bool = False, rolls_back: bool = False
) -> FunctionsVersion:
    """Load the functions if the store has none, or has older ones that no live worker needs.

    Idempotent.

    Args:
        stop_seconds: how long to wait for workers that the new functions do not serve, after asking them to stop; 0: do
            not ask them.
        is_setup: an operator chose this version. If the store already has it, the announcement of another is withdrawn.
        rolls_back: an operator chose this version in place of a newer one, which is then not deployed again.

    Returns:
        The version that the store has now.

    Raises:
        StoreTooNew: those in the store are newer and do not serve this version.
        FunctionsTooOld: they are older and stay for now: live workers need them, or this store user may not load any.
    """
    own = own_version()
    facts = decode_fields(await connection.call("HGETALL", keys.STORE))
    there = FunctionsVersion.parse(facts.get(VERSION_FIELD, ""))
    is_loaded = bool(await connection.call("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY))
    if there.code == own.code and is_loaded:
        if rolls_back or (is_setup and HELD_FIELD in facts):
            await connection.call(*_hold(own, is_held=rolls_back))
        if ANNOUNCED_FIELD in facts and (is_setup or facts[ANNOUNCED_FIELD] == own.stamp):
            await connection.call("HDEL", keys.STORE, ANNOUNCED_FIELD, ANNOUNCED_UNTIL_FIELD)
        return own
    is_replaced = _is_older(there, own) or (rolls_back and 0 < own.order < there.order)
    if HELD_FIELD in facts and VERSION_FIELD in facts and _is_older(there, own) and not is_setup:
        raise FunctionsTooOld(
            f"The functions in the store were rolled back to version {there}; this build needs version {own}.",
            remedy="Use the older version of Deckhands, or run `deckhands upgrade` of this version.",
        )
    if VERSION_FIELD in facts and there.code != own.code and not is_replaced:
        if (refused := find_refusal(facts[VERSION_FIELD])) is not None:
            raise refused
        if not is_loaded:
            raise StoreTooNew(
                f"The store has lost its functions, which had version {there}; this build has {own}, and does not "
                "replace newer functions by older ones.",
                remedy="Run `deckhands setup` of the newer version, which loads them again.",
            )
        logger.warning(
            "The store's functions have version %s; this process has %s and uses the newer ones.", there, own
        )
        return there
    if VERSION_FIELD in facts and (users := await _stop_workers(connection, own, stop_seconds)):
        more = f" and {len(users) - SHOWN_WORKERS} more" if len(users) > SHOWN_WORKERS else ""
        raise FunctionsTooOld(
            f"The functions in the store have version {there}, and running workers need them: "
            f"{', '.join(users[:SHOWN_WORKERS])}{more}. Version {own} of this build does not serve these workers.",
            remedy="Stop them, or run `deckhands setup --stop-older` or `deckhands upgrade` of this version, which ask "
            "them to stop.",
        )
    try:
        # In one go, so that hardly a call can come between. The server replaces all functions at once, or none.
        await connection.call_many(
            [
                ("FUNCTION", "LOAD", "REPLACE", build_source()),
                ("HSET", keys.STORE, VERSION_FIELD, own.stamp),
                ("HDEL", keys.STORE, ANNOUNCED_FIELD, ANNOUNCED_UNTIL_FIELD),
                _hold(own, is_held=rolls_back),
            ]
        )
    except StoreMisconfigured as error:
        what = f"have version {there}" if VERSION_FIELD in facts else "are missing"
        raise FunctionsTooOld(
            f"The functions in the store {what}; this build needs version {own}, and its store user may not load it.",
            remedy="Run `deckhands setup` of this version with a store user that may.",
        ) from error
    logger.info("loaded the functions of version %s into the store", own)
    return own


def _hold(version: FunctionsVersion, *, is_held: bool) -> tuple[str, ...]:
    return ("HSET", keys.STORE, HELD_FIELD, version.stamp) if is_held else ("HDEL", keys.STORE, HELD_FIELD)


async def _stop_workers(connection: Connection, own: FunctionsVersion, stop_seconds: float) -> list[str]:
    """Ask workers to stop, and return those that still run after `seconds`."""
    users = await _find_unserved_workers(connection, own)
    if not users or not stop_seconds:
        return users
    seconds, _ = await connection.call("TIME")
    until = int(seconds) + math.ceil(stop_seconds + CHECK_SECONDS)
    await connection.call("HSET", keys.STORE, ANNOUNCED_FIELD, own.stamp, ANNOUNCED_UNTIL_FIELD, until)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(stop_seconds):
                while users := await _find_unserved_workers(connection, own):  # noqa: ASYNC110  (other processes, through the store)
                    await asyncio.sleep(POLL_SECONDS)
        return users
    finally:
        if users:  # those that have stopped may start again
            await connection.call("HDEL", keys.STORE, ANNOUNCED_FIELD, ANNOUNCED_UNTIL_FIELD)


async def _find_unserved_workers(connection: Connection, own: FunctionsVersion) -> list[str]:
    """Return the live workers that functions of this version would not serve. Calls no function."""
    names = keys.ShardKeys(0)
    time, clock, flat = await connection.call_many(
        [
            ("TIME",),
            ("HMGET", f"{names.root}:clock", "wall", "now"),
            ("ZREVRANGEBYSCORE", names.workers, "+inf", "(0", "WITHSCORES"),
        ]
    )
    now_ms = wall_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    try:
        beat_ms, kept_ms = (float(text) for text in clock)
        now_ms = int(kept_ms + max(0.0, wall_ms - beat_ms))
    except (TypeError, ValueError):
        pass
    alive = [
        worker.decode(errors="backslashreplace")
        for worker, deadline in zip(flat[::2], flat[1::2], strict=True)
        if float(deadline) > now_ms
    ]
    said = await connection.call_many([("HGET", names.worker_facts(worker), WORKER_FIELD) for worker in alive])
    versions = [FunctionsVersion.parse((text or b"").decode(errors="replace").rpartition(" ")[2]) for text in said]
    return [f"{worker} (version {its})" for worker, its in zip(alive, versions, strict=True) if not own.serves(its)]


def _parse_number(text: str) -> int:
    """Parse a number of a stamp; 0 if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS else 0
