"""Saves the state of a shell as a script: umask, functions, exported variables and aliases.

The shell writes the script into a separate file. Variables that the workspace itself sets are left out while they
have their initial value, because they may differ in another workspace.

Does not: save other variables, shell options, history or background jobs.
"""

from __future__ import annotations

import os
import stat

from tool_worker.host.configuration import HostConfiguration
from tool_worker.host.shell.command_marks import quote

SCRIPT_LIMIT_BYTES = 128 * 1024
OWN_VARIABLES = "PWD OLDPWD SHLVL _ TMPDIR DECKHANDS_HOST_ID"
# Aliases come last: bash would replace their names in the functions that it reads.
SAVE = "\\builtin umask -p; \\builtin declare -f; \\builtin declare -Fx; \\builtin declare -px; \\builtin alias -p"


def make_capture_command(configuration: HostConfiguration, file: str) -> str:
    """Return the command that writes the state of its shell to a new file."""
    initial = "".join(
        f'[[ "${{{name}-}}" == {quote(value)} ]] && \\builtin unset -v {name}; '
        for name, value in configuration.environment.items()
    )
    return f"( \\builtin unset -v {OWN_VARIABLES}; {initial}{SAVE} ) >| {quote(file)} 2>/dev/null"


def take_capture(file: str) -> str | None:
    """Return the content of the file, and remove it; None if it is missing, unfit or too long."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        os.unlink(file)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = os.read(descriptor, SCRIPT_LIMIT_BYTES + 1) if is_file else b""
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if not content or len(content) > SCRIPT_LIMIT_BYTES or b"\0" in content:
        return None
    return content.decode("utf-8", "replace")
