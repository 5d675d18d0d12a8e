"""Pack files of this machine into a compressed tar file, and unpack them.

Holds: memory does not grow with the size of the copy; nothing is written outside the target, whatever the tar file
contains; the target gets all of it or, if the copy fails, nothing.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import zstandard

from broker.coordination import MAX_COPY_BYTES
from broker.runtime import UsageError

if sys.version_info >= (3, 11, 4):
    import tarfile
else:  # Debian 12's tarfile has no data filter
    from backports import tarfile  # type: ignore[no-redef]

SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
MAX_NAMED = 20


@dataclass(slots=True)
class UnpackResult:
    """The result of unpacking: entries, bytes of files, and the entries left out as pointing outside the target."""

    files: int = 0
    size_bytes: int = 0
    skipped: list[str] = field(default_factory=list)


def pack(source: Path, target: IO[bytes]) -> list[str]:
    """Write a file or directory as a compressed tar file.

    Returns:
        Some of the files whose set-user-id, set-group-id or sticky bit is left out.

    Raises:
        UsageError: it is too large.
        OSError: it cannot be read.
    """
    without_bits: list[str] = []
    total = 0

    def checked(header: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal total
        total += header.size
        if total > MAX_COPY_BYTES:
            raise UsageError(f"{source} has more than {MAX_COPY_BYTES:,} bytes.", remedy="Take a part of it.")
        if header.mode & SPECIAL_BITS and len(without_bits) < MAX_NAMED:
            without_bits.append(header.name)
        header.mode &= ~SPECIAL_BITS
        header.uid = header.gid = 0
        header.uname = header.gname = ""
        return header if header.isreg() or header.isdir() or header.issym() or header.islnk() else None

    with (
        zstandard.ZstdCompressor(level=3).stream_writer(target, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        # If the named source is itself a link, its target is packed.
        archive.add(source.resolve(strict=True), arcname=source.resolve().name or "root", filter=checked)
    return without_bits


class TooLarge(UsageError):
    """A copy exceeds its caller's limit."""

    code = "too_large"


def _accept_all(_name: str) -> bool:
    return True


def unpack(
    content: IO[bytes],
    target: Path,
    check: Callable[[], None],
    *,
    is_packed: bool = True,
    is_wanted: Callable[[str], bool] = _accept_all,
    limit_bytes: int = MAX_COPY_BYTES,
) -> UnpackResult:
    """Unpack a tar file into an existing directory, or under a new name.

    Args:
        check: called when everything was read; raises if the data differs from the sent data.
        is_packed: whether the file is compressed, by zstandard.
        is_wanted: returns whether to write the entry with this name in the copied directory; others count in no limit.

    Raises:
        TooLarge: it has more than `limit_bytes`.
        UsageError: it is not a whole tar file, or an existing file in the target is in the way.
        OSError: the target cannot be written.
    """
    is_inside = target.is_dir()
    folder = target if is_inside else target.parent
    draft = Path(tempfile.mkdtemp(prefix=".deckhands-", dir=folder))
    try:
        with zstandard.ZstdDecompressor().stream_reader(content) if is_packed else nullcontext(content) as stream:
            done = _extract(stream, draft, "" if is_inside else target.name, is_wanted, limit_bytes)
        check()
        for made in sorted(draft.iterdir()):
            _move(made, folder / made.name)
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise UsageError("The received data is not a whole tar file.", remedy="Copy it again.") from error
    else:
        return done
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _extract(
    stream: IO[bytes], draft: Path, name: str, is_wanted: Callable[[str], bool], limit_bytes: int
) -> UnpackResult:
    """Write one file or directory under a name; if empty, under its own."""
    done, top = UnpackResult(), ""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            original = member.name
            archive.members = []  # type: ignore[attr-defined]  # a hundred thousand of them would stay in memory
            first, *inner = original.split("/")
            if inner and not is_wanted("/".join(inner)):
                continue
            done.size_bytes += member.size
            if done.size_bytes > limit_bytes:
                raise TooLarge(f"It has more than {limit_bytes:,} bytes.", remedy="Take a part of it.")
            top = top or first
            is_one = first == top not in ("", ".", "..") and ".." not in inner
            place = draft / (name or top)
            try:
                if not is_one or (member.islnk() and not _is_below(top, member.linkname)):
                    raise tarfile.OutsideDestinationError(member, original)
                if inner:
                    member.name = "/".join(inner)
                    member.linkname = member.linkname.removeprefix(f"{top}/") if member.islnk() else member.linkname
                    archive.extract(member, place, filter="data")
                else:
                    member.name = place.name
                    archive.extract(member, draft, filter="data")
            except (tarfile.FilterError, KeyError):  # outside; or a hard link to an entry that was left out
                done.skipped.append(original)
                continue
            done.files += 1
    while stream.read(2**20):
        pass
    return done


def _is_below(top: str, path: str) -> bool:
    return path.startswith(f"{top}/") and ".." not in path.split("/")


def _move(made: Path, place: Path) -> None:
    """Move an entry to its place: rename it if the place is free, merge it into a directory, or replace a file."""
    if not made.is_dir() or made.is_symlink() or not os.path.lexists(place):
        if place.is_dir() and not place.is_symlink():
            raise UsageError(f"{place} is a directory.", remedy="Name another target.")
        made.replace(place)
        return
    if place.is_symlink() or not place.is_dir():
        raise UsageError(f"{place} is not a directory.", remedy="Name another target.")
    for inner in sorted(made.iterdir()):
        _move(inner, place / inner.name)
