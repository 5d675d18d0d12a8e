"""How an attempt is scored: the agent's changes in a fresh workspace, with the hidden files laid over them.

Holds: nothing an agent leaves behind decides its own score. A check runs in another workspace, which has the instance's
files, the agent's changes that count, and the hidden files, laid over last. Files that change how programs start or
how tests are found do not count: they are left out and named in the evidence.
Does not: judge whether the work is honest; code that recognises the hidden tests by their behaviour can pass them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

from deckhands.datasets.file_trees import File, Tree

NEVER_WORK = frozenset(
    {
        *("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", "tox.ini", "setup.cfg", "noxfile.py"),
        *(".coveragerc", ".noserc", ".pythonrc", ".pythonrc.py", ".npmrc", ".yarnrc", ".mocharc.json", ".mocharc.js"),
        *("jest.config.js", "vitest.config.js", ".bashrc", ".bash_profile", ".profile", ".envrc", ".env", ".proverc"),
    }
)
"""Files by which others than the task's own sources decide what runs."""
NEVER_BELOW = frozenset({".git", ".hg", ".openhands", "__pycache__", "node_modules", ".venv", "venv", "site-packages"})
NEVER_ENDING = (".pth", ".pyc", ".pyo", ".egg-link")


@dataclass(frozen=True, slots=True)
class Work:
    """The agent's changes to the files of its workspace.

    Attributes:
        tree: the instance's files with the changes that count.
        left_out: paths whose changes do not count.
    """

    tree: Tree
    left_out: tuple[str, ...] = ()


def may_count(name: str, begun_with: Tree) -> bool:
    """Say whether a file of an agent's workspace is examined; files below a directory of tools are not."""
    return name in begun_with or not NEVER_BELOW & set(PurePosixPath(name).parts[:-1])


def work_of(begun_with: Tree, found: Tree, hidden: Tree) -> Work:
    """Return what counts as the agent's work: its changes to the files it began with, and its new files.

    Args:
        found: the files of its workspace at the end.
        hidden: what is laid over; a new file below a directory of hidden ones does not count either.
    """
    hidden_folders = {path.parts[0] for path in map(PurePosixPath, hidden) if len(path.parts) > 1}
    hidden_folders -= {PurePosixPath(name).parts[0] for name in begun_with}
    tree: dict[str, File] = dict(begun_with)
    left_out = []
    for name in sorted({*begun_with, *found}):
        if begun_with.get(name) == found.get(name) or name in hidden:
            continue
        if _is_never_work(PurePosixPath(name), begun_with) or PurePosixPath(name).parts[0] in hidden_folders:
            left_out.append(name)
        elif name in found:
            tree[name] = found[name]
        else:
            del tree[name]
    return Work(tree, tuple(left_out))


def to_check(work: Work, hidden: Tree) -> dict[str, File]:
    """Return the files of the workspace in which the check runs."""
    return {**work.tree, **hidden}


def _is_never_work(path: PurePosixPath, begun_with: Tree) -> bool:
    if path.name in NEVER_WORK or path.name.endswith(NEVER_ENDING) or NEVER_BELOW & set(path.parts[:-1]):
        return True
    # `python3 -m unittest` takes a module of the working directory before the standard library's.
    top = path.parts[0].removesuffix(".py")
    is_own = any(PurePosixPath(name).parts[0].removesuffix(".py") == top for name in begun_with)
    return top in sys.stdlib_module_names and not is_own
