"""The /etc of a sandbox: copies of a few of the machine's files, and four files of ours.

    <files>/etc-<boot>-<digest>/    the machine's files when a sandbox first started after their latest change

It is one directory, because a mount for each file would add 2 ms to every start.

Holds:
    - Keys, passwords and the machine's own names are not copied; neither are files that not every user may read.
    - A copy appears completely or not at all, and never changes, because running sandboxes show it.
    - Copies of earlier boots are removed. No sandbox shows them any more, and a power cut may have damaged them.
Does not: notice a file that is overwritten in place instead of replaced, until a worker restarts.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

ATTEMPTS = 5
"""The number of attempts to copy files that the machine changes meanwhile."""

USER_ID = 1000
HOME = "/home/agent"
HOST_NAME = "workspace"

COPIED = (
    *("alternatives", "crypto-policies", "fonts", "ld.so.cache", "localtime", "mime.types", "os-release"),
    *("pki/ca-trust", "pki/tls/certs", "services", "ssl/certs", "ssl/openssl.cnf"),
)
NETWORK_FILES = ("resolv.conf", "gai.conf", "host.conf")
"""Mounted from the machine if there is a network, as they change while it runs. The copy has empty mount points."""

OWN_FILES = {
    "passwd": f"root:x:0:0:root:/root:/bin/false\nagent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": f"127.0.0.1 localhost {HOST_NAME}\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class EtcCopies:
    """The copy for new sandboxes. It is recreated when the machine's files have changed or the copy is gone.

    Args:
        files: Directory of the copies, created if missing. The workers of a node share it.
    """

    def __init__(self, files: Path, machine: Path = Path("/etc")) -> None:
        self._files = files
        self._machine = machine
        self._copy: Path | None = None
        self._stamps: dict[Path, tuple[int, int] | None] = {}

    def current(self) -> Path:
        """Return the copy, after checking by the status of about thirty files and directories that it is current.

        Raises:
            OSError: it cannot be created.
        """
        if self._copy is None or any(_stamp(path) != stamp for path, stamp in self._stamps.items()):
            stamps = {path: _stamp(path) for path in _list_watched(self._machine)}
            self._copy = make_etc_copy(self._files, self._machine)
            self._stamps = stamps | {self._copy: _stamp(self._copy)}
        return self._copy


def make_etc_copy(files: Path, machine: Path) -> Path:
    """Return the copy of the machine's current /etc. Create it if missing.

    Raises:
        OSError: it cannot be written.
    """
    boot = _BOOT_ID.read_text()[:8]
    failure: OSError | None = None
    for _ in range(ATTEMPTS):
        digest = _digest(machine)
        copy = files / f"etc-{boot}-{digest}"
        if copy.is_dir():
            return copy
        files.mkdir(parents=True, exist_ok=True)
        draft = files / f".etc-{boot}-{secrets.token_hex(8)}"
        try:
            draft.mkdir(mode=0o755)
            _fill(draft, machine)
            if _digest(machine) == digest:
                _put(draft, copy)
                for pattern in ("etc-????????-*", ".etc-????????-*"):
                    for path in files.glob(pattern):
                        if f"etc-{boot}-" not in path.name:
                            shutil.rmtree(path, ignore_errors=True)
                return copy
        except OSError as error:
            first = OSError(error.args[0][0][2]) if isinstance(error, shutil.Error) else error
            if _digest(machine) == digest:
                raise first from None
            failure = first  # a file disappeared: it is being replaced
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    raise OSError(f"{machine} keeps changing") from failure


def _put(draft: Path, copy: Path) -> None:
    try:
        draft.rename(copy)
    except OSError:
        if not copy.is_dir():  # otherwise another worker was faster
            raise


def _fill(draft: Path, machine: Path) -> None:
    for name in COPIED:
        source = machine / name
        target = draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not _is_readable(source):
            continue
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=_list_unfit)
        else:
            shutil.copy2(source, target)
    for name in NETWORK_FILES:
        (draft / name).touch()
    for name, text in OWN_FILES.items():
        (draft / name).write_text(text)


def _list_unfit(folder: str, names: list[str]) -> list[str]:
    """Return the names not to copy: all except links and files and directories that every user may read."""
    paths = (Path(folder, name) for name in names)
    return [path.name for path in paths if not path.is_symlink() and not _is_readable(path)]


def _is_readable(path: Path) -> bool:
    """Return whether a file or directory exists that every user, including ours, may read."""
    if not (path.is_file() or path.is_dir()):
        return False
    needed = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & needed == needed and os.access(path, os.R_OK)


def _list_watched(machine: Path) -> Iterator[Path]:
    """Yield the paths whose status changes when a file or a link is replaced."""
    for name in COPIED:
        yield machine / name
        for folder, _, _ in os.walk(machine / name):
            yield Path(folder)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _digest(machine: Path) -> str:
    """Return a name for the current state of the files. Every change results in another name."""
    digest = hashlib.sha256(repr((OWN_FILES, NETWORK_FILES)).encode())
    for name in COPIED:
        top = (machine / name).resolve()
        inner = sorted(Path(folder, entry) for folder, _, files in os.walk(top) for entry in ("", *files))
        for path in inner or [top]:
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            digest.update(os.fsencode(f"{path} {found.st_mode} {found.st_size} {found.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]
