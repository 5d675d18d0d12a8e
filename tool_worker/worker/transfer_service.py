"""Transfers files in and out of workspaces for users, and saves workspaces on request.

The parts of a long transfer are collected in a spool file beside the workspace, invisible to its programs:

    <root>/<conversation>/.transfer-<hash>

Holds:
    - No path and no link leads out of the workspace, even if programs change files during the transfer.
    - The size of a transfer is limited, both compressed and uncompressed.
    - Every request gets an answer, even a refused one.
    - Writing a part twice has no further effect. A spool file is complete only if its length and its SHA-256 match.
    - A spool file unused for an hour is removed when the next transfer starts. The node keeps `RESERVE_BYTES` free.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from broker.coordination import (
    MAX_COPY_BYTES,
    MAX_STORED_FILE_BYTES,
    PART_BYTES,
    TransferAnswer,
    TransferRequest,
    Transfers,
)
from broker.runtime import Clock, DeckhandsError, OutcomeUnknown, StoreUnavailable, SystemClock
from tool_worker.errors import FileUnfit, SourceUnusable, WorkspaceLost, WorkspaceTooLarge, wait_to_completion
from tool_worker.sandbox import Sandbox
from tool_worker.worker.packing import TRANSFER_LIMITS, describe_entries, list_directory, pack, unpack
from tool_worker.workspace import (
    NOTHING_SAVED,
    Bindings,
    Changes,
    Checkpointing,
    Checkpoints,
    Directory,
    HostFolder,
    Patch,
    SandboxedGit,
    attach,
    create_staging,
    require_git,
)

MAX_NAMES_LEFT_OUT = 1_000
MAX_NAME_CHARS = 300
_log = logging.getLogger(__name__)
SPOOL_PREFIX = ".transfer-"
SPOOL_STALE_SECONDS = 3600.0
MAX_SPOOLS = 4
"""Limit of spools per conversation."""
RESERVE_BYTES = 256 * 2**20
"""Bytes that stay free on the node's disk."""


class TransferService:
    """Transfers files of one node's workspaces.

    Args:
        root: Directory of the node's workspaces.
        sandbox: Returns the node's sandbox, see `Workspaces.get_demanded_sandbox`.
        bindings: Opens the workspaces' directories.
    """

    def __init__(
        self,
        transfers: Transfers,
        root: Path,
        checkpointing: Checkpointing,
        sandbox: Callable[[], Awaitable[Sandbox]],
        bindings: Bindings,
    ) -> None:
        self._transfers = transfers
        self._root = root.absolute()
        self._checkpointing = checkpointing
        self._sandbox = sandbox
        self._bindings = bindings
        self._spools = TransferSpools(self._root, SystemClock())
        # each comparison may use as much memory as the largest patch, and the whole disk bandwidth
        self._comparing = asyncio.Lock()

    async def transfer(self, conversation_id: str, token: str) -> None:
        """Serve one request and answer it. Idempotent."""
        request = await self._transfers.load_request(conversation_id, token)
        if request is None:
            # a worker answered it and died before it removed the note
            self._note_path(conversation_id, token).unlink(missing_ok=True)
            return
        await self._transfers.mark_started(conversation_id, token)
        content: bytes | None = None
        try:
            if request.what in ("upload_part", "download_part", "end"):
                answer, content = await self._transfer_part(conversation_id, token, request)
            elif request.what == "checkpoints" or request.at is not None:
                answer, content = await self._read_checkpoint(conversation_id, token, request)
            else:
                answer, content = await self._perform(conversation_id, token, request)
        except (StoreUnavailable, OutcomeUnknown):
            raise
        except DeckhandsError as error:
            answer = TransferAnswer(error=error.message, remedy=error.remedy, code=error.code)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            code = "no_such_file" if is_missing else "transfer_failed"
            answer = TransferAnswer(error=f"{request.path}: {error.strerror}", code=code)
        except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an answer)
            _log.exception("transfer of %s failed", conversation_id)
            answer = TransferAnswer(error=f"{type(error).__name__}: {error}", code="transfer_failed")
        await self._transfers.answer(conversation_id, token, answer, content)
        self._note_path(conversation_id, token).unlink(missing_ok=True)

    def _note_path(self, conversation_id: str, token: str) -> Path:
        """Return the path of the note that records, for a later worker, how the upload started."""
        name = hashlib.sha256(token.encode()).hexdigest()[:16]
        return self._root / conversation_id / f".upload-{name}"

    async def _perform(
        self, conversation_id: str, token: str, request: TransferRequest
    ) -> tuple[TransferAnswer, bytes | None]:
        folder = HostFolder(self._root, conversation_id)
        await asyncio.to_thread(attach, self._root / conversation_id)
        directory = folder.directory
        if not directory.is_dir():
            raise WorkspaceLost("The workspace is not on this node yet.", remedy="Try again after the next action.")
        if request.what == "upload":
            content = b"" if request.transfer else await self._transfers.load_content(conversation_id, token)
            noted = self._note_path(conversation_id, token)
            done = await asyncio.to_thread(self._unpack, folder, request, content, noted)
            if directory == folder.workspace:
                await self._checkpointing.save_upload(conversation_id)
            return done, None
        if request.what == "download":
            return await asyncio.to_thread(self._pack_current, folder, request.path, token)
        if request.what == "list":
            return await asyncio.to_thread(self._list, folder, request.path), None
        if request.what == "checkpoint":
            return await self._save_checkpoint(conversation_id, is_ours=directory == folder.workspace), None
        if directory != folder.workspace:
            raise SourceUnusable(
                f"The workspace is your own directory {directory}; its original state is not known here.",
                remedy="Compare it with your own version control, such as git.",
            )
        async with self._comparing:
            patch = await self._make_patch(folder)
        content = patch.content
        files = content.count(b"\ndiff --git ") + content.startswith(b"diff --git ")
        names = tuple(ascii(name)[1:-1][:MAX_NAME_CHARS] for name in patch.left_out[:MAX_NAMES_LEFT_OUT])
        left_out = {"left_out": names, "left_out_count": len(patch.left_out)}
        return TransferAnswer(files=files, size_bytes=len(content), **left_out), content

    async def _transfer_part(
        self, conversation_id: str, token: str, request: TransferRequest
    ) -> tuple[TransferAnswer, bytes | None]:
        """Store or return one part of a long transfer, or drop the transfer."""
        if not (self._root / conversation_id).is_dir():
            raise WorkspaceLost("The workspace is not on this node yet.", remedy="Try again after the next action.")
        spools = self._spools
        transfer = request.transfer
        if request.what == "end":
            await asyncio.to_thread(spools.drop, conversation_id, transfer)
            return TransferAnswer(), None
        if request.what == "download_part":
            return TransferAnswer(), await asyncio.to_thread(spools.read, conversation_id, transfer, request.part)
        content = await self._transfers.load_content(conversation_id, token)
        await asyncio.to_thread(spools.write, conversation_id, transfer, request.part, content)
        return TransferAnswer(), None

    async def _read_checkpoint(
        self, conversation_id: str, token: str, request: TransferRequest
    ) -> tuple[TransferAnswer, bytes | None]:
        """List the checkpoints of a workspace, or list or pack files of the last one at or before an event."""
        if not (self._root / conversation_id).is_dir():
            raise WorkspaceLost("The workspace is not on this node yet.", remedy="Try again after the next action.")
        saved, events = await self._checkpointing.find_saved(conversation_id, request.at)
        if request.what == "checkpoints":
            return TransferAnswer(events=tuple(events)), None
        if request.what == "list":
            found = await asyncio.to_thread(saved.list_files, conversation_id, events[-1], request.path)
            entries = [(row.name, row.kind, row.size_bytes) for row in found]
            return describe_entries(entries).model_copy(update={"events": tuple(events[-1:])}), None
        if request.what != "download":
            raise SourceUnusable("A checkpoint cannot be changed.", remedy="Leave the event out.")
        return await asyncio.to_thread(self._pack_saved, conversation_id, saved, events[-1], request.path, token)

    def _pack_saved(
        self, conversation_id: str, saved: Checkpoints, event: int, path: str, token: str
    ) -> tuple[TransferAnswer, bytes | None]:
        folder = self._root / conversation_id
        self._spools.check_room(folder)
        with create_staging(folder) as staging:
            saved.extract(conversation_id, event, path, staging, limits=TRANSFER_LIMITS)
            with Directory(staging) as root:
                answer, content = self._pack(root, conversation_id, path, token)
        return answer.model_copy(update={"events": (event,)}), content

    def _pack_current(self, folder: HostFolder, path: str, token: str) -> tuple[TransferAnswer, bytes | None]:
        with self._bindings.open(folder, folder.read_binding()) as root:
            return self._pack(root, folder.conversation_id, path, token)

    def _pack(
        self, root: Directory, conversation_id: str, path: str, token: str
    ) -> tuple[TransferAnswer, bytes | None]:
        """Pack the requested files. A long archive stays here and is fetched in parts."""
        spools = self._spools
        with spools.create(conversation_id, token) as file:
            done = pack(root, path, file)
        with spools.open(conversation_id, token) as packed:
            size = os.fstat(packed.fileno()).st_size
            if size > MAX_STORED_FILE_BYTES:
                digest = hashlib.file_digest(packed, "sha256").hexdigest()
                return done.model_copy(update={"transfer": token, "packed_bytes": size, "digest": digest}), None
            content = packed.read()
        spools.drop(conversation_id, token)
        return done, content

    def _list(self, folder: HostFolder, path: str) -> TransferAnswer:
        with self._bindings.open(folder, folder.read_binding()) as root:
            return list_directory(root, path)

    def _unpack(self, folder: HostFolder, request: TransferRequest, content: bytes, noted: Path) -> TransferAnswer:
        with ExitStack() as stack:
            packed: IO[bytes] = io.BytesIO(content)
            if request.transfer:
                sent = (request.transfer, request.size_bytes, request.digest)
                packed = stack.enter_context(self._spools.open_complete(folder.conversation_id, *sent))
            root = stack.enter_context(self._bindings.open(folder, folder.read_binding()))
            return unpack(root, request, packed, noted)

    async def _save_checkpoint(self, conversation_id: str, *, is_ours: bool) -> TransferAnswer:
        if not is_ours:
            raise SourceUnusable(
                "The workspace is your own directory; no checkpoints of it are saved.",
                remedy="Save it with your own version control, such as git.",
            )
        saved = await self._checkpointing.save(conversation_id)
        if saved is None:
            raise SourceUnusable(NOTHING_SAVED, remedy="Start its tool workers with DECKHANDS_CHECKPOINTS.")
        return TransferAnswer(files=saved.files, size_bytes=saved.size_bytes)

    async def _make_patch(self, folder: HostFolder) -> Patch:
        require_git()
        base = await self._checkpointing.find_original(folder.conversation_id)
        if base is None and await self._checkpointing.has_source(folder.conversation_id):
            raise SourceUnusable("The original state of the workspace is not known here.", remedy="Download the files.")
        with ExitStack() as held:
            # An overlay stays mounted while its directory is open.
            binding = folder.read_binding()
            opening = asyncio.to_thread(lambda: held.enter_context(self._bindings.open(folder, binding)))
            await wait_to_completion(opening)
            changes = Changes(SandboxedGit(await self._sandbox()))
            return await changes.compare(folder.workspace, base, limit_bytes=MAX_STORED_FILE_BYTES)


class TransferSpools:
    """The spool files of one node."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock

    def write(self, conversation_id: str, transfer: str, part: int, content: bytes) -> None:
        """Write a part of an upload. Idempotent.

        Raises:
            FileUnfit: The part is longer than `PART_BYTES`.
            WorkspaceTooLarge: The node has no room for it, or there are too many transfers.
        """
        if len(content) > PART_BYTES:
            raise FileUnfit(f"A part of the transfer has more than {PART_BYTES:,} bytes.")
        path = self._path(conversation_id, transfer)
        if not path.exists():
            self._make_room(path.parent)
        self.check_room(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            offset = part * PART_BYTES
            while content:
                written = os.pwrite(descriptor, content, offset)
                offset, content = offset + written, content[written:]
        finally:
            os.close(descriptor)

    @contextmanager
    def open_complete(
        self, conversation_id: str, transfer: str, size_bytes: int, digest: str
    ) -> Iterator[BufferedReader]:
        """Open a complete upload.

        Raises:
            FileUnfit: Parts are missing, or the content does not match the digest.
        """
        with self.open(conversation_id, transfer) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if os.fstat(file.fileno()).st_size != size_bytes or found != digest:
                raise FileUnfit("The upload differs from the sent data.", remedy="Start it again.")
            file.seek(0)
            yield file

    @contextmanager
    def create(self, conversation_id: str, transfer: str) -> Iterator[IO[bytes]]:
        """Yield a file for the content of a download. It gets its final name on success and is removed on failure."""
        path = self._path(conversation_id, transfer)
        self._make_room(path.parent)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with draft.open("w+b") as file:
                yield cast("IO[bytes]", _RoomCheckedFile(file, lambda: self.check_room(path.parent)))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def read(self, conversation_id: str, transfer: str, part: int) -> bytes:
        """Return a part of a download.

        Raises:
            FileUnfit: The transfer does not exist.
        """
        with self.open(conversation_id, transfer) as file:
            os.utime(file.fileno())
            file.seek(part * PART_BYTES)
            return file.read(PART_BYTES)

    @contextmanager
    def open(self, conversation_id: str, transfer: str) -> Iterator[BufferedReader]:
        """Open the spool file of a transfer.

        Raises:
            FileUnfit: The transfer does not exist.
        """
        try:
            file = self._path(conversation_id, transfer).open("rb")
        except FileNotFoundError as error:
            raise FileUnfit("The transfer is no longer on this node.", remedy="Start it again.") from error
        with file:
            yield file

    def drop(self, conversation_id: str, transfer: str) -> None:
        """Remove the spool file of a transfer. Idempotent."""
        self._path(conversation_id, transfer).unlink(missing_ok=True)

    def check_room(self, folder: Path) -> None:
        """Check that the disk has room for more.

        Raises:
            WorkspaceTooLarge: Fewer than `RESERVE_BYTES` are free.
        """
        if shutil.disk_usage(folder).free < RESERVE_BYTES:
            raise WorkspaceTooLarge(
                "The node has no room for the transfer.", remedy="Transfer fewer files, or free space on the node."
            )

    def _path(self, conversation_id: str, transfer: str) -> Path:
        name = hashlib.sha256(transfer.encode()).hexdigest()[:32]
        return self._root / conversation_id / f"{SPOOL_PREFIX}{name}"

    def _make_room(self, folder: Path) -> None:
        """Remove stale transfers.

        Raises:
            WorkspaceTooLarge: Too many other transfers are in use.
        """
        used = 0
        for path in folder.glob(f"{SPOOL_PREFIX}*"):
            with suppress(FileNotFoundError):
                if self._clock.now().timestamp() - path.stat().st_mtime > SPOOL_STALE_SECONDS:
                    path.unlink()
                else:
                    used += 1
        if used >= MAX_SPOOLS:
            text = f"{used} transfers of this workspace are not finished."
            raise WorkspaceTooLarge(text, remedy="Try again when they are, or in an hour.")


class _RoomCheckedFile:
    """A file that may grow only while the disk has room."""

    def __init__(self, file: IO[bytes], check: Callable[[], None]) -> None:
        self._file = file
        self._check = check
        self._since = 0

    def write(self, content: bytes) -> int:
        self._since += len(content)
        if self._since >= PART_BYTES:
            self._since = 0
            self._check()
        if self._file.tell() + len(content) > MAX_COPY_BYTES:
            raise WorkspaceTooLarge(
                f"It has more than {MAX_COPY_BYTES:,} bytes when packed.", remedy="Download a part of it."
            )
        return self._file.write(content)
