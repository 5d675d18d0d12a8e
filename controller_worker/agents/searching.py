"""The tools of agents that only look: grep, glob and view (OpenHands 9.2).

Holds: whatever a model writes as pattern or path is one word for the shell, and no option of a program.
Differs: where ripgrep is not installed, find and grep answer the same, but for what `.gitignore` says, because not
every workspace has it. Patterns with a slash are looked for anywhere below `path`, because ripgrep would look for them
below the shell's directory only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from broker.contract.actions import CmdRunAction
from broker.contract.file_events import FileReadAction, FileReadSource
from broker.specs.tool_arguments import optional_text, required_text
from broker.specs.tool_specs import ToolSpec
from controller_worker.agents.path_patterns import extended_regex

MAX_FILES = 100


def grep_action(arguments: Mapping[str, Any]) -> CmdRunAction:
    """Return the command of a search for content."""
    pattern = shlex.quote(required_text(arguments, "pattern", "grep"))
    path = optional_text(arguments, "path", "grep", ".")
    include = _below(path, optional_text(arguments, "include", "grep", ""))
    only = f" -g {shlex.quote(include)}" if include else ""
    return _search(
        f"rg -li{only} --sortr=modified -e {pattern} -- {shlex.quote(path)}",
        f"{_found(path, include)} | xargs -0r grep -liIP -e {pattern} --",
    )


def glob_action(arguments: Mapping[str, Any]) -> CmdRunAction:
    """Return the command of a search for files."""
    path = optional_text(arguments, "path", "glob", ".")
    pattern = _below(path, required_text(arguments, "pattern", "glob"))
    return _search(
        f"rg --files -g {shlex.quote(pattern)} --sortr=modified -- {shlex.quote(path)}",
        f"{_found(path, pattern)} | tr '\\0' '\\n'",
    )


def view_action(arguments: Mapping[str, Any]) -> FileReadAction:
    """Return the view of a file or directory."""
    return FileReadAction(
        path=required_text(arguments, "path", "view"),
        impl_source=FileReadSource.OH_ACI,
        view_range=arguments.get("view_range"),
    )


def _below(path: str, pattern: str) -> str:
    """Return a pattern of paths for ripgrep, to which those with a slash begin in the directory of the shell."""
    if path == "." or "/" not in pattern or pattern.startswith(("/", "!", "**/")):
        return pattern
    return f"**/{pattern}"


def _found(path: str, pattern: str) -> str:
    """Return the command that finds what ripgrep would, those changed last first, each ended by a NUL."""
    start = (path if path.startswith(("/", ".")) else f"./{path}").rstrip("/") or "/"
    start_only = re.sub(r"([*?\[\\])", r"\\\1", start)
    is_not, wanted = ("! ", pattern[1:]) if pattern.startswith("!") else ("", pattern)
    regex = f"{re.escape(start.rstrip('/'))}/{extended_regex(wanted)}"
    itself = f"-path {shlex.quote(start_only)}"
    chosen = f"\\( {itself} -o {is_not}-regex {shlex.quote(regex)} \\) " if pattern else ""
    return (
        f"find {shlex.quote(start)} -regextype posix-extended \\( -name '.?*' ! {itself} \\) -prune -o "
        f"-type f {chosen}-printf '%T@\\t%p\\0' | sort -zrn | cut -zf2-"
    )


def _search(by_ripgrep: str, otherwise: str) -> CmdRunAction:
    header = shlex.quote(f"Below are the execution results of the search command: {by_ripgrep}\n")
    either = f"if command -v rg > /dev/null; then {by_ripgrep}; else {otherwise}; fi"
    # It reads to the end: `head` would stop a search that still has lines to write, and the search would complain.
    return CmdRunAction(command=f"echo {header}; {{ {either}; }} | sed -n 1,{MAX_FILES}p")


GREP = ToolSpec(
    name="grep",
    description=(
        "Search the contents of files by a regular expression, without regard to upper and lower case. Returns the "
        f"paths of files that match, those changed last first, at most {MAX_FILES}. Use `include` to look at some "
        "files only."
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
    convert=grep_action,
)

GLOB = ToolSpec(
    name="glob",
    description=(
        "Find files by a pattern of their paths, such as `**/*.py` or `src/*.ts`. Returns the paths, those changed "
        f"last first, at most {MAX_FILES}."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "The pattern."},
            "path": {"type": "string", "description": "The directory to search; the current one if not given."},
        },
        "required": ["pattern"],
    },
    convert=glob_action,
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
    convert=view_action,
)
