"""Parses patches in the forms that coding models write: `*** Begin Patch`, and unified diffs.

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

Holds: the result has one entry per change of a file, in order; a line that fits neither form is refused.
"""

from __future__ import annotations

import re

from tool_worker.host.text_files.file_errors import EditRefusedError, excerpt

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
        """Return the new lines; context lines are those of the file, which may have other white space.

        Added lines get the indentation that all lines of the file have before that of the patch.

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
    """Return the white space of a file's line before the indentation of the patch; None: they do not fit."""
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
        EditRefusedError: the patch is not valid; the text quotes the wrong line.
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
