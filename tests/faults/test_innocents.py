"""Workers that die again and again: what they only held at the time is not blamed for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from broker.log.conversations import Conversations
from tests.faults.harness import FaultCluster

HELD = 12
DEATHS = 5


async def held(cluster: FaultCluster) -> list[str]:
    """Begin conversations whose command ends when `let_go` says so, and wait until all run."""
    command = "echo begin >> effects; until [ -e go ]; do sleep 0.1; done; echo end >> effects"
    turns = [
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": command, "timeout": 600}}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": "all done"}}]},
    ]
    ids = await cluster.submit(turns, count=HELD)
    await cluster.until(lambda: all(cluster.effects(cid) == ["begin"] for cid in ids))
    return ids


async def let_go(cluster: FaultCluster, ids: list[str]) -> None:
    """Let the commands end, and check that each was carried out once, and told to the agent, which has finished."""
    for cid in ids:
        (Path((cluster.root / f"{cid}.where").read_text()) / "go").touch()
    await cluster.settle(ids)
    for cid in ids:
        assert (await cluster.client.row(cid)).state == "finished"
        assert [e.kind for e in await cluster.client.events(cid) if e.cause is not None][-1] == "observation.run"
        assert cluster.effects(cid) == ["begin", "end"]


@pytest.mark.soak
async def test_commands_outlive_any_number_of_tool_workers(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool("t0")
    ids = await held(cluster)

    async def takeovers() -> Counter[str]:
        return Counter(
            t.conversation_id for t in await Conversations(cluster.client.store).list_takeovers() if t.action_id
        )

    for death in range(DEATHS):
        cluster.kill(f"t{death}")
        cluster.start_tool(f"t{death + 1}")

        async def are_taken_over(times: int = death + 1) -> bool:
            return await takeovers() == dict.fromkeys(ids, times)

        await cluster.until(are_taken_over, what=f"takeover {death + 1}")
    await let_go(cluster, ids)


@pytest.mark.soak
async def test_conversations_outlive_controllers_that_die_while_they_take_them_over(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("c0")
    ids = await held(cluster)
    cluster.kill("c0")
    for death in range(1, DEATHS):
        cluster.start_controller(f"c{death}", DECKHANDS_FAILPOINTS=f"controller.after_claim:kill@{2 * death + 1}")
        assert await cluster.until_ended(f"c{death}") == -9
    cluster.start_controller("last")
    await let_go(cluster, ids)
