"""A requested change to a conversation, validated before it becomes an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from broker.contract import AgentKind, AgentSpec, ConfirmationPolicy, ConversationChanged, EventSource, Limits
from broker.runtime import UsageError
from broker.store import Store
from broker.tools import ToolOffers
from deckhands.client.known_agents import require_agent, require_plugins
from deckhands.client.tasks import inputs

MAX_TEXT_CHARS = 2_000
"""The limit for the reason of a change, a rejection or a command, and for its author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The parts of a conversation to change; None leaves a part as it is.

    Attributes:
        agent: its name, or its whole specification.
        loop: `sdk` or `legacy`: the agent's counterpart in the other loop continues.
        tools: keys or patterns of tools that tool workers offer, to be added.
        title: the name for listings.
        by: the name of the user who makes the change.
        reason: the reason for the change.
    """

    agent: AgentSpec | str | None = None
    loop: AgentKind | None = None
    confirmation: ConfirmationPolicy | None = None
    analyzer: str | None = None
    limits: Limits | None = None
    tools: Sequence[str] = ()
    labels: Mapping[str, str] | None = None
    title: str | None = None
    by: str = ""
    reason: str = ""

    @property
    def has_parts(self) -> bool:
        """Whether anything is to change."""
        given = (self.agent, self.loop, self.confirmation, self.analyzer, self.limits, self.labels, self.title)
        return bool(self.tools) or any(part is not None for part in given)

    async def event(self, store: Store, *, offers_limit_seconds: float) -> ConversationChanged:
        """Return the event that records the change.

        Args:
            offers_limit_seconds: how long a tool may be missing.

        Raises:
            UsageError: a part is invalid, or no running worker knows the agent, the policy, the analyzer or a tool.
        """
        parts: dict[str, Any] = {"by": check_note(self.by, "by"), "reason": check_note(self.reason, "reason")}
        if self.agent is not None:
            parts["agent"] = inputs.to_agent_spec(self.agent, None)
            await require_agent(store, parts["agent"])
        if self.loop is not None:
            if self.loop not in get_args(AgentKind):
                raise UsageError(f"The argument loop is {ascii(self.loop)[:100]}.", remedy="Pass 'sdk' or 'legacy'.")
            parts["loop"] = self.loop
        if self.confirmation is not None:
            remedy = "Pass ConfirmationPolicy(mode=…)."
            parts["confirmation"] = inputs.check_type(ConfirmationPolicy, self.confirmation, "confirmation", remedy)
        if self.analyzer is not None:
            parts["analyzer"] = inputs.to_analyzer(inputs.check_text(self.analyzer, "analyzer"))
        await require_plugins(store, self.confirmation, analyzer=self.analyzer)
        if self.limits is not None:
            parts["limits"] = inputs.to_limits(self.limits)
        if self.labels is not None:
            parts["labels"] = dict(inputs.to_labels(self.labels))
        if self.title is not None:
            parts["title"] = inputs.check_title(self.title)
        names = inputs.to_tool_keys(self.tools)
        if names:
            parts["tools"] = await ToolOffers(store).choose(names, limit_seconds=offers_limit_seconds)
        if not self.has_parts:
            raise UsageError(
                "The request names no setting to change.",
                remedy="Pass agent, loop, confirmation, analyzer, limits, tools, labels, title or model.",
            )
        return ConversationChanged(source=EventSource.USER, **parts)


def check_note(text: str, name: str) -> str | None:
    """Return a user's note about their own request, checked; None: there is none.

    Raises:
        UsageError: it is not a text, or too long.
    """
    said = inputs.check_text(text, name).strip()
    if len(said) > MAX_TEXT_CHARS:
        raise UsageError(f"The {name} has {len(said):,} characters; the limit is {MAX_TEXT_CHARS:,}.")
    return said or None
