"""Tools as shared by both sides of the queue: the prompt side offers a tool, the executing side runs it.

The built-in tools have the names and parameters of OpenHands (9.1); the texts are ours.

Holds: a tool's name, JSON Schema and outcome policy are the same in the prompt and in the worker. A tool that is not
part of an agent reaches a conversation as data (`ToolOffer`), so a controller never imports its code. The offer's
fingerprint shows later whether the worker's tool is still the one that was offered.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_DESCRIPTION_CHARS = 8_000
MAX_SCHEMA_CHARS = 14_000
SERVER_NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
MAX_HEADERS = 20
_PLAIN_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(/[!-~]*)?")
_SECRET_TEXT = re.compile(r"[ -~]*\$\{[A-Za-z_][A-Za-z0-9_]*\}[ -~]*")
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


class McpAddress(BaseModel):
    """An MCP server of one conversation: a server of the operator by its name, or an address that the operator allows.

    Attributes:
        url: the address; empty for a server that the tool workers know by the name.
        headers: headers of its requests. Each has `${NAME}` in it, which stands for a secret of the conversation, so
            that no secret is in a log.
        type: the transport: `http` (streamable) or `sse` (the older one).
        tools: names or patterns of its tools.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, Field(max_length=2_000)] = ""
    headers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")], Annotated[str, Field(max_length=1_000)]] = (
        Field(default_factory=dict, max_length=MAX_HEADERS)
    )
    type: Literal["http", "sse"] = "http"
    tools: Annotated[tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=128)] = ("*",)

    @model_validator(mode="before")
    @classmethod
    def _is_no_program(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "command" in fields:
            raise ValueError("a program is named in the operator's file; name it here without any fields: {}")
        return fields

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url and not _PLAIN_URL.fullmatch(url):
            raise ValueError("write https://HOST/PATH, without a user's name and unusual characters")
        return url

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, text in headers.items():
            if not _SECRET_TEXT.fullmatch(text):
                raise ValueError(
                    f"{name} has no secret in it; write ${{NAME}}, where NAME is one of the task's secrets"
                )
        return headers

    @model_validator(mode="after")
    def _has_address(self) -> McpAddress:
        if self.headers and not self.url:
            raise ValueError("headers need a url: the operator's file has those of a server that it names")
        if any(
            name.lower().startswith(("host", "connection", "content-", "transfer-", "mcp-")) for name in self.headers
        ):
            raise ValueError("the headers Host, Connection, Content-…, Transfer-… and Mcp-… belong to the protocol")
        return self


class ToolOffer(BaseModel):
    """A tool that a tool worker offers to conversations, as data.

    Attributes:
        key: the identifier that users select it by: its name, or `<server>/<name>` for a tool of an MCP server.
        name: the name in the model's tool calls.
        runner: the kind of executor: our own registry of functions and classes, or an MCP server.
        pool: the tool workers that may run it; empty for those that hold the conversation's workspace.
        server: the server of this conversation that has it; None for a tool that workers offer to all.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: Annotated[str, Field(min_length=1, max_length=200)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    parameters: dict[str, Any] = Field(json_schema_extra=OBJECT_SCHEMA)
    runner: Literal["function", "mcp"] = "function"
    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    outcome: OutcomePolicy = OutcomePolicy.AT_MOST_ONCE
    server: McpAddress | None = None

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


SECURITY_RISK = {
    "type": "string",
    "enum": ["LOW", "MEDIUM", "HIGH"],
    "description": "How dangerous this is: LOW reads or changes only the workspace; MEDIUM changes things the task "
    "needs beyond it, such as installing a package; HIGH may harm the system, leak secrets or cannot be undone.",
}

EXECUTE_BASH = ToolSpec(
    name="execute_bash",
    description=(
        "Run a command in the conversation's bash session. The session keeps its directory, variables and background "
        "programs. Several lines run in order, as a script does. "
        "A command that is silent for a while comes back with exit code -1 and is still running: send an empty "
        "command to see more, text with is_input to answer it (Enter follows by itself; a line break is Enter alone), "
        "or `C-c` with is_input to interrupt it. Start servers and other long jobs with is_background. Very long "
        "output loses its middle; a file that is named has all of it."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "description": "The command. Empty: more output of the running one. `C-c`, `C-d`, `C-z`: that key.",
            },
            "is_input": {
                "type": "string",
                "enum": ["true", "false"],
                "description": "true: the command is typed into the program that is running. Default false.",
            },
            "timeout": {
                "type": "number",
                "description": "Seconds after which the call returns even if the command still runs.",
            },
            "is_background": {
                "type": "boolean",
                "description": "true: return at once. The answer names the job's terminal.",
            },
            "terminal": {
                "type": "string",
                "description": "Another shell, by any name, or a job's. Default `main`.",
            },
            "control": {
                "type": "string",
                "enum": ["list", "kill", "reset"],
                "description": "Instead of a command: list terminals and jobs, or end or restart `terminal`.",
            },
            "security_risk": SECURITY_RISK,
        },
        "required": ["command", "security_risk"],
    },
)

THINK = ToolSpec(
    name="think",
    description=(
        "Write a thought down. Nothing is run and nothing changes. Use it to weigh several ways, to plan, or to sort "
        "out what a failure means."
    ),
    parameters={
        "type": "object",
        "properties": {"thought": {"type": "string", "description": "The thought."}},
        "required": ["thought"],
    },
)

FINISH = ToolSpec(
    name="finish",
    description="End the task: it is done, or you cannot get further. Report what was done, checked and left open.",
    parameters={
        "type": "object",
        "properties": {"message": {"type": "string", "description": "The final report to the person."}},
        "required": ["message"],
    },
)

REQUEST_CONDENSATION = ToolSpec(
    name="request_condensation",
    description=(
        "Have the older part of this conversation replaced by a summary. Use it when much of what was said and shown "
        "no longer matters, such as after one part of a long task."
    ),
    parameters={"type": "object", "properties": {}, "required": []},
)

DELEGATE = ToolSpec(
    name="delegate",
    description=(
        "Hand a task to another agent, which works on it by itself and reports its result. It sees the workspace but "
        "nothing of this conversation: the task must say everything it needs. Several calls in one turn work at the "
        "same time."
    ),
    parameters={
        "type": "object",
        "properties": {
            "agent": {"type": "string", "description": "The agent's name, such as CodeActAgent."},
            "task": {"type": "string", "description": "What to do, and what to report."},
            "background": {
                "type": "boolean",
                "description": "true: continue at once; you get the result when it is ready. Default false.",
            },
            "join": {
                "type": "string",
                "enum": ["all", "any"],
                "description": "With several calls in one turn: wait for all of them (default), or for the first.",
            },
        },
        "required": ["agent", "task"],
    },
)
