"""The tool with which read-only agents read files (OpenHands 9.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import FileReadAction, FileReadSource, ToolSpec, required_text


def view_action(arguments: Mapping[str, Any]) -> FileReadAction:
    """Return the view of a file or directory."""
    return FileReadAction(
        path=required_text(arguments, "path", "view"),
        impl_source=FileReadSource.OH_ACI,
        view_range=arguments.get("view_range"),
    )


VIEW = ToolSpec(
    name="view",
    description="Show a file with line numbers, or a directory two levels deep. Long output is cut.",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Absolute path of the file or directory."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "First and last line of a file, from 1; -1 as last: to the end.",
            },
        },
        "required": ["path"],
    },
    convert=view_action,
)
