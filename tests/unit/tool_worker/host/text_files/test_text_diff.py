"""Unified diffs, judged by git."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exploring import examples
from tool_worker.host.text_files.text_file import render_unified_diff

TEXT = st.lists(st.sampled_from(["a\n", "b\n", "\n"]), max_size=12).map("".join)


def apply_with_git(old: str, diff: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.txt"
        path.write_text(old)
        subprocess.run(
            ["git", "apply", "-p0", "--whitespace=nowarn", "-"],
            input=diff.encode(),
            cwd=directory,
            env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": "/"},
            check=True,
            timeout=60,
        )
        return path.read_text() if path.exists() else ""


@given(TEXT, TEXT, st.booleans(), st.booleans())
@settings(max_examples=examples(60))
def test_git_makes_the_new_text_of_the_old(old: str, new: str, is_old_cut: bool, is_new_cut: bool) -> None:
    old = old.removesuffix("\n") if is_old_cut else old
    new = new.removesuffix("\n") if is_new_cut else new
    diff = render_unified_diff(old, new, "a.txt")
    if old == new:
        assert diff == ""
    else:
        assert apply_with_git(old, diff) == new


@pytest.mark.parametrize(
    ("old", "new", "hunk"),
    [
        ("", "a\n", "@@ -0,0 +1 @@\n+a\n"),
        ("a\n", "", "@@ -1 +0,0 @@\n-a\n"),
        ("a", "a\n", "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n"),
        ("1\n2\n3\n4\n5\n6\n7\n8\n", "1\n2\n3\n4\nx\n6\n7\n8\n", "@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+x\n 6\n 7\n 8\n"),
        ("a\na\n", "a\na\na\n", "@@ -1,2 +1,3 @@\n a\n a\n+a\n"),
        ("a\x0cb\n", "a\x0cc\n", "@@ -1 +1 @@\n-a\x0cb\n+a\x0cc\n"),
    ],
)
def test_one_hunk_with_three_lines_around(old: str, new: str, hunk: str) -> None:
    assert render_unified_diff(old, new, "/a b.txt") == f"--- /a b.txt\n+++ /a b.txt\n{hunk}"
