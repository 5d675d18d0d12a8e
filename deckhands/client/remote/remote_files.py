"""Files in the workspaces of a server's conversations.

Does not: keep modes and links of an uploaded directory; each of its files is sent separately.
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from urllib.parse import quote

from broker.coordination import FileEntry
from broker.runtime import UsageError
from deckhands.client.remote.server_calls import ServerCalls
from deckhands.client.transfers.packed_files import unpack

LONG_SECONDS = 900.0
TAR = "application/x-tar"


class RemoteFiles:
    """Copies files between this machine and workspaces; see `WorkspaceFiles`."""

    def __init__(self, calls: ServerCalls) -> None:
        self._calls = calls

    async def read(self, conversation_id: str, path: str) -> bytes:
        """Return the content of a file."""
        content, kind = await self._fetch(conversation_id, path)
        if kind == TAR:
            raise UsageError(f"{path} is not a file.", remedy="Name a file, or download the directory.")
        return content

    async def write(self, conversation_id: str, path: str, content: bytes | str) -> None:
        """Write a file, which appears atomically."""
        plain = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        await self._calls.ask("PUT", _path(conversation_id, path), content=plain, read_seconds=LONG_SECONDS)

    async def upload(self, conversation_id: str, source: Path, path: str) -> None:
        """Copy a file or the files of a directory of this machine into a workspace.

        Raises:
            UsageError: it cannot be read.
        """
        try:
            found = await asyncio.to_thread(_files_in, source)
            for file in found:
                name = path if file == source else f"{path.rstrip('/')}/{file.relative_to(source).as_posix()}"
                await self.write(conversation_id, name, await asyncio.to_thread(file.read_bytes))
        except OSError as error:
            raise UsageError(f"{source} cannot be read: {error.strerror}.", remedy="Name another.") from error

    async def download(self, conversation_id: str, path: str, target: Path) -> None:
        """Copy a file or a directory of a workspace to this machine.

        Raises:
            UsageError: the target cannot be written.
        """
        content, kind = await self._fetch(conversation_id, path)
        try:
            await asyncio.to_thread(_put, content, kind, path, target)
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error}.", remedy="Name another target.") from error

    async def list(self, conversation_id: str, path: str = ".") -> list[FileEntry]:
        """Return the entries of a directory, by name."""
        answer = await self._calls.ask("GET", f"/conversations/{conversation_id}/files", query={"path": path})
        return [FileEntry.model_validate(entry) for entry in answer.json()]

    async def _fetch(self, conversation_id: str, path: str) -> tuple[bytes, str]:
        answer = await self._calls.ask("GET", _path(conversation_id, path), read_seconds=LONG_SECONDS)
        return answer.content, answer.headers["content-type"]


def _path(conversation_id: str, path: str) -> str:
    return f"/conversations/{conversation_id}/files/{quote(path)}"


def _files_in(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    return sorted(file for file in source.rglob("*") if file.is_file() and not file.is_symlink())


def _put(content: bytes, kind: str, path: str, target: Path) -> None:
    if kind == TAR:
        unpack(io.BytesIO(content), target, lambda: None, is_packed=False)
        return
    name = path.rstrip("/").rpartition("/")[2]
    (target / name if target.is_dir() else target).write_bytes(content)
