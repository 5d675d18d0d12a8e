"""Directories of a machine that can never be workspaces.

Holds:
    - A directory is judged by its real location: links are followed, a bind mount counts as its source, and mounts
      below a directory are parts of it.
    - No workspace contains private files of Deckhands (keys, stores, sockets, other workspaces) or lies within them.
      The same holds for other installations of Deckhands and other users' ones, recognised by their characteristic
      files.
    - Such a file marks its directory only if it belongs to the directory's owner, only the owner can read it, and the
      directory is not world-writable. So no other user can block a directory by placing such a file above it.
Does not: search for other installations more than `MAX_DEPTH` levels below a directory, or in more than `MAX_SCANNED`
directories; decide which user may use which directory; operators do, by the workspace roots of their tool workers.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from broker.runtime import BrokerSettings, UsageError, split_paths
from broker.secrets.secrets import KEY_FILE

SYSTEM_TREES = (
    *("/etc", "/usr", "/var", "/proc", "/sys", "/dev", "/run", "/boot"),
    *("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin"),
)
"""Each including everything below it, except `PLACES_FOR_WORK` and below."""
PLACES_FOR_WORK = ("/usr/src", "/var/tmp", "/var/www")  # noqa: S108  (nothing is put there)
SHARED = ("/home", "/media", "/mnt", "/opt", "/srv", "/tmp", *PLACES_FOR_WORK)  # noqa: S108
"""Directories shared by many users, so that no workspace may be the whole of one."""

MARKS = ((KEY_FILE,), ("server.key",), ("server.lock", "password"), (".node/identity",))
"""The characteristic files of a home, of a store and of a node's directory; all files of one entry must exist."""
SIZES = {KEY_FILE: 45, "server.key": 60}
"""The expected sizes, because other programs may have files of these names."""
MAX_DEPTH = 4
MAX_SCANNED = 5_000

MAX_LINKS = 40
"""The kernel's limit for links on a path."""

_MOUNTS = Path("/proc/self/mountinfo")
_UNFIT_IN_NAMES = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Control characters, surrogates, line and paragraph separators."""


@dataclass(frozen=True, slots=True)
class DirectoryLocation:
    """The real location of a directory.

    Attributes:
        name: its path here, without links.
        device, path: its file system and its path in it: the same for all mounts of it.
    """

    name: str
    device: str
    path: str

    def is_in(self, other: DirectoryLocation) -> bool:
        """Return whether this directory is the other one or below it, by any of their names."""
        return _is_in(self.name, other.name) or (self.device == other.device and _is_in(self.path, other.path))


class Mounts:
    """The mounts that this process sees."""

    def __init__(self, mountinfo: str) -> None:
        """Parse the kernel's table (proc(5)): id, parent, device, root, mount point and more."""
        self._mounts: list[DirectoryLocation] = []
        for line in mountinfo.splitlines():
            device, root, point = line.split(" ", 5)[2:5]
            self._mounts.append(DirectoryLocation(_unescape(point), device, _unescape(root)))

    @classmethod
    def current(cls) -> Mounts:
        """Return the current mounts."""
        return cls(os.fsdecode(_MOUNTS.read_bytes()))

    def locate(self, path: Path) -> DirectoryLocation:
        """Return the location of a path without links; the path need not exist."""
        name = str(path)
        mount = DirectoryLocation("/", "", "/")
        for found in self._mounts:  # of two mounts at one point, the later covers the earlier
            if len(found.name) >= len(mount.name) and _is_in(name, found.name):
                mount = found
        inside = name.removeprefix(mount.name).strip("/")
        return DirectoryLocation(name, mount.device, f"{mount.path.rstrip('/')}/{inside}".rstrip("/") or "/")

    def find_names(self, directory: Path) -> Iterator[Path]:
        """Yield all names, through all mounts, of a directory and its parents. Its path must not contain links."""
        yield from (directory, *directory.parents)
        place = self.locate(directory)
        for around in (PurePosixPath(place.path), *PurePosixPath(place.path).parents):
            for mount in self._mounts:
                if mount.device == place.device and around.is_relative_to(mount.path):
                    yield Path(mount.name, around.relative_to(mount.path))

    def find_parts(self, directory: Path) -> list[DirectoryLocation]:
        """Return the locations of a directory and of all mounts below it. Its path must not contain links."""
        name = str(directory)
        below = [mount for mount in self._mounts if mount.name != name and _is_in(mount.name, name)]
        return [self.locate(directory), *below]


def find_private_paths(settings: BrokerSettings) -> tuple[Path, ...]:
    """Return the private paths of Deckhands (directories, files and sockets), as far as the settings show."""
    files = [settings.node_dir, settings.secret_key_file, settings.master_keys_file]
    files += [settings.url_file, settings.celery_url_file]
    names = [settings.home, settings.home / KEY_FILE]
    names += [Path(name).expanduser() for name in files if name]
    names += [Path(name) for name in split_paths(settings.config_files)]
    for url in (settings.url, settings.celery_url, settings.checkpoints):
        parts = urlsplit(url)
        if parts.scheme in ("unix", "redis+socket", "file", "local"):
            names.append(Path(unquote(parts.path)))
    sockets = f"deckhands-{os.getuid()}"
    names += [Path(tempfile.gettempdir(), sockets), Path("/tmp", sockets)]  # noqa: S108  (see `embedded`)
    return tuple(dict.fromkeys(name.absolute() for name in names))


def find_name_fault(name: str) -> str:
    """Return why a directory may not have this name; empty if it may.

    Control characters would disguise a name in logs and on terminals.
    """
    if any(unicodedata.category(character) in _UNFIT_IN_NAMES for character in name):
        return "its name has control characters, or bytes that are not text"
    return "" if len(os.fsencode(name)) < os.pathconf("/", "PC_PATH_MAX") else "its path is too long"


def find_fault(directory: Path, private: Sequence[Path] = ()) -> str:
    """Return why a directory may not be a workspace; empty if it may.

    Args:
        directory: an absolute path without links.
        private: private paths of Deckhands; see `find_private_paths`.

    Raises:
        OSError: it cannot be read.
    """
    is_home = directory.parent == Path("/home") or directory == Path("/root")
    if is_home and directory.stat().st_uid != os.getuid():
        return "it is the home of another user"
    mounts = Mounts.current()
    ours = [(path, mounts.locate(name)) for path in private for name in resolve_links(path)]
    for location in mounts.find_parts(directory):
        for path, place in ours:
            if place.is_in(location):
                return f"it holds {path}, which is Deckhands' own{_describe_mount(location, directory)}"
            if location.is_in(place):
                return f"it is a part of {path}, which is Deckhands' own{_describe_mount(location, directory)}"
    return (
        _find_system_fault(mounts.find_parts(directory), directory, mounts)
        or ("it is shared with other users; name a directory in it" if str(directory) in SHARED else "")
        or _find_installation_fault(directory, mounts)
    )


def find_root_fault(directory: Path) -> str:
    """Return why no directory below a path may be a workspace; empty if one may.

    The path is absolute, without links.
    """
    mounts = Mounts.current()
    return _find_system_fault([mounts.locate(directory)], directory, mounts)  # mounts below it may still be allowed


def parse_workspace_roots(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the directories that an operator has configured, with links followed.

    Raises:
        UsageError: one is not a directory, or belongs to the system.
    """
    found = []
    for name in names:
        path = Path(name).expanduser()
        try:
            resolved = path.resolve(strict=True)
            reason = find_root_fault(resolved) if resolved.is_dir() else "it is not a directory"
        except OSError as error:
            reason = f"{error.strerror}"
        if not path.is_absolute():
            reason = "it is not an absolute path"
        if reason:
            raise UsageError(
                f"The workspace root {name} cannot be used: {reason}.",
                remedy="Use the absolute path of an existing directory for workspaces.",
            )
        found.append(resolved)
    return tuple(found)


def _find_system_fault(parts: list[DirectoryLocation], directory: Path, mounts: Mounts) -> str:
    places_for_work = [mounts.locate(Path(place)) for place in (*PLACES_FOR_WORK, *_find_home_in_var())]
    trees = [(tree, mounts.locate(Path(os.path.realpath(tree)))) for tree in SYSTEM_TREES]
    for location in parts:
        if any(location.is_in(place) for place in places_for_work):
            continue
        for tree, place in trees:
            if place.is_in(location):
                return f"it holds {tree}, which is the system's{_describe_mount(location, directory)}"
            if location.is_in(place):
                return f"it is a part of {tree}, which is the system's{_describe_mount(location, directory)}"
    return ""


def _find_installation_fault(directory: Path, mounts: Mounts) -> str:
    """Return why a directory conflicts with an installation of Deckhands; empty if it may be a workspace."""
    for place in mounts.find_names(directory):
        if mark := _find_mark(place):
            return f"it is a part of {place}, which is a directory of Deckhands: {mark} is there"
    ahead = [(directory, 0)]
    looked = 0
    while ahead and looked < MAX_SCANNED:
        here, depth = ahead.pop(0)
        looked += 1
        with suppress(OSError):  # programs of a workspace cannot read unreadable directories either
            if depth and (mark := _find_mark(here)):
                return f"it holds {here}, which is a directory of Deckhands: {mark} is there"
            if depth < MAX_DEPTH:
                with os.scandir(here) as entries:
                    ahead += [(here / each.name, depth + 1) for each in entries if each.is_dir(follow_symlinks=False)]
    return ""


def _find_mark(directory: Path) -> str:
    """Return the first file that marks a directory as one of Deckhands; empty if there is none."""
    return next((files[0] for files in MARKS if all(_is_secret(directory, name) for name in files)), "")


def _is_secret(directory: Path, name: str) -> bool:
    try:
        file = (directory / name).lstat()
        around = (directory / name).parent.stat()
    except OSError:
        return False
    is_closed = not (file.st_mode & 0o077 and around.st_mode & 0o077) and not around.st_mode & 0o002
    is_ours = stat.S_ISREG(file.st_mode) and file.st_size == SIZES.get(name, file.st_size)
    return is_ours and is_closed and file.st_uid == around.st_uid


def resolve_links(path: Path) -> list[Path]:
    """Return the links on a path and its target. A user who can change one of them can redirect the path."""
    found: list[Path] = []
    here = Path("/")
    ahead = list(path.parts[1:])
    while ahead and len(found) < MAX_LINKS:
        name = ahead.pop(0)
        here = here.parent if name == ".." else here / name
        with suppress(OSError):  # no link, or missing
            target = here.readlink()
            found.append(here)
            here = Path("/") if target.is_absolute() else here.parent
            ahead = [*target.parts[target.is_absolute() :], *ahead]
    return [*found, here]


def _find_home_in_var() -> list[str]:
    """Return this user's home if it is in /var, as for services and on some systems for all users."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return []
    return [home] if len(Path(home).parts) > 3 and home.startswith("/var/") else []


def _describe_mount(location: DirectoryLocation, directory: Path) -> str:
    return "" if location.name == str(directory) else f" (mounted at {location.name})"


def _is_in(name: str, outer: str) -> bool:
    return outer in (name, "/") or name.startswith(f"{outer.rstrip('/')}/")


def _unescape(text: str) -> str:
    """Decode the octal escapes, such as those of blanks, in a name from the kernel's table."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
