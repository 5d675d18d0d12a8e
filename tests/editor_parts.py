"""Calling a file editor: for the tests of what it answers."""

from __future__ import annotations

import json
from typing import Any

from tool_worker.host.editor.file_editor import FileEditor


def run(editor: FileEditor, command: str, path: object, **arguments: object) -> dict[str, Any]:
    """Run one command; whatever comes back must be fit for the wire."""
    result = editor.run({"command": command, "path": str(path), **arguments})
    json.dumps(result, ensure_ascii=False).encode()
    assert result["is_error"] == result["content"].startswith("ERROR:\n")
    return result


def error(editor: FileEditor, command: str, path: object, **arguments: object) -> str:
    """Run a command that must fail, and give its message."""
    result = run(editor, command, path, **arguments)
    assert result["is_error"]
    assert (result["old_content"], result["new_content"], result["diff"]) == (None, None, None)
    message: str = result["content"].removeprefix("ERROR:\n")
    return message
