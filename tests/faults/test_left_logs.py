"""The end of a fault test finds each log that does not hold, whatever became of its store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import FaultCluster
from tests.turns import finish
from tests.unit.deckhands.sample_log import state

WRONG = r"says finished, which does not follow"


async def leave_wrong_log(folder: Path, *, store_dies: bool) -> None:
    async with FaultCluster(folder, append_fsync="always").running() as cluster:
        (cid,) = await cluster.submit([finish()])
        await cluster.client.log.append(cid, [state("finished")])
        if store_dies:
            await cluster.kill_store()


@pytest.mark.parametrize("store_dies", [False, True])
async def test_wrong_log_fails_the_test_that_left_it(tmp_path: Path, *, store_dies: bool) -> None:
    with pytest.raises(AssertionError, match=WRONG):
        await leave_wrong_log(tmp_path, store_dies=store_dies)


async def test_forged_log_is_left_out_by_name(cluster: FaultCluster) -> None:
    (cid,) = await cluster.submit([finish()])
    await cluster.client.log.append(cid, [state("finished")])
    cluster.forged.add(cid)
