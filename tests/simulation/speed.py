"""How many hours of a cluster at work are simulated in an hour of one core.

The cluster has a controller worker, a tool worker, and three conversations that are never idle: a model call takes
20 s and a command 5 s, as in real runs. Hours of a cluster without conversations are measured apart and count nothing.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.chat import Chat, broken_chat, simulate_chat
from tests.simulation.simulated_cluster import Cluster

MODEL_SECONDS, COMMAND_SECONDS = 20.0, 5.0
ROUNDS = 40
IDLE_SECONDS = 600.0


@dataclass(frozen=True)
class Speed:
    """Virtual hours per hour of CPU."""

    busy: float
    idle: float
    boundaries_per_cpu_second: float


def measure_speed(folder: Path) -> Speed:
    """Measure both, in CPU time, so that a busy machine matters little."""
    chat = Chat(
        rounds=ROUNDS,
        controllers=1,
        tools=1,
        latency_seconds=0.0,
        command_seconds=COMMAND_SECONDS,
        model_seconds=MODEL_SECONDS,
        has_bell=False,
        limit_seconds=86_400.0,
    )
    simulate_chat(Chat(), folder)  # imports, and what is compiled at the first use
    began = time.process_time()
    outcome = simulate_chat(chat, folder)
    taken = time.process_time() - began
    assert broken_chat(outcome) == []
    busy_seconds = outcome.cluster.clock.monotonic()
    began = time.process_time()
    _stay_idle()
    idle_taken = time.process_time() - began
    return Speed(busy_seconds / taken, IDLE_SECONDS / idle_taken, len(outcome.cluster.wire.passed) / taken)


def _stay_idle() -> None:
    cluster = Cluster(0, {}, {"LLM_MODEL": "scripted/none.json"})

    async def world() -> None:
        await cluster.open()
        cluster.start_workers(1, 1)
        await asyncio.sleep(IDLE_SECONDS)

    cluster.run(world())
