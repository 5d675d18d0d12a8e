"""Notices of a run about its cluster: missing workers, ignored settings, failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from broker.coordination import ClusterMember, find_silent_roles, list_members
from broker.runtime import OutcomeUnknown, StoreUnavailable
from deckhands.client.client import Client
from deckhands.cluster import Notice

T = TypeVar("T")
POLL_SECONDS = 0.2
IGNORED_SHOWN = 20


async def warn_of_missing_workers(client: Client, on_notice: Notice) -> None:
    """Report the kinds of workers that a cluster lacks, because the run cannot continue without them."""
    with contextlib.suppress(StoreUnavailable, OutcomeUnknown):  # the task is in the log anyway
        if lacking := await find_silent_roles(client.store):
            on_notice(f"No {' and no '.join(lacking)} worker is running; the conversation waits.")


async def warn_of_ignored_settings(client: Client, on_notice: Notice, *, limit_seconds: float = 0.0) -> None:
    """Report unknown settings of models that the controller workers found.

    Args:
        limit_seconds: how long to wait for the first worker.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_seconds
    with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
        while not (found := await live_controllers(client)):
            if loop.time() >= deadline:
                return
            await asyncio.sleep(POLL_SECONDS)
        texts = dict.fromkeys(text for one in found for text in one.about.get("ignored_settings", "").splitlines())
        for text in list(texts)[:IGNORED_SHOWN]:
            on_notice(text)


async def live_controllers(client: Client) -> list[ClusterMember]:
    """Return the controller workers with a valid heartbeat."""
    return [one for one in await list_members(client.store) if one.role == "controller" and one.left_seconds > 0]


async def run_unless_broken(work: Awaitable[T], broken: Awaitable[None]) -> T:
    """Return the result of a coroutine, unless the cluster fails first.

    Raises:
        DeckhandsError: the failure of the cluster.
    """
    working, breakage = asyncio.ensure_future(work), asyncio.ensure_future(broken)
    try:
        await asyncio.wait((working, breakage), return_when=asyncio.FIRST_COMPLETED)
        if breakage.done():
            await breakage
        return await working
    finally:
        for future in (working, breakage):
            future.cancel()
        await asyncio.gather(working, breakage, return_exceptions=True)
