"""What a person changes in a conversation under way, as an event."""

from __future__ import annotations

from typing import ClassVar, Literal

from broker.contract.events import AgentSpec, Event, Limits
from broker.contract.paragraphs import Paragraph
from broker.specs.confirmation_policy import ConfirmationPolicy
from broker.specs.labels import Labels
from broker.specs.tool_specs import ToolOffer


class ConversationChanged(Event):
    """A part of what the conversation is has changed. What is None stays as it was.

    Attributes:
        agent: takes over from here on; it has its own system message if its name is another one.
        confirmation: takes the place of the agent's policy; what a person is asked about now is still asked about.
        analyzer: takes the place of the policy's analyzer.
        limits: take the place of all limits.
        tools: are added to the agent's; one with the key of another takes its place.
        labels: take the place of all labels.
        by: who says so, in their own words; it proves nothing.
        reason: why.
    """

    kind: Literal["conversation.changed"] = "conversation.changed"
    is_shown_to_people: ClassVar[bool] = True
    agent: AgentSpec | None = None
    confirmation: ConfirmationPolicy | None = None
    analyzer: str | None = None
    limits: Limits | None = None
    tools: tuple[ToolOffer, ...] | None = None
    labels: Labels | None = None
    by: str | None = None
    reason: str | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        agent = f"the agent is {self.agent.name}" if self.agent else ""
        tools = f"tools are added: {', '.join(tool.key for tool in self.tools)}" if self.tools else ""
        what = (agent, self._confirmation, self._limits, tools, self._labels)
        text = "; ".join(filter(None, what)) or "nothing has changed"
        text += f", by {self.by}" if self.by else ""
        return f"Changed: {text}" + (f" ({self.reason})" if self.reason else "")

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence, "bold"),)

    @property
    def _confirmation(self) -> str:
        mode = f"confirmation is {self.confirmation.mode}" if self.confirmation else ""
        return "; ".join(filter(None, (mode, f"risks are judged by {self.analyzer}" if self.analyzer else "")))

    @property
    def _limits(self) -> str:
        if self.limits is None:
            return ""
        return "limits: " + ", ".join(f"{name}={value}" for name, value in self.limits if value is not None)

    @property
    def _labels(self) -> str:
        if self.labels is None:
            return ""
        return "labels: " + (", ".join(f"{name}={value}" for name, value in sorted(self.labels.items())) or "none")
