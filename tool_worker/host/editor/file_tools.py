"""The file tools that the host runs in its own process.

Holds: every call has a result; an edit of any tool can be undone.
"""

from __future__ import annotations

import sys

from tool_worker.host.editor.file_editor import FileEditor
from tool_worker.host.editor.file_lines import FileLines
from tool_worker.host.editor.patching import Patching
from tool_worker.host.text_files.file_history import FileHistory
from tool_worker.host.text_files.versioned_files import SeenFiles, VersionedFiles

CHECKED_ENDINGS = (".py", ".pyi", ".json", ".js", ".mjs", ".cjs")


class FileTools:
    """The string-replace editor, patches, and reading and writing lines.

    Args:
        workspace: Absolute path of the workspace.
        history: Descriptor of the file that keeps earlier versions, see `FileHistory`; -1: none.
    """

    def __init__(self, workspace: str, *, history: int = -1) -> None:
        files = VersionedFiles(history=FileHistory(descriptor=history))
        lines = FileLines(files)
        self._seen = SeenFiles()
        self._tools = {
            "edit": FileEditor(workspace, files, self._seen).run,
            "patch": Patching(files, self._seen).apply,
            "read": lines.read,
            "write": lines.write,
        }

    def run(self, tool: str, arguments: dict[str, object]) -> dict[str, object]:
        """Run one call; see `FileEditor.run`, `Patching.apply`, `FileLines.read` and `FileLines.write`."""
        try:
            result = self._tools[tool](arguments)
            if tool == "write":
                self._seen.forget(str(result.get("path")))
        except Exception as error:  # noqa: BLE001  (a defect of a tool is the answer to this call, not the host's end)
            sys.excepthook(*sys.exc_info())
            return {"content": f"ERROR:\nThe editor failed: {type(error).__name__}: {error}", "is_error": True}
        return result

    def to_check(self, result: dict[str, object]) -> list[str]:
        """Return the files changed by a call for which a checker exists; see `file_check`."""
        if result.get("is_error") or not result.get("diff"):
            return []
        paths = result.get("paths") or [result.get("path")]
        assert isinstance(paths, list)
        return [str(path) for path in paths if str(path).lower().endswith(CHECKED_ENDINGS)]
