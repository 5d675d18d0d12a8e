"""The tool `apply_patch`: changes several files at once.

A patch has one of the forms that coding models write: `*** Begin Patch`, or a unified diff.

    *** Begin Patch
    *** Update File: shop/till.py
    @@ class Till:
         is_open = False
    -    limit = 3
    +    limit = 4
    *** Add File: notes.txt
    +A line.
    *** Delete File: old.py
    *** End Patch

Holds: all files are changed or none. If lines are not found, the error quotes them. The search time is bounded. Lines
are compared exactly first, then without trailing white space, then without leading white space as well. Context lines
stay as they are in the file. The result has one entry per change of a file, in order; a line that fits neither form is
refused.
Does not: undo a removal or a move.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from tool_worker.host.editor.editor_arguments import require_text
from tool_worker.host.text_files.file_errors import (
    EditorError,
    EditRefusedError,
    InvalidParameterError,
    as_utf8,
    excerpt,
)
from tool_worker.host.text_files.regular_file import find_status, make_parents, replace_file
from tool_worker.host.text_files.text_file import TextFile, render_unified_diff, with_plain_breaks
from tool_worker.host.text_files.versioned_files import SeenFiles, VersionedFiles

FILES_LIMIT = 200
ADD, UPDATE, DELETE = "add", "update", "delete"

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_DIFF_NOTES = (
    "diff ",
    "index ",
    "old mode ",
    "new mode ",
    "new file mode ",
    "deleted file mode ",
    "similarity index ",
    "rename from ",
    "rename to ",
    "Binary files ",
)


class Chunk:
    """One part of a change: old lines and their replacement.

    Attributes:
        headings: Lines to find first, such as the head of a class.
        line: The probable first line, from 1; 0 if not given.
        is_at_end: Whether the part is at the end of the file.
        context: Positions in `new` and in `old` of each line that is in both.
    """

    def __init__(self, line: int = 0) -> None:
        self.headings: list[str] = []
        self.line = line
        self.old: list[str] = []
        self.new: list[str] = []
        self.is_at_end = False
        self.context: list[tuple[int, int]] = []

    def render(self, found: list[str]) -> list[str]:
        """Return the new lines; context lines are taken from the file, because their white space may differ.

        If all lines of the file are indented further than in the patch, added lines get the same extra indentation.

        Args:
            found: The lines of the file that match `old`.
        """
        margins = {_find_margin(old, line) for old, line in zip(self.old, found) if old.strip()}  # noqa: B905  (equally many)
        margin = margins.pop() if len(margins) == 1 else None
        lines = [margin + line if margin and line.strip() else line for line in self.new]
        for new, old in self.context:
            lines[new] = found[old]
        return lines


def _find_margin(old: str, line: str) -> str | None:
    """Return the extra indentation of a file's line over that of the patch; None if the lines do not match."""
    there, written = (text[: len(text) - len(text.lstrip())] for text in (line, old))
    return there[: len(there) - len(written)] if there.endswith(written) else None


class FileChange:
    """The change of one file; `target` is the new path of a moved file."""

    def __init__(self, kind: str, path: str) -> None:
        self.kind = kind
        self.path = path
        self.target = ""
        self.chunks: list[Chunk] = []


def parse_patch(text: str) -> list[FileChange]:
    """Parse a patch.

    Raises:
        EditRefusedError: the patch is invalid; the text quotes the offending line.
    """
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    begins = [number for number, line in enumerate(lines) if line.strip() == "*** Begin Patch"]
    if begins:
        changes = _parse_envelope(lines[begins[0] + 1 :])
    elif any(line.startswith("--- ") for line in lines):
        changes = _parse_unified_diff(lines)
    else:
        raise EditRefusedError("No patch was applied. It begins with neither `*** Begin Patch` nor `--- path`.")
    if not changes:
        raise EditRefusedError("No patch was applied. It changes no file.")
    if len(changes) > FILES_LIMIT:
        raise EditRefusedError(f"No patch was applied. It changes more than {FILES_LIMIT} files.")
    return changes


def _parse_envelope(lines: list[str]) -> list[FileChange]:
    changes: list[FileChange] = []
    for line in lines:
        if line.strip() == "*** End Patch":
            return changes
        kind, path = _file_head(line)
        if kind:
            changes.append(FileChange(kind, path))
            if kind == ADD:
                changes[-1].chunks.append(Chunk())
        elif not changes:
            raise _line_error(line)
        elif line.startswith("*** Move to: ") and changes[-1].kind == UPDATE:
            changes[-1].target = line.removeprefix("*** Move to: ").strip()
        else:
            _add_line(changes[-1], line)
    raise EditRefusedError("No patch was applied. Its last line `*** End Patch` is missing.")


def _file_head(line: str) -> tuple[str, str]:
    for kind, head in ((ADD, "*** Add File: "), (UPDATE, "*** Update File: "), (DELETE, "*** Delete File: ")):
        if line.startswith(head):
            return kind, line.removeprefix(head).strip()
    return "", ""


def _add_line(change: FileChange, line: str) -> None:
    """Add a line to the change of a file."""
    if change.kind == ADD and line.startswith("+"):
        change.chunks[-1].new.append(line[1:])
        return
    if change.kind != UPDATE:
        if line.strip():
            raise _line_error(line)
        return
    if line.startswith("@@"):
        heading = line[2:].strip().removesuffix("@@").strip()
        match = _HUNK.match(line)
        if not (change.chunks and not change.chunks[-1].old and not change.chunks[-1].new):
            change.chunks.append(Chunk())
        if match:
            change.chunks[-1].line = int(match[1])
        elif heading:
            change.chunks[-1].headings.append(heading)
        return
    if not change.chunks:
        change.chunks.append(Chunk())
    chunk = change.chunks[-1]
    if line.strip() == "*** End of File":
        chunk.is_at_end = True
    else:
        _add_content_line(chunk, line)


def _add_content_line(chunk: Chunk, line: str) -> None:
    sign, rest = line[:1], line[1:]
    if sign in (" ", ""):
        chunk.context.append((len(chunk.new), len(chunk.old)))
        chunk.old.append(rest)
        chunk.new.append(rest)
    elif sign == "-":
        chunk.old.append(rest)
    elif sign == "+":
        chunk.new.append(rest)
    elif sign != "\\":  # "\ No newline at end of file"
        raise _line_error(line)


def _parse_unified_diff(lines: list[str]) -> list[FileChange]:
    changes: list[FileChange] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        if line.startswith("--- ") and lines[number + 1 : number + 2] and lines[number + 1].startswith("+++ "):
            changes.append(_change_from_heads(_diff_path(line), _diff_path(lines[number + 1])))
            number += 2
        elif match := _HUNK.match(line):
            if not changes:
                raise _line_error(line)
            number = _add_hunk(changes[-1], match, lines, number + 1)
        elif not line.strip() or line.startswith(_DIFF_NOTES) or line.startswith("\\"):
            if line.startswith(("rename ", "Binary files ")):
                raise EditRefusedError(f"No patch was applied. Use bash for this part of it: `{excerpt(line, 200)}`.")
            number += 1
        else:
            raise _line_error(line)
    return changes


def _add_hunk(change: FileChange, head: re.Match[str], lines: list[str], number: int) -> int:
    """Add as many lines as the hunk's head announces; return the index of the next line."""
    chunk = Chunk(int(head[1]))
    change.chunks.append(chunk)
    old = int(head[2] or 1)
    new = int(head[4] or 1)
    while number < len(lines) and (len(chunk.old) < old or len(chunk.new) < new):
        if lines[number].startswith(("@@ -", "--- ", "diff ")) and _HUNK.match(lines[number]):
            break
        _add_content_line(chunk, lines[number])
        number += 1
    return number


def _change_from_heads(old: str, new: str) -> FileChange:
    if old == "/dev/null":
        return FileChange(ADD, new.removeprefix("b/"))
    if new == "/dev/null":
        return FileChange(DELETE, old.removeprefix("a/"))
    old, new = (old[2:], new[2:]) if old.startswith("a/") and new.startswith("b/") else (old, new)
    change = FileChange(UPDATE, old)
    change.target = "" if new == old else new
    return change


def _diff_path(line: str) -> str:
    return line[4:].partition("\t")[0].strip()


def _line_error(line: str) -> EditRefusedError:
    return EditRefusedError(
        f"No patch was applied. This line fits nowhere in it: `{excerpt(line, 200)}`. Each line of a change begins "
        "with a blank, `-` or `+`, and each file with `*** Add File: `, `*** Update File: ` or `*** Delete File: `."
    )


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
    """Restore a file; if this fails as well, the model still reads the error of the patch."""
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
