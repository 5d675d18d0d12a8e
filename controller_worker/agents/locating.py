"""The tools of LocAgent, by which code is found (OpenHands 9.3: names and parameters; the words are ours).

Differs: the original runs them as cells in the agent's kernel, where they can do anything; here they are questions to a
program that only reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract.code_search import CodeSearchAction
from broker.contract.tool_specs import ToolSpec
from controller_worker.agents.call_arguments import refuse_unknown, require

_NAMES = "Directories and files are named by their path, such as `shop/till.py`; classes and functions by that and "
_NAMES += "their name, such as `shop/till.py:Till.open`. A part of a name is enough where only one thing has it."

SEARCH_CODE_SNIPPETS = ToolSpec(
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

GET_ENTITY_CONTENTS = ToolSpec(
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

EXPLORE_TREE_STRUCTURE = ToolSpec(
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


def code_search_action(tool: ToolSpec, arguments: Mapping[str, Any]) -> CodeSearchAction:
    """Return the question of a call.

    Raises:
        ToolCallError: an argument is missing, or there is none of that name.
    """
    require(arguments, tool.parameters["required"], tool.name)
    refuse_unknown(arguments, tool.parameters["properties"], tool.name)
    return CodeSearchAction(question=tool.name, arguments=dict(arguments))
