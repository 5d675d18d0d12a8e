"""The bubblewrap sandbox: separate namespaces for users, processes, files, IPC, host name and network.

Holds:
    - Programs can write only to the workspace, its home and its /tmp (separate directories, or bounded file systems in
      memory), and to /dev/shm in memory.
    - All processes end with the first one, which is the host. No other process can end, stop or trace it.
    - No program has a capability or can gain one. The environment contains only given variables.
    - System calls that change the machine are refused (see `seccomp`). The host also restricts writes with the
      kernel's own rules (see `host/hardening`).
Does not:
    - Limit memory and CPU.
    - Keep a program with network access from the machine's own ports.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from tool_worker.sandbox.sandbox import (
    DOCUMENT_PACKAGES,
    HOST_CODE,
    PACKAGE_ROOT,
    SYSTEM_PATH,
    Capabilities,
    Enclosure,
    HostDescriptors,
    find_document_packages,
    find_interpreter,
    list_interpreter_prefixes,
    make_agent_environment,
)
from tool_worker.sandbox.seccomp import make_system_call_filter
from tool_worker.sandbox.system_files import COPIED, HOME, HOST_NAME, NETWORK_FILES, OWN_FILES, USER_ID, EtcCopies

TEMPORARY = ("/tmp", HOME)  # noqa: S108  (these are mounts inside the sandbox)
WRAPPER_COMMAND = "bwrap"
"""The command name of the process outside the namespaces. It waits for the first process inside."""
TRIAL_LIMIT_SECONDS = 10.0

# These change the whole machine if root's user id writes to them, even without any capability. bubblewrap 0.8 covers
# them only for users who appear able to write to the directory.
DANGEROUS_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")

# These show the whole machine to every user; those in the second tuple, to root's user id without any capability.
SHARED_PROC = ("timer_list", "sched_debug")
SHARED_PROC_OF_ROOT = ("kpagecount", "kpageflags", "kpagecgroup", "slabinfo", "vmallocinfo", "pagetypeinfo")


class BubblewrapSandbox:
    """Runs programs under `bwrap`; a `Sandbox`.

    Args:
        files: Directory, created if missing, for the files that replace the machine's /etc.
    """

    name = "bwrap"
    code_root = "/run/deckhands"
    packages_at = f"{code_root}/packages"
    """Not where they are on the machine: a mount below /tmp or the home would keep these from lasting."""
    capabilities = Capabilities(confines_programs=True, uses_control_groups=True, packages_at=packages_at)
    reach = "their own workspace, and where a conversation was given the network, the machine's with its own ports"
    system_call_filter = make_system_call_filter()

    def __init__(self, files: Path) -> None:
        self._files = files
        self._etc_copies = EtcCopies(files)

    def reason_unavailable(self) -> str | None:
        """See `Sandbox.reason_unavailable`."""
        if not Path(_find_executable()).exists():
            return "bwrap is not installed"
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            options = self.options(Enclosure(self._files, "/workspace"))
            trial = self.command([find_interpreter(), "-I", "-S", "-c", "pass"], options)
            subprocess.run(trial, env={}, check=True, capture_output=True, timeout=TRIAL_LIMIT_SECONDS)  # noqa: S603
        except subprocess.CalledProcessError as error:
            return f"bwrap does not work here: {error.stderr.decode('utf-8', 'replace').strip()}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bwrap does not work here: {error}"
        return None

    def shell_environment(self, enclosure: Enclosure) -> Mapping[str, str]:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.shell_environment`."""
        # The host's comes last: it serves a system without Python, and must not hide the system's own.
        return make_agent_environment(HOME, f"{SYSTEM_PATH}:{Path(find_interpreter()).parent}")

    def keeps_home(self, enclosure: Enclosure) -> bool:
        """See `Sandbox.keeps_home`."""
        return not _has_mounts_below(HOME, enclosure)

    def keeps_temporary(self, enclosure: Enclosure) -> bool:
        """See `Sandbox.keeps_temporary`."""
        return not _has_mounts_below(TEMPORARY[0], enclosure)

    def writable(self, enclosure: Enclosure) -> Sequence[str]:
        """See `Sandbox.writable`."""
        # Not /proc: by writing there, a program could make the kernel kill the host instead of itself when memory is
        # short.
        return [enclosure.mount_at, *TEMPORARY, "/dev"]

    def forbidden_addresses(self) -> Sequence[str]:
        """See `Sandbox.forbidden_addresses`."""
        return ()

    def options(self, enclosure: Enclosure) -> Sequence[str]:
        """See `Sandbox.options`."""
        executable = _find_executable()
        return [
            *_namespaces(executable, enclosure),
            *_system(),
            *self._etc(enclosure),
            *_temporary(executable, enclosure),
            *_list_binds(enclosure),
            *("--remount-ro", "/", "--chdir", enclosure.mount_at),
        ]

    def command(
        self, program: Sequence[str], options: Sequence[str], descriptors: HostDescriptors | int | None = None
    ) -> Sequence[str]:
        """See `Sandbox.command`."""
        if not isinstance(descriptors, HostDescriptors):
            filtered = () if descriptors is None else _make_filter_option(descriptors)
            return [_find_executable(), *options, *filtered, "--", *program]
        reported = ("--info-fd", str(descriptors.pid), "--args", str(descriptors.options), "--as-pid-1")
        return [_find_executable(), *reported, *_make_filter_option(descriptors.system_calls), "--", *program]

    def remove_dead(self, root: Path, is_alive: Callable[[str], bool]) -> None:
        """See `Sandbox.remove_dead`. Processes of dead hosts end by `kill_stragglers`."""

    def kill_stragglers(self, host_id: str) -> None:
        """See `Sandbox.kill_stragglers`."""

    def _etc(self, enclosure: Enclosure) -> Iterator[str]:
        copy = self._etc_copies.current()
        # One mount, unless other mounts lie below: no mount point can be created in a read-only mount.
        is_shared = any(path.is_relative_to("/etc") for path in (Path(enclosure.mount_at), *enclosure.read_only))
        for name in OWN_FILES if is_shared else ("",):
            yield from ("--ro-bind", str(copy / name), str(Path("/etc", name)))
        for name in COPIED if is_shared else ():
            yield from ("--ro-bind-try", str(copy / name), str(Path("/etc", name)))
        for name in NETWORK_FILES if enclosure.has_network else ():
            yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")


def _make_filter_option(descriptor: int) -> tuple[str, ...]:
    return ("--seccomp", str(descriptor)) if BubblewrapSandbox.system_call_filter else ()


@functools.cache
def _find_executable() -> str:
    """Return the path of bwrap: the system's, or that of a package installed with our Python."""
    beside_python = Path(sys.executable).parent
    return shutil.which("bwrap", path=f"{SYSTEM_PATH}:{beside_python}") or "/usr/bin/bwrap"


def _namespaces(executable: str, enclosure: Enclosure) -> Iterator[str]:
    yield from ("--unshare-user", "--uid", str(USER_ID), "--gid", str(USER_ID), "--unshare-pid", "--unshare-ipc")
    yield from ("--unshare-uts", "--hostname", HOST_NAME, "--unshare-cgroup-try", "--new-session", "--cap-drop", "ALL")
    if not enclosure.has_network:
        yield "--unshare-net"
    if enclosure.ends_with_starter:
        yield "--die-with-parent"
    if "--disable-userns" in _find_options(executable):
        yield "--disable-userns"


def _system() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--proc", "/proc")
    for name in DANGEROUS_PROC:
        yield from ("--ro-bind-try", f"/proc/{name}", f"/proc/{name}")
    for name in (*SHARED_PROC, *(SHARED_PROC_OF_ROOT if os.getuid() == 0 else ())):
        if Path("/proc", name).exists():
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")
    yield from ("--dev", "/dev", "--dir", "/run", "--dir", "/var", "--symlink", "../tmp", "/var/tmp")  # noqa: S108


def _temporary(executable: str, enclosure: Enclosure) -> Iterator[str]:
    size = ["--size", str(enclosure.temporary_bytes)] if "--size" in _find_options(executable) else []
    kept = (enclosure.temporary, enclosure.home, None)
    for path, source in zip((*TEMPORARY, "/dev/shm"), kept, strict=True):  # noqa: S108  (a mount inside the sandbox)
        yield from (*size, "--tmpfs", path) if source is None else ("--bind", str(source), path)
    yield from ("--remount-ro", "/dev")


def _has_mounts_below(directory: str, enclosure: Enclosure) -> bool:
    """Return whether a path is mounted below a directory. Agents must then never have written to it.

    bwrap creates mount points before it leaves the old root. A link left by an agent in place of a directory on the way
    would redirect it to the outside.
    """
    targets = map(PurePosixPath, map(str, (enclosure.mount_at, *list_interpreter_prefixes(), *enclosure.read_only)))
    return any(target.is_relative_to(directory) for target in targets)


def _list_binds(enclosure: Enclosure) -> Iterator[str]:
    """Yield the mounts of directories, outer ones first, so that none covers one inside it."""
    package = PACKAGE_ROOT / "tool_worker"
    code = PurePosixPath(BubblewrapSandbox.code_root, "tool_worker")
    binds = [
        (PurePosixPath(enclosure.mount_at), "--bind", enclosure.workspace),
        *((code / name, "--ro-bind", package / name) for name in HOST_CODE),
    ]
    if packages := find_document_packages():
        at = PurePosixPath(BubblewrapSandbox.packages_at)
        binds += [(at / name, "--ro-bind", packages / name) for name in DOCUMENT_PACKAGES]
    for path in _list_readable(enclosure):
        binds += [(PurePosixPath(path), "--ro-bind", path)]
        # These are mounted too, so that programs cannot replace a mount point by a link for later sandboxes.
        binds += [(PurePosixPath(way), "--bind", way) for way in _list_own_parts(enclosure, path)[1:]]
    for target, option, source in sorted(dict.fromkeys(binds), key=_sort_key):
        yield from (option, str(source), str(target))


def _sort_key(bind: tuple[PurePosixPath, str, Path]) -> tuple[int, bool]:
    """Sort key of mounts: outer ones first, and for the same path the read-only one last."""
    return len(bind[0].parts), bind[1] != "--bind"


def _list_readable(enclosure: Enclosure) -> Iterator[Path]:
    """Yield the readable paths besides the system, without paths behind a link that an agent may have created."""
    for path in dict.fromkeys((*list_interpreter_prefixes(), *enclosure.read_only)):
        if path.is_relative_to("/usr"):
            continue
        if not any(way.is_symlink() for way in _list_own_parts(enclosure, path)):
            yield path


def _list_own_parts(enclosure: Enclosure, path: Path) -> Sequence[Path]:
    """Return a path and its parent directories, as far as they lie inside a workspace."""
    if enclosure.mount_at != str(enclosure.workspace):
        return ()
    parts = (path, *path.parents)
    return [part for part in parts if part.is_relative_to(enclosure.workspace) and part != enclosure.workspace]


@functools.cache
def _find_options(executable: str) -> frozenset[str]:
    """Return the options of the installed version: 0.6 has neither `--size` nor `--disable-userns`."""
    help_text = subprocess.run(  # noqa: S603
        [executable, "--help"], env={}, capture_output=True, check=True, timeout=TRIAL_LIMIT_SECONDS
    ).stdout
    return frozenset(word for word in help_text.decode().split() if word.startswith("--"))
