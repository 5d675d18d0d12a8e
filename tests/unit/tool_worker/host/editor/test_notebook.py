"""Notebooks in the file editor: shown by cells, and changed cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.editor_parts import error, run
from tool_worker.host.editor.file_editor import FileEditor
from tool_worker.host.editor.notebook import HOW_TO_EDIT

OUTPUTS = [
    {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]},
    {"output_type": "execute_result", "data": {"text/plain": "y" * 5000, "image/png": "AAAA" * 1000}},
    {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["long"] * 100},
]


def cell(kind: str, source: Any, **more: Any) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {"kept": True}, "source": source, **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    code = cell("code", ["x = 1\n", "print(x)"], execution_count=3, outputs=OUTPUTS, id="a")
    cells = [cell("markdown", "# Title", id="t"), code, cell("code", "y", execution_count=None, outputs=[], id="b")]
    document = {"cells": cells, "metadata": {"z": 1, "a": 2}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "a.ipynb").write_text(json.dumps(document))
    return tmp_path / "a.ipynb"


def cells_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cells"]


def test_cells_are_numbered_and_outputs_cut(editor: FileEditor, path: Path) -> None:
    text = run(editor, "view", path)["content"]
    assert text.startswith(
        f"The notebook {path}, 3 cells. {HOW_TO_EDIT}\n[1] markdown\n# Title\n[2] code\nx = 1\nprint(x)\n--> 1\n2\n"
    )
    assert "[4000 more characters] [image/png]" in text
    assert "--> ValueError: no\n" in text
    assert "AAAA" not in text
    assert "long" not in text
    assert run(editor, "view", path, view_range=[3, -1])["content"].endswith(f"{HOW_TO_EDIT}\n[3] code\ny\n")
    assert "should be within the range" in error(editor, "view", path, view_range=[4, 5])


def test_a_cell_is_replaced_and_loses_its_outputs(editor: FileEditor, path: Path) -> None:
    result = run(editor, "replace_cell", path, cell=2, new_str="x = 2\nx")
    assert result["content"].endswith("[2] code\nx = 2\nx\n")
    first, second, third = cells_of(path)
    assert second == {
        "cell_type": "code",
        "metadata": {"kept": True},
        "source": ["x = 2\n", "x"],
        "execution_count": None,
        "outputs": [],
        "id": "a",
    }
    assert (first["id"], third["id"]) == ("t", "b")
    run(editor, "replace_cell", path, cell=2, new_str="words", cell_type="markdown")
    assert "outputs" not in cells_of(path)[1]
    run(editor, "undo_edit", path)
    assert cells_of(path)[1]["cell_type"] == "code"


def test_cells_are_inserted_and_deleted(editor: FileEditor, path: Path) -> None:
    run(editor, "insert_cell", path, cell=0, new_str="first", cell_type="markdown")
    run(editor, "insert_cell", path, cell=4, new_str="last")
    assert [one["source"] for one in cells_of(path)][::4] == [["first"], ["last"]]
    assert [one["cell_type"] for one in cells_of(path)] == ["markdown", "markdown", "code", "code", "code"]
    assert len({one["id"] for one in cells_of(path)}) == 5
    run(editor, "delete_cell", path, cell=2)
    assert len(cells_of(path)) == 4
    assert list(json.loads(path.read_text())["metadata"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("replace_cell", {"cell": 4, "new_str": ""}, "from 1 to 3"),
        ("replace_cell", {"cell": 0, "new_str": ""}, "from 1 to 3"),
        ("insert_cell", {"cell": "1", "new_str": ""}, "from 0 to 3"),
        ("insert_cell", {"cell": True, "new_str": ""}, "from 0 to 3"),
        ("replace_cell", {"cell": 1}, "`new_str` is required"),
        ("insert_cell", {"cell": 1, "new_str": "", "cell_type": "x"}, "one of code, markdown, raw"),
        ("delete_cell", {}, "from 1 to 3"),
    ],
)
def test_invalid_cell_number_is_refused(
    editor: FileEditor, path: Path, command: str, arguments: dict[str, Any], said: str
) -> None:
    before = path.read_bytes()
    assert said in error(editor, command, path, **arguments)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["{}", "[", '{"cells": [1]}', "[" * 100_000, '{"cells": {}}', ""])
def test_invalid_notebook_is_shown_as_text_without_cells(editor: FileEditor, path: Path, text: str) -> None:
    path.write_text(text)
    assert "cat -n" in run(editor, "view", path)["content"]
    assert "is not a notebook" in error(editor, "replace_cell", path, cell=1, new_str="")


def test_a_large_notebook_is_shown_in_parts(editor: FileEditor, path: Path) -> None:
    document = {"cells": [cell("code", "x" * 3000) for _ in range(20)]}
    path.write_text(json.dumps(document))
    text = run(editor, "view", path)["content"]
    assert len(text) < 17_000
    assert text.endswith("[Cut here. Give `view_range` to see cells from 6 on.]\n")
    assert "[20] code" in run(editor, "view", path, view_range=[18, 20])["content"]
