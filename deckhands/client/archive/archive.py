"""The archive: writes conversations of a store into files, checks them, and reads them as if they were in the store.

A listing reads the manifests and summaries of the files.

Holds: `save` reads the written file back and checks it before it returns. A file is never replaced by a file of another
conversation with the same id, nor by a shorter log of the same conversation. A damaged file is reported and hides no
other file.
Does not: keep secrets, snapshots, idempotency keys, or the files of a workspace, only the location of its checkpoints;
keep an index. Filters need the content of the files, so a listing may read all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import BinaryIO, TypeVar, cast

from pydantic import ValidationError

from broker.contract import SCHEMA_VERSION, ConversationCreated, DelegateEnded, Event, UploadedSource, codec
from broker.coordination import StoredFiles
from broker.log import EventLog, check_blobs, list_binary
from broker.runtime import CorruptEntry, UnknownConversation, failpoint
from broker.store import Cipher, Encryption, Store
from deckhands.client.archive.archived_file import (
    BLOBS,
    SUMMARY,
    UPLOADS,
    ArchivedFile,
    FileWriter,
    Manifest,
    SummaryNumbers,
)
from deckhands.client.archive.listing import ArchiveListing
from deckhands.client.archive.storage import ArchiveConflict, ArchiveStorage, ArchiveUnavailable, CorruptArchive
from deckhands.client.reading.summary import summarize

IN_MEMORY_BYTES = 4 * 2**20

T = TypeVar("T")


class Archive:
    """The archived conversations at one place.

    Args:
        encryption: the keys of the store that the conversations come from; None if encrypted files need not be read.

    Raises:
        ArchiveUnavailable: from every call: the place cannot be used.
    """

    def __init__(self, url: str, encryption: Encryption | None = None) -> None:
        self.url = url
        self._encryption = encryption
        self._place = ArchiveStorage(url)
        self.listing = ArchiveListing(self._place)
        """The files, newest first."""

    async def save(self, store: Store, events: Sequence[Event], *, checkpoint: str = "") -> Manifest:
        """Write a settled conversation into its file, and check the file. Idempotent.

        Args:
            events: its whole log, as stored.
            checkpoint: the location of workspace checkpoints; empty: there is none.

        Raises:
            ArchiveConflict: the file exists, for another conversation or with more events.
            CorruptEntry: a text that the log names is missing or damaged.
            DataLocked: the conversation is encrypted, and this process lacks its key.
            TooLargeToArchive: beyond the limits of a file.
            CorruptArchive: the written file reads back differently.
        """
        created = events[0]
        assert isinstance(created, ConversationCreated)
        conversation_id = created.conversation_id
        cipher = await store.encryption.find_cipher(conversation_id)
        with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as spooled:
            draft = cast("BinaryIO", spooled)
            with contextlib.closing(FileWriter(draft, cipher)) as writer:
                await asyncio.to_thread(writer.add_events, events)
                await self._add_texts(writer, store, conversation_id, events)
                source = created.workspace.source
                if isinstance(source, UploadedSource):
                    content = await StoredFiles(store).fetch(conversation_id, source.parcel)
                    await asyncio.to_thread(writer.add, f"{UPLOADS}{source.parcel}", content)
                manifest = _manifest(writer, events, created, store, checkpoint)
                await asyncio.to_thread(self._finish, writer, manifest, draft)
        failpoint("archive.checked")
        return manifest

    def _finish(self, writer: FileWriter, manifest: Manifest, draft: BinaryIO) -> None:
        writer.finish(manifest)
        self._check_conflict(manifest)
        draft.seek(0)
        failpoint("archive.before_write")
        self._place.write(manifest.conversation_id, draft)
        failpoint("archive.written")
        with self.open_file(manifest.conversation_id, writer.cipher) as found:
            if found.manifest != manifest:
                raise CorruptArchive(f"The archived file of {manifest.conversation_id} reads back differently.")
            found.check()

    def _check_conflict(self, manifest: Manifest) -> None:
        conversation_id = manifest.conversation_id
        if self._place.size(conversation_id) is None:
            return
        try:
            with self.open_file(conversation_id) as found:
                earlier = found.manifest
        except CorruptArchive:  # a partial file, left by a crash
            return
        is_same = earlier.first_sha256 == manifest.first_sha256
        if not is_same or earlier.last_event_id > manifest.last_event_id:
            what = "more events of this conversation" if is_same else "another conversation of this id"
            raise ArchiveConflict(
                f"The archive {self.url} holds {what}, {conversation_id}.",
                remedy="Move its file elsewhere, or delete one of the two.",
            )

    async def has(self, conversation_id: str) -> bool:
        """Return whether a conversation has a file."""
        return await asyncio.to_thread(self._place.size, conversation_id) is not None

    async def names(self) -> list[str]:
        """Return the ids of all archived conversations, the most recently written file first."""
        return await asyncio.to_thread(self._place.names)

    async def call_with_file(self, conversation_id: str, question: Callable[[ArchivedFile], T]) -> T | None:
        """Call a function with a conversation's file and return its result; None: the conversation is not archived.

        Raises:
            CorruptArchive: the file cannot be used.
            DataLocked: the file is encrypted, and its key was deleted or is unknown here.
        """
        cipher = None
        if self._encryption is not None and self._encryption.is_on:
            manifest = await self.manifest(conversation_id)
            if manifest is not None:
                cipher = await self.load_cipher(manifest)
        return await asyncio.to_thread(self._ask, conversation_id, question, cipher)

    async def call_with_manifest(self, conversation_id: str, question: Callable[[ArchivedFile], T]) -> T | None:
        """Like `call_with_file`, for a function that needs no member of an encrypted file."""
        return await asyncio.to_thread(self._ask, conversation_id, question)

    def find_size(self, conversation_id: str) -> int | None:
        """Return the size of a conversation's file in bytes; None: it is not archived. Blocks."""
        return self._place.size(conversation_id)

    @contextlib.contextmanager
    def open_file(self, conversation_id: str, cipher: Cipher | None = None) -> Iterator[ArchivedFile]:
        """Open a conversation's file. Blocks.

        Raises:
            ArchiveUnavailable: also if there is no file.
            CorruptArchive: the file cannot be used.
        """
        size = self._place.size(conversation_id) or 0
        with self._place.reading(conversation_id) as file:
            yield ArchivedFile(file, conversation_id, size_bytes=size, cipher=cipher)

    async def load_cipher(self, manifest: Manifest) -> Cipher | None:
        """Return the cipher of a file; None: it is not encrypted, or this archive has no keys.

        Raises:
            DataLocked: its key was deleted or is unknown here.
        """
        if not manifest.data_key or self._encryption is None or not self._encryption.is_on:
            return None
        return await self._encryption.load_cipher(manifest.conversation_id, manifest.data_key.encode())

    async def manifest(self, conversation_id: str) -> Manifest | None:
        """Return the manifest of a conversation; None: it is not archived.

        Raises:
            CorruptArchive: the file cannot be used.
        """
        return await self.call_with_manifest(conversation_id, lambda found: found.manifest)

    async def events(
        self, conversation_id: str, *, after: int = 0, is_whole: bool = False, decode: codec.Decoder = codec.decode
    ) -> list[Event] | None:
        """Return events as `Client.events` does; None: the conversation is not archived.

        Raises:
            CorruptArchive: the file cannot be used.
        """

        def read(found: ArchivedFile) -> list[Event]:
            events = found.events(decode, after=after)
            return [_whole(found, event) for event in events] if is_whole else list(events)

        return await self.call_with_file(conversation_id, read)

    async def read_checked(self, conversation_id: str) -> list[Event]:
        """Return all events of a file with their whole texts, after comparing every part with the manifest.

        Raises:
            UnknownConversation: it is not archived.
            CorruptArchive: the file cannot be used.
        """

        def read(found: ArchivedFile) -> list[Event]:
            found.check()
            return [_whole(found, event) for event in found.events(codec.decode)]

        events = await self.call_with_file(conversation_id, read)
        if events is None:
            raise UnknownConversation(conversation_id)
        return events

    async def upload(self, conversation_id: str, name: str) -> bytes | None:
        """Return the file that a workspace started with; None: the conversation is not archived.

        Raises:
            CorruptArchive: the file cannot be used.
        """
        return await self.call_with_file(conversation_id, lambda found: found.upload(name))

    async def binary_blobs(self, conversation_id: str, events: Iterable[Event]) -> dict[str, bytes]:
        """Return the binary blobs of archived events, by address; empty if it is not archived.

        Raises:
            CorruptArchive: the file cannot be used.
        """
        addresses = list_binary(events)
        found = await self.call_with_file(conversation_id, lambda found: found.blobs(addresses)) if addresses else None
        return found or {}

    async def remove(self, conversation_id: str) -> bool:
        """Remove a conversation's file; return whether there was one. Idempotent."""
        return await asyncio.to_thread(self._place.remove, conversation_id)

    async def sweep(self, *, before: datetime) -> None:
        """Remove the drafts of killed writers that have not changed since `before`."""
        await asyncio.to_thread(self._place.sweep, before=before)

    async def _add_texts(self, writer: FileWriter, store: Store, conversation_id: str, events: Sequence[Event]) -> None:
        blobs, added = EventLog(store).blobs, set[str]()
        for event in events:
            if not event.blobs:
                continue
            contents = await blobs.fetch(conversation_id, [ref.sha256 for ref in event.blobs.values()])
            try:
                check_blobs(contents, list_binary([event]))
                codec.restore(event.wire(), contents)
            except CorruptEntry as error:
                raise CorruptEntry(f"Event {event.id} of {conversation_id}: {error.message}") from error
            for sha in contents.keys() - added:
                await asyncio.to_thread(writer.add, f"{BLOBS}{sha}", contents[sha])
            added |= contents.keys()

    def _ask(
        self, conversation_id: str, question: Callable[[ArchivedFile], T], cipher: Cipher | None = None
    ) -> T | None:
        if self._place.size(conversation_id) is None:
            return None
        try:
            with self.open_file(conversation_id, cipher) as found:
                return question(found)
        except ArchiveUnavailable:
            if self._place.size(conversation_id) is None:  # just removed
                return None
            raise


def _manifest(
    writer: FileWriter,
    events: Sequence[Event],
    created: ConversationCreated,
    store: Store,
    checkpoint: str,
) -> Manifest:
    summary = summarize(events)
    as_json, cipher = summary.as_json(), writer.cipher
    writer.add(SUMMARY, json.dumps(as_json, indent=1).encode())
    return Manifest(
        version=1 if cipher is None else 2,
        data_key="" if cipher is None else cipher.key_id.decode(),
        numbers=None if cipher is None else SummaryNumbers.model_validate(as_json),
        schema_version=SCHEMA_VERSION,
        conversation_id=created.conversation_id,
        last_event_id=events[-1].id,
        first_sha256=writer.first_sha256,
        archived=store.clock.now(),
        created=summary.started,
        updated=summary.updated,
        state=summary.state,
        title=created.title if cipher is None else "",
        tenant=created.tenancy.tenant if created.tenancy else "",
        labels=created.labels or {},
        parent=created.parent.conversation_id if created.parent else "",
        forked_from=created.forked_from or "",
        delegates=tuple(find_delegates(events)),
        checkpoint=checkpoint,
        members=writer.members,
    )


def find_delegates(events: Sequence[Event]) -> list[str]:
    """Return the delegates that ended with an observation in a log, each once."""
    return list(dict.fromkeys(event.conversation_id for event in events if isinstance(event, DelegateEnded)))


def _whole(found: ArchivedFile, event: Event) -> Event:
    if not event.blobs:
        return event
    wire = codec.restore(event.wire(), found.blobs({ref.sha256 for ref in event.blobs.values()}))
    return codec.event_from_wire(wire, event.id)


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
