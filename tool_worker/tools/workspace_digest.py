"""The digest of a workspace: equal if and only if its files are.

Holds: the command leaves nothing behind. In a git repository, files named by a `.gitignore` are left out, and a commit
does not change the digest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from broker.contract import DigestWorkspaceAction, Observation, WorkspaceDigestObservation
from tool_worker.tools.tool import HostRequest, Tool

TIMEOUT_SECONDS = 60.0
DIGEST = re.compile(r"^([0-9a-f]{40,64})(?:  -)?$", re.MULTILINE)
IGNORED = (".git", ".venv", "node_modules", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
"""Folders that do not count where there is no repository."""
COMMAND = rf"""
if objects=$(cd "$(git rev-parse --git-path objects 2>/dev/null || echo /none)" 2>/dev/null && pwd); then
    # The objects of the tree go elsewhere, so that the repository stays as it is.
    new=$(mktemp -d)
    export GIT_INDEX_FILE="$new/index" GIT_OBJECT_DIRECTORY="$new" GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects"
    git -c core.fsmonitor=false add -A . && git write-tree
    status=$?
    rm -rf "$new"
else
    find . \( {" -o ".join(f"-name {name}" for name in IGNORED)} \) -prune -o \( -type f -o -type l \) -print0 \
        | LC_ALL=C sort -z | xargs -0 -r sha256sum | sha256sum
    status=$?
fi
test $status = 0
"""


class DigestWorkspace(Tool):
    """Compute the digest of the workspace's files."""

    action = DigestWorkspaceAction

    def request(self, action: DigestWorkspaceAction) -> HostRequest:  # noqa: ARG002  (there is nothing to choose)
        """See `Tool.request`."""
        arguments = {"command": COMMAND, "is_input": False, "timeout": TIMEOUT_SECONDS, "blocking": True}
        return HostRequest("bash", {**arguments, "cwd": None, "is_static": True})

    def observe(self, action: DigestWorkspaceAction, result: Mapping[str, Any]) -> Observation:  # noqa: ARG002
        """See `Tool.observe`."""
        found = DIGEST.findall(result["content"]) if result["metadata"].get("exit_code") == 0 else []
        if not found:
            return WorkspaceDigestObservation(content=result["content"][-1_000:])
        return WorkspaceDigestObservation(digest=found[-1])
