"""Fixtures of the file editor's tests; `tests.editor_parts` calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tool_worker.host.editor.file_editor import FileEditor


@pytest.fixture
def editor(tmp_path: Path) -> FileEditor:
    return FileEditor(str(tmp_path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.txt"


@pytest.fixture
def ten_lines(tmp_path: Path) -> Path:
    path = tmp_path / "ten.txt"
    path.write_text("".join(f"line {number}\n" for number in range(1, 11)))
    return path
