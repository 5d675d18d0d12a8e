"""Queries of the workspace's code, their results, and the tools for them (OpenHands 9.2, 9.3: names, parameters).

Differs: the original runs these tools as cells in the agent's kernel, with full access. Here they are queries to a
read-only program. `grep` returns the lines, not only the file names, because an agent would read each file next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from broker.contract.actions import RiskyAction
from broker.contract.events import JsonObject, Observation
from broker.contract.tool_arguments import RISK, refuse_unknown, require
from broker.contract.tool_specs import OutcomePolicy, ToolSpec


class CodeSearchAction(RiskyAction):
    """Query the workspace's code: its contents and its dependencies. It changes nothing.

    Attributes:
        question: `grep`, `glob`, `search_code_snippets`, `get_entity_contents` or `explore_tree_structure`.
    """

    kind: Literal["action.search_code"] = "action.search_code"
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.IDEMPOTENT
    question: str
    arguments: JsonObject = Field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Looking through the code ({self.question}): {', '.join(map(str, self.arguments.values()))}"


class CodeSearchObservation(Observation):
    """The result of a code query."""

    kind: Literal["observation.search_code"] = "observation.search_code"
    question: str


def _query_tool(name: str, description: str, parameters: dict[str, Any]) -> ToolSpec:
    """Return the tool for the query of this name."""

    def convert(arguments: Mapping[str, Any]) -> CodeSearchAction:
        # Models that estimate the risk of other tools pass it here too.
        arguments = {key: value for key, value in arguments.items() if key != RISK}
        require(arguments, parameters["required"], name)
        refuse_unknown(arguments, parameters["properties"], name)
        return CodeSearchAction(question=name, arguments=arguments)

    return ToolSpec(name, description, parameters, convert)


GREP = _query_tool(
    name="grep",
    description=(
        "Search file contents by line with a regular expression (Python's syntax). Shows matching lines with their "
        "numbers, files changed last first. Skips hidden files and installed packages."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "The regular expression."},
            "path": {"type": "string", "description": "File or directory. Default: the current one."},
            "include": {"type": "string", "description": "Which files, such as `*.py` or `*.{ts,tsx}`."},
            "context": {"type": "integer", "description": "Lines around each match, up to 10."},
            "case_sensitive": {"type": "boolean", "description": "Default false."},
        },
        "required": ["pattern"],
    },
)

GLOB = _query_tool(
    name="glob",
    description="Find files by path pattern, such as `**/*.py` or `src/*.ts`; those changed last first, at most 100.",
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "The pattern."},
            "path": {"type": "string", "description": "The directory. Default: the current one."},
        },
        "required": ["pattern"],
    },
)

_NAMES = "Directories and files are named by their path, such as `shop/till.py`; classes and functions by that and "
_NAMES += "their name, such as `shop/till.py:Till.open`. A part of a name is enough where only one thing has it."

SEARCH_CODE_SNIPPETS = _query_tool(
    name="search_code_snippets",
    description=(
        "Find code by words or by line numbers. A word that names a class, function or file shows it; besides, the "
        "lines that contain the word are listed with what they stand in. Line numbers show the code around them."
    ),
    parameters={
        "type": "object",
        "properties": {
            "search_terms": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Names or words, each looked for by itself, without regard to upper and lower case.",
            },
            "line_nums": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "Lines of one file, whose path is in `file_path_or_pattern`.",
            },
            "file_path_or_pattern": {
                "type": "string",
                "description": "Where to look: a path, or a pattern such as `src/**/*.py`. Default `**/*.py`.",
            },
        },
        "required": [],
    },
)

GET_ENTITY_CONTENTS = _query_tool(
    name="get_entity_contents",
    description=(
        f"Show files, classes and functions whole, with line numbers; of a long one, what it consists of. {_NAMES}"
    ),
    parameters={
        "type": "object",
        "properties": {
            "entity_names": {
                "type": "array",
                "items": {"type": "string"},
                "description": "What to show.",
            },
        },
        "required": ["entity_names"],
    },
)

EXPLORE_TREE_STRUCTURE = _query_tool(
    name="explore_tree_structure",
    description=(
        "Walk from entities to what they contain, import, call and inherit (downstream), or to what contains, "
        f"imports, calls and inherits them (upstream). {_NAMES} `.` is the whole workspace. Only Python files have "
        "classes and functions here, and a call is shown only where names and imports tell what is called."
    ),
    parameters={
        "type": "object",
        "properties": {
            "start_entities": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Where to begin.",
            },
            "direction": {
                "type": "string",
                "enum": ["downstream", "upstream", "both"],
                "description": "Which way to go. Default downstream.",
            },
            "traversal_depth": {
                "type": "integer",
                "description": "How many steps to go; -1: to the end. Default 2.",
            },
            "entity_type_filter": {
                "type": "array",
                "items": {"type": "string", "enum": ["directory", "file", "class", "function"]},
                "description": "Show only these. Default all.",
            },
            "dependency_type_filter": {
                "type": "array",
                "items": {"type": "string", "enum": ["contains", "imports", "invokes", "inherits"]},
                "description": "Follow only these. Default all.",
            },
        },
        "required": ["start_entities"],
    },
)
