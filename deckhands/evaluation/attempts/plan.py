"""What an evaluation does, and the attempts that result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.contract import AgentSpec, Limits
from deckhands.client import Point
from deckhands.evaluation.datasets.instances import Instance

LABEL = "evaluation"
"""The label of its conversations; the value is its name."""
AT_ONCE = 4
RETRIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What an evaluation does.

    Attributes:
        name: unique; conversations of it have the label `evaluation=NAME`.
        models: the agent's setting for each model, by its name in the results.
        attempts: how many for each instance and model.
        at_once: how many attempts may be under way at most.
        retries: how often an attempt is begun again after failures of the infrastructure.
        budget_usd: no attempt begins once all of them together have spent this much.
        critic: the model that judges attempts; empty: none. It decides about instances that nothing else scores.
        origin: the conversation that attempts are forks of, instead of beginning with their instance's task.
        is_paced: False: `at_once` attempts are under way, whatever the load.
        tenant: the owner of the attempts' conversations; empty: no tenant.
        dataset: its name for people; the instances are in `instances`.
        pool: the pool of tool workers that hold the workspaces; None: the usual one.
        network: whether the commands of agents reach the network; those of checks never do.
        until: the stopping criterion, as `stopping.Until` reads it; empty: when all attempts have ended.
    """

    name: str
    instances: Sequence[Instance]
    models: Sequence[str]
    attempts: int = 1
    agent: AgentSpec = field(default_factory=AgentSpec)
    limits: Limits = field(default_factory=Limits)
    at_once: int = AT_ONCE
    retries: int = RETRIES
    budget_usd: float | None = None
    scripts: Path | None = None
    critic: str = ""
    origin: Point | None = None
    until: str = ""
    is_paced: bool = True
    pool: str | None = None
    tenant: str = ""
    dataset: str = ""
    network: bool = True

    @property
    def size(self) -> int:
        """How many attempts there are."""
        return len(self.instances) * len(self.models) * self.attempts

    def all_attempts(self) -> list[Attempt]:
        """Return them in the order in which they begin."""
        return [
            Attempt(instance, model, number)
            for number in range(1, self.attempts + 1)
            for instance in self.instances
            for model in self.models
        ]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one instance with one model."""

    instance: Instance
    model: str
    number: int

    @property
    def key(self) -> tuple[str, str, int]:
        """As in its row."""
        return self.model, self.instance.id, self.number
