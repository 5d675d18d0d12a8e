"""Reach the store of an evaluation from any process, whether a driver runs or not.

Holds: an evaluation is found by its directory or its name. If it ran on a private cluster, its store is in the home
directory, and is started temporarily if it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from broker.runtime import OutcomeUnknown, StoreUnavailable, UsageError, is_conversation_id
from broker.store import EmbeddedValkey
from deckhands.client import Client, cluster_client
from deckhands.cluster import AlreadySupervised, Home, supervise
from deckhands.evaluation.directory import REQUEST, load_request
from deckhands.settings import CliSettings

TRIES, AGAIN_SECONDS = 20, 0.5
T = TypeVar("T")


def find_evaluation(text: str) -> tuple[str, str]:
    """Return the name of an evaluation, given its directory or name, and the owner of its private cluster.

    Raises:
        UsageError: there is no such evaluation.
    """
    if (Path(text) / REQUEST).exists():
        asked = load_request(Path(text))
        return asked.name, asked.home or asked.name
    if "/" in text or not is_conversation_id(text):
        raise UsageError(
            f"{text!r} is not an evaluation: it has no {REQUEST}.",
            remedy="Name its directory, or its name; `deckhands eval run` starts one.",
        )
    return text, text


@asynccontextmanager
async def evaluation_client(settings: CliSettings, name: str) -> AsyncIterator[Client]:
    """Connect to the store that an evaluation uses.

    Raises:
        UsageError: the evaluation has not started, so it has no store.
        StoreError: the store cannot be reached.
    """
    home = Home(settings.home)
    folder = home.evaluation_folder(name)
    if not folder.is_dir():
        if settings.url is None and home.cluster_url is None:
            raise UsageError(
                f"The evaluation {name} has not started: it has no private cluster here, and no cluster is running.",
                remedy="`deckhands eval attach DIR` starts it. If it uses a cluster, set DECKHANDS_URL to its store.",
            )
        async with cluster_client(settings) as client:
            yield client
        return
    try:
        client = await Client.connect(home.evaluation_url(name), patience_seconds=1.0)
    except StoreUnavailable:
        with supervise(folder, "An evaluation"):
            store = EmbeddedValkey(folder / "valkey")
            await store.start()
            try:
                async with await Client.connect(store.url) as client:
                    yield client
            finally:
                await store.stop()
        return
    async with client:
        yield client


async def run_in_store(settings: CliSettings, name: str, act: Callable[[Client], Awaitable[T]]) -> T:
    """Call a function with the store of an evaluation, and return its result.

    A private store ends with the command that runs the evaluation. If that happens during the call, the store is
    started again and the call is repeated.

    Args:
        act: must be idempotent.

    Raises:
        UsageError, StoreError: the store cannot be reached.
    """
    is_private = Home(settings.home).evaluation_folder(name).is_dir()
    for number in range(1, TRIES + 1):
        try:
            async with evaluation_client(settings, name) as client:
                return await act(client)
        except (StoreUnavailable, OutcomeUnknown, AlreadySupervised):
            if not is_private or number == TRIES:
                raise
            await asyncio.sleep(AGAIN_SECONDS)
    raise AssertionError("the last try returns or raises")
