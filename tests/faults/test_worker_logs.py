"""What an operator reads in the log of a controller worker: a line when a conversation is taken, settles or is lost."""

from __future__ import annotations

import re
import signal

from tests.faults.harness import FaultCluster, steps

COUNT = 8


def lines(cluster: FaultCluster, name: str, pattern: str) -> list[str]:
    return [line for line in cluster.log_of(name).splitlines() if re.search(pattern, line)]


async def test_conversation_logs_a_line_when_taken_lost_and_settled(cluster: FaultCluster) -> None:
    cluster.start_controller("zombie")
    ids = await cluster.submit(steps(1), count=COUNT, latency=600.0)
    await cluster.until(lambda: len(lines(cluster, "zombie", "is claimed")) == COUNT, limit=60, what="all are taken")
    cluster.signal("zombie", signal.SIGSTOP)
    cluster.start_controller("survivor")
    await cluster.until(lambda: len(lines(cluster, "survivor", "is claimed")) == COUNT, limit=60, what="the takeover")
    cluster.signal("zombie", signal.SIGCONT)
    await cluster.until(lambda: lines(cluster, "zombie", "presumed dead"), limit=60, what="the zombie's awakening")
    await cluster.until(lambda: lines(cluster, "zombie", "taken over by other workers"), limit=60, what="its losses")
    for cid in ids:
        await cluster.client.cancel(cid, wait_seconds=60)
        settled = f"INFO .* conversation {cid} settles as stopped at event \\d+$"
        await cluster.until(lambda: len(lines(cluster, "survivor", settled)) == 1, what="its end")  # noqa: B023
    lost = lines(cluster, "zombie", "taken over by other workers")
    assert len(lost) < COUNT, lost
    assert all(sum(cid in line for cid in ids) <= 5 for line in lost), lost
    assert not lines(cluster, "zombie", "fenced")
