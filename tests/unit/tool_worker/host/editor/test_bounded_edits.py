"""Edits that would cost without end are refused, or cost what they should; two names of one file are one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tool_worker.host.editor.file_tools import FileTools
from tool_worker.host.editor.patching import COMPARED_LINES_LIMIT
from tool_worker.host.editor.replacements import SPANS_LIMIT, Replacement, apply_replacements
from tool_worker.host.text_files.file_errors import EditRefusedError


def everywhere(old: str, new: str) -> Replacement:
    return Replacement(old, new, is_everywhere=True)


def test_a_text_cannot_be_doubled_until_memory_is_full() -> None:
    with pytest.raises(EditRefusedError, match="would have"):
        apply_replacements("a" * 1_000, [everywhere("a", "aa")] * 40, "/f")


def test_of_many_replacements_only_the_first_places_are_kept() -> None:
    text, spans = apply_replacements("x\n" * 50_000, [everywhere("x", "y")], "/f")
    assert (text, len(spans)) == ("y\n" * 50_000, SPANS_LIMIT)


def patched(folder: Path, patch: str) -> dict[str, object]:
    return FileTools(str(folder)).run("patch", {"patch": patch, "cwd": str(folder)})


def test_patch_does_not_change_a_file_and_its_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").symlink_to("a")
    begin = "*** Begin Patch\n"
    both = "".join(f"*** Update File: {name}\n@@\n-{old}\n+new\n" for name, old in (("a", "one"), ("b", "two")))
    done = patched(tmp_path, f"{begin}{both}*** End Patch\n")
    assert (done["is_error"], "twice" in str(done["content"])) == (True, True)
    assert (tmp_path / "a").read_text() == "one\ntwo\n"
    assert patched(tmp_path, f"{begin}*** Delete File: b\n*** End Patch\n")["is_error"]
    assert (tmp_path / "b").is_symlink()


def test_a_patch_that_compares_too_much_is_refused(tmp_path: Path) -> None:
    lines = 100_000
    (tmp_path / "long").write_text("line\n" * lines)
    chunks = "@@\n line\n+x\n" * (COMPARED_LINES_LIMIT // lines + 2)
    done = patched(tmp_path, f"*** Begin Patch\n*** Update File: long\n{chunks}*** End Patch\n")
    assert (done["is_error"], "several patches" in str(done["content"])) == (True, True)
