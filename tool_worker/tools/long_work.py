"""Long work: runs the checks of features, and saves the progress.

Holds: the feature list is written, never read. A link in the workspace cannot redirect the file. Files of the workspace
can change the text of a check's result, but not the result, which is the exit code of a separate shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from broker.contract import (
    FEATURES_FILE,
    INIT_SCRIPT,
    MAX_COMMAND_OUTPUT_CHARS,
    NOTES_FILE,
    FeatureCheckAction,
    FeatureCheckObservation,
    Observation,
    SaveProgressAction,
    SaveProgressObservation,
    truncate_content,
)
from tool_worker.tools.tool import HostRequest, Tool

INIT_SECONDS = 300
COMMIT_SECONDS = 120
SAVE_SECONDS = INIT_SECONDS + 2 * COMMIT_SECONDS
FOLDER = FEATURES_FILE.rpartition("/")[0]
KILLED = "\n[It was killed after {seconds:g} seconds.]"

WRITE = f"""
[ ! -L {FOLDER} ] || rm -f {FOLDER}
mkdir -p {FOLDER}
edited=no
if [ -e {FEATURES_FILE} ] || [ -L {FEATURES_FILE} ] || [ -n "$written" ]; then
    if [ -L {FEATURES_FILE} ] || ! echo "$written  {FEATURES_FILE}" | sha256sum -c --status 2>/dev/null; then
        edited=yes
    fi
fi
rm -rf {FEATURES_FILE}
printf %s "$features" > {FEATURES_FILE}
"""
COMMIT = f"""
git rev-parse --is-inside-work-tree >/dev/null 2>&1 || git init -q . >/dev/null 2>&1
timeout {COMMIT_SECONDS} git add -A . >"$output" 2>&1
committed=$?
if [ $committed = 0 ] && ! git diff --cached --quiet; then
    timeout {COMMIT_SECONDS} git commit -q -m "$message" -- . >>"$output" 2>&1 </dev/null
    committed=$?
fi
"""
START = f"""
echo "# Progress notes ({NOTES_FILE})"
if [ -f {NOTES_FILE} ]; then tail -c 8000 {NOTES_FILE}; else echo "There are none yet."; fi
printf '\\n# Latest commits\\n'
git log --oneline -n 10 2>/dev/null || echo "There are none yet."
printf '\\n# Output of {INIT_SCRIPT}\\n'
if [ -f {INIT_SCRIPT} ]; then
    timeout {INIT_SECONDS} bash {INIT_SCRIPT} >"$output" 2>&1 </dev/null
    status=$?
    tail -c 6000 "$output"
    echo "[{INIT_SCRIPT} ended with exit code $status]"
else
    echo "There is no such script yet."
fi
"""


def make_save_command(action: SaveProgressAction) -> str:
    """Return the script. The first line of its output is: whether the file was edited, the commit's status, its id."""
    values = {"features": action.features, "written": action.written_sha256, "message": action.message}
    return "\n".join(
        [
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            "output=$(mktemp)",
            "edited=no committed=0",
            *([WRITE] if action.features else []),
            *([COMMIT] if action.message else []),
            'echo "$edited $committed $(git rev-parse -q --verify HEAD 2>/dev/null)"',
            'if [ "$committed" != 0 ]; then',
            '    printf "The progress could not be committed:\\n"; tail -c 2000 "$output"',
            "fi",
            *([START] if action.report else []),
            'rm -f "$output"',
        ]
    )


def _make_request(command: str, seconds: float) -> HostRequest:
    arguments = {"command": command, "is_input": False, "timeout": seconds, "blocking": True}
    return HostRequest("bash", {**arguments, "cwd": None, "is_static": True})


class CheckFeature(Tool):
    """Run the check of a feature."""

    action = FeatureCheckAction

    def request(self, action: FeatureCheckAction) -> HostRequest:
        """See `Tool.request`."""
        return _make_request(action.command.strip(), action.timeout)

    def observe(self, action: FeatureCheckAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        content = truncate_content(result["content"], MAX_COMMAND_OUTPUT_CHARS)
        if result["state"] == "hard_timeout":
            content += KILLED.format(seconds=action.timeout)
        exit_code = result["metadata"].get("exit_code", -1)
        return FeatureCheckObservation(content=content, feature_id=action.feature_id, exit_code=exit_code)


class SaveProgress(Tool):
    """Save the progress."""

    action = SaveProgressAction

    def request(self, action: SaveProgressAction) -> HostRequest:
        """See `Tool.request`."""
        return _make_request(make_save_command(action), SAVE_SECONDS)

    def observe(self, action: SaveProgressAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        head, _, rest = result["content"].partition("\n")
        edited, _, commit = [*head.split(), "", "", ""][:3]
        content = truncate_content("\n\n".join(text for text in (action.report, rest.strip()) if text), 30_000)
        return SaveProgressObservation(content=content, commit=commit, was_edited=edited == "yes")
