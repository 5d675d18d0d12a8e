"""Reading, editing and writing files (OpenHands 10.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import (
    ApplyPatchAction,
    ErrorObservation,
    FileEditAction,
    FileEditObservation,
    FileEditSource,
    FileReadAction,
    FileReadObservation,
    FileReadSource,
    FileWriteAction,
    FileWriteObservation,
    Observation,
)
from tool_worker.tools.tool import HostRequest, Tool

MAX_KEPT_CHARS = 200_000
"""For a larger file, the observation of an edit has only the diff."""

DOCUMENT_SECONDS = 60.0

EDIT_FIELDS = ("file_text", "old_str", "new_str", "insert_line")
LATER_EDIT_FIELDS = ("replace_all", "overwrite", "cell", "cell_type")
"""Fields that hosts of earlier versions do not know."""


class ReadFile(Tool):
    """Read a file, or view a file or a directory as the editor does."""

    action = FileReadAction

    def request(self, action: FileReadAction) -> HostRequest:
        """See `Tool.request`."""
        if not _is_view(action):
            return HostRequest("read", {"path": action.path, "start": action.start, "end": action.end})
        view_range = list(action.view_range) if action.view_range is not None else None
        if action.path.lower().endswith(".pdf"):
            arguments = {"path": action.path, "view_range": view_range}
            return HostRequest("code", {"question": "document", "arguments": arguments, "timeout": DOCUMENT_SECONDS})
        return HostRequest("edit", {"command": "view", "path": action.path, "view_range": view_range})

    def observe(self, action: FileReadAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`.

        A failed view is a `FileReadObservation` whose text starts with `ERROR:`, as in the original.
        """
        if result.get("is_error") and not _is_view(action):
            return ErrorObservation(content=result["content"])
        shown = result.get("image_url")
        return FileReadObservation(
            content=result["content"],
            path=action.path if _is_view(action) else result["path"],
            impl_source=action.impl_source,
            image_urls=(shown,) if isinstance(shown, str) else None,
        )


class WriteFile(Tool):
    """Write a file, or lines of it."""

    action = FileWriteAction

    def request(self, action: FileWriteAction) -> HostRequest:
        """See `Tool.request`."""
        fields = {"path": action.path, "content": action.content, "start": action.start, "end": action.end}
        return HostRequest("write", fields)

    def observe(self, action: FileWriteAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        if result.get("is_error"):
            return ErrorObservation(content=result["content"])
        return FileWriteObservation(path=result.get("path") or action.path)


class EditFile(Tool):
    """Change a file with a command of the string-replace editor."""

    action = FileEditAction

    def request(self, action: FileEditAction) -> HostRequest | Observation:
        """See `Tool.request`."""
        if action.impl_source is not FileEditSource.OH_ACI:
            return ErrorObservation(
                content="Edits by draft are not available here. Use str_replace_editor with str_replace or insert."
            )
        fields = {name: getattr(action, name) for name in EDIT_FIELDS}
        fields |= {name: given for name in LATER_EDIT_FIELDS if (given := getattr(action, name)) is not None}
        if action.edits is not None:
            fields["edits"] = [edit.model_dump() for edit in action.edits]
        return HostRequest("edit", {"command": action.command, "path": action.path, **fields})

    def observe(self, action: FileEditAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`.

        A failed edit is a `FileEditObservation` whose text starts with `ERROR:`, as in the original.
        """
        return FileEditObservation(
            content=result["content"],
            path=result.get("path") or action.path,
            prev_exist=bool(result.get("prev_exist")),
            old_content=_keep_if_small(result.get("old_content")),
            new_content=_keep_if_small(result.get("new_content")),
            diff=result.get("diff"),
            impl_source=action.impl_source,
        )


class ApplyPatch(Tool):
    """Change files by a patch."""

    action = ApplyPatchAction

    def request(self, action: ApplyPatchAction) -> HostRequest:
        """See `Tool.request`."""
        return HostRequest("patch", {"patch": action.patch})

    def observe(self, action: ApplyPatchAction, result: Mapping[str, Any]) -> Observation:  # noqa: ARG002
        """See `Tool.observe`."""
        if result.get("is_error"):
            return ErrorObservation(content=result["content"])
        return FileEditObservation(
            content=result["content"], path=result.get("path") or "", prev_exist=True, diff=result.get("diff")
        )


def _keep_if_small(content: str | None) -> str | None:
    return content if content is None or len(content) <= MAX_KEPT_CHARS else None


def _is_view(action: FileReadAction) -> bool:
    return action.impl_source is FileReadSource.OH_ACI or action.view_range is not None
