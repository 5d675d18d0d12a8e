"""What an evaluation does, and the attempts that this comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.contract.events import AgentSpec, Limits
from deckhands.client.forking import Point
from deckhands.datasets.instances import Instance

LABEL = "evaluation"
"""Of its conversations; the value is its name."""
AT_ONCE = 4
RETRIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What an evaluation does.

    Attributes:
        name: unique; conversations of it have the label `evaluation=NAME`.
        models: by the names in the results: how the agent finds each.
        attempts: of each instance, with each model.
        at_once: how many attempts may be under way at most.
        retries: how often an attempt that the infrastructure has failed is begun again.
        budget_usd: no attempt begins once all of them together have spent so much.
        critic: the model that judges attempts; empty: none does. It decides about instances that nothing else scores.
        origin: what attempts begin as, instead of with the task of their instance: forks of this conversation.
        is_paced: False: as many as `at_once` are under way, whatever machines and models say.
        tenant: whose conversations its attempts are; empty: nobody's in particular.
        dataset: what it is shown under; its instances are in `instances`.
        pool: of the tool workers that have the workspaces of attempts; None: the usual one.
        until: when enough is known, as `stopping.Until` reads it; empty: when all attempts have ended.
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
