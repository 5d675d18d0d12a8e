"""Reach the store of an evaluation from any process, whether a driver runs or not.

Holds: an evaluation is found by its directory or its name. If it ran on a private cluster, its store is in the home
directory; a store that is not running is started for as long as it is needed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.runtime.errors import StoreUnavailable, UsageError
from broker.runtime.ids import is_conversation_id
from broker.store.embedded import EmbeddedValkey
from deckhands.cli.connecting import cluster_client
from deckhands.client.client import Client
from deckhands.evaluation.directory import ASKED, asked_in
from deckhands.home import Home, supervising
from deckhands.settings import FaceSettings


def named(text: str) -> tuple[str, str]:
    """Return the name of an evaluation, given its directory or name, and the owner of its private cluster.

    Raises:
        UsageError: it is neither.
    """
    if (Path(text) / ASKED).exists():
        asked = asked_in(Path(text))
        return asked.name, asked.home or asked.name
    if "/" in text or not is_conversation_id(text):
        raise UsageError(f"{text!r} is no evaluation: it has no {ASKED}.", remedy="Name its directory, or its name.")
    return text, text


@asynccontextmanager
async def evaluation_client(settings: FaceSettings, name: str) -> AsyncIterator[Client]:
    """Connect to the store that an evaluation uses.

    Raises:
        NoCluster, StoreError: it cannot be reached.
    """
    home = Home(settings.home)
    folder = home.evaluation_folder(name)
    if not folder.is_dir():
        async with cluster_client(settings) as client:
            yield client
        return
    try:
        client = await Client.connect(home.evaluation_url(name), patience_seconds=1.0)
    except StoreUnavailable:
        with supervising(folder, "An evaluation"):
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
