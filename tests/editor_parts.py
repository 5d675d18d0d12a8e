"""Helpers that call a file editor."""

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


def without_lacking_margins(text: str, old_str: str, new_str: str) -> tuple[str, str]:
    """Both texts without the outer white space of `old_str` that its stripped form does not have around it in a text."""
    core = old_str.strip()
    if old_str in text or not core:
        return old_str, new_str
    start = old_str.index(core)
    end = start + len(core)

    def is_there(first: int, last: int) -> bool:
        return text.count(old_str[first:last]) == text.count(core)

    first = next(place for place in range(start + 1) if is_there(place, end))
    last = next(place for place in range(len(old_str), end - 1, -1) if is_there(first, place))
    for character in old_str[:first]:
        if not new_str.startswith(character):
            break
        new_str = new_str[1:]
    for character in reversed(old_str[last:]):
        if not new_str.endswith(character):
            break
        new_str = new_str[:-1]
    return old_str[first:last], new_str
