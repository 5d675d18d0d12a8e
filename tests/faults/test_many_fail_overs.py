"""Hundreds of fail-overs of groups of servers side by side: no acknowledged event is lost, all conversations continue.

The history of calls and acknowledgements is checked by `tests.fail_over_history`, which uses nothing of the product.
Times until conversations continue are printed and bounded by nothing: they depend on the machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.runtime import make_celery_url
from tests.fail_over_history import describe_times
from tests.fail_over_run import run_side_by_side
from tests.faults.harness import steps
from tests.faults.test_sentinel import SentinelCluster
from tests.polling import unhurried, until
from tests.proof import Proof
from tests.sentinels import SentinelGroup, Server, begin_fail_over, end_fail_over
from tests.stores import redis_program, valkey_program

CONVERSATIONS, STEPS, WORKER_FAIL_OVERS = 8, 2_000, 25
GROUPS_SHARE, CLUSTERS_SHARE = 0.75, 0.1
"""Of the time that a section of docs/proof.md has."""


async def check_fail_overs(
    folder: Path, count: int, capsys: pytest.CaptureFixture[str], proof: Proof, *, is_cluster: bool = False
) -> None:
    seed = time.time_ns() % 1_000_000
    programs = [valkey_program()] * (1 if is_cluster else 3) + [redis_program()]
    seconds = proof.seconds * (CLUSTERS_SHARE if is_cluster else GROUPS_SHARE)
    result = await run_side_by_side(programs, folder, count=count, seed=seed, is_cluster=is_cluster, seconds=seconds)
    show(capsys, f"seed {seed}: {result}")
    times = sorted(result.takeover_seconds)
    proof.record(
        "fail-overs of a slot in a cluster" if is_cluster else "fail-overs of a group",
        trials=result.fail_overs,
        failures=len(result.faults),
        unit="fail-overs",
        seed=seed,
        figures={
            "kinds": ", ".join(f"{count} {kind}" for kind, count in sorted(result.kinds.items())),
            "events acknowledged": result.acknowledged,
            "calls without an acknowledgement": result.unknown,
            "promoted servers that were replaced at once": result.replaced,
            "to the next acknowledged event, p50": f"{times[len(times) // 2]:.2f} s",
            "to the next acknowledged event, p99": f"{times[len(times) * 99 // 100]:.2f} s",
        },
    )
    assert result.faults == []
    assert result.fail_overs >= (count if math.isinf(proof.seconds) else 1)
    assert len(result.takeover_seconds) > 0


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        print(f"\n{line}")


@pytest.mark.timeout(600)
async def test_four_fail_overs_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Proof) -> None:
    await check_fail_overs(tmp_path, 4, capsys, proof)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
async def test_two_hundred_fail_overs_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    await check_fail_overs(tmp_path, 200, capsys, proof)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
async def test_thousand_fail_overs_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    await check_fail_overs(tmp_path, 1_000, capsys, proof)


@pytest.mark.timeout(600)
async def test_two_fail_overs_in_clusters_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    await check_fail_overs(tmp_path, 2, capsys, proof, is_cluster=True)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
async def test_many_fail_overs_in_clusters_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    await check_fail_overs(tmp_path, 100, capsys, proof, is_cluster=True)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_conversations_of_workers_continue_soon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    """Real workers: the time from each promotion to the next event of each conversation."""
    found: list[float] = []
    root = tmp_path / "cluster"
    root.mkdir()
    async with (
        SentinelGroup(valkey_program(), tmp_path / "group", down_after_ms=1_000).running() as group,
        SentinelCluster(root).on(group) as cluster,
    ):
        cluster.start(DECKHANDS_CELERY_URL=make_celery_url(group.url), DECKHANDS_ACKS="replica")
        ids = await cluster.submit(steps(STEPS, seconds=0.1), count=CONVERSATIONS)
        await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids), limit=unhurried(60))
        for _ in range(WORKER_FAIL_OVERS):
            old = await group.primary()
            new = await begin_fail_over(group, old, "kill")
            found += await measure_next_events(new, [cluster.client.store.known_keys(cid).meta for cid in ids])
            await end_fail_over(group, old, new, "kill")
    times = describe_times(found)
    show(capsys, f"{WORKER_FAIL_OVERS} fail-overs under workers, to the next event of each conversation: {times}")
    proof.record(
        "fail-overs under workers", trials=WORKER_FAIL_OVERS, unit="kills of the primary", figures={"times": times}
    )
    assert len(found) == WORKER_FAIL_OVERS * CONVERSATIONS


async def measure_next_events(server: Server, metas: Sequence[str]) -> list[float]:
    """Return the seconds from now until the log of each conversation has grown."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    lasts = {meta: await server.call("HGET", meta, "last_id") for meta in metas}
    found: list[float] = []

    async def have_grown() -> bool:
        for meta in list(lasts):
            if await server.call("HGET", meta, "last_id") != lasts[meta]:
                del lasts[meta]
                found.append(loop.time() - started)
        return not lasts

    await until(have_grown, limit=120, what="event of each conversation")
    return found
