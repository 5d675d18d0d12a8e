"""A dataset of `deckhands eval` as a taskset of `verifiers`."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.task import TaskData

from deckhands.evaluation import read_dataset

RESULT = "deckhands"
"""The entry of a trace's `info` with the result of its attempt."""


class DeckhandsTasksetConfig(TasksetConfig):
    """Which dataset: a name or a path as for `deckhands eval run`."""

    dataset: str = "shipped"


class DeckhandsData(TaskData):
    """The data of one task: the dataset, and the instance with its files and its check."""

    dataset: str = ""
    instance: str = ""


class DeckhandsTask(vf.Task[DeckhandsData]):
    """One instance. Its reward and its metrics are those of the attempt that the harness made."""

    @vf.reward
    async def check(self, trace: vf.Trace) -> float:
        """Return the reward of the dataset's check."""
        return float(trace.info.get(RESULT, {}).get("reward", 0.0))

    @vf.metric
    async def scores(self, trace: vf.Trace) -> dict[str, float]:
        """Return the numbers that the check has written."""
        return dict(trace.info.get(RESULT, {}).get("metrics", {}))


class DeckhandsTaskset(vf.Taskset[DeckhandsTask, DeckhandsTasksetConfig]):
    """The instances of a dataset."""

    def load(self) -> Iterable[DeckhandsTask]:
        """Yield a task for each instance."""
        for one in read_dataset(self.config.dataset):
            data = DeckhandsData(id=one.id, name=one.id, prompt=one.task, dataset=self.config.dataset, instance=one.id)
            yield DeckhandsTask(data, self.config.task)
