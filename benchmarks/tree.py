"""A tree of fifty delegates: how long a parent and those below it take, and what that costs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import cpu_seconds
from benchmarks.noop_tool import POOL
from broker.contract.events import AgentSpec, DelegateEnded, Limits, LLMSpec, WorkspaceSpec

BRANCHES = 5
LEAVES = 9
"""Below each branch: with the branches themselves, fifty delegates."""
LATENCY_SECONDS = 0.05
LEVELS = 3


async def measure(bench: Bench) -> Result:
    """Run the tree, from the submit to the finish of its root."""
    branches, leaves = bench.choose(smoke=(2, 2), short=(BRANCHES, LEAVES), full=(BRANCHES, LEAVES))
    count = branches * (leaves + 1)
    # A level asks twice: to delegate, or to run its command, and to finish.
    ideal = LEVELS * 2 * LATENCY_SECONDS
    seconds: list[float] = []
    cpu: list[float] = []
    async with running_cluster(bench.directory / "tree") as cluster:
        agent = _tree(cluster.directory, branches, leaves)
        controller = await cluster.start_controller()
        await cluster.start_noop_tool()
        for number in range(bench.choose(smoke=1, short=6, full=21)):
            before = cpu_seconds(controller)
            took = await _run(cluster, agent, branches)
            if number:  # the first one loads what the others find loaded
                seconds.append(took)
                cpu.append((cpu_seconds(controller) - before) / (count + 1))
            elif bench.choose(smoke=True, short=False, full=False):
                seconds, cpu = [took], [cpu_seconds(controller) - before]
    figures = (
        Figure("from the submit to the root's finish", "s", Spread.of(seconds)),
        Figure("the same ÷ the latency of the model calls in a row", "", Spread.of(one / ideal for one in seconds)),
        Figure("controller CPU per conversation of the tree", "ms", Spread.of(cpu, scale=1_000)),
    )
    note = (
        f"A root, {branches} delegates and {leaves} delegates of each: {count} delegates on {LEVELS} levels, each a "
        f"separate conversation. The leaves run a command of the no-op tool; all calls of a turn work at the same "
        f"time. {LATENCY_SECONDS * 1_000:g} ms of model latency: {ideal:g} s in a row. One controller process."
    )
    return Result("A tree of delegates", figures, note)


def _tree(directory: Path, branches: int, leaves: int) -> AgentSpec:
    """Return the root's specification, with those of all below it."""
    command = {"name": "execute_bash", "arguments": {"command": "true"}}
    leaf = AgentSpec(llm=_model(directory, "leaf", [command]))
    branch = AgentSpec(
        llm=_model(directory, "branch", [_delegate("leaf")] * leaves),
        enable_delegation=True,
        delegates={"leaf": leaf},
    )
    return AgentSpec(
        llm=_model(directory, "root", [_delegate("branch")] * branches),
        enable_delegation=True,
        delegates={"branch": branch},
    )


def _delegate(name: str) -> dict[str, Any]:
    return {"name": "delegate", "arguments": {"agent": name, "task": "Do your part."}}


def _model(directory: Path, name: str, calls: list[dict[str, Any]]) -> LLMSpec:
    finish = {"name": "finish", "arguments": {"message": f"{name} is done"}}
    turns = [{"tool_calls": calls}, {"tool_calls": [finish]}]
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"turns": turns, "latency_seconds": LATENCY_SECONDS}))
    return LLMSpec(model=f"scripted/{path}")


async def _run(cluster: BenchCluster, agent: AgentSpec, branches: int) -> float:
    began = time.perf_counter()
    conversation_id = await cluster.client.submit(
        "Do it, all of you.",
        agent=agent,
        workspace=WorkspaceSpec(pool=POOL),
        limits=Limits(max_iterations=100_000),
    )
    summary = await cluster.client.wait_until_settled(conversation_id)
    took = time.perf_counter() - began
    assert summary.state == "finished", summary
    ends = [event for event in await cluster.client.events(conversation_id) if isinstance(event, DelegateEnded)]
    assert [end.agent_state for end in ends] == ["finished"] * branches, ends
    return took
