"""The number of round trips to the store in one step, counted on virtual time: with a far store, they are its cost.

Nothing else takes time here: the model answers at once and so does the shell, every command travels for half a round
trip and so does its reply. So the length of a step, divided by a round trip, is the number of round trips that wait for
each other.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConversationCreated, Event, ModelReply
from broker.log.event_log import EventLog
from broker.log.status import fold_status
from broker.runtime.settings import BrokerSettings
from broker.secrets.secrets import Secrets, load_secret_key
from tests.simulation.canonical import CID, bash, said
from tests.simulation.simulated_cluster import Cluster

ROUND_TRIP_SECONDS = 0.7
MOST_ROUND_TRIPS = 3
OPENING_ROUND_TRIPS = 3
"""What the first step takes besides: its workspace is opened, which reads the log. None of that is behind the first
model call, whose prompt is built from the log that was read at the claim."""
ROUNDING = 1e-6
STEPS = 6
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}


class _Always(Random):
    """Draws the longest way each time."""

    def random(self) -> float:
        return 1.0


def round_trips(
    turns: Sequence[Mapping[str, Any]], folder: Path, *, secrets: Mapping[str, str] | None = None
) -> list[float]:
    """Return how many round trips lie between each reply of the model and the next one, as the log has them."""
    path = folder / "script.json"
    path.write_text(json.dumps({"latency_seconds": 0, "turns": [*turns, FINISH]}))
    cluster = Cluster(0, {}, {"LLM_MODEL": f"scripted/{path}"})
    cluster.wire.latency_seconds, cluster.wire.random = ROUND_TRIP_SECONDS / 2, _Always()
    cluster.node.run_seconds = 0.0
    events: list[Event] = []

    async def world() -> None:
        store = await cluster.open()
        cluster.start("controller", cluster.controller)
        cluster.start("tools", cluster.tools)
        log = EventLog(store)
        held = Secrets(store, lambda: load_secret_key(BrokerSettings.from_env(), is_made=True))
        for name, value in (secrets or {}).items():
            await held.put(CID, name, value)
        created = ConversationCreated(conversation_id=CID, agent=AgentSpec(tool_concurrency=2))
        await log.create(created, [said("<task>")], key="task")
        async with asyncio.timeout(600):
            async for event in log.tail(CID):
                events.append(event)
                if fold_status(events).is_terminal:
                    return

    cluster.run(world())
    assert fold_status(events).state is AgentState.FINISHED
    appended = [
        next(written.at for written in cluster.server.written if written.first_id <= event.id <= written.last_id)
        for event in events
        if isinstance(event, ModelReply)
    ]
    assert len(appended) == len(turns) + 1
    return [(after - before) / ROUND_TRIP_SECONDS for before, after in pairwise(appended)]


def test_a_step_with_a_command_takes_three_round_trips(tmp_path: Path) -> None:
    first, *others = round_trips([{"tool_calls": [bash(f"command {n}")]} for n in range(STEPS)], tmp_path)
    assert max(others) <= MOST_ROUND_TRIPS + ROUNDING, others
    assert first <= MOST_ROUND_TRIPS + OPENING_ROUND_TRIPS + ROUNDING


def test_secrets_cost_no_round_trip_of_their_own(tmp_path: Path) -> None:
    turns = [{"tool_calls": [bash(f"echo $TOKEN {n}")]} for n in range(STEPS)]
    _, *others = round_trips(turns, tmp_path, secrets={"TOKEN": "a-secret-of-the-conversation"})
    assert max(others) <= MOST_ROUND_TRIPS + ROUNDING, others
