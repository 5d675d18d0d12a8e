"""A plan that an agent proposes before anything is done, and its acceptance."""

from __future__ import annotations

from typing import Literal

from broker.contract.actions import RiskyAction
from broker.contract.events import Observation


class PlanAction(RiskyAction):
    """Propose a plan. No tool worker runs it: once a person has confirmed it, or nobody has to, it is accepted.

    Attributes:
        plan: Markdown.
    """

    kind: Literal["action.plan"] = "action.plan"
    plan: str

    @property
    def sentence(self) -> str:
        """What a person is asked about: the whole of it."""
        return f"The plan:\n{self.plan}"


class PlanAcceptedObservation(Observation):
    """A plan is accepted: from here on the agent that carries it out goes on with the conversation."""

    kind: Literal["observation.plan_accepted"] = "observation.plan_accepted"
    agent: str

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"The plan is accepted; {self.agent} carries it out."
