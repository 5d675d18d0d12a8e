"""The risk of reading or changing a path.

Holds: changing a path that is unknown before its use is HIGH. No path is looked up, so that the same action has the
same risk everywhere.
"""

from __future__ import annotations

import posixpath
import re

from broker.contract import ActionSecurityRisk

LOW, MEDIUM, HIGH = ActionSecurityRisk.LOW, ActionSecurityRisk.MEDIUM, ActionSecurityRisk.HIGH

SECRETS = re.compile(
    r"/etc/(g?shadow|sudoers|ssl/private)|/proc/[^/]+/(environ|mem|maps)|(^|/)\.(ssh|aws|gnupg|kube|docker|netrc|pgpass"
    r"|git-credentials|env)(/|$|\.)|(^|/)id_(rsa|dsa|ecdsa|ed25519)|credentials|/dev/(mem|kmem|sd|nvme|tcp|udp)"
)
RUNS_LATER = re.compile(
    r"(^|/)(\.git/(hooks|config)|\.gitconfig|\.bash(rc|_profile|_login)|\.profile|\.zshrc|authorized_keys"
    r"|sitecustomize\.py|usercustomize\.py)|\.pth$"
)
"""Files that other programs run later."""
WORKSPACE = "/workspace"
SCRATCH = ("/tmp/", "/var/tmp/")  # noqa: S108  (what commands write there, not we)
NOWHERE = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty"})


def rate_reading(path: str | None, workspace: str) -> ActionSecurityRisk:
    """Return the risk of reading a path; None for an unknown one."""
    if path is None:
        return MEDIUM
    if SECRETS.search(path):
        return HIGH
    return LOW if _is_inside(path, workspace) or path in NOWHERE else MEDIUM


def rate_writing(path: str | None, workspace: str) -> ActionSecurityRisk:
    """Return the risk of changing or deleting a path; None for an unknown one."""
    if path is None or SECRETS.search(path) or RUNS_LATER.search(path):
        return HIGH
    if path in NOWHERE or path.startswith(SCRATCH):
        return LOW if ".." not in path else HIGH
    is_all = posixpath.normpath(path) in (".", "..", posixpath.normpath(workspace), "*", "./*")
    return HIGH if is_all or not _is_inside(path, workspace) else LOW


def _is_inside(path: str, workspace: str) -> bool:
    """Return whether a path, relative to any directory in the workspace, stays in it."""
    if path.startswith("~"):
        return False
    if path.startswith("/"):
        clean = posixpath.normpath(path)
        return any(clean == root or clean.startswith(root + "/") for root in (posixpath.normpath(workspace), WORKSPACE))
    return ".." not in path.split("/")
