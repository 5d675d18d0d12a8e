"""Find and open a running cluster: the named one, or the one that `deckhands up` runs on this machine."""

from __future__ import annotations

from broker.runtime import StoreUnavailable
from broker.store import Store, open_store
from deckhands.client.errors import NoCluster
from deckhands.cluster import Home
from deckhands.settings import CliSettings


async def open_cluster(
    url: str | None = None,
    *,
    shards: int | None = None,
    patience_seconds: float | None = 30.0,
    settings: CliSettings | None = None,
) -> Store:
    """Open the store of a cluster as a client; see `open_store` for the arguments.

    Args:
        url: None: DECKHANDS_URL, or the cluster that runs from the home directory.
        shards: None: from the settings.
        settings: None: those of this process.

    Raises:
        NoCluster: no URL is given or set, and no cluster is running here.
        StoreError: it cannot be reached or used.
    """
    settings = settings or CliSettings.from_env()
    named = url or settings.url
    found = named or Home(settings.home).cluster_url
    if found is None:
        raise NoCluster
    try:
        number = shards or settings.shards
        return await open_store(found, shards=number, patience_seconds=patience_seconds, deploys=False)
    except StoreUnavailable as error:
        if named is None and isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
            raise NoCluster from error
        raise
