"""Text files of a workspace as tools change them, and the versions that this replaced.

Holds: encoding, line breaks and mode of a file survive a change, and lines that were not changed keep their bytes; what
was written can be read back; what was replaced can be restored, in the reverse order.
A version is restored only to a file that still is what the edit made of it, so that no other program's changes are
lost.
"""

from __future__ import annotations

import os

from tool_worker.host.text_files.file_errors import EditRefusedError, NoTextError
from tool_worker.host.text_files.file_history import FileHistory
from tool_worker.host.text_files.regular_file import read_regular_file, replace_file, require_size
from tool_worker.host.text_files.text_file import TextFile

REMEMBERED_GUESSES = 1_000


class VersionedFiles:
    """Reads and writes text files, and remembers their earlier versions.

    Args:
        max_file_bytes: Larger files are neither read nor written.
        history: Keeps the versions; None: for as long as this object lives.
    """

    def __init__(self, *, max_file_bytes: int = 10 * 2**20, history: FileHistory | None = None) -> None:
        self._max_file_bytes = max_file_bytes
        self._history = history or FileHistory()
        self._guessed: dict[str, str] = {}

    def read(self, path: str) -> tuple[bytes, TextFile]:
        """Read a file: its bytes, and what they say.

        Raises:
            FileRejectedError: it is too large, or no regular file.
            NoTextError: it is binary.
            FileAccessError: the operating system refused.
        """
        content = read_regular_file(path, self._max_file_bytes)
        return content, self._decoded(path, content)

    def create(self, path: str, text: str) -> None:
        """Write a file that was not there, in UTF-8; raises what `change` does but for its encoding."""
        content = text.encode()
        require_size(path, len(content), self._max_file_bytes)
        replace_file(path, content)
        # The created text and not the file's absence: in OpenHands, undoing a creation restores what was created.
        self._history.push(os.path.realpath(path), content, content)

    def change(self, path: str, old_content: bytes, file: TextFile, text: str) -> None:
        r"""Give a file another text.

        Args:
            old_content: What `read` returned, as `file` is.
            text: With `\n` as line break.

        Raises:
            EditRefusedError: the file's encoding cannot hold the text, or it could not be told from another one then.
            FileRejectedError: it would be too large.
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
        """Bring back the newest version of a file: what it was before, and what it is now.

        Raises:
            EditRefusedError: there is none, or another program has changed the file since.
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
        earlier = self._decoded(path, version.content)
        replace_file(path, version.content)
        self._history.drop_newest(target)
        return file, earlier

    def _decoded(self, path: str, content: bytes) -> TextFile:
        """Decode a file; a guess counts until it does not fit, so that no edit changes the encoding of the next."""
        target = os.path.realpath(path)
        file = TextFile.decode(content, self._guessed.pop(target, ""))
        if file is None:
            raise NoTextError(path)
        if file.is_guessed:
            self._guessed[target] = file.encoding
            if len(self._guessed) > REMEMBERED_GUESSES:
                del self._guessed[next(iter(self._guessed))]
        return file
