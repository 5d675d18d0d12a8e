"""A store that answers slowly: steps get slower, and nobody buries the living (F47)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import FaultCluster, steps
from tests.faults.proxy import SlowProxy


@pytest.mark.parametrize(
    "round_trip_seconds",
    [
        pytest.param(1.0, marks=pytest.mark.soak),
        *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (0.5, 2.0, 4.0)),
    ],
)
async def test_nobody_buries_the_living_while_the_store_is_slow(
    cluster: FaultCluster, round_trip_seconds: float
) -> None:
    """The store is slow from a moment on, and workers that start meanwhile find it so."""
    proxy = SlowProxy(Path(f"{cluster.store.socket}.proxy"), Path(cluster.store.socket))
    names = ["c1", "c2", "t1", "c3", "t2"]
    async with proxy.running():
        cluster.url_for_workers = f"{cluster.store.url}.proxy"
        cluster.start_controller("c1")
        cluster.start_controller("c2")
        cluster.start_tool("t1")
        ids = await cluster.submit(steps(2), count=4)
        await cluster.settle(ids)
        proxy.delay_seconds = round_trip_seconds / 2
        cluster.start_controller("c3")
        cluster.start_tool("t2")
        ids += await cluster.submit(steps(2), count=4)
        await cluster.settle(ids, limit=60 + 60 * round_trip_seconds)
        proxy.delay_seconds = 0.0
        ids += await cluster.submit(steps(2))
        await cluster.settle(ids)
        await cluster.check(ids, commands=2)
        assert not [name for name in names if "presumed dead" in cluster.log_of(name)]
        for name in names:
            cluster.kill(name)
