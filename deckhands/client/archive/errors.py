"""The errors of an archive."""

from __future__ import annotations

from broker.runtime import DeckhandsError


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
