"""Here-documents that a command leaves unfinished. Their further lines are typed with `is_input`, as at a terminal.

Holds: a command without an unfinished here-document is unchanged. Bash itself decides which ones are finished; this
module only recognises the commands for which bash must be asked.
"""

from __future__ import annotations

import re

from tool_worker.host.shell.command_marks import quote

_OPERATOR = re.compile(r"""(?<!<)<<(?!<)(-?)[ \t]*(?:'([^'\n]*)'|"([^"\n]*)"|\\?([^\s'"\\;&|<>()]+))""")
# The variables have long names, because a `readonly` one of the shell could not be set.
_READ_REST = r"""\builtin eval "$(
_deckhands_command={command}
while [[ $(\builtin printf %s "$_deckhands_command" | LC_ALL=C /bin/bash -n 2>&1) == \
*"here-document at line "*" delimited by end-of-file"* ]] && IFS= \builtin read -r _deckhands_line; do
    _deckhands_command+=$'\n'$_deckhands_line
done
\builtin printf %s "$_deckhands_command"
)" """


def finish_here_documents(command: str) -> str:
    """Return a command that reads missing lines from the terminal first; the command itself if none can be missing."""
    return _READ_REST.format(command=quote(command)) if _may_be_unfinished(command) else command


def _may_be_unfinished(command: str) -> bool:
    """Return whether a here-document operator has no later line with its delimiter."""
    positions: dict[str, int] = {}
    indented: dict[str, int] = {}
    start = 0
    for line in command.split("\n"):
        positions[line] = start
        indented[line.lstrip("\t")] = start
        start += len(line) + 1
    for match in _OPERATOR.finditer(command):
        delimiter = match[2] or match[3] or match[4] or ""
        if (indented if match[1] else positions).get(delimiter, 0) < match.end():
            return True
    return False
