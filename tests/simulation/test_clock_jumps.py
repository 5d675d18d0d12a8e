"""Clocks that are an hour off or jump by an hour: every wait ends within seconds of its length (F46)."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConversationCreated, Event, Limits, LLMSpec
from broker.contract.observations import AgentStateChangedObservation
from broker.log.event_log import EventLog
from broker.log.status import Status
from broker.runtime.clock import Clock
from broker.store.store import Store, open_store
from tests.simulation.canonical import CID, bash, said
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.virtual_loop import SimulatedProcess
from tests.simulation.wire import OtherClock, ProcessConnection

HOUR = 3_600.0
WAIT_SECONDS = 60.0
SLACK_SECONDS = 25.0
"""A wait is up to a quarter longer than was asked for, so that not all come back at once."""
RATE_LIMITED = {
    "turns": [
        {"tool_calls": [bash("one")]},
        {
            "tool_calls": [{"name": "finish", "arguments": {"message": "done"}}],
            "error": {"code": "rate_limit", "retry_after_seconds": WAIT_SECONDS},
        },
    ]
}


class SkewedCluster(Cluster):
    """A simulated cluster whose store and workers have wall clocks of their own."""

    def __init__(self, folder: Path, script: dict[str, Any]) -> None:
        path = folder / "script.json"
        path.write_text(json.dumps({"latency_seconds": 0.1} | script))
        self.llm = LLMSpec(model=f"scripted/{path}")
        super().__init__(7, {}, {"LLM_MODEL": self.llm.model})
        self.announced: list[tuple[AgentState, float]] = []

    def start_controller(self, name: str, clock: Clock) -> SimulatedProcess:
        async def main(store: Store) -> None:
            await store.aclose()
            connection = ProcessConnection(self.wire, process)
            own = await open_store(connection, clock=clock, patience_seconds=None, opening_seconds=None)
            await self.controller(own)

        process = self.start(name, main)
        return process

    async def until_event(self, condition: Callable[[Event], bool]) -> Event:
        """Follow the log up to an event."""
        store = await self.open()
        async with asyncio.timeout(3 * HOUR):
            async for event in EventLog(store).tail(CID):
                if condition(event):
                    return event
        raise AssertionError

    async def submit(self, limits: Limits | None = None) -> None:
        store = await self.open()
        created = ConversationCreated(conversation_id=CID, agent=AgentSpec(llm=self.llm), limits=limits or Limits())
        await EventLog(store).create(created, [said("<task>")], key="task")
        self.loop.create_task(self.watch(), context=self.loop.world.context)

    async def until_over(self) -> Status:
        """Wait for the end of the conversation and return its status then."""
        status = Status()

        def ends(event: Event) -> bool:
            nonlocal status
            status = status.apply(event)
            return status.is_terminal

        await self.until_event(ends)
        while not self.announced or self.announced[-1][0] is not status.state:
            await asyncio.sleep(0.01)  # the other reader has not got so far
        return status

    async def watch(self) -> None:
        """Note when each state was announced, by the simulation's time."""
        store = await self.open()
        async for event in EventLog(store).tail(CID):
            if isinstance(event, AgentStateChangedObservation):
                self.announced.append((event.agent_state, self.clock.monotonic()))

    def waits(self) -> list[float]:
        """Return how long each wait for the model's quota took."""
        follows = zip(self.announced, self.announced[1:], strict=False)
        return [after - at for (state, at), (_, after) in follows if state is AgentState.RATE_LIMITED]


def is_waiting(event: Event) -> bool:
    return isinstance(event, AgentStateChangedObservation) and event.agent_state is AgentState.RATE_LIMITED


def check_waits(cluster: SkewedCluster) -> None:
    assert cluster.waits()
    assert all(WAIT_SECONDS - 5 < wait < WAIT_SECONDS + SLACK_SECONDS for wait in cluster.waits()), cluster.waits()


async def take_over_while_waiting(
    cluster: SkewedCluster, ahead: float, limit_seconds: float, *, store_follows: bool
) -> AgentState:
    """Let a controller with a wrong clock die while it waits, and another one end the conversation."""
    await cluster.open()
    wrong = cluster.start_controller("wrong", OtherClock(cluster.clock, ahead))
    cluster.start("tools", cluster.tools)
    await cluster.submit(Limits(max_seconds=limit_seconds))
    await cluster.until_event(is_waiting)
    await asyncio.sleep(1.0)
    wrong.kill()
    cluster.start_controller("right", cluster.clock)
    if store_follows:
        cluster.server.clock.ahead_seconds -= ahead
    return (await cluster.until_over()).state


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_clock_of_the_store_jumps_during_a_wait(tmp_path: Path, jump: float, workers: int) -> None:
    cluster = SkewedCluster(tmp_path, RATE_LIMITED)

    async def world() -> None:
        await cluster.open()
        for number in range(workers):
            cluster.start_controller(f"controller-{number}", cluster.clock)
        cluster.start("tools", cluster.tools)
        await cluster.submit(Limits(max_seconds=10 * WAIT_SECONDS))
        await cluster.until_event(is_waiting)
        await asyncio.sleep(WAIT_SECONDS / 3)
        cluster.server.clock.ahead_seconds += jump
        assert (await cluster.until_over()).state is AgentState.FINISHED

    cluster.run(world())
    check_waits(cluster)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_controller_with_a_wrong_clock_parks_and_dies(tmp_path: Path, ahead: float) -> None:
    cluster = SkewedCluster(tmp_path, RATE_LIMITED)
    state = cluster.run(take_over_while_waiting(cluster, ahead, 10 * WAIT_SECONDS, store_follows=False))
    assert state is AgentState.FINISHED
    check_waits(cluster)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_time_limit_follows_the_cluster_after_a_takeover(tmp_path: Path, ahead: float) -> None:
    cluster = SkewedCluster(tmp_path, RATE_LIMITED)
    state = cluster.run(take_over_while_waiting(cluster, ahead, WAIT_SECONDS / 2, store_follows=True))
    assert state is AgentState.ERROR
    began = next(at for state, at in cluster.announced if state is AgentState.RUNNING)
    assert WAIT_SECONDS / 2 - 5 < cluster.announced[-1][1] - began < WAIT_SECONDS / 2 + 5
