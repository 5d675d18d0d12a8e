"""The tools that the tool workers of a store offer: published as data, chosen when a conversation is created.

Holds: a conversation keeps the offers from its creation, in its first event; later changes affect new conversations
only. An offer that is overwritten in the store is restored by its live worker within a few heartbeats.
Does not: withdraw the offers of a worker that has ended. A call then waits for another worker of the pool, as every
action does; a worker without the tool reports that.
Keys: `deck:tools`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from broker.contract import ToolOffer
from broker.coordination import BEATS_PER_FACTS, HEARTBEAT_SECONDS, Quarantine, find_silent_roles
from broker.runtime import StoreRefused, UsageError
from broker.store import WRONG_TYPE_PREFIX, Argument, Store, keys
from broker.tools.tool_failures import ReportedFailure, ToolFailures

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

        It runs every few seconds, and writes cost disk space of the store; so it reads before it writes.
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
                return _check_limits(
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


def _check_limits(chosen: Iterable[ToolOffer]) -> tuple[ToolOffer, ...]:
    by_key = {offer.key: offer for offer in chosen}
    if len(by_key) > MAX_CHOSEN:
        raise UsageError(f"{len(by_key)} tools are chosen; the limit is {MAX_CHOSEN}.", remedy="Choose fewer.")
    chars = sum(len(offer.model_dump_json()) for offer in by_key.values())
    if chars > MAX_CHOSEN_CHARS:
        text = f"The {len(by_key)} chosen tools have {chars:,} characters together; the limit is {MAX_CHOSEN_CHARS:,}."
        raise UsageError(text, remedy="Choose fewer.")
    return tuple(by_key.values())
