"""The tool `apply_patch`: changes several files at once.

Holds: all files are changed or none. If lines are not found, the error quotes them. The search time is bounded. Lines
are compared exactly first, then without trailing white space, then without leading white space as well. Context lines
stay as they are in the file.
Does not: undo a removal or a move.
"""

from __future__ import annotations

import os
from contextlib import suppress

from tool_worker.host.editor.editor_arguments import require_text
from tool_worker.host.editor.patch_text import ADD, DELETE, Chunk, FileChange, parse_patch
from tool_worker.host.text_files.file_errors import (
    EditorError,
    EditRefusedError,
    InvalidParameterError,
    as_utf8,
    excerpt,
)
from tool_worker.host.text_files.regular_file import find_status, make_parents, replace_file
from tool_worker.host.text_files.seen_files import SeenFiles
from tool_worker.host.text_files.text_diff import render_unified_diff
from tool_worker.host.text_files.text_file import TextFile, with_plain_breaks
from tool_worker.host.text_files.versioned_files import VersionedFiles

COMPARED_LINES_LIMIT = 20_000_000
"""Bound of the lines that one patch may read and compare; with repeated lines, many positions look like a match."""
READ_BYTES_LIMIT = 32 * 2**20
"""Bound of the total size of all files of a patch."""


class _PlannedFile:
    """The planned state of a file; `text` is None if the file is removed."""

    def __init__(self, mark: str, path: str, old: bytes | None, file: TextFile | None, text: str | None) -> None:
        self.mark = mark
        self.path = path
        self.old = old
        self.file = file
        self.text = text


class Patching:
    """Applies patches."""

    def __init__(self, files: VersionedFiles, seen: SeenFiles) -> None:
        self._files = files
        self._seen = seen

    def apply(self, arguments: dict[str, object]) -> dict[str, object]:
        """Apply a patch.

        Args:
            arguments: `patch`; its paths are relative to `cwd`.

        Returns:
            `content`, `is_error`, `path` (of the first file), `paths` (of the files that exist afterwards),
            `prev_exist`, `old_content` and `new_content` (None), and `diff` of all files.
        """
        try:
            changes = parse_patch(require_text(arguments, "patch", "apply_patch"))
            cwd = str(arguments.get("cwd") or "/")
            plan = self._plan(changes, cwd)
            self._execute(plan)
        except EditorError as error:
            return _result(f"ERROR:\n{error}", [], is_error=True)
        listed = "\n".join(f"{one.mark} {os.path.relpath(one.path, cwd)}" for one in plan)
        return _result(f"Success. Updated the following files:\n{listed}", plan)

    def _plan(self, changes: list[FileChange], cwd: str) -> list[_PlannedFile]:
        plan: list[_PlannedFile] = []
        budget = [COMPARED_LINES_LIMIT]
        left = READ_BYTES_LIMIT
        for change in changes:
            path = os.path.normpath(os.path.join(cwd, change.path))
            if not change.path or "\0" in change.path + change.target:
                raise InvalidParameterError("patch", change.path, "A file in it has no usable path.")
            if any(os.path.realpath(one.path) == os.path.realpath(path) for one in plan):
                raise EditRefusedError(f"No patch was applied. It changes {change.path} twice: write one change of it.")
            if change.kind == ADD:
                self._plan_new(plan, path, "\n".join([*change.chunks[0].new, ""]) if change.chunks else "")
                continue
            if os.path.islink(path) and (change.kind == DELETE or change.target):
                raise EditRefusedError(f"No patch was applied. {change.path} is a link: remove it in the shell.")
            content, file = self._files.read(path)
            left -= len(content)
            if left < 0:
                raise EditRefusedError("No patch was applied. Its files are too large together: use several patches.")
            self._seen.require_current(path, content)
            if change.kind == DELETE:
                plan.append(_PlannedFile("D", path, content, file, None))
                continue
            text = _apply_chunks(file.text, change.chunks, change.path, budget)
            if change.target:
                plan.append(_PlannedFile("D", path, content, file, None))
                self._plan_new(plan, os.path.normpath(os.path.join(cwd, change.target)), text)
            else:
                plan.append(_PlannedFile("M", path, content, file, text))
        return plan

    def _plan_new(self, plan: list[_PlannedFile], path: str, text: str) -> None:
        if find_status(path) or any(one.path == path for one in plan):
            raise EditRefusedError(f"No patch was applied. There is a file at {path} already: update it instead.")
        plan.append(_PlannedFile("A", path, None, None, with_plain_breaks(text)))

    def _execute(self, plan: list[_PlannedFile]) -> None:
        done: list[_PlannedFile] = []
        try:
            for one in plan:
                done.append(one)
                self._write(one)
        except (EditorError, OSError) as error:
            for one in reversed(done):
                _restore(one)
                self._seen.forget(one.path)
            raise EditRefusedError(f"No patch was applied. {error}") from error

    def _write(self, one: _PlannedFile) -> None:
        if one.text is None:
            os.unlink(one.path)
            self._seen.forget(one.path)
        elif one.old is None or one.file is None:
            make_parents(one.path)
            self._files.create(one.path, one.text)
            self._seen.note(one.path, one.text.encode())
        else:
            self._files.change(one.path, one.old, one.file, one.text)
            self._seen.note_change(one.path, self._files.read(one.path)[0])


def _restore(one: _PlannedFile) -> None:
    """Restore a file; if that fails too, the model still reads the error of the patch."""
    with suppress(EditorError, OSError):
        if one.old is None:
            os.unlink(one.path)
        else:
            replace_file(one.path, one.old)


def _apply_chunks(text: str, chunks: list[Chunk], path: str, budget: list[int]) -> str:
    lines = text.split("\n")
    has_last_break = lines[-1] == ""
    if has_last_break:
        lines.pop()
    cursor = shift = 0
    for chunk in chunks:
        for heading in chunk.headings:
            place = _find_lines(lines, [heading], cursor, budget)
            if place is None:
                raise EditRefusedError(f"No patch was applied. There is no line `{excerpt(heading, 200)}` in {path}.")
            cursor = place + 1
        place = _find_position(lines, chunk, cursor, chunk.line - 1 + shift if chunk.line else None, budget)
        if place is None:
            shown = excerpt("\n".join(chunk.old), 1000)
            raise EditRefusedError(f"No patch was applied. These lines are not in {path}:\n{shown}\nView the file.")
        end = place + len(chunk.old)
        lines[place:end] = chunk.render(lines[place:end])
        cursor = place + len(chunk.new)
        shift += len(chunk.new) - len(chunk.old)
    has_break = bool(lines) and (has_last_break or not text)
    return "\n".join(lines) + ("\n" if has_break else "")


def _find_position(lines: list[str], chunk: Chunk, cursor: int, expected: int | None, budget: list[int]) -> int | None:
    """Return the position of a chunk: the expected line, the end of the file, or the first match from the cursor on."""
    if not chunk.old:
        is_placed = expected is not None or chunk.headings
        return min(expected + 1 if expected is not None else cursor, len(lines)) if is_placed else len(lines)
    old = chunk.old
    # Models end a chunk with an empty line that the file does not have.
    for wanted in (old, old[:-1]) if old[-1] == "" and chunk.new[-1:] == [""] and len(old) > 1 else (old,):
        preferred = [expected] if expected is not None else []
        preferred += [len(lines) - len(wanted)] if chunk.is_at_end else []
        for place in preferred:
            if place >= cursor and lines[place : place + len(wanted)] == wanted:
                return _trim_chunk(chunk, wanted, place)
        first = _find_lines(lines, wanted, cursor, budget)
        if first is not None:
            return _trim_chunk(chunk, wanted, first)
    return None


def _trim_chunk(chunk: Chunk, wanted: list[str], place: int) -> int:
    if len(wanted) < len(chunk.old):
        chunk.old = wanted
        chunk.new = chunk.new[:-1]
        chunk.context = [(new, old) for new, old in chunk.context if new < len(chunk.new) and old < len(wanted)]
    return place


def _find_lines(lines: list[str], wanted: list[str], cursor: int, budget: list[int]) -> int | None:
    for reduced in (None, str.rstrip, str.strip):
        _spend(budget, len(lines))
        there = lines if reduced is None else [reduced(line) for line in lines]
        looked_for = wanted if reduced is None else [reduced(line) for line in wanted]
        place = cursor
        while place + len(wanted) <= len(lines):
            try:
                place = there.index(looked_for[0], place)
            except ValueError:
                break
            _spend(budget, len(wanted))
            if there[place : place + len(wanted)] == looked_for:
                return place
            place += 1
    return None


def _spend(budget: list[int], lines: int) -> None:
    budget[0] -= lines
    if budget[0] < 0:
        raise EditRefusedError("No patch was applied. Too much would have to be compared: use several patches.")


def _result(content: str, plan: list[_PlannedFile], *, is_error: bool = False) -> dict[str, object]:
    changes = [(one, one.file.text if one.file else "", one.text or "") for one in plan]
    return {
        "content": as_utf8(content),
        "is_error": is_error,
        "path": excerpt(as_utf8(plan[0].path)) if plan else "",
        "paths": [as_utf8(one.path) for one in plan if one.text is not None],
        "prev_exist": True,
        "old_content": None,
        "new_content": None,
        "diff": None if is_error else "".join(render_unified_diff(old, new, one.path) for one, old, new in changes),
    }
