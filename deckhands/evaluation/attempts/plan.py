"""The plan of an evaluation, and its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.contract import AgentSpec, Limits
from deckhands.client import ForkPoint
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.scorers import PythonScorer

LABEL = "evaluation"
"""The label of its conversations; the value is its name."""
AT_ONCE = 4
RETRIES = 3


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The definition of an evaluation.

    Attributes:
        name: unique; its conversations have the label `evaluation=NAME`.
        models: the agent's setting for each model, by its name in the results.
        attempts: the number for each instance and model.
        at_once: the maximum number of attempts in flight.
        retries: how often an attempt is repeated after failures of the infrastructure.
        budget_usd: no attempt starts once all attempts together have spent this much.
        token_budget: the same for their prompt and completion tokens.
        critic: the model that judges attempts; empty for none. It decides instances without another score.
        scorers: functions that score attempts. The first decides instances without a check or an answer.
        origin: the conversation that attempts are forks of, instead of starting with their instance's task.
        is_paced: whether the load limits the attempts in flight; otherwise, always `at_once` are in flight.
        tenant: the tenant of the attempts' conversations; empty for none.
        dataset: its name, for display only; the instances are in `instances`.
        pool: the pool of tool workers that hold the workspaces; None for the default.
        network: whether the commands of agents reach the network; those of checks never do.
        rollout: whether the exact tokens of the agents' replies are recorded.
        secrets: those of the agents' conversations; checks have none.
        until: the stopping criterion, parsed by `stopping.Until`; empty to run all attempts.
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
    token_budget: float | None = None
    scripts: Path | None = None
    critic: str = ""
    scorers: Sequence[PythonScorer] = ()
    origin: ForkPoint | None = None
    until: str = ""
    is_paced: bool = True
    pool: str | None = None
    tenant: str = ""
    dataset: str = ""
    network: bool = True
    rollout: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """The number of attempts."""
        return len(self.instances) * len(self.models) * self.attempts

    def list_attempts(self) -> list[Attempt]:
        """Return the attempts in their starting order: all attempts at an instance before those at the next one."""
        return [
            Attempt(instance, model, number)
            for instance in self.instances
            for number in range(1, self.attempts + 1)
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
        """Its key in the results."""
        return self.model, self.instance.id, self.number
