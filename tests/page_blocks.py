"""The blocks of code on the pages, with the comments for the tests before them.

`<!-- part: NAME -->` divides a page: the blocks of a part do not rely on those of other parts.

Readers do not see a comment. `<!-- not run: REASON -->` gives the reason why a block cannot run in a test, which then
checks its commands. `<!-- run: … -->` says how to run one, see `How`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.source_code import ROOT, tracked_sources

RUN_ELSEWHERE = {
    "docs/adding-things.md#adding-things": "tests/end_to_end/test_adding_things.py",
    "docs/protocols.md": "tests/end_to_end/test_ag_ui.py",
    "docs/parity.md#migrating": "tests/end_to_end/test_headless.py",
    "docs/python.md": "tests/end_to_end/test_python_page.py",
    "docs/rollouts.md": "tests/end_to_end/test_rollouts_page.py",
    "docs/serving.md": "tests/end_to_end/test_serving_page.py",
}
"""Pages, or parts of them, whose blocks one test runs."""
NOT_FOR_READERS = ("CHANGELOG.md", "docs/decisions/", "examples/projects/", "tests/")
SHELL = ("bash", "console")
PART = re.compile(r"^<!-- part: ([\w-]+) -->$", re.MULTILINE)
FENCE = re.compile(
    r"(?:^`(?P<file>[\w./-]+)`\n\n)?(?:^<!-- (?P<comment>[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class How:
    """How to run a block.

    Attributes:
        model: the profile that plays the model; empty: the first.
        id_of: the kind of conversation that replaces `ID`.
        shows: a required part of its output.
        is_private: without the cluster that the pages share.
        is_later: it is a file, which a later command runs.
    """

    model: str = ""
    id_of: str = "finished"
    shows: str = ""
    is_private: bool = False
    is_later: bool = False


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        part: the page, or `PAGE#NAME` behind the mark of a part.
        file: the name above it, if it is the text of a file.
        not_run: why it cannot run; empty if it can.
    """

    page: str
    part: str
    line: int
    language: str
    text: str
    file: str = ""
    not_run: str = ""
    how: How = field(default_factory=How)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> str:
        """The text as a shell reads it: of a console, the lines behind a prompt."""
        if self.language != "console":
            return self.text
        return "".join(line.removeprefix("$ ") for line in self.text.splitlines(True) if line.startswith("$ "))

    @property
    def shown(self) -> list[str]:
        """The lines that a console shows besides its commands."""
        lines = self.text.splitlines() if self.language == "console" else []
        return [line for line in lines if line and not line.startswith("$ ")]


def pages() -> list[str]:
    paths = [source.path for source in tracked_sources()]
    return [path for path in paths if path.endswith(".md") and not path.startswith(NOT_FOR_READERS)]


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = [(0, page), *((mark.start(), f"{page}#{mark[1]}") for mark in PART.finditer(text))]
    for found in FENCE.finditer(text):
        comment = found["comment"] or ""
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(
            page,
            next(part for start, part in reversed(parts) if start <= found.start()),
            line,
            found["language"],
            found["text"],
            file=found["file"] or "",
            not_run=comment.removeprefix("not run: ") if comment.startswith("not run: ") else "",
            how=_how(comment.removeprefix("run: ")) if comment.startswith("run: ") else How(),
        )


def _how(words: str) -> How:
    names = {"model": "model", "ID": "id_of", "shows": "shows"}
    given = dict(word.split("=", 1) for word in shlex.split(words) if "=" in word)
    flags = {word for word in shlex.split(words) if "=" not in word}
    assert given.keys() <= names.keys(), words
    assert flags <= {"later", "privately"}, words
    given = {names[name]: value for name, value in given.items()}
    return How(**given, is_private="privately" in flags, is_later="later" in flags)
