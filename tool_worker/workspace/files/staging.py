"""Directories in the making beside a workspace, and the removal of what was made.

    <root>/<conversation>/.draft-<random>/

Holds: the next worker that makes something for the conversation, or the reaper, removes what a killed worker left half
made; neither removes what is being made.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from tool_worker.completion import to_completion

STAGING_PREFIX = ".draft-"


@contextmanager
def staging_in(folder: Path) -> Iterator[Path]:
    """Yield a new directory in a conversation's folder; what is in it at the end is removed.

    Blocks while somebody else clears up there.
    """
    with _shared(folder):
        staging = folder / f"{STAGING_PREFIX}{secrets.token_hex(8)}"
        try:
            staging.mkdir(mode=0o700)
            yield staging
        finally:
            with suppress(OSError):
                remove(staging)


@asynccontextmanager
async def async_staging_in(folder: Path) -> AsyncIterator[Path]:
    """See `staging_in`; it is another thread that waits and removes."""
    closing = ExitStack()
    try:
        yield await to_completion(asyncio.to_thread(closing.enter_context, staging_in(folder)))
    finally:
        await to_completion(asyncio.to_thread(closing.close))


def put(made: Path, place: Path) -> None:
    """Move a directory to where it belongs.

    Raises:
        FileExistsError: another one with something in it is there.
    """
    try:
        made.rename(place)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from error
        raise


def remove_staging(folder: Path) -> None:
    """Remove what was left half made in a conversation's folder, unless something is being made there."""
    if any(folder.glob(f"{STAGING_PREFIX}*")):
        with _opened(folder) as descriptor:
            _clear_if_alone(folder, descriptor)


def remove(path: Path) -> None:
    """Remove a directory with all in it, however deep it is, and what its owner may not write. Idempotent.

    Raises:
        OSError: something of it cannot be removed.
    """
    with suppress(OSError):
        path.rmdir()
    # A program nests deeper than Python does, and Go's module cache, for one, may not be written.
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if path.exists():
            subprocess.run([*command, "--", str(path)], check=False, capture_output=True, env={})  # noqa: S603
    if path.exists():
        raise OSError(errno.ENOTEMPTY, "Not all of it can be removed", str(path))


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _shared(folder: Path) -> Iterator[None]:
    """Keep others from removing staging in this folder; those that are there go before."""
    with _opened(folder) as descriptor:
        _clear_if_alone(folder, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def _clear_if_alone(folder: Path, descriptor: int) -> None:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for staging in folder.glob(f"{STAGING_PREFIX}*"):
            with suppress(OSError):
                remove(staging)
