"""Score an attempt: apply the agent's changes in a fresh workspace, with the hidden files added on top.

It also finds a failed set-up of an attempt in the log of its conversation.

Holds: files that an agent leaves behind cannot decide its own score. A check runs in another workspace with the
instance's files, the agent's changes that count and, added last, the hidden files. Files that change how programs start
or how tests are found do not count: they are left out and named in the evidence. `check_programs` defines how tests
run. For a failed set-up, only the environment's command before the agent's first step counts, and its result. An agent
can write neither.
Does not: judge whether the work is honest; code that recognises the hidden tests by their behaviour can pass them. A
check that is a command decides by its exit code, so code under test that ends its process with 0 can pass it. Neither
does it find a set-up that fails only in the check; for that, `Evaluation` runs the set-up without the agent's work.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import PurePosixPath

from broker.contract import (
    SETUP_SCRIPT,
    CmdOutputObservation,
    CmdRunAction,
    Event,
    EventSource,
    Observation,
    OutcomeUnknownObservation,
)
from deckhands.evaluation.datasets.file_trees import Tree, TreeFile, format_name
from deckhands.evaluation.datasets.instances import SETUP_FAILED

NEVER_WORK = frozenset(
    {
        *(
            "conftest.py",
            "sitecustomize.py",
            "usercustomize.py",
            "pytest.ini",
            ".pytest.ini",
            "pytest.toml",
            ".pytest.toml",
            "tox.ini",
            "setup.cfg",
            "noxfile.py",
        ),
        *(".coveragerc", ".noserc", ".pythonrc", ".pythonrc.py", ".npmrc", ".yarnrc", ".yarnrc.yml", "bunfig.toml"),
        *(".bashrc", ".bash_profile", ".bash_login", ".profile", ".bash_aliases", ".inputrc", ".envrc", ".env"),
        *(".proverc", ".rspec", ".Rprofile", "phpunit.xml", "phpunit.xml.dist", "go.work", "pyvenv.cfg"),
    }
)
"""Files outside the task's own sources that can decide which code runs."""
NEVER_NAMED = re.compile(
    r"(jest|vitest|babel|karma|ava|playwright|cypress)\.(config|conf|setup)\.\w+"
    r"|\.(mocharc|babelrc|swcrc|nycrc|c8rc|jestrc|taprc)(\.\w+)?"
)
"""The same, for programs that read such files in several languages."""
TEST_MODULES = frozenset({"pytest", "_pytest", "py", "pluggy", "iniconfig", "pygments", "nose", "nose2", "hypothesis"})
"""Modules of Python test frameworks: a file with such a name in the workspace would run in their place."""
IMPORTABLE = frozenset({".py", ".so", ".pyd"})
SOURCE_FOLDERS = frozenset({"src", "lib"})
"""Directories, besides the workspace itself, where Python finds modules in checks."""
NEVER_BELOW = frozenset(
    {".git", ".hg", ".openhands", ".cargo", "__pycache__", "node_modules", ".venv", "venv", "site-packages"}
)
MAX_NAMES, MAX_NAME_CHARS = 1_000, 300
NEVER_ENDING = (".pth", ".pyc", ".pyo", ".egg-link", "_test.go")
MAX_TOML_BYTES, MAX_DOTS = 64 * 1024, 100
"""Limits of a project file and of each of its lines: parsing a dotted key takes quadratic time."""


@dataclass(frozen=True, slots=True)
class AgentWork:
    """The agent's changes to the files of its workspace.

    Attributes:
        tree: the instance's files with the changes that count.
        left_out: paths whose changes do not count.
    """

    tree: Tree
    left_out: tuple[str, ...] = ()

    @property
    def names_left_out(self) -> list[str]:
        """The form of `left_out` in a row: 1,000 names, and the number of further ones."""
        names = [format_name(name)[:MAX_NAME_CHARS] for name in self.left_out[:MAX_NAMES]]
        more = len(self.left_out) - len(names)
        return [*names, f"and {more:,} more"] if more else names


def may_count(name: str, begun_with: Tree) -> bool:
    """Return whether a file of an agent's workspace is examined; files below a directory of tools are not."""
    return name in begun_with or not NEVER_BELOW & set(PurePosixPath(name).parts[:-1])


def compute_work(begun_with: Tree, found: Tree, hidden: Tree, check: str = "") -> AgentWork:
    """Return the agent's work: its changes to the initial files, and its new files.

    Args:
        found: the files of its workspace at the end.
        hidden: the files to add on top. A new file below a directory of hidden files does not count either.
        check: the deciding command; a new module that it would run by `-m` does not count.
    """
    runs = TEST_MODULES | set(re.findall(r"-m\s*([A-Za-z_]\w*)", check))
    hidden_folders = {path.parts[0] for path in map(PurePosixPath, hidden) if len(path.parts) > 1}
    hidden_folders -= {PurePosixPath(name).parts[0] for name in begun_with}
    tree: dict[str, TreeFile] = dict(begun_with)
    left_out = []
    for name in sorted({*begun_with, *found}):
        old, new = begun_with.get(name), found.get(name)
        if old == new or name in hidden:
            continue
        path = PurePosixPath(name)
        if _is_never_work(path, begun_with, runs) or path.parts[0] in hidden_folders or _sets_pytest(path, old, new):
            left_out.append(name)
        elif new is not None:
            tree[name] = new
        else:
            del tree[name]
    in_the_way = _find_conflicts(tree, begun_with, hidden)
    for name in in_the_way:
        del tree[name]
    return AgentWork(tree, tuple(sorted([*left_out, *in_the_way])))


def _find_conflicts(tree: Tree, begun_with: Tree, hidden: Tree) -> list[str]:
    """Return the agent's files that conflict with a remaining file: a file in place of a directory, or the reverse."""
    stay = {name for name in tree if tree[name] == begun_with.get(name)} | set(hidden)
    folders = {str(parent) for name in stay for parent in PurePosixPath(name).parents}
    agents = (name for name in tree if name not in stay)
    return [name for name in agents if name in folders or stay & {str(one) for one in PurePosixPath(name).parents}]


def build_check_files(work: AgentWork, hidden: Tree) -> dict[str, TreeFile]:
    """Return the files of the workspace in which the check runs."""
    return {**work.tree, **hidden}


def _is_never_work(path: PurePosixPath, begun_with: Tree, runs: AbstractSet[str]) -> bool:
    is_named = path.name in NEVER_WORK or NEVER_NAMED.fullmatch(path.name) is not None
    if is_named or path.name.endswith(NEVER_ENDING) or NEVER_BELOW & set(path.parts[:-1]):
        return True
    # Python prefers a module in the working directory to those of the standard library and of installed packages.
    if _is_new_module(path, begun_with, sys.stdlib_module_names | runs, 0):
        return True
    return path.parts[0] in SOURCE_FOLDERS and len(path.parts) > 1 and _is_new_module(path, begun_with, runs, 1)


def _is_new_module(path: PurePosixPath, begun_with: Tree, names: AbstractSet[str], depth: int) -> bool:
    """Return whether a file belongs to a module with one of these names that the instance's own files lack."""
    above, top = path.parts[:depth], path.parts[depth].partition(".")[0]
    return (
        path.suffix in IMPORTABLE
        and top in names
        and not any(
            name.parts[:depth] == above and len(name.parts) > depth and name.parts[depth].partition(".")[0] == top
            for name in map(PurePosixPath, begun_with)
        )
    )


def _sets_pytest(path: PurePosixPath, old: TreeFile | None, new: TreeFile | None) -> bool:
    """Return whether a change in a `pyproject.toml` affects the settings of pytest."""
    return path.name == "pyproject.toml" and _pytest_settings(old) != _pytest_settings(new)


def _pytest_settings(file: TreeFile | None) -> object:
    """Return the settings of pytest; None if there are none.

    Invalid TOML, or one that is slow to parse, is assumed to have settings.
    """
    if file is None:
        return None
    if len(file.content) > MAX_TOML_BYTES or any(line.count(b".") > MAX_DOTS for line in file.content.splitlines()):
        return file
    try:
        tool = tomllib.loads(file.content.decode()).get("tool")
    except (ValueError, RecursionError):
        return file
    return tool.get("pytest") if isinstance(tool, dict) else None


COMMAND = f"source {SETUP_SCRIPT}"
NO_EXIT_CODE = "no_exit_code"
_SAYS_FAILED = re.compile(re.escape(SETUP_FAILED).replace(re.escape("{code}"), r"(\d+)"))


@dataclass(frozen=True, slots=True)
class FailedSetup:
    """A set-up that failed: the exit code as a cause, and the output."""

    cause: str
    text: str

    @classmethod
    def of(cls, answer: Observation) -> FailedSetup | None:
        """Return how a command failed; None if it succeeded."""
        if not isinstance(answer, CmdOutputObservation):
            return cls(NO_EXIT_CODE, answer.content)
        if answer.exit_code == 0:
            return None
        said = _find_last_line(answer)
        exit_code = int(said[1]) if said else answer.exit_code
        if exit_code < 0:
            return cls(NO_EXIT_CODE, answer.content + answer.metadata.suffix)
        return cls(f"exit_code_{exit_code}", answer.content)


def find_failed_setup(events: Sequence[Event]) -> FailedSetup | None:
    """Return how the set-up before the agent's first step failed; None if it did not fail, or if its end is unknown."""
    answer = find_setup_answer(events)
    return None if answer is None or isinstance(answer, OutcomeUnknownObservation) else FailedSetup.of(answer)


def find_setup_answer(events: Sequence[Event]) -> Observation | None:
    """Return the result of the set-up before the agent's first step; None if it has none."""
    for event in events:
        if isinstance(event, CmdRunAction) and event.source is EventSource.ENVIRONMENT and event.command == COMMAND:
            return next((one for one in events if isinstance(one, Observation) and one.cause == event.id), None)
    return None


def find_check_answer(events: Sequence[Event]) -> CmdOutputObservation | None:
    """Return the result of the command of a check; None if it has none."""
    return next((event for event in reversed(events) if isinstance(event, CmdOutputObservation)), None)


def may_have_failed(answer: CmdOutputObservation) -> bool:
    """Return whether the set-up may have made a check fail: the check reports this, or did not end."""
    return answer.exit_code < 0 or _find_last_line(answer) is not None


def _find_last_line(answer: CmdOutputObservation) -> re.Match[str] | None:
    return _SAYS_FAILED.fullmatch(answer.content.rstrip().rpartition("\n")[2].strip())
