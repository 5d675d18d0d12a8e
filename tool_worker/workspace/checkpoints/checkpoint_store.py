"""Stored checkpoints of workspaces, from which any node can continue.

    objects/<2>/<sha256>           a piece of a file, compressed, under the hash of its content
    bases/<conversation>           the manifest of the workspace's original state
    checkpoints/<conversation>     the latest manifest: every entry of the workspace, files as lists of pieces
    history/<conversation>/<event> manifests by the last event whose effects they contain: the first and the last ones

If conversations are encrypted, a piece is named by a keyed hash of its content and encrypted with the key of its
conversation's tenant. A manifest is encrypted, too, but lists the names of its pieces in plain text, so that `removal`
needs no key.

Holds:
    - Files that did not change since the last checkpoint are neither read nor written again.
    - A manifest is written after all its pieces, and replaces the previous one atomically: a restore yields a whole
      checkpoint, either the last or the one before.
    - Restored content is checked against its hash, and stays below the directory.
    - An entry is left out only if it changed while it was read, never because of a failure of the storage or of ours.
    - The conversations of a tenant share a key, so that equal files of a tenant are stored once. The names of different
      tenants' pieces differ.
Does not:
    - Save shells, processes, or files outside of the workspace.
    - Free the space of removed checkpoints; `removal` does.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import fsspec  # type: ignore[import-untyped]
import zstandard
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from broker.runtime import Clock, CorruptEntry, DataLocked, StoreError, check_conversation_id
from broker.store import Cipher, Encryption
from tool_worker.errors import CheckpointCorrupt, CheckpointsUnavailable, FileUnfit, SourceUnusable, WorkspaceTooLarge
from tool_worker.workspace.files.file_tree import (
    DIRECTORY,
    FILE,
    LINK,
    TemporaryAccess,
    TreeEntry,
    TreeLimits,
    is_entry_error,
    iter_entries,
)
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.staging import create_staging, move_into_place
from tool_worker.workspace.launch.shell_state import ShellState

VERSION, ENCRYPTED_VERSION = 1, 2
CHECKPOINTS, BASES, HISTORY = "checkpoints", "bases", "history"
KEPT_CHECKPOINTS = 10
"""How many checkpoints of a conversation are kept for forks: the first one, and the last ones."""
PIECE_BYTES = 8 * 2**20
MAX_MANIFEST_BYTES = 256 * 2**20
MODE_BITS = 0o777
"""The mode bits that are restored. A set-user-id file would run as the user who restores it."""
UNSETTLED_NS = 50_000_000
"""A file that changed this recently may change again within the same clock tick, so it is read again next time."""
RENEWED_SECONDS = 3 * 86_400.0
"""An older piece is written again when a checkpoint uses it: a removal may be about to drop it as unused."""
REMEMBERED = 8
"""How many manifests are remembered, for their next fork."""
ROUNDS = 100
"""How often unreadable entries are made readable, one directory level deeper each time."""

MANIFEST, PIECE = "manifest of a checkpoint", "piece of a checkpoint"

K = TypeVar("K")
V = TypeVar("V")

_Rows = list[list[Any]]
_Pieces = dict[str, tuple[tuple[int, ...], list[str]]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The figures of one checkpoint.

    Attributes:
        files: Number of entries of every kind.
        size_bytes: Size of all regular files.
        read_bytes: Size of the files that were read because they may have changed.
        written_bytes: Bytes added to the storage for them.
        event: The last event of the log when it was saved; None if not recorded.
        source: The conversation that it was copied from; empty if it is the conversation's own.
        tree: Hash of all entries: checkpoints with the same hash have the same files.
        shell_state: The state of the idle shell; None if it is not known, or if an action was in progress.
    """

    files: int
    size_bytes: int
    read_bytes: int = 0
    written_bytes: int = 0
    event: int | None = None
    source: str = ""
    tree: str = field(default="", compare=False)
    shell_state: ShellState | None = None


class SavedFile(NamedTuple):
    """An entry of a directory in a checkpoint; its kind is that of `file_tree`."""

    name: str
    kind: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A manifest that was written for a fork.

    Attributes:
        place, stamp: Its local file; None in other storages.
    """

    packed: bytes
    place: Path | None
    stamp: tuple[int, ...]


@dataclass(slots=True)
class SavedFiles:
    """The files of a workspace's last checkpoint. A cache: losing it only costs time."""

    pieces: _Pieces = field(default_factory=dict)


class CheckpointCiphers(Protocol):
    """Finds the keys of checkpoints. The calls block.

    Raises:
        CheckpointsUnavailable: raised by each method: this process does not have the key, or the key was deleted.
    """

    def of_conversation(self, conversation_id: str) -> Cipher | None:
        """Return the cipher for new checkpoints of a conversation; None if it is not encrypted."""

    def of_key(self, sealed: bytes) -> Cipher:
        """Return the cipher with the key id at the start of something encrypted."""


class Checkpoints:
    """The checkpoints at one URL, such as `file:///shared/checkpoints` or `s3://bucket/deckhands`.

    All calls block on the storage.

    Args:
        ciphers: finds the keys of encrypted conversations; None if there are none.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        limits: TreeLimits | None = None,
        folder: str = CHECKPOINTS,
        ciphers: CheckpointCiphers | None = None,
    ) -> None:
        self._clock = clock
        self._ciphers = ciphers
        self._folder = folder
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self._limits = limits or TreeLimits()
        self._copies: OrderedDict[tuple[tuple[int, ...] | bytes, str], _Copy] = OrderedDict()
        self._descriptions: OrderedDict[tuple[int, ...] | bytes, Checkpoint] = OrderedDict()

    def save(
        self,
        conversation_id: str,
        workspace: Path | Directory,
        known: SavedFiles,
        *,
        event: int | None = None,
        get_shell: Callable[[], ShellState | None] = lambda: None,
    ) -> Checkpoint:
        """Save a workspace.

        Args:
            workspace: Its path, or the opened directory, which stays open.
            get_shell: Returns the state of the shell if no action has run since the call of `save`.
            event: The last event of the log whose effects are in the files. Forks at this event or later can start from
                the checkpoint.
            known: The files of this workspace's last checkpoint in this storage; updated in place.

        Raises:
            WorkspaceTooLarge: The workspace exceeds the limits; the last checkpoint stays.
            CheckpointsUnavailable: The storage cannot be used; the last checkpoint stays.
            OSError: The workspace cannot be read; the last checkpoint stays.
        """
        cipher = self._ciphers.of_conversation(conversation_id) if self._ciphers is not None else None
        opening = nullcontext(workspace) if isinstance(workspace, Directory) else Directory(workspace)
        with opening as directory, TemporaryAccess(directory) as opened_up:
            for _ in range(ROUNDS):
                closed: list[str] = []
                rows, pieces, done = self._save_entries(directory, known, closed, cipher)
                if not closed:
                    break
                opened_up.grant(closed)
            else:
                raise PermissionError(errno.EACCES, "It is closed again and again", closed[0])
        for row in rows:
            row[2] = opened_up.modes.get(row[0], int(row[2])) & 0o777
        shell = get_shell()
        fields = {"version": VERSION, "event": event, "shell": shell.to_fields() if shell is not None else None}
        manifest = encode_manifest({**fields, "entries": rows}, cipher, conversation_id)
        if event is not None:
            self._write(f"{self._history_path(conversation_id)}/{event:012}", manifest)
        written = self._write(self._manifest_path(conversation_id), manifest)
        if event is not None:
            self._trim_history(conversation_id)
        known.pieces = pieces
        return replace(done, written_bytes=done.written_bytes + written, event=event)

    def _save_entries(
        self, directory: Directory, known: SavedFiles, closed: list[str], cipher: Cipher | None
    ) -> tuple[_Rows, _Pieces, Checkpoint]:
        """Save the content of all files that may have changed; append unreadable paths to `closed`."""
        began_ns = int(self._clock.now().timestamp() * 1e9)
        read = written = size = 0
        saved: _Pieces = {}
        rows: _Rows = []
        for entry in iter_entries(directory, self._limits, closed=closed):
            content: Any = entry.target
            if entry.kind == FILE:
                before = known.pieces.get(entry.path)
                if before is not None and before[0] == entry.stamp:
                    content = before[1]
                else:
                    try:
                        content, added = self._save_file(directory, entry, cipher)
                    except PermissionError:
                        closed.append(entry.path)
                        continue
                    except FileUnfit:
                        continue  # no longer a regular file
                    except OSError as error:
                        if is_entry_error(error):
                            continue  # the file was removed
                        raise
                    written += added
                    read += entry.size
                if entry.ctime_ns < began_ns - UNSETTLED_NS:
                    saved[entry.path] = (entry.stamp, content)
                size += entry.size
            rows.append([entry.path, entry.kind, entry.mode, entry.mtime_ns, entry.size, content])
        return rows, saved, Checkpoint(len(rows), size, read, written)

    def has(self, conversation_id: str) -> bool:
        """Return whether a conversation's workspace has a checkpoint.

        Raises:
            CheckpointsUnavailable: The storage cannot be read.
        """
        return self._exists(self._manifest_path(conversation_id))

    def restore(self, conversation_id: str, workspace: Path) -> Checkpoint:
        """Restore a workspace from its last checkpoint, atomically; the directory must not exist yet.

        Raises:
            FileNotFoundError: There is no checkpoint.
            FileExistsError: The directory exists.
            CheckpointCorrupt: The checkpoint is damaged.
            CheckpointsUnavailable, OSError: The checkpoint cannot be read, or the directory cannot be written.
        """
        if workspace.exists():
            raise FileExistsError(f"{workspace} is there already")
        workspace.parent.mkdir(parents=True, exist_ok=True)
        with create_staging(workspace.parent) as folder:
            restored = self.write_files(conversation_id, folder / workspace.name)
            move_into_place(folder / workspace.name, workspace)
        return restored

    def write_files(self, conversation_id: str, target: Path) -> Checkpoint:
        """Write the files of a conversation's last checkpoint as a new directory, which may be left incomplete.

        Raises: See `restore`.
        """
        manifest = self._read_manifest(self._manifest_path(conversation_id))
        target.mkdir(mode=0o700)
        size = self._restore_rows(target, manifest["entries"], self._find_cipher(manifest))
        return replace(self._describe_manifest(manifest), size_bytes=size)

    def list_files(self, conversation_id: str, event: int, path: str) -> list[SavedFile]:
        """Return the entries of a directory in the checkpoint of an event, by name.

        Raises:
            SourceUnusable: There is no checkpoint of this event.
            FileNotFoundError, NotADirectoryError: The checkpoint has no directory at the path.
            CheckpointCorrupt, CheckpointsUnavailable: The checkpoint cannot be read.
        """
        rows: _Rows = self._read_kept(conversation_id, event)["entries"]
        wanted = _check_path(rows, path)
        if wanted is not None and wanted[1] != DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        folder = wanted[0] if wanted is not None else ""
        named = [(row[0].rpartition("/"), row) for row in rows]
        return sorted(SavedFile(name, row[1], row[4]) for (above, _, name), row in named if above == folder)

    def extract(self, conversation_id: str, event: int, path: str, target: Path, *, limits: TreeLimits) -> None:
        """Write a file or a directory of the checkpoint of an event below a directory, under its path.

        Args:
            target: An empty directory.

        Raises:
            SourceUnusable: There is no checkpoint of this event.
            FileNotFoundError: The checkpoint has nothing at the path.
            WorkspaceTooLarge: It exceeds the limits.
            CheckpointCorrupt, CheckpointsUnavailable, OSError: It cannot be read, or the directory cannot be written.
        """
        manifest = self._read_kept(conversation_id, event)
        rows: _Rows = manifest["entries"]
        wanted = _check_path(rows, path)
        if wanted is not None:
            place = wanted[0]
            rows = [row for row in rows if f"{row[0]}/".startswith(f"{place}/") or place.startswith(f"{row[0]}/")]
        if len(rows) > limits.files or sum(row[4] for row in rows) > limits.bytes:
            raise WorkspaceTooLarge(
                f"{path} has more than {limits.files:,} files or {limits.bytes:,} bytes.", remedy="Name a part of it."
            )
        self._restore_rows(target, rows, self._find_cipher(manifest))

    def _read_kept(self, conversation_id: str, event: int) -> dict[str, Any]:
        try:
            return self._read_manifest(f"{self._history_path(conversation_id)}/{event:012}")
        except FileNotFoundError as error:
            raise SourceUnusable(
                f"No files are saved after event {event}.", remedy="Ask for the checkpoints, and name one of them."
            ) from error

    def _restore_rows(self, draft: Path, rows: _Rows, cipher: Cipher | None) -> int:
        """Write entries below a directory, and return the size of their files."""
        size = sum(self._restore_entry(draft, row, cipher) for row in rows)
        # Directories last: one without write permission could not be filled, and each entry changes its time.
        for path, _, mode, mtime_ns, _, _ in reversed([row for row in rows if row[1] == DIRECTORY]):
            (draft / path).chmod(mode & MODE_BITS)
            os.utime(draft / path, ns=(mtime_ns, mtime_ns))
        return size

    def describe(self, conversation_id: str) -> Checkpoint:
        """Return the figures of a conversation's last checkpoint. Raises the same errors as `restore`."""
        path = self._manifest_path(conversation_id)
        key = self._find_key(path)
        found = self._descriptions.get(key)
        if found is None:
            manifest = self._read_manifest(path)
            found = self._describe_manifest(manifest)
            if self._find_cipher(manifest) is None:  # an encrypted one equals no other
                _remember(self._descriptions, key, found)
        return found

    def copy(self, source_id: str, target_id: str, *, at: int | None = None) -> bool:
        """Give a fork a checkpoint of its source; return whether there was one. Pieces are shared, not copied.

        Args:
            at: The event of the fork: the last checkpoint at or before it is used, or else the first one after it.
        """
        if not self.has(source_id):
            return False
        nearest, target = self._find_nearest(source_id, at), self._manifest_path(target_id)
        cipher = self._ciphers.of_conversation(target_id) if self._ciphers is not None else None
        key = self._find_key(nearest), source_id
        if cipher is None and (made := self._copies.get(key)) is not None:
            self._write_copy(target, made)
            return True
        manifest = self._read_manifest(nearest)
        theirs = self._find_cipher(manifest)
        if cipher is not theirs and (cipher is None or theirs is None or cipher.key_id != theirs.key_id):
            manifest = self._encrypt_again(manifest, theirs, cipher)
        copied = encode_manifest({**manifest, "source": source_id}, cipher, target_id)
        self._write(target, copied)
        if cipher is None and theirs is None:
            place = Path(target) if isinstance(self._files, LocalFileSystem) else None
            packed = self._read_packed(target)
            _remember(self._copies, key, _Copy(packed, place, _make_stamp(place) if place is not None else ()))
        return True

    def _write_copy(self, target: str, made: _Copy) -> None:
        """Write the manifest of another fork of the same checkpoint: as the same file, where files have links."""
        with self._translate_errors():
            if made.place is None:
                self._files.pipe_file(target, made.packed)
                return
            draft = Path(target).with_name(f".{secrets.token_hex(8)}")
            try:
                os.link(made.place, draft)
                if _make_stamp(draft) != made.stamp:  # that fork has saved its own files since
                    raise FileNotFoundError(str(made.place))
                draft.replace(target)
                draft.unlink(missing_ok=True)  # a rename to another link of the same file does nothing
            except OSError:
                draft.unlink(missing_ok=True)
                _replace(Path(target), made.packed)

    def _encrypt_again(self, manifest: dict[str, Any], theirs: Cipher | None, cipher: Cipher | None) -> dict[str, Any]:
        """Return a manifest whose pieces are encrypted for another tenant: a fork outlives the key of its source."""
        rows: _Rows = []
        for row in manifest["entries"]:
            content = row[5]
            if row[1] == FILE:
                content = [self._save_piece(self._load_piece(name, theirs), cipher)[0] for name in row[5]]
            rows.append([*row[:5], content])
        return {**manifest, "entries": rows}

    def forget(self, conversation_id: str) -> None:
        """Drop the checkpoints of a conversation. Idempotent."""
        if self.has(conversation_id):
            self._files.rm_file(self._manifest_path(conversation_id))
        for event in self.list_events(conversation_id):
            self._files.rm_file(f"{self._history_path(conversation_id)}/{event:012}")

    def _save_file(self, directory: Directory, entry: TreeEntry, cipher: Cipher | None) -> tuple[list[str], int]:
        pieces: list[str] = []
        written = 0
        with directory.open_file(entry.path, follows_links=False) as descriptor:
            while len(pieces) * PIECE_BYTES <= self._limits.bytes:
                piece = _read_up_to(descriptor, PIECE_BYTES)
                if not piece:
                    break
                digest, added = self._save_piece(piece, cipher)
                pieces.append(digest)
                written += added
        return pieces, written

    def _save_piece(self, piece: bytes, cipher: Cipher | None) -> tuple[str, int]:
        """Write a piece unless it is there; return its name and the bytes written."""
        digest = _name_piece(piece, cipher)
        path = self._object_path(digest)
        return digest, 0 if self._is_fresh(path) else self._write(path, piece, cipher)

    def _load_piece(self, digest: str, cipher: Cipher | None) -> bytes:
        piece = self._read(self._object_path(digest), PIECE_BYTES, cipher)
        if _name_piece(piece, cipher) != digest:
            raise CheckpointCorrupt(f"The piece {digest} is damaged.")
        return piece

    def _restore_entry(self, draft: Path, row: list[Any], cipher: Cipher | None) -> int:
        path, kind, mode, mtime_ns, _, content = row
        target = draft / path
        if kind == DIRECTORY:
            target.mkdir(mode=0o700)
            return 0
        if kind == LINK:
            # No entry is below a link, so nothing is written through it.
            target.symlink_to(content)
            return 0
        size = 0
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for digest in content:
                size += file.write(self._load_piece(digest, cipher))
            os.fchmod(file.fileno(), mode & MODE_BITS)
        os.utime(target, ns=(mtime_ns, mtime_ns))
        return size

    def _read_manifest(self, path: str, *, is_decrypted: bool = True) -> dict[str, Any]:
        folder, _, conversation_id = path.rpartition("/")
        if folder.startswith(f"{self._root}/{HISTORY}/"):
            conversation_id = folder.rpartition("/")[2]
        try:
            manifest: dict[str, Any] = json.loads(self._read(path, MAX_MANIFEST_BYTES))
            if manifest["version"] == ENCRYPTED_VERSION and is_decrypted:
                manifest = self._decrypt_manifest(manifest, conversation_id)
            if manifest["version"] == ENCRYPTED_VERSION:
                is_sound = all(isinstance(name, str) for name in manifest["pieces"])
            else:
                is_sound = manifest["version"] == VERSION and are_valid_rows(manifest["entries"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointCorrupt(f"The checkpoint of {conversation_id} cannot be read: {error}.") from error
        if not is_sound:
            raise CheckpointCorrupt(f"The checkpoint of {conversation_id} has entries that lead out of it.")
        return manifest

    def _decrypt_manifest(self, manifest: dict[str, Any], conversation_id: str) -> dict[str, Any]:
        """Decrypt a manifest; raises CheckpointsUnavailable without its key, and ValueError if it was changed."""
        sealed = base64.b64decode(manifest["encrypted"], validate=True)
        cipher = self._load_cipher(sealed)
        try:
            packed = cipher.decrypt(sealed, _describe(conversation_id))
            found: dict[str, Any] = json.loads(_unpack(packed, MAX_MANIFEST_BYTES))
        except (CorruptEntry, zstandard.ZstdError) as error:
            raise ValueError(str(error)) from error
        return {**found, "cipher": cipher}

    def _load_cipher(self, sealed: bytes) -> Cipher:
        if self._ciphers is None:
            raise CheckpointsUnavailable(
                "The checkpoint is encrypted, and this process has no master key: set DECKHANDS_MASTER_KEYS_FILE."
            )
        return self._ciphers.of_key(sealed)

    def _find_cipher(self, manifest: dict[str, Any]) -> Cipher | None:
        found: Cipher | None = manifest.get("cipher")
        return found

    def _describe_manifest(self, manifest: dict[str, Any]) -> Checkpoint:
        event = manifest.get("event")
        source = manifest.get("source")
        return Checkpoint(
            len(manifest["entries"]),
            0,
            event=event if isinstance(event, int) else None,
            source=source if isinstance(source, str) else "",
            tree=hashlib.sha256(json.dumps(manifest["entries"]).encode("ascii")).hexdigest(),
            shell_state=ShellState.parse(manifest.get("shell")),
        )

    def _find_nearest(self, conversation_id: str, at: int | None) -> str:
        """Return the path of the manifest closest to an event."""
        events = self.list_events(conversation_id) if at is not None else []
        if at is None or not events or events[-1] <= at:
            return self._manifest_path(conversation_id)
        chosen = max((event for event in events if event <= at), default=events[0])
        return f"{self._history_path(conversation_id)}/{chosen:012}"

    def list_events(self, conversation_id: str) -> list[int]:
        """Return the events of the kept checkpoints of a conversation, in order.

        Raises:
            CheckpointsUnavailable: The storage cannot be read.
        """
        folder = self._history_path(conversation_id)
        with self._translate_errors():
            self._files.invalidate_cache()
            found = self._files.find(folder) if self._files.exists(folder) else []
        names = (path.rpartition("/")[2] for path in found)
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def _trim_history(self, conversation_id: str) -> None:
        for event in self.list_events(conversation_id)[1 : -(KEPT_CHECKPOINTS - 1)]:
            with self._translate_errors(FileNotFoundError), suppress(FileNotFoundError):
                self._files.rm_file(f"{self._history_path(conversation_id)}/{event:012}")

    @contextmanager
    def _translate_errors(self, *passing: type[Exception]) -> Iterator[None]:
        """Turn every error of the storage client into `CheckpointsUnavailable`, except the types in `passing`."""
        try:
            yield
        except passing:
            raise
        except Exception as error:
            raise CheckpointsUnavailable(f"The checkpoints at {self._root} cannot be used: {error}") from error

    def _exists(self, path: str) -> bool:
        with self._translate_errors():
            if not isinstance(self._files, LocalFileSystem):
                return bool(self._files.exists(path))
            try:
                Path(path).stat()  # other errors do not prove that it is missing
            except FileNotFoundError:
                return False
            return True

    def _is_fresh(self, path: str) -> bool:
        """Return whether a piece exists and is too recent to be dropped as unused."""
        if type(self._files).modified is AbstractFileSystem.modified:
            return self._exists(path)  # this storage reports no times, so nothing is dropped from it
        with self._translate_errors():
            try:
                written = self._files.modified(path)
            except FileNotFoundError:
                return False
        age = self._clock.now() - (written if written.tzinfo else written.replace(tzinfo=UTC))
        return bool(age < timedelta(seconds=RENEWED_SECONDS))

    def _write(self, path: str, content: bytes, cipher: Cipher | None = None) -> int:
        packed = _pack(content) if cipher is None else cipher.encrypt(_pack(content), PIECE)
        with self._translate_errors():
            if isinstance(self._files, LocalFileSystem):
                _replace(Path(path), packed)
            else:
                self._files.pipe_file(path, packed)  # object stores write objects atomically
        return len(packed)

    def _find_key(self, path: str) -> tuple[int, ...] | bytes:
        """Return what tells a manifest from others: its local file, or a hash of its content.

        Raises:
            FileNotFoundError, CheckpointsUnavailable: It cannot be read.
        """
        if isinstance(self._files, LocalFileSystem):
            with self._translate_errors(FileNotFoundError):
                return _make_stamp(Path(path))
        return hashlib.sha256(self._read_packed(path)).digest()

    def _read_packed(self, path: str) -> bytes:
        with self._translate_errors(FileNotFoundError):
            packed: bytes = self._files.cat_file(path)
            return packed

    def _read(self, path: str, limit_bytes: int, cipher: Cipher | None = None) -> bytes:
        packed = self._read_packed(path)
        try:
            return _unpack(packed if cipher is None else cipher.decrypt(packed, PIECE), limit_bytes)
        except (zstandard.ZstdError, CorruptEntry) as error:
            raise CheckpointCorrupt(f"{path} is damaged: {error}.") from error

    def _object_path(self, digest: str) -> str:
        return f"{self._root}/objects/{digest[:2]}/{digest}"

    def _history_path(self, conversation_id: str) -> str:
        return f"{self._root}/{HISTORY}/{check_conversation_id(conversation_id)}"

    def _manifest_path(self, conversation_id: str) -> str:
        return f"{self._root}/{self._folder}/{check_conversation_id(conversation_id)}"


def _make_stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    known[key] = value
    while len(known) > REMEMBERED:
        known.popitem(last=False)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{secrets.token_hex(8)}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _read_up_to(descriptor: int, limit_bytes: int) -> bytes:
    chunks, missing = [], limit_bytes
    while missing > 0 and (chunk := os.read(descriptor, missing)):
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _pack(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


def _unpack(packed: bytes, limit_bytes: int) -> bytes:
    return zstandard.ZstdDecompressor().decompress(packed, max_output_size=limit_bytes)


def _name_piece(piece: bytes, cipher: Cipher | None) -> str:
    return hashlib.sha256(piece).hexdigest() if cipher is None else cipher.digest(piece)


def _describe(conversation_id: str) -> str:
    """Return the description that the encryption binds a conversation's manifest to.

    It is needed because a tenant's conversations share a key.
    """
    return f"{MANIFEST} of {conversation_id}"


def encode_manifest(manifest: dict[str, Any], cipher: Cipher | None = None, conversation_id: str = "") -> bytes:
    """Serialize a manifest, encrypted with a cipher for its conversation; the names of its pieces stay plain."""
    manifest = {name: value for name, value in manifest.items() if name != "cipher"}
    if cipher is not None:
        sealed = cipher.encrypt(_pack(encode_manifest(manifest)), _describe(conversation_id))
        pieces = sorted(set(iter_pieces(manifest["entries"])))
        manifest = {
            "version": ENCRYPTED_VERSION,
            "event": manifest.get("event"),
            "pieces": pieces,
            "encrypted": base64.b64encode(sealed).decode(),
        }
    return json.dumps(manifest, separators=(",", ":")).encode("ascii")


def iter_pieces(rows: list[list[Any]]) -> Iterator[str]:
    """Yield the hashes of all pieces of a checkpoint's files."""
    for row in rows:
        if row[1] == FILE:
            yield from row[5]


def _check_path(rows: _Rows, path: str) -> list[Any] | None:
    """Return the entry at a path; None for the workspace itself. Raises FileNotFoundError if there is none."""
    plain = "/".join(part for part in path.split("/") if part not in ("", "."))
    if not plain:
        return None
    for row in rows:
        if row[0] == plain:
            return row
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def are_valid_rows(rows: list[list[Any]]) -> bool:
    """Return whether every entry's directory precedes it, so that no entry leads out, even through a link."""
    directories = {""}
    for row in rows:
        folder, _, name = row[0].rpartition("/")
        if len(row) != 6 or name in ("", ".", "..") or "\0" in name or folder not in directories:
            return False
        if row[1] == DIRECTORY:
            directories.add(row[0])
        elif row[1] not in (FILE, LINK):
            return False
    return True


SCOPE = "checkpoints"
LIMIT_SECONDS = 60.0

T = TypeVar("T")


class StoreCiphers:
    """Implements `CheckpointCiphers` by a store's keys, which the loop of this process reads."""

    def __init__(self, encryption: Encryption) -> None:
        self._encryption = encryption
        self._loop = asyncio.get_running_loop()

    def of_conversation(self, conversation_id: str) -> Cipher | None:
        """See `CheckpointCiphers`."""
        return self._wait_for(self._encryption.find_tenant_cipher(conversation_id, SCOPE))

    def of_key(self, sealed: bytes) -> Cipher:
        """See `CheckpointCiphers`."""
        return self._wait_for(self._encryption.load_tenant_cipher(sealed, SCOPE))

    def _wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result(LIMIT_SECONDS)
        except (DataLocked, StoreError, TimeoutError) as error:
            raise CheckpointsUnavailable(f"The key of the checkpoint is not known: {error}") from error
