"""The file tools against a plain model: any order of edits, writes, undos and views, while other programs interfere.

The model keeps what every file holds and the bytes that each edit has replaced. It knows no atomic writes and no
`TextFile`; it decodes and encodes files by itself.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.editor_parts import without_lacking_margins
from tests.exploring import examples
from tool_worker.host.editor.file_tools import FileTools

NAMES = st.sampled_from(["a.txt", "a.txt", "a.txt", "b.sh"])
# Few letters, so that a short text occurs in a longer one; some of them have no code in every encoding, and together
# some of them look like another one.
LETTERS = "a é€\x81"
SHORT = st.text(LETTERS + "\n", max_size=4)
LINES = st.lists(st.text(LETTERS, max_size=3), max_size=6)
CODES = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
BREAKS = st.sampled_from(["\n", "\r\n", "\r", "mixed"])
MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
VERSIONS = 10
UNUSUAL_MODE = 0o776


@dataclass(frozen=True)
class Known:
    """The decoded content of a file."""

    original: str
    code: str
    mark: bytes

    @classmethod
    def of(cls, content: bytes) -> Known:
        for mark, code in MARKS.items():
            if content.startswith(mark):
                return cls(content[len(mark) :].decode(code), code, mark)
        for code in ("utf-8", "cp1252"):
            try:
                return cls(content.decode(code), code, b"")
            except UnicodeDecodeError:
                continue
        return cls(content.decode("latin-1"), "latin-1", b"")

    @property
    def text(self) -> str:
        return self.original.replace("\r\n", "\n").replace("\r", "\n")

    @property
    def shown(self) -> list[str]:
        """The lines as `view` numbers them."""
        return self.text.removesuffix("\n").split("\n")

    def edited(self, text: str) -> bytes | None:
        """The bytes of the file with another text; None where the file cannot hold it."""
        try:
            content = self.mark + self._with_breaks(text).encode(self.code)
        except UnicodeEncodeError:
            return None
        return content if Known.of(content).text == text else None

    def _with_breaks(self, text: str) -> str:
        old, new = self.original.splitlines(keepends=True), text.splitlines(keepends=True)
        ends = ["\r\n" if line.endswith("\r\n") else line[-1] for line in old if line[-1] in "\r\n"]
        usual = max(("\n", "\r\n", "\r"), key=ends.count)
        same = [line.rstrip("\r\n") + "\n" * line.endswith(("\r", "\n")) for line in old]
        head = 0
        while head < min(len(old), len(new)) and same[head] == new[head]:
            head += 1
        tail = 0
        while tail < min(len(old), len(new)) - head and same[-1 - tail] == new[-1 - tail]:
            tail += 1
        changed = "".join(new[head : len(new) - tail]).replace("\n", usual)
        return "".join(old[:head]) + changed + "".join(old[len(old) - tail :])


def replaced(text: str, old_str: str, new_str: str) -> str | None:
    """The text with `new_str` in the only place of `old_str`; None where there is none, or another one too."""
    old_str, new_str = without_lacking_margins(text, old_str, new_str)
    places = [place for place in range(len(text) + 1) if text.startswith(old_str, place)]
    if old_str == new_str or len(places) != 1:
        return None
    return text[: places[0]] + new_str + text[places[0] + len(old_str) :]


def ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


class FileToolsMachine(RuleBasedStateMachine):
    """Two files, which can also be reached through a link, and the known facts about them."""

    def __init__(self) -> None:
        super().__init__()
        self._temporary = tempfile.TemporaryDirectory()
        self._directory = Path(self._temporary.name) / "files"
        self._directory.mkdir()
        (self._directory.parent / "link").symlink_to(self._directory)
        self._history = os.open(self._directory.parent / "history", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._tools = FileTools(str(self._directory), history=self._history)
        self._files: dict[str, bytes] = {}
        self._modes: dict[str, int] = {}
        self._versions: dict[str, list[tuple[bytes, bytes]]] = {}

    def teardown(self) -> None:
        os.close(self._history)
        self._temporary.cleanup()

    @initialize(lines=LINES, code=CODES, line_break=BREAKS)
    def one_file_is_there(self, lines: list[str], code: str, line_break: str) -> None:
        self.another_program_writes("a.txt", lines, code, line_break, has_last=True)

    @rule(name=NAMES, lines=LINES, code=CODES, line_break=BREAKS, has_last=st.booleans())
    def another_program_writes(self, name: str, lines: list[str], code: str, line_break: str, has_last: bool) -> None:
        breaks = [("\n", "\r\n")[n % 2] if line_break == "mixed" else line_break for n in range(len(lines))]
        if breaks and not has_last:
            breaks[-1] = ""
        content = "".join(line + end for line, end in zip(lines, breaks, strict=True)).encode(code, "replace")
        (self._directory / name).write_bytes(content)
        (self._directory / name).chmod(UNUSUAL_MODE)
        self._files[name] = content
        self._modes[name] = UNUSUAL_MODE

    @rule(is_cut=st.booleans())
    def the_host_ends(self, is_cut: bool) -> None:
        if is_cut:
            os.write(self._history, b"push 5 100 abc\nhalf a record")
        self._tools = FileTools(str(self._directory), history=self._history)

    @rule(name=NAMES)
    def another_program_removes(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)
        self._files.pop(name, None)

    @rule(name=NAMES, text=SHORT, line_break=st.sampled_from(["\n", "\r\n"]), by_link=st.booleans())
    def create(self, name: str, text: str, line_break: str, by_link: bool) -> None:
        text = text.replace("\n", line_break)
        result = self._edit("create", name, by_link, file_text=text)
        assert result["is_error"] == (name in self._files)
        if name not in self._files:
            self._created(name, text.encode())

    @rule(name=NAMES, old_str=SHORT, new_str=SHORT, by_link=st.booleans())
    def str_replace(self, name: str, old_str: str, new_str: str, by_link: bool) -> None:
        result = self._edit("str_replace", name, by_link, old_str=old_str, new_str=new_str)
        known = self._known(name)
        self._changed(name, result, known and replaced(known.text, old_str, new_str))

    @rule(name=NAMES, line=st.integers(-1, 7), new_str=SHORT, by_link=st.booleans())
    def insert(self, name: str, line: int, new_str: str, by_link: bool) -> None:
        result = self._edit("insert", name, by_link, insert_line=line, new_str=new_str)
        known = self._known(name)
        text = None
        if known and 0 <= line <= (len(known.shown) if known.text else 0):
            has_last = known.text.endswith("\n")
            lines = known.shown if known.text else []
            text = "\n".join([*lines[:line], new_str, *lines[line:]]) + "\n" * has_last
            if not known.text:
                text = new_str + "\n"
        self._changed(name, result, text)

    @rule(name=NAMES, content=SHORT, start=st.integers(-1, 7), end=st.integers(-2, 7))
    def write(self, name: str, content: str, start: int, end: int) -> None:
        fields = {"path": name, "content": content, "start": start, "end": end, "cwd": str(self._directory)}
        result = self._tools.run("write", fields)
        known = self._known(name)
        if start < 0 or end < -1 or -1 < end < start:
            self._changed(name, result, None)
        elif known is None:
            assert not result["is_error"]
            self._created(name, ended(content).encode())
        else:
            lines = known.text.splitlines(keepends=True)
            after = "" if end == -1 else "".join(lines[end:])
            self._changed(name, result, ended("".join(lines[:start])) + ended(content) + after)

    @rule(name=NAMES, by_link=st.booleans())
    def undo_edit(self, name: str, by_link: bool) -> None:
        result = self._edit("undo_edit", name, by_link)
        versions = self._versions.get(name, [])
        is_possible = bool(versions) and self._files.get(name) == versions[-1][1]
        assert result["is_error"] is not is_possible
        if is_possible:
            self._files[name] = versions.pop()[0]

    @rule(name=NAMES, count=st.integers(5, 12))
    def insert_often(self, name: str, count: int) -> None:
        for number in range(count):
            self.insert(name, 0, str(number), by_link=False)

    @rule(name=NAMES)
    def undo_all_edits(self, name: str) -> None:
        for _ in range(VERSIONS + 1):
            self.undo_edit(name, by_link=False)
            self.files_hold_what_the_model_says_and_nothing_else_is_there()

    @rule(name=NAMES, first=st.integers(0, 7), last=st.integers(-1, 7))
    def view_a_range(self, name: str, first: int, last: int) -> None:
        known = self._known(name)
        result = self._edit("view", name, by_link=False, view_range=[first, last])
        count = len(known.shown) if known else 0
        end = count if last == -1 else min(last, count)
        assert result["is_error"] is not (known is not None and 1 <= first <= count and end >= first)
        if known and not result["is_error"]:
            assert self._numbered(known, first, end) in result["content"]

    @rule(name=NAMES, start=st.integers(0, 7), end=st.integers(-1, 7))
    def read(self, name: str, start: int, end: int) -> None:
        known = self._known(name)
        result = self._tools.run("read", {"path": name, "start": start, "end": end, "cwd": str(self._directory)})
        assert result["is_error"] == (known is None or -1 < end < start)
        if known and not result["is_error"]:
            lines = known.text.splitlines(keepends=True)
            assert result["content"] == "".join(lines[start:] if end == -1 else lines[start:end])

    @invariant()
    def files_hold_what_the_model_says_and_nothing_else_is_there(self) -> None:
        assert {path.name: path.read_bytes() for path in self._directory.iterdir()} == self._files
        for name in self._files:
            assert (self._directory / name).stat().st_mode & 0o777 == self._modes[name]

    @invariant()
    def files_are_shown_as_they_are(self) -> None:
        for name in self._files:
            known = self._known(name)
            assert known is not None
            result = self._edit("view", name, by_link=False)
            assert self._numbered(known, 1, len(known.shown)) in result["content"]

    def _edit(self, command: str, name: str, by_link: bool, **arguments: object) -> dict[str, Any]:
        directory = self._directory.parent / "link" if by_link else self._directory
        return self._tools.run("edit", {"command": command, "path": f"{directory}/{name}", **arguments})

    def _known(self, name: str) -> Known | None:
        return Known.of(self._files[name]) if name in self._files else None

    def _changed(self, name: str, result: dict[str, Any], text: str | None) -> None:
        """Take in an edit that was to lead to this text; None: that was to be refused."""
        known = self._known(name)
        content = known.edited(text) if known is not None and text is not None else None
        assert result["is_error"] is (content is None), result
        if known is None or content is None:
            return
        self._remember(name, self._files[name], content)
        self._files[name] = content
        if "new_content" in result:
            assert (result["old_content"], result["new_content"]) == (known.text, text)

    def _created(self, name: str, content: bytes) -> None:
        self._files[name] = content
        self._modes[name] = 0o666 & ~_umask()
        self._remember(name, content, content)

    def _remember(self, name: str, content: bytes, written: bytes) -> None:
        versions = self._versions.setdefault(name, [])
        versions.append((content, written))
        del versions[:-VERSIONS]

    @staticmethod
    def _numbered(known: Known, first: int, last: int) -> str:
        return "".join(f"{n:6}\t{known.shown[n - 1]}\n" for n in range(first, last + 1))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.hypothesis
def test_any_order_of_calls_leaves_what_the_model_says() -> None:
    run_state_machine_as_test(FileToolsMachine, settings=settings(max_examples=examples(60), stateful_step_count=35))


@pytest.mark.soak
def test_any_order_of_many_calls_leaves_what_the_model_says() -> None:
    run_state_machine_as_test(FileToolsMachine, settings=settings(max_examples=500, stateful_step_count=60))
