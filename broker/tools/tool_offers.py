"""The tools that the tool workers of a store offer: published as data, chosen when a conversation begins.

Holds: what a conversation was given stays as it was offered then, in its first event; an offer that changes later
reaches new conversations only.
Does not: withdraw the offer of a worker that has ended. A call then waits for another worker of the pool, as every
action does; a worker without the tool answers that it has none.
Keys: `deck:tools`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from broker.runtime.errors import StoreRefused, UsageError
from broker.specs.tool_specs import ToolOffer
from broker.store import keys
from broker.store.store import Store

MAX_CHOSEN = 128
_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)


class ToolOffers:
    """The offers of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def publish(self, offers: Iterable[ToolOffer]) -> None:
        """Offer tools under their keys, in place of earlier offers under the same.  Idempotent."""
        fields = [part for offer in offers for part in (offer.key, offer.model_dump_json())]
        try:
            if fields:
                await self._store.persist(lambda: self._store.connection.call("HSET", keys.TOOLS, *fields))
        except StoreRefused as error:  # a key of another type: the worker serves all but new conversations that ask
            _log.error("tools cannot be offered under %s: %s", keys.TOOLS, error)

    async def all(self) -> dict[str, ToolOffer]:
        """Return every offer by its key, sorted; those of a newer version that cannot be read are left out."""
        flat = await self._store.persist(lambda: self._store.connection.call("HGETALL", keys.TOOLS))
        found = {}
        for key, text in sorted(zip(flat[::2], flat[1::2], strict=True)):
            try:
                found[key.decode()] = ToolOffer.model_validate_json(text)
            except ValueError:
                continue
        return found

    async def choose(self, wanted: Sequence[str], *, limit_seconds: float = 0.0) -> tuple[ToolOffer, ...]:
        """Return the offers that people have asked for, in the order of the patterns and then of the keys.

        Args:
            wanted: keys, or patterns such as `github/*`; each has to match an offer.
            limit_seconds: how long to wait for workers that have not published yet.

        Raises:
            UsageError: nothing is offered under one of them, or there are more than 128.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_seconds
        while True:
            offers = await self.all()
            missing = [pattern for pattern in wanted if not any(fnmatchcase(key, pattern) for key in offers)]
            if not missing:
                return _distinct(offer for pattern in wanted for offer in _matching(offers, pattern))
            if loop.time() >= deadline:
                known = ", ".join(offers) or "none"
                raise UsageError(f"No tool worker offers the tool {missing[0]!r}.", remedy=f"Offered: {known}.")
            await asyncio.sleep(_POLL_SECONDS)


def _matching(offers: dict[str, ToolOffer], pattern: str) -> list[ToolOffer]:
    return [offer for key, offer in offers.items() if fnmatchcase(key, pattern)]


def _distinct(chosen: Iterable[ToolOffer]) -> tuple[ToolOffer, ...]:
    by_key = {offer.key: offer for offer in chosen}
    if len(by_key) > MAX_CHOSEN:
        raise UsageError(f"{len(by_key)} tools are chosen; the limit is {MAX_CHOSEN}.", remedy="Choose fewer.")
    return tuple(by_key.values())
