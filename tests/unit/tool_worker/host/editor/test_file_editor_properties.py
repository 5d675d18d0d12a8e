"""What holds for every text, every file and every call of the file editor."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.editor_parts import without_lacking_margins
from tool_worker.host.editor.file_editor import FileEditor
from tool_worker.host.text_files.text_file import TextFile

# Few letters, so that a short text occurs in a longer one, twice, overlapping, or with blanks around it.
SHORT = st.text("ab \n", max_size=4)
LONG = st.text("ab \n", max_size=30)
LINE_BREAKS = st.sampled_from(["\n", "\r\n", "\r"])
CODES = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
LINES = st.lists(st.text("aé€", max_size=3), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


def one_file(content: bytes) -> tuple[tempfile.TemporaryDirectory[str], Path, FileEditor]:
    directory = tempfile.TemporaryDirectory()
    path = Path(directory.name) / "a.txt"
    path.write_bytes(content)
    return directory, path, FileEditor(directory.name)


def replace_in_model(text: str, old_str: str, new_str: str) -> str | None:
    """The text with `new_str` in the only place of `old_str`; None where the editor must refuse."""

    def places(part: str) -> list[int]:
        return [index for index in range(len(text) + 1) if text.startswith(part, index)]

    old_str, new_str = without_lacking_margins(text, old_str, new_str)
    if old_str == new_str or len(places(old_str)) != 1:
        return None
    before, after = text[: places(old_str)[0]], text[places(old_str)[0] + len(old_str) :]
    return before + new_str + after


@given(LONG, SHORT, SHORT)
@example("}\n}\n}", "}\n}", "")
@example("", "", "a")
@example("a", " a", "b ")
def test_str_replace_does_what_its_model_does(text: str, old_str: str, new_str: str) -> None:
    directory, path, editor = one_file(text.encode())
    with directory:
        result = editor.run({"command": "str_replace", "path": str(path), "old_str": old_str, "new_str": new_str})
        expected = replace_in_model(text, old_str, new_str)
        assert result["is_error"] == (expected is None)
        assert path.read_text() == (text if expected is None else expected)


@given(LONG, st.integers(-1, 40), SHORT)
def test_insert_does_what_its_model_does(text: str, line: int, new_str: str) -> None:
    lines = text.split("\n")
    has_last_break = lines[-1] == ""
    if has_last_break:
        lines.pop()
    expected = None
    if 0 <= line <= len(lines):
        expected = "\n".join([*lines[:line], new_str, *lines[line:]]) + "\n" * has_last_break
    directory, path, editor = one_file(text.encode())
    with directory:
        result = editor.run({"command": "insert", "path": str(path), "insert_line": line, "new_str": new_str})
        assert result["is_error"] == (expected is None)
        assert path.read_text() == (text if expected is None else expected)


@given(
    LINES,
    st.lists(LINE_BREAKS, min_size=8, max_size=8),
    CODES,
    st.lists(st.tuples(st.integers(0, 8), st.text("aé\n", max_size=3)), max_size=10),
)
def test_undoing_restores_every_byte(
    lines: list[str], breaks: list[str], code: str, insertions: list[tuple[int, str]]
) -> None:
    text = "".join(line + line_break for line, line_break in zip(lines, breaks, strict=False))
    assume(code != "latin-1" or "€" not in text)
    directory, path, editor = one_file(text.encode(code))
    with directory:
        versions = [path.read_bytes()]
        for line, new_str in insertions:
            edit = {"command": "insert", "path": str(path), "insert_line": line, "new_str": new_str}
            if not editor.run(edit)["is_error"]:
                versions.append(path.read_bytes())
        while len(versions) > 1:
            assert path.read_bytes() == versions.pop()
            assert editor.run({"command": "undo_edit", "path": str(path)})["is_error"] is False
        assert path.read_bytes() == versions.pop()
        assert editor.run({"command": "undo_edit", "path": str(path)})["is_error"] is True


@given(
    st.binary() | st.text("aé€\r\n\0\x01").map(str.encode) | st.text("aé\r\n").map(lambda text: text.encode("cp1252"))
)
@example(b"\xff\xfea\0\r\0\n\0")
@example(b"\xef\xbb\xbf\xef\xbb\xbfa\r")
def test_a_file_that_is_text_survives_decoding(content: bytes) -> None:
    file = TextFile.decode(content)
    if file is None:
        assert b"\0" in content or not is_utf_8(content)
    else:
        assert file.encode(file.text) == content
        assert "\r" not in file.text


def is_utf_8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@given(st.text("ab\r\n", max_size=20), st.text("ab\n", max_size=20))
@example("a\rb\n\nc", "a\n\nc")
def test_an_edited_text_is_read_back_whatever_its_line_breaks(original: str, edited: str) -> None:
    file = TextFile.decode(original.encode())
    assert file
    reread = TextFile.decode(file.encode(edited))
    assert reread
    assert reread.text == edited


@given(st.lists(st.tuples(st.text("ab", max_size=2), st.sampled_from(["\n", "\r\n"])), min_size=1), st.integers(0))
def test_lines_that_were_not_edited_keep_their_bytes(lines: list[tuple[str, str]], place: int) -> None:
    place %= len(lines)
    file = TextFile.decode("".join(line + line_break for line, line_break in lines).encode())
    assert file
    edited = [line for line, _ in lines]
    edited[place] = "new"
    written = file.encode("".join(line + "\n" for line in edited)).split(b"\n")[:-1]
    for index, (line, line_break) in enumerate(lines):
        if index != place:
            assert written[index] + b"\n" == (line + line_break).encode()


@given(
    st.dictionaries(
        st.sampled_from(["command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"]), JSON
    ),
    st.sampled_from(["view", "create", "str_replace", "insert", "undo_edit"]) | st.none(),
    st.sampled_from(["a.txt", "b.txt", "", "a.txt/b", "../a.txt"]) | st.none() | st.text(max_size=5),
)
def test_every_call_is_answered(arguments: dict[str, object], command: str | None, name: str | None) -> None:
    directory, _, editor = one_file(b"one\r\ntwo")
    with directory:
        if command is not None:
            arguments["command"] = command
        if name is not None:
            arguments["path"] = f"{directory.name}/{name}"
        result = editor.run(arguments)
    json.dumps(result, ensure_ascii=False).encode()
    assert set(result) == {"content", "is_error", "path", "prev_exist", "old_content", "new_content", "diff"}
    assert result["is_error"] == str(result["content"]).startswith("ERROR:\n")
