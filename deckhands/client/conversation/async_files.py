"""The files of one conversation's workspace."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from broker.coordination import FileEntry
from deckhands.client.protocol import ConversationClient


class AsyncFiles:
    """Files of the workspace; paths are relative to it. The workspace exists from the first action on."""

    def __init__(self, client: Callable[[], Awaitable[ConversationClient]], conversation_id: Callable[[], str]) -> None:
        self._client = client
        self._id = conversation_id

    async def read(self, path: str) -> bytes:
        """Return the content of a file; see `WorkspaceFiles.read`."""
        return await (await self._client()).files.read(self._id(), path)

    async def write(self, path: str, content: bytes | str) -> None:
        """Write a file, which appears atomically; see `WorkspaceFiles.write`."""
        await (await self._client()).files.write(self._id(), path, content)

    async def upload(self, source: str | os.PathLike[str], path: str) -> None:
        """Copy a file or a directory of this machine into the workspace; see `WorkspaceFiles.upload`."""
        await (await self._client()).files.upload(self._id(), Path(source), path)

    async def download(self, path: str, target: str | os.PathLike[str]) -> None:
        """Copy a file or a directory of the workspace to this machine; see `WorkspaceFiles.download`."""
        await (await self._client()).files.download(self._id(), path, Path(target))

    async def list(self, path: str = ".") -> list[FileEntry]:
        """Return the entries of a directory; see `WorkspaceFiles.list`."""
        return await (await self._client()).files.list(self._id(), path)
