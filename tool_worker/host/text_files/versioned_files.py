"""Text files of a workspace as tools edit them, and the replaced versions.

`SeenFiles` records the contents that a model has seen, to refuse edits of files that another program has changed since.

Holds: a change keeps the file's encoding, line breaks and mode, and the bytes of unchanged lines. Written text can be
read back. Replaced versions can be restored in reverse order. A version is restored only if the file still has the
content that the edit wrote, so that changes by other programs are not lost. A file that was never viewed can be edited,
as in OpenHands. Beyond `FILES_LIMIT` files, the oldest views are forgotten.
Does not: remember seen contents after a restart of the workspace host.
"""

from __future__ import annotations

import os

from tool_worker.host.text_files.file_errors import EditRefusedError, NoTextError
from tool_worker.host.text_files.file_history import FileHistory
from tool_worker.host.text_files.regular_file import read_regular_file, replace_file, require_size
from tool_worker.host.text_files.text_file import TextFile

REMEMBERED_GUESSES = 1_000


class VersionedFiles:
    """Reads and writes text files, and keeps their earlier versions.

    Args:
        max_file_bytes: Larger files are neither read nor written.
        history: Keeps the versions; None to keep them in this object.
    """

    def __init__(self, *, max_file_bytes: int = 10 * 2**20, history: FileHistory | None = None) -> None:
        self._max_file_bytes = max_file_bytes
        self._history = history or FileHistory()
        self._guessed: dict[str, str] = {}

    def read(self, path: str) -> tuple[bytes, TextFile]:
        """Read a file; return its bytes and its decoded text.

        Raises:
            FileRejectedError: it is too large, or not a regular file.
            NoTextError: it is binary.
            FileAccessError: the operating system refused.
        """
        content = read_regular_file(path, self._max_file_bytes)
        return content, self._decode(path, content)

    def create(self, path: str, text: str) -> None:
        """Write a new file in UTF-8. Raises the errors of `change`, except those of the encoding."""
        content = text.encode()
        require_size(path, len(content), self._max_file_bytes)
        replace_file(path, content)
        # In OpenHands, undoing a creation restores the created text and does not remove the file.
        self._history.push(os.path.realpath(path), content, content)

    def change(self, path: str, old_content: bytes, file: TextFile, text: str) -> None:
        r"""Replace the text of a file.

        Args:
            old_content: The bytes that `read` returned together with `file`.
            text: With `\n` as line break.

        Raises:
            EditRefusedError: the file's encoding cannot represent the text, or would not be recognized afterwards.
            FileRejectedError: the file would be too large.
            FileAccessError: the operating system refused.
        """
        try:
            content = file.encode(text)
        except UnicodeEncodeError as error:
            raise EditRefusedError(
                f"No edit was performed. {path} is encoded as {file.encoding}, which has no code for "
                f"`{error.object[error.start]}`. Write it with other characters, or convert the file to UTF-8 first, "
                "e.g. with `iconv`."
            ) from None
        reread = TextFile.decode(content, file.encoding if file.is_guessed else "")
        if reread is None or reread.text != text:
            raise EditRefusedError(
                f"No edit was performed. {path} is encoded as {file.encoding}, and the edited text could not be told "
                "from another encoding or from binary content. Convert the file to UTF-8 first, e.g. with `iconv`."
            )
        require_size(path, len(content), self._max_file_bytes)
        replace_file(path, content)
        self._history.push(os.path.realpath(path), old_content, content)

    def restore(self, path: str) -> tuple[TextFile, TextFile]:
        """Restore the newest version of a file; return its text before and after.

        Raises:
            EditRefusedError: there is no version, or another program has changed the file since.
            FileRejectedError, FileAccessError: as for `read` and `change`.
        """
        present, file = self.read(path)
        target = os.path.realpath(path)
        version = self._history.newest(target)
        if version is None:
            raise EditRefusedError(f"No edit history found for {path}.")
        if not version.was_replaced_by(present):
            raise EditRefusedError(
                f"The last edit to {path} was not undone: a command or another program has changed the file since, and "
                "undoing would lose that change. View the file, and take your edit back with `str_replace`."
            )
        earlier = self._decode(path, version.content)
        replace_file(path, version.content)
        self._history.drop_newest(target)
        return file, earlier

    def _decode(self, path: str, content: bytes) -> TextFile:
        """Decode a file; a guessed encoding is kept while it fits, so that an edit does not change the next guess."""
        target = os.path.realpath(path)
        file = TextFile.decode(content, self._guessed.pop(target, ""))
        if file is None:
            raise NoTextError(path)
        if file.is_guessed:
            self._guessed[target] = file.encoding
            if len(self._guessed) > REMEMBERED_GUESSES:
                del self._guessed[next(iter(self._guessed))]
        return file


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
        """Record the result of an edit as seen, if the model has seen the file before."""
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
