"""The listing of archived conversations, read from the manifests and summaries of their files.

Holds: a damaged file is reported, and hides no other.
Does not: keep an index; filters need the content of the files, so a listing may read all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from pydantic import ValidationError

from deckhands.client.archive.archive import Archive
from deckhands.client.archive.archived_file import SUMMARY, ArchivedFile, Manifest, SummaryNumbers
from deckhands.client.archive.errors import CorruptArchive

AT_ONCE = 8
"""Files read at once."""


class ArchivedConversation(SummaryNumbers):
    """A conversation as its file describes it; see `Summary` for the numbers.

    Attributes:
        manifest: the description in the file.
    """

    manifest: Manifest

    @property
    def conversation_id(self) -> str:
        """Its id."""
        return self.manifest.conversation_id

    @property
    def state(self) -> str:
        """The state in which it left the store."""
        return self.manifest.state

    @property
    def title(self) -> str:
        """Its title."""
        return self.manifest.title

    @property
    def labels(self) -> dict[str, str]:
        """The labels that its producer has set."""
        return self.manifest.labels


async def describe_all(
    archive: Archive, names: list[str], on_damaged: Callable[[CorruptArchive], None]
) -> AsyncGenerator[list[ArchivedConversation], None]:
    """Yield the descriptions of conversations in the order of their names, reading up to 8 files at a time.

    Args:
        names: as `Archive.names` returns them. Those whose file is gone are left out.
        on_damaged: called for each file that cannot be used, which is left out.

    Raises:
        ArchiveUnavailable: the place cannot be used.
    """

    async def look(name: str) -> ArchivedConversation | None:
        try:
            return await archive.call_with_manifest(name, _describe)
        except CorruptArchive as error:
            on_damaged(error)
            return None

    for first in range(0, len(names), AT_ONCE):
        found = await asyncio.gather(*map(look, names[first : first + AT_ONCE]))
        yield [one for one in found if one is not None]


def _describe(found: ArchivedFile) -> ArchivedConversation:
    name = found.manifest.conversation_id
    try:
        sums = found.manifest.numbers or SummaryNumbers.model_validate_json(found.member(SUMMARY))
    except (ValidationError, RecursionError) as error:
        raise CorruptArchive(f"The archived file of {name} cannot be used: its summary is not one.") from error
    return ArchivedConversation(manifest=found.manifest, **sums.model_dump())
