"""Transfers files in and out of workspaces for people, and saves workspaces on request.

Holds: no path and no link leads out of the workspace, whatever its programs do meanwhile; the size of a transfer is
bounded, packed and unpacked; every request gets an answer, also a refused one.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import stat
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, cast

import zstandard

from broker.coordination.stored_files import MAX_STORED_FILE_BYTES
from broker.coordination.transfers import TransferAnswer, TransferRequest, Transfers
from broker.runtime.errors import DeckhandsError, OutcomeUnknown, StoreUnavailable
from tool_worker.checkpoints.checkpointing import Checkpointing
from tool_worker.errors import FileUnfit, SourceUnusable, WorkspaceLost, WorkspaceTooLarge
from tool_worker.files.file_tree import FILE, LINK, Entry, TreeLimits, entries
from tool_worker.files.openat2_paths import Directory
from tool_worker.files.unpacking import Unpacking
from tool_worker.launch.host_folder import HostFolder
from tool_worker.opening.changes import Changes, Patch
from tool_worker.opening.repositories import Repositories, require_git
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.workspace.bindings import Bindings

LIMITS = TreeLimits(files=100_000, bytes=512 * 2**20)
"""The limits of one transfer, unpacked."""
TOO_LARGE = f"It has more than {MAX_STORED_FILE_BYTES:,} bytes when packed, which is the limit of one transfer."
MAX_NAMES_LEFT_OUT, MAX_NAME_CHARS = 1_000, 300
IN_PARTS = "Transfer a part of it."

_log = logging.getLogger(__name__)


class TransferService:
    """Transfers files of one node's workspaces.

    Args:
        root: Directory of the node's workspaces.
        sandbox: Returns the node's sandbox, see `Workspaces.demanded_sandbox`.
        bindings: Opens their directories.
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
        self._comparing = asyncio.Lock()  # each may take as much memory as a patch may have bytes, and all of a disk

    async def transfer(self, conversation_id: str, token: str) -> None:
        """Serve one request, and answer it.  Idempotent."""
        request = await self._transfers.request(conversation_id, token)
        if request is None:
            self._noted(conversation_id, token).unlink(missing_ok=True)  # answered by a worker that died afterwards
            return
        content: bytes | None = None
        try:
            answer, content = await self._carried(conversation_id, token, request)
        except (StoreUnavailable, OutcomeUnknown):
            raise
        except DeckhandsError as error:
            answer = TransferAnswer(error=error.message, remedy=error.remedy, code=error.code)
        except OSError as error:
            answer = TransferAnswer(error=f"{request.path}: {error.strerror}", code="transfer_failed")
        except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an answer)
            _log.exception("transfer of %s", conversation_id)
            answer = TransferAnswer(error=f"{type(error).__name__}: {error}", code="transfer_failed")
        await self._transfers.answer(conversation_id, token, answer, content)
        self._noted(conversation_id, token).unlink(missing_ok=True)

    def _noted(self, conversation_id: str, token: str) -> Path:
        """Return the note of how an upload was begun, for a worker that takes it over."""
        name = hashlib.sha256(token.encode()).hexdigest()[:16]
        return self._root / conversation_id / f".upload-{name}"

    async def _carried(
        self, conversation_id: str, token: str, request: TransferRequest
    ) -> tuple[TransferAnswer, bytes | None]:
        folder = HostFolder(self._root, conversation_id)
        directory = folder.directory
        if not directory.is_dir():
            raise WorkspaceLost("The workspace is not on this node yet.", remedy="Try again after the next action.")
        if request.what == "upload":
            content = await self._transfers.content(conversation_id, token)
            noted = self._noted(conversation_id, token)
            done = await asyncio.to_thread(self._unpacked, folder, request, content, noted)
            self._checkpointing.note_change(conversation_id)
            return done, None
        if request.what == "download":
            return await asyncio.to_thread(self._packed, folder, request.path)
        if request.what == "checkpoint":
            return await self._checkpoint(conversation_id, is_ours=directory == folder.workspace), None
        if directory != folder.workspace:
            raise SourceUnusable(
                f"The workspace is your own directory {directory}; its original state is not known here.",
                remedy="Compare it with your own version control, such as git.",
            )
        async with self._comparing:
            patch = await self._patch(conversation_id, directory)
        content = patch.content
        files = content.count(b"\ndiff --git ") + content.startswith(b"diff --git ")
        names = tuple(ascii(name)[1:-1][:MAX_NAME_CHARS] for name in patch.left_out[:MAX_NAMES_LEFT_OUT])
        left_out = {"left_out": names, "left_out_count": len(patch.left_out)}
        return TransferAnswer(files=files, size_bytes=len(content), **left_out), content

    def _packed(self, folder: HostFolder, path: str) -> tuple[TransferAnswer, bytes]:
        with self._bindings.open(folder, folder.read_binding()) as root:
            return packed(root, path)

    def _unpacked(self, folder: HostFolder, request: TransferRequest, content: bytes, noted: Path) -> TransferAnswer:
        with self._bindings.open(folder, folder.read_binding()) as root:
            return unpacked(root, request, content, noted)

    async def _checkpoint(self, conversation_id: str, *, is_ours: bool) -> TransferAnswer:
        if not is_ours:
            raise SourceUnusable(
                "The workspace is your own directory; no checkpoints of it are saved.",
                remedy="Save it with your own version control, such as git.",
            )
        saved = await self._checkpointing.save(conversation_id)
        if saved is None:
            raise SourceUnusable(
                "The node of this workspace saves no checkpoints.",
                remedy="Start its tool workers with DECKHANDS_CHECKPOINTS.",
            )
        return TransferAnswer(files=saved.files, size_bytes=saved.size_bytes)

    async def _patch(self, conversation_id: str, directory: Path) -> Patch:
        require_git()
        base = await self._checkpointing.original(conversation_id)
        if base is None and await self._checkpointing.has_source(conversation_id):
            raise SourceUnusable("The original state of the workspace is not known here.", remedy="Download the files.")
        changes = Changes(Repositories(await self._sandbox()))
        return await changes.since(directory, base, limit_bytes=MAX_STORED_FILE_BYTES)


def packed(root: Directory, path: str) -> tuple[TransferAnswer, bytes]:
    """Return a file or a directory of a workspace as a tar file whose names begin with its own name.

    Raises:
        FileUnfit: it is neither.
        WorkspaceTooLarge: it is larger than what is carried.
        OSError: it is not there, or leads out.
    """
    name = PurePosixPath(path).name or "workspace"
    target = io.BytesIO()
    done = TransferAnswer()
    with (
        zstandard.ZstdCompressor(level=3).stream_writer(target, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry_name, entry, descriptor in _found(root, path, name):
            done = TransferAnswer(
                files=done.files + 1, size_bytes=done.size_bytes + _add(archive, entry_name, entry, descriptor)
            )
            if target.tell() > MAX_STORED_FILE_BYTES:
                raise WorkspaceTooLarge(TOO_LARGE, remedy=IN_PARTS)
    if target.tell() > MAX_STORED_FILE_BYTES:
        raise WorkspaceTooLarge(TOO_LARGE, remedy=IN_PARTS)
    return done, target.getvalue()


def unpacked(root: Directory, request: TransferRequest, content: bytes, noted: Path) -> TransferAnswer:
    """Put the one file or directory of a packed tar file into the workspace.

    Args:
        noted: where it is noted, from the first try on, whether it goes into the target or becomes it: a try that
            was cut short may have made the target.

    Raises:
        FileUnfit, WorkspaceTooLarge, OSError: see `Unpacking.unpack`.
    """
    plain = _decompressed(content)
    parts = [part for part in request.path.split("/") if part not in ("", ".")]
    is_inside = request.is_inside or not parts or _is_directory(root, "/".join(parts))
    is_inside = _first_choice(noted, is_inside=is_inside)
    rename = None if is_inside else parts.pop()
    if rename == "..":
        raise FileUnfit(f"{request.path} leads out of the workspace.")
    with Directory.inside(root, _made(root, parts)) as directory:
        done = Unpacking(directory, LIMITS, rename_first=rename).unpack(plain, "tar")
    return TransferAnswer(files=done.files, size_bytes=done.size_bytes)


def _first_choice(noted: Path, *, is_inside: bool) -> bool:
    earlier = noted.read_text() if noted.exists() else ""
    if earlier not in ("inside", "instead"):
        noted.write_text("inside" if is_inside else "instead")
        return is_inside
    return earlier == "inside"


def _found(root: Directory, path: str, name: str) -> Iterator[tuple[str, Entry | os.stat_result, int]]:
    """Yield what is to be packed: the name it gets, what it is, and a descriptor of a regular file's content."""
    if not _is_directory(root, path):
        with root.opened_file(path) as descriptor:
            yield name, os.fstat(descriptor), descriptor
        return
    with Directory.inside(root, path) as directory:
        yield name, os.fstat(directory.descriptor), -1
        for entry in entries(directory, LIMITS):
            if entry.kind != FILE:
                yield f"{name}/{entry.path}", entry, -1
                continue
            with suppress(OSError, FileUnfit), directory.opened_file(entry.path, follows_links=False) as descriptor:
                yield f"{name}/{entry.path}", os.fstat(descriptor), descriptor


def _add(archive: tarfile.TarFile, name: str, entry: Entry | os.stat_result, descriptor: int) -> int:
    """Add an entry to a tar file and return how many bytes its content has."""
    header = tarfile.TarInfo(name)
    if isinstance(entry, Entry):
        header.mode, header.mtime = entry.mode, entry.mtime_ns // 10**9
        header.type = tarfile.SYMTYPE if entry.kind == LINK else tarfile.DIRTYPE
        header.linkname = entry.target
    else:
        header.mode, header.mtime = stat.S_IMODE(entry.st_mode) & 0o777, int(entry.st_mtime)
        header.type = tarfile.DIRTYPE if stat.S_ISDIR(entry.st_mode) else tarfile.REGTYPE
    if descriptor < 0:
        archive.addfile(header)
        return 0
    assert isinstance(entry, os.stat_result)
    header.size = entry.st_size
    with os.fdopen(os.dup(descriptor), "rb") as file:
        archive.addfile(header, cast("IO[bytes]", _PaddedFile(file)))
    return header.size


class _PaddedFile:
    """A file that holds as many bytes as it did, whatever it has lost since: the header with its size is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(size).ljust(size, b"\0")


def _is_directory(root: Directory, path: str) -> bool:
    try:
        descriptor = root.open(path, os.O_PATH)
    except FileNotFoundError:
        return False
    try:
        return stat.S_ISDIR(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _made(root: Directory, parts: list[str]) -> str:
    """Make a directory and all around it, and return its path; links that stay inside are followed."""
    for end in range(1, len(parts) + 1):
        if not _is_directory(root, "/".join(parts[:end])):
            with Directory.inside(root, "/".join(parts[: end - 1]) or ".") as parent:
                os.mkdir(parts[end - 1], 0o755, dir_fd=parent.descriptor)
    return "/".join(parts) or "."


def _decompressed(content: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)) as reader:
            plain = reader.read(LIMITS.bytes + 1)
    except zstandard.ZstdError as error:
        raise FileUnfit(f"The upload is damaged: {error}") from error
    if len(plain) > LIMITS.bytes:
        raise WorkspaceTooLarge(f"The upload has more than {LIMITS.bytes:,} bytes.", remedy=IN_PARTS)
    return plain
