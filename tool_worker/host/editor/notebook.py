"""Jupyter notebooks: their cells as text, and edits of single cells.

Holds: a change leaves all other content and its order unchanged; outputs are truncated for display; changing a code
cell removes its outputs.
Does not: run cells.
"""

from __future__ import annotations

import json
import os

from tool_worker.host.editor.editor_arguments import optional_text, parse_line_range
from tool_worker.host.text_files.file_errors import EditRefusedError, InvalidParameterError, MissingParameterError
from tool_worker.host.text_files.text_file import with_plain_breaks

SHOWN_OUTPUT_CHARS = 1000
SHOWN_OUTPUTS = 10
HOW_TO_EDIT = (
    "Edit them with the commands `replace_cell`, `insert_cell` (after `cell`; 0: first) and `delete_cell`; their "
    "parameters are `cell`, `new_str`, and maybe `cell_type` (code, markdown)."
)
CELL_TYPES = ("code", "markdown", "raw")

Cell = dict[str, object]


class JupyterNotebook:
    """A notebook.

    Raises:
        EditRefusedError: the text is not a notebook.
    """

    def __init__(self, text: str, path: str) -> None:
        refusal = EditRefusedError(f"{path} is not a notebook: it has no list of cells in JSON. Repair it with bash.")
        try:
            self._document = json.loads(text)
        except (ValueError, RecursionError):
            raise refusal from None
        cells = self._document.get("cells") if isinstance(self._document, dict) else None
        if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
            raise refusal
        self._cells: list[Cell] = cells
        self._path = path

    def render(self, view_range: object, limit_chars: int) -> str:
        """Return cells with their numbers, from 1, and their outputs.

        Args:
            view_range: First and last cell; None: all.
            limit_chars: Bound of the text; if it is reached, a note names the first cell that is not complete.

        Raises:
            InvalidParameterError: there are no such cells.
        """
        count = len(self._cells)
        if not count:
            return f"The notebook {self._path} has no cells. {HOW_TO_EDIT}\n"
        first, last, note = (1, count, "") if view_range is None else parse_line_range(view_range, count)
        text = f"{note}The notebook {self._path}, {count} {'cell' if count == 1 else 'cells'}. {HOW_TO_EDIT}\n"
        for number in range(first, last + 1):
            cell = f"[{number}] {self._cells[number - 1].get('cell_type')}\n{_render_cell(self._cells[number - 1])}\n"
            if len(text) + len(cell) > limit_chars:
                room = max(limit_chars - len(text), 0)
                return f"{text}{cell[:room]}\n[Cut here. Give `view_range` to see cells from {number} on.]\n"
            text += cell
        return text

    def change(self, command: str, arguments: dict[str, object]) -> tuple[str, int]:
        """Run `replace_cell`, `insert_cell` or `delete_cell`.

        Args:
            arguments: `cell`, a number from 1 (`insert_cell`: the new one comes after it; 0: first), `new_str`, and
                optionally `cell_type`.

        Returns:
            The text of the notebook, and the number of the cell to show; 0 for none.
        """
        number = self._number(arguments, lowest=0 if command == "insert_cell" else 1)
        kind = optional_text(arguments, "cell_type")
        if kind is not None and kind not in CELL_TYPES:
            raise InvalidParameterError("cell_type", kind, f"It should be one of {', '.join(CELL_TYPES)}.")
        source = optional_text(arguments, "new_str")
        if command == "delete_cell":
            del self._cells[number - 1]
            number = 0
        elif source is None:
            raise MissingParameterError(command, "new_str")
        elif command == "insert_cell":
            self._cells.insert(number, self._new_cell(kind or "code"))
            number += 1
        if number:
            cell = self._cells[number - 1]
            cell["source"] = with_plain_breaks(source or "").splitlines(keepends=True)
            _reset_outputs(cell, kind)
        return json.dumps(self._document, indent=1, ensure_ascii=False) + "\n", number

    def _number(self, arguments: dict[str, object], *, lowest: int) -> int:
        number = arguments.get("cell")
        if not isinstance(number, int) or isinstance(number, bool) or not lowest <= number <= len(self._cells):
            raise InvalidParameterError("cell", number, f"It should be a number from {lowest} to {len(self._cells)}.")
        return number

    def _new_cell(self, kind: str) -> Cell:
        minor = self._document.get("nbformat_minor")
        has_ids = self._document.get("nbformat") == 4 and isinstance(minor, int) and minor >= 5
        identity: Cell = {"id": os.urandom(4).hex()} if has_ids else {}
        return {"cell_type": kind, **identity, "metadata": {}, "source": []}


def _reset_outputs(cell: Cell, kind: str | None) -> None:
    """Update type and outputs of a cell with a new source: a code cell loses its outputs, other types have none."""
    if kind is not None:
        cell["cell_type"] = kind
    if cell.get("cell_type") == "code":
        cell["execution_count"] = None
        cell["outputs"] = []
    else:
        cell.pop("execution_count", None)
        cell.pop("outputs", None)


def _render_cell(cell: Cell) -> str:
    outputs = cell.get("outputs")
    shown = [_render_output(output) for output in (outputs[:SHOWN_OUTPUTS] if isinstance(outputs, list) else [])]
    if isinstance(outputs, list) and len(outputs) > SHOWN_OUTPUTS:
        shown.append(f"[{len(outputs) - SHOWN_OUTPUTS} more outputs]")
    return "\n".join([_join_source(cell.get("source")), *(f"--> {text}" for text in shown)])


def _render_output(output: object) -> str:
    if not isinstance(output, dict):
        return "[an output that cannot be read]"
    if output.get("output_type") == "error":
        return f"{output.get('ename')}: {output.get('evalue')}"[:SHOWN_OUTPUT_CHARS]
    of_kinds = output.get("data")
    kinds = of_kinds if isinstance(of_kinds, dict) else {}
    text = _join_source(output.get("text") or kinds.get("text/plain")).rstrip()
    others = [str(kind) for kind in kinds if str(kind) != "text/plain"]
    if len(text) > SHOWN_OUTPUT_CHARS:
        text = f"{text[:SHOWN_OUTPUT_CHARS]}\n[{len(text) - SHOWN_OUTPUT_CHARS} more characters]"
    return f"{text} [{', '.join(others)}]"[: 2 * SHOWN_OUTPUT_CHARS] if others else text


def _join_source(source: object) -> str:
    return "".join(map(str, source)) if isinstance(source, list) else str(source or "")
