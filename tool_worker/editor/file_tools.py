"""The tools that the host carries out itself and at once, on files of the workspace.

Holds: every call has a result; an edit can be undone whichever of the tools made it.
"""

from __future__ import annotations

import sys

from tool_worker.editor.file_editor import FileEditor
from tool_worker.editor.file_history import FileHistory
from tool_worker.editor.file_lines import FileLines
from tool_worker.editor.versioned_files import VersionedFiles


class FileTools:
    """The string-replace editor, and reading and writing lines.

    Args:
        workspace: Absolute path of the workspace.
        history: Descriptor of the file that keeps earlier versions, see `FileHistory`; -1: none.
    """

    def __init__(self, workspace: str, *, history: int = -1) -> None:
        files = VersionedFiles(history=FileHistory(descriptor=history))
        lines = FileLines(files)
        self._tools = {"edit": FileEditor(workspace, files).run, "read": lines.read, "write": lines.write}

    def run(self, tool: str, arguments: dict[str, object]) -> dict[str, object]:
        """Run one call; see `FileEditor.run`, `FileLines.read` and `FileLines.write`."""
        try:
            return self._tools[tool](arguments)
        except Exception as error:  # noqa: BLE001  (a defect of a tool is the answer to this call, not the host's end)
            sys.excepthook(*sys.exc_info())
            return {"content": f"ERROR:\nThe editor failed: {type(error).__name__}: {error}", "is_error": True}
