"""Find a conversation: in the store of a cluster, in the store of a run in progress, or in the files of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from broker.runtime import StoreUnavailable, UnknownConversation, UsageError, check_conversation_id
from broker.store import Store, open_store
from deckhands.client.errors import IsArchived, NoCluster
from deckhands.cluster import Home
from deckhands.settings import CliSettings

if TYPE_CHECKING:
    from broker.contract import Event
    from deckhands.client.client import Client
    from deckhands.client.reader import Reader
    from deckhands.client.reading.summary import Summary

    Source = TypeVar("Source", bound=Reader)

T = TypeVar("T")


def on_cluster(act: Callable[[Client], Awaitable[T]]) -> T:
    """Call a function with a client of the cluster and return its result. Raises the errors of `cluster_client`."""

    async def reach() -> T:
        async with cluster_client(CliSettings.from_env()) as client:
            return await act(client)

    return asyncio.run(reach())


def on_conversation(conversation_id: str, act: Callable[[Client], Awaitable[T]]) -> T:
    """Call a function with a client of the conversation's store, and return its result.

    Raises the errors of `conversation_client`.
    """

    async def reach() -> T:
        async with conversation_client(CliSettings.from_env(), conversation_id) as client:
            return await act(client)

    return asyncio.run(reach())


def store_url(settings: CliSettings) -> str:
    """Return DECKHANDS_URL, or the store of the cluster that runs from the home directory.

    Raises:
        UsageError: there is neither.
    """
    url = settings.url or Home(settings.home).cluster_url
    if url is None:
        raise UsageError(
            "DECKHANDS_URL is not set, and no cluster is running here.",
            remedy="Set it to the store, such as redis://host:6379/0. `deckhands up` runs a cluster without it.",
        )
    return url


@asynccontextmanager
async def cluster_client(settings: CliSettings) -> AsyncIterator[Client]:
    """Connect to the cluster at DECKHANDS_URL, or to the one that runs from the home directory.

    Raises:
        NoCluster: there is neither.
        StoreError: it cannot be reached or used.
    """
    from deckhands.client.client import Client  # imports everything that a client can do

    async with Client(await open_cluster(settings=settings), settings.archive) as client:
        yield client


@asynccontextmanager
async def conversation_client(settings: CliSettings, conversation_id: str) -> AsyncIterator[Client]:
    """Connect to the conversation's store: that of a run in progress, or the cluster's.

    Raises:
        IsArchived: it is in the archive.
        UnknownConversation: there is no such conversation.
        StoreError: the cluster cannot be reached or used.
    """
    from deckhands.client.client import Client

    async with _open_store_of(Client, settings, conversation_id) as client:
        yield client


@asynccontextmanager
async def conversation_reader(settings: CliSettings, conversation_id: str) -> AsyncIterator[Reader]:
    """Connect to the conversation's store only to read, which imports less; raises as `conversation_client` does."""
    from deckhands.client.reader import Reader

    async with _open_store_of(Reader, settings, conversation_id) as reader:
        yield reader


@asynccontextmanager
async def _open_store_of(kind: type[Source], settings: CliSettings, conversation_id: str) -> AsyncIterator[Source]:
    check_conversation_id(conversation_id)
    home = Home(settings.home)
    if home.has_run(conversation_id):
        source = await _open_run(kind, home, conversation_id)
        if source is None:
            raise RunIsOver(conversation_id)
        async with source:
            yield source
        return
    async with kind(await open_cluster(settings=settings), settings.archive) as source:
        try:
            await source.log_reader.load_last_id(conversation_id)
        except UnknownConversation:
            if await source.is_archived(conversation_id):
                raise IsArchived(conversation_id) from None
            raise
        yield source


class RunIsOver(UnknownConversation):
    """The conversation belongs to a run that is not in progress."""

    def __init__(self, conversation_id: str) -> None:
        super().__init__(conversation_id)
        self.message = f"The run {conversation_id} is not in progress."
        self.remedy = f"`deckhands run --resume {conversation_id}` continues it."


async def read_events(settings: CliSettings, conversation_id: str, *, is_lenient: bool = False) -> list[Event]:
    """Return the events of a conversation with whole texts, from the store, a run or the archive.

    Args:
        is_lenient: see `Client.events`.

    Raises:
        UnknownConversation: no such conversation.
        CorruptEntry: an event is damaged; carries its id.
        StoreError: the cluster cannot be reached or used.
    """
    return [event async for page in read_pages(settings, conversation_id, is_lenient=is_lenient) for event in page]


async def read_pages(
    settings: CliSettings, conversation_id: str, *, is_lenient: bool = False, first_size: int | None = None
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of `read_events` in pages, see `LogReader.read_pages`; raises the same errors."""
    from broker.contract import codec, decode_any
    from deckhands.client.reader import Reader
    from deckhands.client.runs.records import RunFolder

    check_conversation_id(conversation_id)
    home = Home(settings.home)
    folder = RunFolder(home.run_folder(conversation_id))
    reader = await _open_run(Reader, home, conversation_id)
    if reader is not None:
        async with reader:
            async for page in reader.pages(
                conversation_id, is_whole=True, is_lenient=is_lenient, first_size=first_size
            ):
                yield page
            return
    if folder.has_events:
        yield folder.events()
        return
    try:
        async with Reader(await open_cluster(settings=settings), settings.archive) as reader:
            async for page in reader.pages(
                conversation_id, is_whole=True, is_lenient=is_lenient, first_size=first_size
            ):
                yield page
    except NoCluster as error:
        if settings.archive:
            from deckhands.client.archive.archive import Archive

            decode = decode_any if is_lenient else codec.decode
            archived = await Archive(settings.archive).events(conversation_id, is_whole=True, decode=decode)
            if archived is not None:
                yield archived
                return
        if home.has_had_cluster:
            raise
        raise UnknownConversation(conversation_id) from error


async def read_summary(settings: CliSettings, conversation_id: str) -> Summary:
    """Return the summary of a conversation from the store, a run or the archive; raises the errors of `read_events`."""
    from deckhands.client.reading.summary import summarize
    from deckhands.client.runs.records import RunFolder

    check_conversation_id(conversation_id)
    home = Home(settings.home)
    folder = RunFolder(home.run_folder(conversation_id))
    if home.has_run(conversation_id) and folder.is_over:
        return folder.summary()
    return summarize(await read_events(settings, conversation_id, is_lenient=True))


async def read_wait_reason(settings: CliSettings, conversation_id: str) -> str:
    """Return the reason why a conversation waits; empty if it does not wait or is not in progress."""
    from deckhands.client.reader import Reader

    home = Home(settings.home)
    try:
        if home.has_run(conversation_id):
            reader = await _open_run(Reader, home, conversation_id)
        else:
            reader = Reader(await open_cluster(settings=settings))
        if reader is None:
            return ""
        async with reader:
            return (await reader.row(conversation_id)).wait_reason
    except (UnknownConversation, NoCluster):
        return ""


async def _open_run(kind: type[Source], home: Home, conversation_id: str) -> Source | None:
    """Connect to the private store of a run in progress; None if it is not in progress."""
    if not home.has_run(conversation_id):
        return None
    try:
        return await kind.connect(home.run_url(conversation_id), patience_seconds=1.0)
    except StoreUnavailable:
        return None


async def open_cluster(
    url: str | None = None,
    *,
    shards: int | None = None,
    patience_seconds: float | None = 30.0,
    settings: CliSettings | None = None,
) -> Store:
    """Open the store of a cluster as a client; see `open_store` for the arguments.

    Args:
        url: None for DECKHANDS_URL, or the cluster that runs from the home directory.
        shards: None: from the settings.
        settings: None: those of this process.

    Raises:
        NoCluster: no URL is given or set, and no cluster is running here.
        StoreError: it cannot be reached or used.
    """
    settings = settings or CliSettings.from_env()
    named = url or settings.url
    found = named or Home(settings.home).cluster_url
    if found is None:
        raise NoCluster
    try:
        number = shards or settings.shards
        return await open_store(found, shards=number, patience_seconds=patience_seconds, deploys=False)
    except StoreUnavailable as error:
        if named is None and isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
            raise NoCluster from error
        raise
