"""Follow one conversation: each event once, in order, until it has settled; and the pieces of a reply.

`AsyncFiles` copies files of its workspace.

Holds: an event is delivered once, whichever method delivers it. If the store comes back with an older log, following
continues from the end of that log.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from pathlib import Path

from broker.contract import Event
from broker.coordination import FileEntry
from broker.log import LivePiece
from broker.runtime import EventsLost, OutcomeUnknown, StoreUnavailable, UsageError
from deckhands.client.conversation.cluster_connection import ClusterConnection
from deckhands.client.protocol import ConversationClient
from deckhands.client.reading.summary import Tally
from deckhands.client.watcher import follow

Callback = Callable[[Event], Awaitable[None] | None]
"""Called with each event."""

QUEUED = 1_000


class ConversationFollower:
    """The events of a conversation that were delivered so far.

    Args:
        callbacks: each gets every event.
        is_threaded: run callbacks that are not asynchronous in a thread, where they may block.

    Attributes:
        conversation_id: the id of the conversation.
        tally: the tally of all delivered events.
    """

    def __init__(self, conversation_id: str, callbacks: Sequence[Callback], *, is_threaded: bool) -> None:
        self.tally = Tally()
        self.conversation_id = conversation_id
        self._callbacks = callbacks
        self._is_threaded = is_threaded
        self._told_id = 0
        self._is_at_it = False

    async def until_settled(self, place: ClusterConnection) -> AsyncGenerator[Event]:
        """Yield new events until the conversation has settled.

        Raises:
            UsageError: another task already follows it through this object.
            BaseException: an error of a callback.
        """
        if self._is_at_it:
            raise UsageError(
                f"The conversation {self.conversation_id} is being waited for already.",
                remedy="Use a second object for it.",
            )
        self._is_at_it = True
        try:
            while True:
                try:
                    following = follow(place.client, self.conversation_id, self.tally, is_whole=True)
                    async with contextlib.aclosing(following) as events:
                        async for event in events:
                            if event.id > self._told_id:
                                self._told_id = event.id
                                await self._run_callbacks(event)
                                yield event
                except EventsLost as lost:
                    self.tally, self._told_id = Tally(), min(self._told_id, lost.last_id)
                else:
                    return
        finally:
            self._is_at_it = False

    async def with_pieces(self, place: ClusterConnection) -> AsyncGenerator[Event | LivePiece]:
        """Yield the events of `until_settled`, and the pieces of replies while they are written."""
        queue: asyncio.Queue[Event | LivePiece | None] = asyncio.Queue(QUEUED)

        async def pump(source: AsyncIterable[Event | LivePiece], *, is_last: bool) -> None:
            try:
                async for item in source:
                    await queue.put(item)
            except Exception as error:
                if is_last:
                    await queue.put(None)
                if is_last or not isinstance(error, StoreUnavailable | OutcomeUnknown):
                    raise  # pieces may be lost, events may not
            else:
                if is_last:
                    await queue.put(None)

        following = asyncio.create_task(pump(self.until_settled(place), is_last=True))
        watching = asyncio.create_task(pump(place.client.pieces(self.conversation_id), is_last=False))
        try:
            while (item := await queue.get()) is not None:
                yield item
            await following
        finally:
            for task in (following, watching):
                task.cancel()
            await asyncio.gather(following, watching, return_exceptions=True)

    async def _run_callbacks(self, event: Event) -> None:
        for callback in self._callbacks:
            if self._is_threaded and not inspect.iscoroutinefunction(callback):
                await asyncio.to_thread(callback, event)
                continue
            reported = callback(event)
            if inspect.isawaitable(reported):
                await reported


class AsyncFiles:
    """Files of the workspace; paths are relative to it. The workspace exists from the first action on."""

    def __init__(self, client: Callable[[], Awaitable[ConversationClient]], conversation_id: Callable[[], str]) -> None:
        self._client = client
        self._id = conversation_id

    async def read(self, path: str, *, at: int | None = None) -> bytes:
        """Return the content of a file; see `WorkspaceFiles.read`."""
        return await (await self._client()).files.read(self._id(), path, at=at)

    async def write(self, path: str, content: bytes | str) -> None:
        """Write a file, which appears atomically; see `WorkspaceFiles.write`."""
        await (await self._client()).files.write(self._id(), path, content)

    async def upload(self, source: str | os.PathLike[str], path: str) -> None:
        """Copy a file or a directory of this machine into the workspace; see `WorkspaceFiles.upload`."""
        await (await self._client()).files.upload(self._id(), Path(source), path)

    async def download(self, path: str, target: str | os.PathLike[str], *, at: int | None = None) -> None:
        """Copy a file or a directory of the workspace to this machine; see `WorkspaceFiles.download`."""
        await (await self._client()).files.download(self._id(), path, Path(target), at=at)

    async def list(self, path: str = ".", *, at: int | None = None) -> list[FileEntry]:
        """Return the entries of a directory; see `WorkspaceFiles.list`."""
        return await (await self._client()).files.list(self._id(), path, at=at)

    async def checkpoints(self) -> Sequence[int]:
        """Return the events with a checkpoint of the files; see `WorkspaceFiles.checkpoints`."""
        return await (await self._client()).files.checkpoints(self._id())
