"""The location of archived files: a directory, or any place that fsspec supports, such as `s3://bucket/deckhands`.

    <two letters>/<conversation>.zip     the letters are the first two of the SHA-256 of the id, in hexadecimal
    .drafts/                             files being written, in a directory

Holds: in a directory, files appear atomically, and are on the disk when `write` returns.
Does not: guarantee that elsewhere. A reader may find part of a file there, so files are checked before use.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from broker.runtime import DeckhandsError, check_conversation_id, is_conversation_id


class ArchiveUnavailable(DeckhandsError):
    """The place cannot be read or written."""

    code = "archive_unavailable"
    retryable = True


class CorruptArchive(DeckhandsError):
    """An archived file is damaged, or was not written by Deckhands."""

    code = "corrupt_archive"


class ArchiveConflict(DeckhandsError):
    """The archive holds another conversation with this id, or a longer log of this one."""

    code = "archive_conflict"


class TooLargeToArchive(DeckhandsError):
    """A conversation exceeds the limits of an archived file."""

    code = "too_large_to_archive"


SUFFIX = ".zip"
WRITTEN_FIELDS = ("mtime", "LastModified", "last_modified", "updated", "created")
"""The names under which file systems report the time of a write: the local one, S3, Azure, Google, memory."""
OWN_DIRECTORY = 0o700
DRAFTS = ".drafts"


class ArchiveStorage:
    """The files of an archive. All calls block, for as long as the place takes.

    Raises:
        ArchiveUnavailable: from every call: the place cannot be used.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        self.url = url
        with self._convert_errors():
            self._file_system, root = fsspec.core.url_to_fs(url)
        self._is_local = isinstance(self._file_system, LocalFileSystem)
        self._root = root.rstrip("/")

    @property
    def _files(self) -> Any:
        """The file system, without the listings that it keeps: s3fs keeps each, also for sizes, and without expiry."""
        self._file_system.invalidate_cache()
        return self._file_system

    def path(self, conversation_id: str) -> str:
        """Return the path of a conversation's file in its file system."""
        return f"{self._root}/{_name_folder(check_conversation_id(conversation_id))}/{conversation_id}{SUFFIX}"

    def size(self, conversation_id: str) -> int | None:
        """Return the size of a conversation's file in bytes; None: there is none."""
        with self._convert_errors(FileNotFoundError):
            return int(self._files.info(self.path(conversation_id))["size"])
        return None

    def names(self) -> list[str]:
        """Return the ids of all conversations with a file, the most recently written first.

        Files with other names, and in other folders, are left out.
        """
        return [name for _, name in sorted((file for files in self.list_folders() for file in files), reverse=True)]

    def list_folders(self) -> Iterator[list[tuple[float, str]]]:
        """Yield the files of each folder: the time of the write in seconds, and the id of the conversation."""
        with self._convert_errors(FileNotFoundError):
            folders = [about["name"] for about in self._files.ls(self._root, detail=True) if _is_folder(about)]
            for folder in sorted(folders):
                yield list(self._list_folder(folder))

    def _list_folder(self, folder: str) -> Iterator[tuple[float, str]]:
        prefix = folder.rpartition("/")[2]
        for path, written in self._scan(folder):
            name = path.rpartition("/")[2].removesuffix(SUFFIX)
            if is_conversation_id(name) and _name_folder(name) == prefix and path.endswith(SUFFIX):
                yield written, name

    def _scan(self, folder: str) -> Iterator[tuple[str, float]]:
        with suppress(FileNotFoundError):
            if self._is_local:  # ten times as fast as fsspec's own
                with os.scandir(folder) as files:
                    for file in files:
                        with suppress(FileNotFoundError):  # it was just removed
                            yield file.name, file.stat().st_mtime
                return
            for about in self._files.ls(folder, detail=True):
                yield about["name"], _written_at(about)

    @contextmanager
    def reading(self, conversation_id: str) -> Iterator[Any]:
        """Open a conversation's file for random access."""
        with self._convert_errors(), self._files.open(self.path(conversation_id), "rb") as file:
            yield file

    def write(self, conversation_id: str, content: BinaryIO) -> None:
        """Write a conversation's file, replacing an existing one."""
        path = self.path(conversation_id)
        with self._convert_errors():
            if self._is_local:
                _write_here(Path(path), Path(self._root, DRAFTS), content)
                return
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._files.open(path, "wb") as file:
                shutil.copyfileobj(content, file)

    def remove(self, conversation_id: str) -> bool:
        """Remove a conversation's file; return whether there was one. Idempotent."""
        with self._convert_errors(FileNotFoundError):
            self._files.rm_file(self.path(conversation_id))
            return True
        return False

    def sweep(self, *, before: datetime) -> None:
        """Remove the drafts of killed writers, which have not changed since `before`."""
        if not self._is_local:
            return
        with self._convert_errors(FileNotFoundError):
            for draft in Path(self._root, DRAFTS).iterdir():
                with suppress(FileNotFoundError):  # it was just finished, or removed by another sweep
                    if draft.stat().st_mtime < before.timestamp():
                        draft.unlink()

    @contextmanager
    def _convert_errors(self, *passing: type[Exception]) -> Iterator[None]:
        """Convert errors of the place to ours, except those about a single file."""
        try:
            yield
        except passing:
            return
        except (OSError, ValueError, ImportError) as error:
            raise ArchiveUnavailable(
                f"The archive {self.url} cannot be used: {type(error).__name__}: {error}.",
                remedy="Check DECKHANDS_ARCHIVE.",
            ) from error


def _name_folder(conversation_id: str) -> str:
    return sha256(conversation_id.encode()).hexdigest()[:2]


def _is_folder(about: Mapping[str, Any]) -> bool:
    return about["type"] == "directory" and len(about["name"].rpartition("/")[2].rstrip("/")) == 2


def _written_at(about: Mapping[str, Any]) -> float:
    """Return the time when a file was written, in seconds; 0: its file system does not report it in a known form."""
    for field in WRITTEN_FIELDS:
        found = about.get(field)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, str):
            with suppress(ValueError):
                return datetime.fromisoformat(found).timestamp()
    return 0.0


def _write_here(path: Path, drafts: Path, content: BinaryIO) -> None:
    made = {path.parent, path.parent.parent}
    for folder in (path.parent, drafts):
        made |= {each.parent for each in (folder, *folder.parents) if not each.exists()}
        folder.mkdir(mode=OWN_DIRECTORY, parents=True, exist_ok=True)
    # Two processes may write the same file: a conversation is archived alone and with its parent.
    with tempfile.NamedTemporaryFile(dir=drafts, prefix=path.name, delete=False) as draft:
        try:
            shutil.copyfileobj(content, draft)
            draft.flush()
            os.fsync(draft.fileno())
            Path(draft.name).replace(path)
        except BaseException:
            Path(draft.name).unlink(missing_ok=True)
            raise
    for folder in made:  # a new folder is on the disk, with its content, once its parent is synced
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
