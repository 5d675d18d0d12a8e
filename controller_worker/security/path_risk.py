"""The risk of reading or changing a path.

Holds: changing a path that is unknown before its use is HIGH. No path is looked up, so that the same action has the
same risk everywhere.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, replace
from enum import IntEnum
from fnmatch import fnmatchcase

from broker.contract import ActionSecurityRisk


class Rating(IntEnum):
    """A risk that distinguishes a command understood as MEDIUM from one that is not understood."""

    UNKNOWN = -1
    LOW = 0
    MEDIUM = 1
    UNCLEAR = 2
    """Not understood: MEDIUM in the log, but a user is asked as for an unknown risk."""
    HIGH = 3

    @property
    def risk(self) -> ActionSecurityRisk:
        """The risk as recorded in the log."""
        return ActionSecurityRisk.MEDIUM if self is Rating.UNCLEAR else ActionSecurityRisk[self.name]


LOW, MEDIUM, UNCLEAR, HIGH = Rating.LOW, Rating.MEDIUM, Rating.UNCLEAR, Rating.HIGH

SECRETS = re.compile(
    r"/etc/(g?shadow|sudoers|ssl/private)|/run/secrets/|/proc/[^/]+/(environ|mem|maps)|(^|/)\.(ssh|aws|gnupg|kube|docker|netrc|pgpass"
    r"|git-credentials|npmrc|pypirc|bash_history|env)(/|$|\.)|(^|/)id_(rsa|dsa|ecdsa|ed25519)|credentials|/dev/(mem|kmem|sd|nvme|tcp|udp)"
)
OUTSIDE = re.compile(r"(^|^-\w|[^\w.*])[/~]")
"""A text that holds an absolute path or one of a home: `/a`, `-f/a`, `--file=~/a`, `@/a` or `file:///a`."""
RUNS_LATER = re.compile(
    r"(^|/)(\.git(/?$|/(hooks|info|config|modules|worktrees)(/|$|\.))|\.gitconfig|\.bash(rc|_profile|_login)|\.profile"
    r"|\.zshrc|\.envrc|\.husky/|authorized_keys|sitecustomize\.py|usercustomize\.py)|\.pth$"
)
"""Files that other programs run later."""
HIDDEN_SECRETS = frozenset(
    (
        *(".ssh", ".aws", ".gnupg", ".kube", ".docker", ".netrc", ".pgpass", ".git-credentials"),
        *(".npmrc", ".pypirc", ".bash_history", ".env"),
    )
)
HIDDEN_RUNS_LATER = frozenset(
    (
        *(".git", ".gitconfig", ".bashrc", ".bash_profile", ".bash_login", ".profile", ".zshrc"),
        *(".envrc", ".husky"),
    )
)
GLOB = re.compile(r"[*?\[]")
WORKSPACE = "/workspace"
SCRATCH = ("/tmp/", "/var/tmp/")  # noqa: S108  (what commands write there, not we)
MAX_DIRECTORIES = 16
"""With more possible current directories, the current one counts as unknown."""
NOWHERE = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty"})


def rate_reading(path: str | None, workspace: str) -> Rating:
    """Return the risk of reading a path; None for an unknown one."""
    if path is None:
        return UNCLEAR
    if _may_expand_to(path, HIDDEN_SECRETS) or SECRETS.search(path) or SECRETS.search(posixpath.normpath(path)):
        return HIGH
    if _is_inside(path, workspace) or path in NOWHERE:
        return LOW
    return UNCLEAR if GLOB.search(path) else MEDIUM


def names_secret(word: str) -> bool:
    """Return whether an argument of a program contains the path of a secret outside of the workspace."""
    return OUTSIDE.search(word) is not None and SECRETS.search(word) is not None


def rate_writing(path: str | None, workspace: str) -> Rating:
    """Return the risk of changing or deleting a path; None for an unknown one."""
    if path is None:
        return HIGH
    clean = posixpath.normpath(path)
    if _may_expand_to(path, HIDDEN_SECRETS | HIDDEN_RUNS_LATER) or any(
        pattern.search(text) for pattern in (SECRETS, RUNS_LATER) for text in (path, clean)
    ):
        return HIGH
    if path in NOWHERE or path.startswith(SCRATCH):
        return LOW if ".." not in path else HIGH
    whole = (".", "..", posixpath.normpath(workspace), WORKSPACE)
    is_all = clean in (*whole, "*", "/workspace/*", f"{posixpath.normpath(workspace)}/*")
    return HIGH if is_all or not _is_inside(path, workspace) else LOW


def _may_expand_to(path: str, names: frozenset[str]) -> bool:
    """Return whether a glob may match one of the hidden files and directories `names`, as `.e*` matches `.env`."""
    parts = [part for part in path.split("/") if part.startswith((".", "[.")) and GLOB.search(part)]
    return any(fnmatchcase(name, part) for part in parts for name in names)


def _is_inside(path: str, workspace: str) -> bool:
    """Return whether a path, relative to any directory in the workspace, stays in it."""
    if path.startswith("~"):
        return False
    if path.startswith("/"):
        clean = posixpath.normpath(path)
        return any(clean == root or clean.startswith(root + "/") for root in (posixpath.normpath(workspace), WORKSPACE))
    return ".." not in path.split("/")


@dataclass(frozen=True)
class Paths:
    """Rates paths, given the current directory of a command.

    Attributes:
        workspace: the directory that may be changed.
        directories: the possible current directories: "" for any in the workspace, None for an unknown one.
    """

    workspace: str
    directories: frozenset[str | None] = frozenset(("",))

    def rate_reading(self, path: str | None) -> Rating:
        """Return the risk of reading a path; None for an unknown one."""
        return max(rate_reading(_join(directory, path), self.workspace) for directory in self.directories)

    def rate_writing(self, path: str | None) -> Rating:
        """Return the risk of changing or deleting a path; None for an unknown one."""
        return max(rate_writing(_join(directory, path), self.workspace) for directory in self.directories)

    def change(self, path: str | None) -> Paths:
        """Return the paths after `cd` to a directory; None for an unknown one."""
        changed = {_join(directory, path) for directory in self.directories}
        clean = (None if one is None else posixpath.normpath(one) for one in changed)
        return replace(self, directories=frozenset("" if one == "." else one for one in clean))

    def join(self, other: Paths) -> Paths:
        """Return the paths for a command whose current directory may be either one."""
        both = self.directories | other.directories
        return replace(self, directories=both if len(both) <= MAX_DIRECTORIES else frozenset((None,)))

    def rate_staying(self) -> Rating:
        """Return the risk of leaving the shell in this directory, because the next command writes relative to it."""
        return max(self._rate_directory(directory) for directory in self.directories)

    def _rate_directory(self, directory: str | None) -> Rating:
        if directory is None or directory.startswith(".."):
            return UNCLEAR
        return LOW if directory == "" else rate_writing(f"{directory}/file", self.workspace)


def _join(directory: str | None, path: str | None) -> str | None:
    if path is None or path.startswith(("/", "~")) or directory == "":
        return path
    return None if directory is None else f"{directory}/{path}"
