"""Staging directories beside a workspace, for content that is being created or removed.

    <root>/<conversation>/.draft-<random>/

Holds: leftovers of a killed worker are removed by the next worker that uses staging for the conversation, or by the
reaper. Neither removes a staging directory in use.
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

from tool_worker.errors import wait_to_completion
from tool_worker.workspace.files.overlay_mounts import unmount_below

STAGING_PREFIX = ".draft-"


@contextmanager
def create_staging(folder: Path) -> Iterator[Path]:
    """Yield a new directory in a conversation's folder; it is removed at the end with its remaining content.

    Blocks while another worker removes leftovers there.
    """
    with _share_folder(folder):
        staging = folder / f"{STAGING_PREFIX}{secrets.token_hex(8)}"
        try:
            staging.mkdir(mode=0o700)
            yield staging
        finally:
            with suppress(OSError):
                remove_tree(staging)


@asynccontextmanager
async def create_staging_async(folder: Path) -> AsyncIterator[Path]:
    """See `create_staging`; waits and removes in a thread."""
    closing = ExitStack()
    try:
        yield await wait_to_completion(asyncio.to_thread(closing.enter_context, create_staging(folder)))
    finally:
        await wait_to_completion(asyncio.to_thread(closing.close))


def move_into_place(made: Path, place: Path) -> None:
    """Move a directory to its final place.

    Raises:
        FileExistsError: A directory that is not empty exists there.
    """
    try:
        made.rename(place)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from error
        raise


def remove_staging(folder: Path) -> None:
    """Remove leftovers in a conversation's folder, unless staging is in use there."""
    if any(folder.glob(f"{STAGING_PREFIX}*")):
        with _open_folder(folder) as descriptor:
            _clear_if_alone(folder, descriptor)


def remove_tree(path: Path) -> None:
    """Remove a directory tree of any depth, including read-only directories and overlays. Idempotent.

    Raises:
        OSError: An entry cannot be removed.
    """
    with suppress(OSError):
        path.rmdir()
    if path.exists():
        unmount_below(path)
    # `rm` handles any depth, unlike Python's recursion. Read-only trees occur in practice, such as Go's module cache.
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if path.exists():
            subprocess.run([*command, "--", str(path)], check=False, capture_output=True, env={})  # noqa: S603
    if path.exists():
        raise OSError(errno.ENOTEMPTY, "Not all of it can be removed", str(path))


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _share_folder(folder: Path) -> Iterator[None]:
    """Remove leftovers in this folder if no other worker uses staging there, then hold a shared lock."""
    with _open_folder(folder) as descriptor:
        _clear_if_alone(folder, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def _clear_if_alone(folder: Path, descriptor: int) -> None:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for staging in folder.glob(f"{STAGING_PREFIX}*"):
            with suppress(OSError):
                remove_tree(staging)
