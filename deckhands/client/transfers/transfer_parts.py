"""Long transfers as file objects: written data is sent in parts, and received parts are read.

Holds: one part is in memory; both are used in a thread, while the loop sends and fetches.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from broker.coordination import (
    LONG_ANSWER_LIMIT_SECONDS,
    MAX_COPY_BYTES,
    PART_BYTES,
    TransferAnswer,
    TransferFailed,
    TransferRequest,
    Transfers,
)
from broker.runtime import UsageError, new_key

T = TypeVar("T")
END_LIMIT_SECONDS = 10.0
OnProgress = Callable[[int, int | None], None]
"""Called with the number of transferred bytes, packed, and the total if it is known."""


class _Parts:
    """The connection from a thread to the event loop."""

    def __init__(self, transfers: Transfers, conversation_id: str, on_progress: OnProgress | None) -> None:
        self._is_stopped = False
        self._turn = asyncio.Lock()
        self._transfers = transfers
        self._conversation_id = conversation_id
        self._on_progress = on_progress or (lambda _done, _all: None)
        self._loop = asyncio.get_running_loop()
        self._digest = hashlib.sha256()
        self._count = 0

    def _run_in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_stopped:
            work.close()
            raise TransferFailed("The copy was stopped.")
        return asyncio.run_coroutine_threadsafe(self._run_in_turn(work), self._loop).result()

    async def _run_in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        async with self._turn:
            if self._is_stopped:
                work.close()
                raise TransferFailed("The copy was stopped.")
            return await work

    async def _forget(self, transfer: str) -> None:
        """Stop the thread, and have the node forget the transfer; ignores the node's errors."""
        self._is_stopped = True
        async with self._turn:  # a part in transit would arrive after it
            with suppress(TransferFailed):
                request = TransferRequest(what="end", transfer=transfer)
                await self._transfers.send_request(self._conversation_id, request, limit_seconds=END_LIMIT_SECONDS)


class OutgoingParts(_Parts):
    """An upload, as a file that is written."""

    def __init__(self, transfers: Transfers, conversation_id: str, on_progress: OnProgress | None = None) -> None:
        super().__init__(transfers, conversation_id, on_progress)
        self._transfer = new_key()
        self._has_begun = False
        self._buffer = bytearray()
        self._size = 0

    def write(self, content: bytes) -> int:
        """Take the next bytes; sends a part when one is full."""
        self._buffer += content
        while len(self._buffer) > PART_BYTES:
            self._run_in_loop(self._send())
        return len(content)

    def flush(self) -> None:
        """Do nothing: an incomplete part is kept until `finish`."""

    async def finish(self, path: str) -> TransferAnswer:
        """Send the last part, and have everything put into the workspace.

        Raises:
            TransferFailed: the tool worker failed.
        """
        is_inside = path.endswith("/")
        if not self._count:
            request = TransferRequest(what="upload", path=path, is_inside=is_inside)
            content = bytes(self._buffer)
        else:
            await self._send()
            request = TransferRequest(
                what="upload",
                path=path,
                is_inside=is_inside,
                transfer=self._transfer,
                size_bytes=self._size,
                digest=self._digest.hexdigest(),
            )
            content = b""
        ask, limit = self._transfers.send_request, LONG_ANSWER_LIMIT_SECONDS
        return (await ask(self._conversation_id, request, content, limit_seconds=limit)).answer

    async def end(self) -> None:
        """Have the node forget the transfer, if it has any of it. Idempotent."""
        if self._has_begun:
            await self._forget(self._transfer)
        self._is_stopped = True

    async def _send(self) -> None:
        part = bytes(self._buffer[:PART_BYTES])
        if self._size + len(part) > MAX_COPY_BYTES:
            raise UsageError(f"It has more than {MAX_COPY_BYTES:,} bytes when packed.", remedy="Take a part of it.")
        self._has_begun = True
        request = TransferRequest(what="upload_part", transfer=self._transfer, part=self._count)
        await self._transfers.send_request(self._conversation_id, request, part)
        del self._buffer[:PART_BYTES]
        self._digest.update(part)
        self._size += len(part)
        self._count += 1
        self._on_progress(self._size, None)


class IncomingParts(_Parts):
    """A download, as a file that is read."""

    def __init__(
        self,
        transfers: Transfers,
        conversation_id: str,
        answer: TransferAnswer,
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__(transfers, conversation_id, on_progress)
        self._answer = answer
        self._rest = b""
        self._size = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most this many; fetches a part if none are left."""
        if not self._rest and self._size < self._answer.packed_bytes:
            self._rest = self._run_in_loop(self._fetch())
        end = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:end], self._rest[end:]
        return found

    def check(self) -> None:
        """Check that everything has arrived.

        Raises:
            TransferFailed: it has not, or it differs from the sent data.
        """
        while self.read(PART_BYTES):
            pass
        if self._digest.hexdigest() != self._answer.digest:
            raise TransferFailed("The received data differs from the sent data.", remedy="Copy it again.")

    async def end(self) -> None:
        """Have the node forget the transfer. Idempotent."""
        await self._forget(self._answer.transfer)

    async def _fetch(self) -> bytes:
        request = TransferRequest(what="download_part", transfer=self._answer.transfer, part=self._count)
        content = (await self._transfers.send_request(self._conversation_id, request)).content
        if not content:
            raise TransferFailed("A part of the download is missing.", remedy="Copy it again.")
        self._digest.update(content)
        self._size += len(content)
        self._count += 1
        self._on_progress(self._size, self._answer.packed_bytes)
        return content
