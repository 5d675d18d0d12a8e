"""The tools of agents that only look: grep, glob and view (OpenHands 9.2).

Holds: whatever a model writes as pattern or path is one word for the shell.
Differs: where ripgrep is not installed, grep and find answer instead, because not every workspace has it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from broker.actions import CmdRunAction
from broker.file_events import FileReadAction, FileReadSource
from broker.tool_specs import ToolSpec
from controller_worker.agents.call_arguments import optional_text, required_text

MAX_FILES = 100

GREP = ToolSpec(
    name="grep",
    description=(
        "Search the contents of files by a regular expression, without regard to upper and lower case. Returns the "
        "paths of files that match, those changed last first, at most 100. Use `include` to look at some files only."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "The regular expression."},
            "path": {"type": "string", "description": "The directory to search; the current one if not given."},
            "include": {"type": "string", "description": "Which files to look at, such as `*.py` or `*.{ts,tsx}`."},
        },
        "required": ["pattern"],
    },
)

GLOB = ToolSpec(
    name="glob",
    description=(
        "Find files by a pattern of their paths, such as `**/*.py` or `src/*.ts`. Returns the paths in order, at most "
        "100."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "The pattern."},
            "path": {"type": "string", "description": "The directory to search; the current one if not given."},
        },
        "required": ["pattern"],
    },
)

VIEW = ToolSpec(
    name="view",
    description="Show a file with line numbers, or a directory two levels deep. Long output is cut.",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Absolute path of the file or directory."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "First and last line of a file, from 1; -1 as last: to the end.",
            },
        },
        "required": ["path"],
    },
)


def grep_action(arguments: Mapping[str, Any]) -> CmdRunAction:
    """Return the command of a search for content."""
    pattern = shlex.quote(required_text(arguments, "pattern", GREP.name))
    path = shlex.quote(optional_text(arguments, "path", GREP.name, "."))
    include = optional_text(arguments, "include", GREP.name, "")
    only = f" -g {shlex.quote(include)}" if include else ""
    only_of_grep = f" --include={shlex.quote(include)}" if include else ""
    return _search(
        f"rg -li{only} --sortr=modified -e {pattern} -- {path}", f"grep -rliIE{only_of_grep} -e {pattern} -- {path}"
    )


def glob_action(arguments: Mapping[str, Any]) -> CmdRunAction:
    """Return the command of a search for files."""
    pattern = required_text(arguments, "pattern", GLOB.name)
    path = optional_text(arguments, "path", GLOB.name, ".")
    names = pattern.rpartition("/")[2] or "*"
    return _search(
        f"rg --files -g {shlex.quote(pattern)} --sortr=modified -- {shlex.quote(path)}",
        f"find {shlex.quote(path)} -name {shlex.quote(names)} -type f -not -path '*/.*'",
    )


def view_action(arguments: Mapping[str, Any]) -> FileReadAction:
    """Return the view of a file or directory."""
    return FileReadAction(
        path=required_text(arguments, "path", VIEW.name),
        impl_source=FileReadSource.OH_ACI,
        view_range=arguments.get("view_range"),
    )


def _search(by_ripgrep: str, otherwise: str) -> CmdRunAction:
    header = shlex.quote(f"Below are the execution results of the search command: {by_ripgrep}\n")
    either = f"if command -v rg > /dev/null; then {by_ripgrep}; else {otherwise}; fi"
    return CmdRunAction(command=f"echo {header}; {{ {either}; }} | head -n {MAX_FILES}")
