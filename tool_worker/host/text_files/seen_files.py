"""Records the file contents that a model has seen, to refuse edits of files that something else has changed since.

Holds: a file that was never viewed can be edited, as in OpenHands. Beyond `FILES_LIMIT` files, the oldest views are
forgotten.
Does not: survive the workspace host; after a restart, nothing counts as seen.
"""

from __future__ import annotations

import os

from tool_worker.host.text_files.file_errors import EditRefusedError

FILES_LIMIT = 1000


class SeenFiles:
    """The content of each file at the model's last view or own edit."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def note(self, path: str, content: bytes) -> None:
        """Record the content as seen."""
        key = os.path.realpath(path)
        self._seen.pop(key, None)
        self._seen[key] = hash(content)
        if len(self._seen) > FILES_LIMIT:
            del self._seen[next(iter(self._seen))]

    def note_change(self, path: str, content: bytes) -> None:
        """Record the result of an edit as seen, if the model had seen the file before."""
        if os.path.realpath(path) in self._seen:
            self.note(path, content)

    def forget(self, path: str) -> None:
        """Mark a file as never seen."""
        self._seen.pop(os.path.realpath(path), None)

    def require_current(self, path: str, content: bytes) -> None:
        """Refuse an edit that is based on an older content.

        Raises:
            EditRefusedError: the model has seen another content.
        """
        seen = self._seen.get(os.path.realpath(path))
        if seen is not None and seen != hash(content):
            raise EditRefusedError(
                f"No edit was performed. {path} has changed on disk since you last viewed it, by a command or another "
                "program. View it again, then edit it."
            )
