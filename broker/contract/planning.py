"""A plan that an agent proposes before anything is done, and its acceptance."""

from __future__ import annotations

from typing import ClassVar, Literal

from broker.contract.actions import RiskyAction
from broker.contract.events import Observation
from broker.contract.kinds import Paragraph
from broker.specs.tool_specs import ToolSpec

MAX_SHOWN_LINES = 1_000

PROPOSE_PLAN = ToolSpec(
    name="propose_plan",
    description=(
        "Propose the plan, when you have looked at all that it touches. Once it is accepted it is carried out as it "
        "stands, so it has to be complete."
    ),
    parameters={
        "type": "object",
        "properties": {"plan": {"type": "string", "description": "The whole plan, in Markdown."}},
        "required": ["plan"],
    },
)


class PlanAction(RiskyAction):
    """Propose a plan. No tool worker runs it: once a person has confirmed it, or nobody has to, it is accepted.

    Attributes:
        plan: Markdown.
    """

    kind: Literal["action.plan"] = "action.plan"
    argument: ClassVar[tuple[str, str]] = ("plan", "plan")
    sentence_template: ClassVar[str] = "The plan:\n{plan}"
    tool_spec: ClassVar[ToolSpec] = PROPOSE_PLAN
    plan: str

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`; a plan is shown whole, because a person is asked about it."""
        return (Paragraph(self.thought), Paragraph(self.sentence, max_lines=MAX_SHOWN_LINES))


class PlanAcceptedObservation(Observation):
    """A plan is accepted: the agent that carries it out takes over the conversation."""

    kind: Literal["observation.plan_accepted"] = "observation.plan_accepted"
    is_decided: ClassVar[bool] = True
    sentence_template: ClassVar[str] = "The plan is accepted; {agent} carries it out."
    agent: str
