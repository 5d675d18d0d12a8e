"""Context editing and compaction: the parts of a long prompt that Claude's provider drops or summarizes.

Both are in beta at Anthropic. The names of edits and headers are those of its documentation, including their dates.

Holds: an edit is sent only if it is configured. The provider's own defaults apply to unset fields.
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
"""Minimum trigger of a compaction; the provider refuses less."""
INSTRUCTIONS_LIMIT_CHARS = 20_000

Fields = dict[str, Any]


class ToolUseClearing(BaseModel):
    """Drops tool results from a prompt, oldest first.

    Attributes:
        trigger_tokens: the prompt length that triggers it.
        trigger_tool_uses: alternatively, the number of tool uses that triggers it.
        keep: the number of latest tool uses that keep their results.
        clear_at_least_tokens: drop nothing if less than this can be dropped, because dropping invalidates the prompt
            cache.
        exclude_tools: tools whose results stay.
        clear_tool_inputs: also drop the tools' inputs.
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
        """The edit as sent to the provider."""
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
    """Drops thinking blocks from a prompt.

    Attributes:
        keep_turns: the number of latest turns whose thinking stays; `all` for every turn; None for the provider's
            default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_turns: int | Literal["all"] | None = None

    @field_validator("keep_turns")
    @classmethod
    def _keeps_one(cls, turns: int | Literal["all"] | None) -> int | Literal["all"] | None:
        if isinstance(turns, int) and turns < 1:
            raise ValueError("the latest turn always keeps its thinking; set 1 or more")
        return turns

    @property
    def edit(self) -> Fields:
        """The edit as sent to the provider."""
        fields: Fields = {"type": "clear_thinking_20251015"}
        if self.keep_turns == "all":
            return fields | {"keep": "all"}
        return fields if self.keep_turns is None else fields | {"keep": _count("thinking_turns", self.keep_turns)}


class Compaction(BaseModel):
    """Lets the provider summarize the conversation so far.

    Attributes:
        trigger_tokens: the prompt length that triggers it; None means the provider's 150,000.
        instructions: the content of a summary, in place of the provider's own instructions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    trigger_tokens: int | None = Field(default=None, ge=LEAST_TRIGGER_TOKENS)
    instructions: str | None = Field(default=None, min_length=1, max_length=INSTRUCTIONS_LIMIT_CHARS)

    @property
    def edit(self) -> Fields:
        """The edit as sent to the provider."""
        fields: Fields = {"type": COMPACT}
        if self.trigger_tokens is not None:
            fields["trigger"] = _count("input_tokens", self.trigger_tokens)
        return fields | ({"instructions": self.instructions} if self.instructions else {})


class ContextManagementSpec(BaseModel):
    """The edits to request; `true` requests the provider's defaults.

    Attributes:
        clear_thinking: sent first, as the provider requires.
        clear_tool_uses: see `ToolUseClearing`.
        compact: see `Compaction`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    clear_thinking: ThinkingClearing | None = None
    clear_tool_uses: ToolUseClearing | None = None
    compact: Compaction | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_enough(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return {} if value else None
        return value

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
        """The request fields for the edits."""
        return {"context_management": {"edits": self._edits}}

    @property
    def betas(self) -> list[str]:
        """The names for the beta header."""
        is_editing = self.clear_thinking is not None or self.clear_tool_uses is not None
        return [EDITING_BETA] * is_editing + [COMPACTION_BETA] * (self.compact is not None)


def add_betas(headers: Mapping[str, str], spec: ContextManagementSpec | None) -> dict[str, str]:
    """Return headers whose beta header also names the given features."""
    if spec is None:
        return dict(headers)
    named = [value for name, value in headers.items() if name.lower() == BETA_HEADER]
    others = {name: value for name, value in headers.items() if name.lower() != BETA_HEADER}
    betas = [beta.strip() for value in named for beta in value.split(",")]
    return others | {BETA_HEADER: ",".join(dict.fromkeys([*filter(None, betas), *spec.betas]))}


def is_compacting(fields: Mapping[str, Any]) -> bool:
    """Return whether a request asks for compaction; `completion_kwargs` may have set the fields."""
    found = fields.get("context_management")
    edits = found.get("edits") if isinstance(found, Mapping) else None
    listed = edits if isinstance(edits, list) else []
    return any(isinstance(edit, Mapping) and edit.get("type") == COMPACT for edit in listed)


def _count(kind: str, value: int) -> Fields:
    return {"type": kind, "value": value}
