"""What programs of a sandbox see as /etc: a few of the machine's files, copied, and four of our own.

    <files>/etc-<digest>/    as the machine's were when the first worker started after their last change

A mount for each of them would take two milliseconds of every start.

Holds: keys, passwords and the machine's own names stay outside; a copy appears whole or not at all, and is never
changed: sandboxes that run already show it.
Does not: follow changes of the machine's files until a worker is started again, or remove the copies before.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path

USER_ID = 1000
HOME = "/home/agent"
HOST_NAME = "workspace"

COPIED = (
    *("alternatives", "crypto-policies", "fonts", "ld.so.cache", "localtime", "mime.types", "os-release"),
    *("pki/ca-trust", "pki/tls/certs", "services", "ssl/certs", "ssl/openssl.cnf"),
)
OF_NETWORK = ("resolv.conf", "gai.conf", "host.conf")
"""Lent where there is a network: they change while the machine runs. The copy has empty ones to mount them on."""

OWN = {
    "passwd": f"root:x:0:0:root:/root:/bin/false\nagent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": f"127.0.0.1 localhost {HOST_NAME}\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def own_etc(files: Path, machine: Path = Path("/etc")) -> Path:
    """Return the copy of what the machine's /etc is now, made if need be.

    Args:
        files: Directory of the copies, made if need be; of a node, whose workers share it.

    Raises:
        OSError: it cannot be written.
    """
    copy = files / f"etc-{_digest(machine)}"
    if copy.is_dir():
        return copy
    files.mkdir(parents=True, exist_ok=True)
    draft = files / f".etc-{secrets.token_hex(8)}"
    try:
        draft.mkdir(mode=0o755)
        _fill(draft, machine)
        try:
            draft.rename(copy)
        except OSError:
            if not copy.is_dir():  # otherwise another worker was first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return copy


def _fill(draft: Path, machine: Path) -> None:
    for name in COPIED:
        source, target = machine / name, draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=_unfit)
        elif os.access(source, os.R_OK):
            shutil.copy2(source, target)
    for name in OF_NETWORK:
        (draft / name).touch()
    for name, text in OWN.items():
        (draft / name).write_text(text)


def _unfit(folder: str, names: list[str]) -> list[str]:
    """Name what cannot be copied: links can, and those files and directories that we may read."""
    return [name for name in names if not _is_fit(Path(folder, name))]


def _is_fit(path: Path) -> bool:
    return path.is_symlink() or ((path.is_file() or path.is_dir()) and os.access(path, os.R_OK))


def _digest(machine: Path) -> str:
    """Return a name for what the files are now: another when one of them is."""
    digest = hashlib.sha256(repr((OWN, OF_NETWORK)).encode())
    for top in [(machine / name).resolve() for name in COPIED]:
        for path in [top, *sorted(top.rglob("*"))] if top.exists() else ():
            found = path.lstat()
            digest.update(os.fsencode(f"{path} {found.st_mode} {found.st_size} {found.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]
