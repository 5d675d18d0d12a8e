"""An evaluation in a separate process, which benchmarks start and kill: `python -m benchmarks.submitter SPEC`.

SPEC is a file of JSON: see `Spec`. Instances are `i0` and so on; the answer of each is 6, unless there is a check.
Results are in `results.jsonl` beside it, what the process has used in `used.json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import peak_kib, resident_kib
from benchmarks.noop_tool import POOL
from broker.contract.events import Limits
from broker.store.store import open_store
from deckhands.client.client import Client
from deckhands.evaluation.attempts.plan import EvaluationPlan
from deckhands.evaluation.attempts.results import Results
from deckhands.evaluation.attempts.status import EvaluationStatus
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.evaluation import Evaluation

ANSWER, OTHER = "6", "7"
TASK = "What is 2 * 3? (latency-key=i{})"
"""The model server takes as long as the name says; see tests/model_server/latency.py."""
TURN_SECONDS = 0.05
RESULTS, USED = "results.jsonl", "used.json"


@dataclass(frozen=True, slots=True)
class Spec:
    """What is evaluated.

    Attributes:
        pool: of the tool workers; None: any.
        check: a command that scores each attempt in a fresh workspace, instead of its answer.
        is_every_other_wrong: the answer 6 is right for half of the instances only.
    """

    url: str
    name: str
    count: int
    at_once: int
    model: str
    scripts: str = ""
    is_paced: bool = False
    pool: str | None = POOL
    check: str = ""
    is_every_other_wrong: bool = False

    def write(self, folder: Path) -> Path:
        """Write it into a folder, and return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "spec.json"
        path.write_text(json.dumps({name: getattr(self, name) for name in self.__slots__}))
        return path

    def plan(self) -> EvaluationPlan:
        """Return it as a plan."""
        return EvaluationPlan(
            self.name,
            [self._instance(number) for number in range(self.count)],
            [self.model],
            at_once=self.at_once,
            limits=Limits(max_iterations=1_000),
            scripts=Path(self.scripts) if self.scripts else None,
            is_paced=self.is_paced,
            pool=self.pool,
        )

    def _instance(self, number: int) -> Instance:
        name, task = f"i{number}", TASK.format(number)
        if self.check:
            return Instance(name, task, check=self.check)
        return Instance(name, task, answer=OTHER if self.is_every_other_wrong and number % 2 == 0 else ANSWER)


async def evaluate(path: Path) -> None:
    """Carry it out, and write down what that has used."""
    spec, lags, seen = Spec(**json.loads(path.read_text())), [], []
    base = resident_kib(os.getpid())

    async def measure_lag() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TURN_SECONDS)
            lags.append(time.monotonic() - before - TURN_SECONDS)

    def on_status(status: EvaluationStatus) -> None:
        seen.append(status)

    async with Client(await open_store(spec.url)) as client:
        with Results(path.parent / RESULTS) as results:
            measuring, began = asyncio.create_task(measure_lag()), time.monotonic()
            await Evaluation(client, spec.plan(), results, on_status=on_status).run()
            seconds = time.monotonic() - began
            measuring.cancel()
    lags.sort()
    used = {
        "seconds": seconds,
        "cpu": time.process_time(),
        "base_kib": base,
        "peak_kib": peak_kib(os.getpid()),
        "lag_p99": lags[int(0.99 * (len(lags) - 1))] if lags else 0.0,
        "most_in_flight": max((one.in_flight for one in seen), default=0),
        "bounds": sorted({one.bound for one in seen}),
    }
    (path.parent / USED).write_text(json.dumps(used))


if __name__ == "__main__":
    asyncio.run(evaluate(Path(sys.argv[1])))
