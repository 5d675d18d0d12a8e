"""The tools that the tool workers of a store offer: published as data, chosen when a conversation is created.

If a tool worker cannot offer a tool, it publishes the reason, and a user who requests the tool sees it.

Holds: a conversation keeps the offers from its creation, in its first event; later changes affect new conversations
only. An offer that is overwritten in the store is restored by its live worker within a few heartbeats. A reason is one
line of bounded length without control characters, sanitised on writing and again on reading. Reports of workers that
have ended are neither shown nor kept.
Does not: withdraw the offers of a worker that has ended. A call then waits for another worker of the pool, as every
action does; a worker without the tool reports that. It does not mask secrets; the tool worker does, because it knows
them.
Keys: `deck:tools`, `deck:tools:failed`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from broker.contract import ToolOffer
from broker.coordination import BEATS_PER_FACTS, HEARTBEAT_SECONDS, Quarantine, find_silent_roles, list_members
from broker.runtime import StoreRefused, UsageError
from broker.store import WRONG_TYPE_PREFIX, Argument, Store, keys

SANDBOX = "sandbox"
MAX_FAILURES = 32
MAX_REPORT_BYTES = 64 * 2**10
MAX_NAME_CHARS = 200
MAX_REASON_CHARS = 600


def to_one_line(text: str, limit: int) -> str:
    """Return a text as one line of at most `limit` characters, without control and invisible characters."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _clean_name(text: str) -> str:
    return to_one_line(text, MAX_NAME_CHARS)


def _clean_reason(text: str) -> str:
    return to_one_line(text, MAX_REASON_CHARS)


class ToolFailure(BaseModel):
    """A source of tools that cannot be loaded, or a sandbox that does not work.

    Attributes:
        source: a name of `DECKHANDS_TOOLS`, an entry point, an MCP server, or `SANDBOX`.
        server: the MCP server, whose tools would be offered under `<server>/`; empty for other sources.
        reason: the cause.
        remedy: the action to take.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: Annotated[str, AfterValidator(_clean_name)]
    server: Annotated[str, AfterValidator(_clean_name)] = ""
    reason: Annotated[str, AfterValidator(_clean_reason)]
    remedy: Annotated[str, AfterValidator(_clean_reason)] = ""

    def may_explain(self, pattern: str) -> bool:
        """Return whether this failure may be the reason that a requested tool is missing."""
        server, slash, _ = pattern.partition("/")
        if self.server:
            return fnmatchcase(self.server, server) and (bool(slash) or "*" in server)
        return not slash and self.source != SANDBOX


@dataclass(frozen=True, slots=True)
class ReportedFailure:
    """A failure and its location."""

    worker_id: str
    node: str
    failure: ToolFailure

    def __str__(self) -> str:
        where = f"the tool worker {_clean_name(self.worker_id)}" + (
            f" (node {_clean_name(self.node)})" if self.node else ""
        )
        source = self.failure.source
        reason = self.failure.reason.rstrip(".")
        what = f"{where} has no working sandbox" if source == SANDBOX else f"{where} cannot load tools from {source}"
        return f"{what[0].upper()}{what[1:]}: {reason}."


class ToolFailures:
    """The failures reported by the tool workers of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def report(self, worker_id: str, failures: Iterable[ToolFailure]) -> None:
        """Replace a worker's previous report; no failures remove it. Idempotent."""
        found = [failure.model_dump() for failure in failures][:MAX_FAILURES]
        try:
            if found:
                await self._store.call("HSET", keys.TOOLS_FAILED, worker_id, json.dumps(found))
            ended = await self._find_other_ended(worker_id)
            gone: list[bytes | str] = [*ended, *([] if found else [worker_id])]
            if gone:
                await self._store.call("HDEL", keys.TOOLS_FAILED, *gone)
        except StoreRefused as error:  # a key of another type: the worker continues without the report
            _log.error("cannot publish the failures of tools under %s: %s", keys.TOOLS_FAILED, error)

    async def load_all(self) -> list[ReportedFailure]:
        """Return the reports of all running workers, by worker. Invalid reports are left out."""
        try:
            flat = await self._store.call("HGETALL", keys.TOOLS_FAILED)
        except StoreRefused:
            return []
        if not flat:
            return []
        texts = dict(zip(flat[::2], flat[1::2], strict=True))
        found = []
        for member in sorted(await list_members(self._store), key=lambda member: member.worker_id):
            text = texts.get(member.worker_id.encode(errors="replace"), b"")
            if member.role == "tool" and member.left_seconds > 0 and len(text) <= MAX_REPORT_BYTES:
                node = member.about.get("node", "")
                found += [ReportedFailure(member.worker_id, node, failure) for failure in _parse_failures(text)]
        return found

    async def _find_other_ended(self, worker_id: str) -> list[bytes]:
        """Return other workers with a report that are no longer running, even if it is empty."""
        reported = (await self._store.call("HGETALL", keys.TOOLS_FAILED))[::2]
        if set(reported) <= {worker_id.encode()}:
            return []
        running = {member.worker_id.encode(errors="replace") for member in await list_members(self._store)}
        return [name for name in reported if name not in running and name != worker_id.encode()]


def _parse_failures(text: bytes) -> list[ToolFailure]:
    try:
        listed = json.loads(text)
        return [ToolFailure.model_validate(one) for one in listed[:MAX_FAILURES]]
    except (ValueError, TypeError, KeyError, ValidationError, RecursionError):
        return []


MAX_CHOSEN = 128
MAX_CHOSEN_CHARS = 3 * 2**18
"""The limit for all chosen tools together, in JSON, because they are part of the first event of their conversation."""
MAX_NAMED_FAILURES = 5
_POLL_SECONDS = 0.05
_FAILURES_EVERY = 5
"""The failures are read once in this many polls of the offers, because they cost a round trip for each worker."""

_log = logging.getLogger(__name__)


class ToolOffers:
    """The offers of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def publish(self, offers: Iterable[ToolOffer]) -> None:
        """Publish tools under their keys, replacing earlier offers. Idempotent.

        If the key of the offers has another type, it is moved to the quarantine.
        """
        fields = [part for offer in offers for part in (offer.key, offer.model_dump_json())]
        try:
            if fields:
                await self._call_with_repair("HSET", keys.TOOLS, *fields)
        except StoreRefused as error:  # the worker serves everything but new conversations that request these tools
            _log.error("cannot publish the offers of tools under %s: %s", keys.TOOLS, error)

    async def restore(self, offers: Iterable[ToolOffer]) -> None:
        """Publish offers again that were overwritten or removed in the store. Idempotent.

        It runs every few seconds and reads before it writes, because writes cost disk space of the store.
        """
        texts = {offer.key: (offer, offer.model_dump_json().encode()) for offer in offers}
        if not texts:
            return
        try:
            found = await self._store.call("HMGET", keys.TOOLS, *texts)
        except StoreRefused:
            found = [None] * len(texts)
        await self.publish(offer for (offer, text), known in zip(texts.values(), found, strict=True) if text != known)

    async def keep_published(self, offers: Callable[[], Iterable[ToolOffer]]) -> None:
        """Restore the offers of a live worker every few heartbeats, until cancelled."""
        while True:
            await asyncio.sleep(BEATS_PER_FACTS * HEARTBEAT_SECONDS)
            await self.restore(offers())

    async def load_all(self) -> dict[str, ToolOffer]:
        """Return all offers by key, sorted. Offers of a newer version that cannot be parsed are left out."""
        try:
            flat = await self._store.call("HGETALL", keys.TOOLS)
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message:
                raise
            flat = []  # the workers move the key away and publish again
        found = {}
        for key, text in sorted(zip(flat[::2], flat[1::2], strict=True)):
            try:
                found[key.decode()] = ToolOffer.model_validate_json(text)
            except ValueError:
                continue
        return found

    async def choose(self, wanted: Sequence[str], *, limit_seconds: float = 0.0) -> tuple[ToolOffer, ...]:
        """Return the requested offers, in the order of the patterns and then of the keys.

        Args:
            wanted: keys, or patterns such as `github/*`; each must match an offer.
            limit_seconds: how long to wait for workers that have not published yet.

        Raises:
            UsageError: a pattern matches no offer, or there are more than 128. It is raised at once if a running tool
                worker has reported why it cannot offer the tool.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_seconds
        for look in itertools.count():
            offers = await self.load_all()
            missing = [pattern for pattern in wanted if not any(fnmatchcase(key, pattern) for key in offers)]
            if not missing:
                return check_limits(
                    offer for pattern in wanted for key, offer in offers.items() if fnmatchcase(key, pattern)
                )
            is_over = loop.time() >= deadline
            if is_over or look % _FAILURES_EVERY == 0:
                reported = await ToolFailures(self._store).load_all()
                causes = [one for one in reported if one.failure.may_explain(missing[0])]
                if causes or is_over:
                    raise _missing_tool_error(missing[0], causes, offers, await find_silent_roles(self._store))
            await asyncio.sleep(_POLL_SECONDS)
        raise AssertionError("it counts for ever")

    async def _call_with_repair(self, *command: Argument) -> None:
        try:
            await self._store.call(*command)
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message:
                raise
            await Quarantine(self._store).move_away(keys.TOOLS, "hash", error)
            await self._store.call(*command)


def _missing_tool_error(
    pattern: str, causes: Sequence[ReportedFailure], offers: Iterable[str], silent: Collection[str]
) -> UsageError:
    named = causes[:MAX_NAMED_FAILURES]
    left = len(causes) - MAX_NAMED_FAILURES
    what = [f"No tool worker offers the tool {pattern!r}.", *map(str, named)]
    if "tool" in silent:
        what.append("No tool worker is running.")
    if left > 0:
        what.append(f"And {left} more; `deckhands tools --list` shows them.")
    remedies = dict.fromkeys(cause.failure.remedy for cause in named if cause.failure.remedy)
    return UsageError(" ".join(what), remedy=" ".join([*remedies, f"Offered: {', '.join(offers) or 'none'}."]))


def check_limits(chosen: Iterable[ToolOffer]) -> tuple[ToolOffer, ...]:
    """Return the tools that a conversation shall have, each once.

    Raises:
        UsageError: there are too many, or they have too many characters together.
    """
    by_key = {offer.key: offer for offer in chosen}
    if len(by_key) > MAX_CHOSEN:
        raise UsageError(f"{len(by_key)} tools are chosen; the limit is {MAX_CHOSEN}.", remedy="Choose fewer.")
    chars = sum(len(offer.model_dump_json()) for offer in by_key.values())
    if chars > MAX_CHOSEN_CHARS:
        text = f"The {len(by_key)} chosen tools have {chars:,} characters together; the limit is {MAX_CHOSEN_CHARS:,}."
        raise UsageError(text, remedy="Choose fewer.")
    return tuple(by_key.values())
