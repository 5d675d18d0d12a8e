"""Tools as shared by both sides of the queue: the prompt side offers a tool, the executing side runs it.

Holds: a tool's name, JSON Schema and outcome policy are the same in the prompt and in the worker. A tool that is not
part of an agent reaches a conversation as data (`ToolOffer`), so a controller never imports its code. The offer's
fingerprint shows later whether the worker's tool is still the one that was offered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_DESCRIPTION_CHARS = 8_000
MAX_SCHEMA_CHARS = 14_000
OBJECT_SCHEMA: dict[str, Any] = {"required": ["type"], "properties": {"type": {"const": "object"}}}
"""The JSON Schema of a schema for objects."""
"""Longer texts would be moved out of the event that has to hold them, see `codec.shorten`."""


class OutcomePolicy(StrEnum):
    """The recovery policy for an action whose worker died before its outcome was recorded."""

    IDEMPOTENT = "idempotent"
    """Run it again."""
    CHECKABLE = "checkable"
    """Ask the tool whether the action took effect; run it if not."""
    AT_MOST_ONCE = "at_most_once"
    """Never run it again; report the outcome as unknown."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it.

    Attributes:
        name: the name in the model's tool calls.
        description: for the model.
        parameters: JSON Schema of the arguments, an object.
        convert: returns the action for a call's arguments; it may raise `ToolCallError` or pydantic's
            `ValidationError`. None: the tool leads to no action.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    convert: Callable[[Mapping[str, Any]], BaseModel] | None = field(default=None, compare=False, repr=False)


class ToolOffer(BaseModel):
    """A tool that a tool worker offers to conversations, as data.

    Attributes:
        key: the identifier that users select it by: its name, or `<server>/<name>` for a tool of an MCP server.
        name: the name in the model's tool calls.
        runner: the kind of executor: our own registry of functions and classes, or an MCP server.
        pool: the tool workers that may run it; empty for those that hold the conversation's workspace.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: Annotated[str, Field(min_length=1, max_length=200)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    parameters: dict[str, Any] = Field(json_schema_extra=OBJECT_SCHEMA)
    runner: Literal["function", "mcp"] = "function"
    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    outcome: OutcomePolicy = OutcomePolicy.AT_MOST_ONCE

    @field_validator("parameters")
    @classmethod
    def _check_schema(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if len(_to_canonical_json(parameters)) > MAX_SCHEMA_CHARS:
            raise ValueError(f"the schema has more than {MAX_SCHEMA_CHARS} characters")
        if parameters.get("type") != "object":
            raise ValueError("the schema of the arguments must be of the type object")
        return parameters

    @property
    def fingerprint(self) -> str:
        """A hash of the name, the description and the schema: all that the model sees of the tool."""
        shown = [self.name, self.description, self.parameters]
        return hashlib.sha256(_to_canonical_json(shown).encode()).hexdigest()[:32]

    @property
    def spec(self) -> ToolSpec:
        """The tool as the model sees it."""
        return ToolSpec(self.name, self.description, self.parameters)


def _to_canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
