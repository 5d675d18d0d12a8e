"""The resources of a server that tenants use: open streams and waiting requests, files in transfer, connections.

Holds: no tenant has more than its share of any of them (`ServerOptions.tenant_percent`), with any number of keys, so
the rest is free for others.
Does not: count a connection that ends before its key is known; one without a valid request ends after `head_seconds`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from deckhands.server.problems import RETRY_SECONDS, Problem


class Held:
    """The share of each tenant of one resource.

    Args:
        what: the resource, in the plural, as in `too_many_<what>_of_tenant`.
        most: the total number at this server.
        percent: the percentage that one tenant may hold.
    """

    def __init__(self, what: str, most: int, percent: int) -> None:
        self._what = what
        self._most = most
        self._share = count_share(most, percent)
        self._tenants: dict[object, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tenants)

    def hold(self, holder: object, tenant: str) -> None:
        """Record the tenant of a holder; an existing holder may change its tenant.

        Raises:
            Problem: the tenant has its share, or all are in use. The holder is as before.
        """
        before = self._tenants.get(holder)
        if before == tenant:
            return
        if self._counts[tenant] >= self._share:
            raise make_share_problem(self._what, self._counts[tenant])
        if before is None and len(self._tenants) >= self._most:
            raise Problem(
                503,
                f"too_many_{self._what}",
                f"The server has reached its limit of {self._most:,} {self._what}.",
                remedy="Try again, or use another server.",
                headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
            )
        self.release(holder)
        self._tenants[holder] = tenant
        self._counts[tenant] += 1

    def release(self, holder: object) -> None:
        """Record that a holder has ended. Idempotent."""
        tenant = self._tenants.pop(holder, None)
        if tenant is not None:
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]

    @contextmanager
    def holding(self, tenant: str) -> Iterator[None]:
        """Hold one while the block runs. Raises the errors of `hold`."""
        holder = object()
        self.hold(holder, tenant)
        try:
            yield
        finally:
            self.release(holder)


class Turns:
    """Turns of short requests: each tenant has a few at a time; further requests of the same tenant wait.

    Args:
        at_once: how many requests of one tenant are worked on at the same time.
        max_waiting: how many further requests of one tenant may wait.
    """

    def __init__(self, at_once: int, max_waiting: int) -> None:
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()

    async def take(self, tenant: str) -> Callable[[], None]:
        """Wait for a turn, in the order of a tenant's requests. Returns an idempotent function that ends it.

        Raises:
            Problem: too many requests of the tenant wait.
        """
        found = self._of.get(tenant)
        if found is None:
            self._of[tenant] = found = asyncio.Semaphore(self._at_once)
        if found.locked() and self._waiting[tenant] >= self._max_waiting:
            raise Problem(
                429,
                "too_many_requests_of_tenant",
                f"{self._max_waiting:,} requests of this tenant wait at this server already.",
                remedy="Send fewer at a time.",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self._waiting[tenant] += 1
        try:
            await found.acquire()
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        turns = [found]

        def end() -> None:
            if turns:
                turns.pop().release()

        return end


def count_share(most: int, percent: int) -> int:
    """Return how many of `most` one tenant may hold, at least one."""
    return max(1, most * percent // 100)


def make_share_problem(what: str, held: int) -> Problem:
    """Return the problem that a tenant has its share of a resource."""
    return Problem(
        429,
        f"too_many_{what}_of_tenant",
        f"This tenant has {held:,} {what} open at this server, which is its share. The others are for other tenants.",
        remedy="Close one, use another server, or let its operator raise `deckhands serve --tenant-percent`.",
        headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
    )
