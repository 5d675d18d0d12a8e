"""What can be wrong with an archive."""

from __future__ import annotations

from broker.runtime import DeckhandsError


class ArchiveUnavailable(DeckhandsError):
    """The place cannot be read or written."""

    code = "archive_unavailable"
    retryable = True


class CorruptArchive(DeckhandsError):
    """An archived file is damaged, or is not what Deckhands writes."""

    code = "corrupt_archive"


class ArchiveConflict(DeckhandsError):
    """The archive holds another conversation of this id, or more of this one."""

    code = "archive_conflict"


class TooLargeToArchive(DeckhandsError):
    """A conversation is beyond the limits of an archived file."""

    code = "too_large_to_archive"
