"""What Claude's provider may leave out of a long prompt, or summarise: context editing and compaction.

Both are in beta at Anthropic; the names of edits and headers are those of its documentation, with their dates.

Holds: an edit that is not asked for is not sent; the provider's own defaults fill what is not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

EDITING_BETA = "context-management-2025-06-27"
COMPACTION_BETA = "compact-2026-01-12"
BETA_HEADER = "anthropic-beta"
COMPACT = "compact_20260112"
LEAST_TRIGGER_TOKENS = 50_000
"""Of a compaction; the provider refuses less."""
INSTRUCTIONS_LIMIT_CHARS = 20_000

Fields = dict[str, Any]


class ToolUseClearing(BaseModel):
    """Which results of tools are left out of a prompt, the oldest first.

    Attributes:
        trigger_tokens: the prompt's length from which it happens.
        trigger_tool_uses: or the number of tool uses in it.
        keep: how many of the latest tool uses keep their results.
        clear_at_least_tokens: unless so much can be left out, nothing is, and the provider's cache stays of use.
        exclude_tools: results of these tools stay.
        clear_tool_inputs: what the tools were called with is left out, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    trigger_tokens: int | None = Field(default=None, ge=1)
    trigger_tool_uses: int | None = Field(default=None, ge=1)
    keep: int | None = Field(default=None, ge=0)
    clear_at_least_tokens: int | None = Field(default=None, ge=1)
    exclude_tools: tuple[str, ...] = ()
    clear_tool_inputs: bool = False

    @model_validator(mode="after")
    def _has_one_trigger(self) -> Self:
        if self.trigger_tokens is not None and self.trigger_tool_uses is not None:
            raise ValueError("set trigger_tokens or trigger_tool_uses, not both")
        return self

    @property
    def edit(self) -> Fields:
        """As it is sent."""
        fields: Fields = {"type": "clear_tool_uses_20250919"}
        if self.trigger_tokens is not None:
            fields["trigger"] = _count("input_tokens", self.trigger_tokens)
        if self.trigger_tool_uses is not None:
            fields["trigger"] = _count("tool_uses", self.trigger_tool_uses)
        if self.keep is not None:
            fields["keep"] = _count("tool_uses", self.keep)
        if self.clear_at_least_tokens is not None:
            fields["clear_at_least"] = _count("input_tokens", self.clear_at_least_tokens)
        if self.exclude_tools:
            fields["exclude_tools"] = list(self.exclude_tools)
        return fields | ({"clear_tool_inputs": True} if self.clear_tool_inputs else {})


class ThinkingClearing(BaseModel):
    """Whose thoughts are left out of a prompt.

    Attributes:
        keep_turns: how many of the latest turns keep theirs; `all` keeps every thought; None leaves it to the provider.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_turns: int | Literal["all"] | None = None

    @field_validator("keep_turns")
    @classmethod
    def _keeps_one(cls, turns: int | Literal["all"] | None) -> int | Literal["all"] | None:
        if isinstance(turns, int) and turns < 1:
            raise ValueError("the latest turn always keeps its thoughts; give 1 or more")
        return turns

    @property
    def edit(self) -> Fields:
        """As it is sent."""
        fields: Fields = {"type": "clear_thinking_20251015"}
        if self.keep_turns == "all":
            return fields | {"keep": "all"}
        return fields if self.keep_turns is None else fields | {"keep": _count("thinking_turns", self.keep_turns)}


class Compaction(BaseModel):
    """When the provider summarises what a conversation was so far.

    Attributes:
        trigger_tokens: the prompt's length from which it happens; None means the provider's 150,000.
        instructions: what a summary should hold, in place of the provider's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    trigger_tokens: int | None = Field(default=None, ge=LEAST_TRIGGER_TOKENS)
    instructions: str | None = Field(default=None, min_length=1, max_length=INSTRUCTIONS_LIMIT_CHARS)

    @property
    def edit(self) -> Fields:
        """As it is sent."""
        fields: Fields = {"type": COMPACT}
        if self.trigger_tokens is not None:
            fields["trigger"] = _count("input_tokens", self.trigger_tokens)
        return fields | ({"instructions": self.instructions} if self.instructions else {})


class ContextManagementSpec(BaseModel):
    """What is left out or summarised; `true` asks for the provider's own values.

    Attributes:
        clear_thinking: sent first, as the provider wants it.
        clear_tool_uses: see there.
        compact: see there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    clear_thinking: ThinkingClearing | None = None
    clear_tool_uses: ToolUseClearing | None = None
    compact: Compaction | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_enough(cls, value: Any) -> Any:
        return {} if value is True else None if value is False else value

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self._edits:
            raise ValueError("name clear_thinking, clear_tool_uses or compact")
        return self

    @property
    def _edits(self) -> list[Fields]:
        parts = (self.clear_thinking, self.clear_tool_uses, self.compact)
        return [part.edit for part in parts if part is not None]

    @property
    def fields(self) -> Fields:
        """Of a request."""
        return {"context_management": {"edits": self._edits}}

    @property
    def betas(self) -> list[str]:
        """What the beta header has to name."""
        is_editing = self.clear_thinking is not None or self.clear_tool_uses is not None
        return [EDITING_BETA] * is_editing + [COMPACTION_BETA] * (self.compact is not None)


def with_betas(headers: Mapping[str, str], spec: ContextManagementSpec | None) -> dict[str, str]:
    """Return headers that name what the settings need, beside what is named in them already."""
    if spec is None:
        return dict(headers)
    named = [value for name, value in headers.items() if name.lower() == BETA_HEADER]
    others = {name: value for name, value in headers.items() if name.lower() != BETA_HEADER}
    betas = [beta.strip() for value in named for beta in value.split(",")]
    return others | {BETA_HEADER: ",".join(dict.fromkeys([*filter(None, betas), *spec.betas]))}


def compacts(fields: Mapping[str, Any]) -> bool:
    """Say whether the fields of a request ask for compactions; `completion_kwargs` may have set them."""
    found = fields.get("context_management")
    edits = found.get("edits") if isinstance(found, Mapping) else None
    listed = edits if isinstance(edits, list) else []
    return any(isinstance(edit, Mapping) and edit.get("type") == COMPACT for edit in listed)


def _count(kind: str, value: int) -> Fields:
    return {"type": kind, "value": value}
