"""How dangerous it is to read or to change what a path names.

Holds: a path that is not known before it is used is dangerous to change; nothing is looked up, so that the same action
has the same risk everywhere.
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
"""What is written there runs when somebody does something else."""
WORKSPACE = "/workspace"
SCRATCH = ("/tmp/", "/var/tmp/")  # noqa: S108  (what commands write there, not we)
NOWHERE = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty"})


def reading_risk(path: str | None, workspace: str) -> ActionSecurityRisk:
    """Return the risk of reading a path; None for one that is not known."""
    if path is None:
        return MEDIUM
    if SECRETS.search(path):
        return HIGH
    return LOW if _is_inside(path, workspace) or path in NOWHERE else MEDIUM


def writing_risk(path: str | None, workspace: str) -> ActionSecurityRisk:
    """Return the risk of changing or deleting what a path names; None for one that is not known."""
    if path is None or SECRETS.search(path) or RUNS_LATER.search(path):
        return HIGH
    if path in NOWHERE or path.startswith(SCRATCH):
        return LOW if ".." not in path else HIGH
    is_all = posixpath.normpath(path) in (".", "..", posixpath.normpath(workspace), "*", "./*")
    return HIGH if is_all or not _is_inside(path, workspace) else LOW


def _is_inside(path: str, workspace: str) -> bool:
    """Say whether a path, taken from somewhere in the workspace, stays in it."""
    if path.startswith("~"):
        return False
    if path.startswith("/"):
        clean = posixpath.normpath(path)
        return any(clean == root or clean.startswith(root + "/") for root in (posixpath.normpath(workspace), WORKSPACE))
    return ".." not in path.split("/")
