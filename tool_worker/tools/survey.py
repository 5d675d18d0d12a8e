"""The survey: reads a workspace's instructions for agents, by one command in a separate shell.

Holds: the command changes nothing and reads a limited amount. Names and texts are encoded in base64, so no byte is
lost.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from broker.contract import (
    AGENT_FOLDERS,
    FILE_MARK,
    HOOK_SCRIPT,
    INSTRUCTION_FILES,
    MAX_FILE_BYTES,
    MAX_HEAD_BYTES,
    MAX_NESTED_DEPTH,
    MAX_NESTED_FILES,
    MAX_SKILLS,
    MAX_SURVEY_BYTES,
    NESTED_FILES,
    SCRIPT_MARK,
    SERVER_FILES,
    SETUP_SCRIPT,
    SKILL_FOLDERS,
    Observation,
    SurveyAction,
    SurveyObservation,
)
from tool_worker.tools.tool import HostRequest, Tool

TIMEOUT_SECONDS = 20.0
LINE_FEED = "-name '*\n*'"
"""Names that the list of files, which has a line for each, cannot hold."""
MAX_SERVER_FILES = 20
"""Files that name MCP servers, of each folder of skills."""
NESTED_SECONDS = 5
"""For the search in all folders; of a larger workspace, the files found until then count."""


def command() -> str:
    """Return the command, which prints a line per file with its path and the start of its text in base64."""
    names, nested, servers = map(_match_names, (INSTRUCTION_FILES, NESTED_FILES, SERVER_FILES))
    return (
        # Files of a skill that is a folder are no skills.
        'is_part() { p=${1%/*}; while [ "$p" != "$d" ]; do case $p in "$d"/*) ;; *) return 0;; esac; '
        'if [ -f "$p/SKILL.md" ] || [ -f "$p/skill.md" ]; then return 0; fi; p=${p%/*}; done; return 1; }; '
        # Of a skill that is a folder, the front matter.
        "start() { case $1 in */[Ss][Kk][Ii][Ll][Ll].[Mm][Dd]) "
        f'head -c {MAX_HEAD_BYTES} "$1" | sed \'1!{{/^---/q;}}\';; *) head -c {MAX_FILE_BYTES} "$1";; esac; }}; '
        'encode() { base64 | tr -d "\\n"; }; '
        f'for d in . {" ".join(SKILL_FOLDERS)} ./ {" ".join(AGENT_FOLDERS)}; do if [ "$d" = . ]; then '
        f"find . -maxdepth 1 \\( {names} \\) -type f | LC_ALL=C sort; "
        f'elif [ "$d" = ./ ]; then timeout {NESTED_SECONDS} find . -maxdepth {MAX_NESTED_DEPTH} '
        f"\\( -name '.?*' -o -name node_modules -o {LINE_FEED} \\) -prune -o "
        f"-path './*/*' \\( {nested} \\) -type f -print | LC_ALL=C sort | head -n {MAX_NESTED_FILES}; "
        f'elif [ -d "$d" ]; then {{ find "$d" {LINE_FEED} -prune -o \\( {servers} \\) -type f -print | LC_ALL=C sort | '
        f"head -n {MAX_SERVER_FILES}; "
        f'find "$d" {LINE_FEED} -prune -o -iname skill.md -type f -print | LC_ALL=C sort; '
        f'find "$d" {LINE_FEED} -prune -o -iname "*.md" ! -iname skill.md -type f -print | LC_ALL=C sort | '
        'while IFS= read -r f; do is_part "$f" || printf "%s\\n" "$f"; done; } | '
        f"head -n {MAX_SKILLS}; fi; done | {{ left={MAX_SURVEY_BYTES}; "
        'while IFS= read -r f; do p=$(printf %s "${f#./}" | encode); text=$(start "$f" | encode); '
        "left=$((left - ${#p} - ${#text})); "
        f"if [ $left -lt 0 ]; then printf '{FILE_MARK} %s\\n' \"$p\"; break; fi; "
        f'printf \'{FILE_MARK} %s %s\\n\' "$p" "$text"; done; }}; '
        f"for f in {SETUP_SCRIPT} {HOOK_SCRIPT}; do if [ -f $f ]; then echo {SCRIPT_MARK} $f; fi; done"
    )


def _match_names(files: Iterable[str]) -> str:
    return " -o ".join(f"-iname {shlex.quote(name)}" for name in files)


class SurveyWorkspace(Tool):
    """Read a workspace's instruction files."""

    action = SurveyAction

    def request(self, action: SurveyAction) -> HostRequest:  # noqa: ARG002  (there is nothing to choose)
        """See `Tool.request`."""
        arguments = {
            "command": command(),
            "is_input": False,
            "timeout": TIMEOUT_SECONDS,
            "blocking": True,
            "cwd": None,
            "is_static": True,
        }
        return HostRequest("bash", arguments)

    def observe(self, action: SurveyAction, result: Mapping[str, Any]) -> Observation:  # noqa: ARG002
        """See `Tool.observe`."""
        lines = result["content"].splitlines(keepends=True)
        scripts = [line.removeprefix(SCRIPT_MARK).strip() for line in lines if line.startswith(SCRIPT_MARK)]
        return SurveyObservation(
            content="".join(line for line in lines if not line.startswith(SCRIPT_MARK)),
            is_complete=result["metadata"].get("exit_code") == 0,
            scripts=tuple(name for name in (SETUP_SCRIPT, HOOK_SCRIPT) if name in scripts),
        )
