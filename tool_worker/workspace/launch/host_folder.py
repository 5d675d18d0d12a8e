"""The files of one conversation's workspace on this node, including its locks.

    <root>/<conversation>/workspace/       the workspace, unless it is a named directory
    <root>/<conversation>/home/, tmp/      the home and /tmp of its programs, if the sandbox gives it separate ones
    <root>/<conversation>/host/            not visible to programs in the sandbox:
        binding.json     directory, sandbox and network, fixed when the workspace is first opened
        opening.lock     held while the host is started or ended
        alive.lock       held by the host and its sandbox while one of them lives
        pid-<n>.json     the process whose death ends all others of the workspace, as numbered in pid namespace <n>
        gitconfig        of programs without a sandbox
        shell.json       the state of the shell that the first host of a fork restores
        deleted          when the conversation was found to be deleted from its store
        socket, journal, history (of edited files), host.log, egress.log; entrance/socket, while a container is started

A `Binding` has the properties of a workspace that are fixed for its whole life.

Holds: locks are kernel locks on open files, so they are released however their holder ends.
Does not: decide which directories may be workspaces, see `bindings`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.contract import WorkspaceSpec
from tool_worker.errors import WorkspaceConflict
from tool_worker.sandbox import AUTO
from tool_worker.workspace.launch.shell_state import ShellState

MOUNT_AT = "/workspace"


@dataclass(frozen=True, slots=True)
class Binding:
    """The properties of a workspace that are fixed for its whole life.

    Attributes:
        path: Its directory on this node.
        mount_at: The directory's path as its programs see it.
        host_id: Random; marks the processes of its hosts.
        image: Image of its container, if it has one; empty for the node's first one.
        allow: Network hosts that its programs may reach, by a proxy.
        tenant: Tenant of the conversation, for a named directory; None for our own directories and for bindings of
            earlier versions.
    """

    path: str
    mount_at: str
    sandbox: str
    has_network: bool
    host_id: str
    allow: tuple[str, ...] = ()
    image: str = ""
    tenant: str | None = None

    def is_named(self, own: Path) -> bool:
        """Return whether the conversation named the directory; otherwise we created it."""
        return self.path != str(own)

    def check_spec(self, spec: WorkspaceSpec) -> None:
        """Check that a specification fits this binding; no path, no image and the sandbox `auto` fit every binding.

        Raises:
            WorkspaceConflict: The workspace was first opened with another specification.
        """
        is_other = (
            (spec.path is not None and str(to_absolute(spec.path)) != self.path)
            or spec.sandbox not in (AUTO, self.sandbox)
            or spec.network != self.has_network
            or spec.allow != tuple(self.allow)
        )
        if is_other:
            raise WorkspaceConflict(
                f"The workspace is {self.path} in the sandbox {self.sandbox}, "
                f"{'with' if self.has_network else 'without'} network"
                f"{' but ' + ', '.join(self.allow) if self.allow else ''}.",
                remedy="Ask for the same, or start another conversation.",
            )


def to_absolute(path: str) -> Path:
    """Return an absolute path without `.` and `..`; links in it are kept."""
    return Path(os.path.normpath(Path(path).absolute()))


LOG_TAIL_BYTES = 2000
BACKLOG = 64
HOME, TEMPORARY = "home", "tmp"


class HostFolder:
    """The files of one conversation under the node's root directory."""

    def __init__(self, root: Path, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.workspace = root / conversation_id / "workspace"
        self._folder = root / conversation_id / "host"
        self.home = root / conversation_id / HOME
        self.temporary = root / conversation_id / TEMPORARY
        self.journal = self._folder / "journal"
        self.history = self._folder / "history"
        self.log = self._folder / "host.log"
        self.entrance = self._folder / "entrance" / "socket"
        self.git_configuration = self._folder / "gitconfig"
        self.egress_log = self._folder / "egress.log"
        # Tool workers of one node may run in several containers, where one number means different processes.
        self.pid = self._folder / f"pid-{Path('/proc/self/ns/pid').stat().st_ino}.json"
        self._alive = self._folder / "alive.lock"
        self._opening = self._folder / "opening.lock"
        self._binding = self._folder / "binding.json"
        self._deleted = self._folder / "deleted"
        self._shell = self._folder / "shell.json"

    @property
    def exists(self) -> bool:
        """Whether the workspace was ever opened on this node."""
        return self._binding.exists()

    @property
    def directory(self) -> Path:
        """The workspace: a named directory, or our own one, which may not exist yet."""
        binding = self.read_binding()
        return Path(binding.path) if binding is not None else self.workspace

    def create(self) -> None:
        """Create the folder, closed to other users. Idempotent."""
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def read_deleted_at(self) -> float | None:
        """Return when the conversation was found to be deleted from its store, as a timestamp; None if it was not."""
        try:
            return float(self._deleted.read_text())
        except (OSError, ValueError):
            return None

    def mark_deleted(self, timestamp: float) -> None:
        """Record that the conversation was deleted, if it has files here. Idempotent."""
        if self._folder.is_dir() and self.read_deleted_at() is None:
            self._deleted.write_text(str(timestamp))

    def create_home(self, files: Mapping[str, str] | None = None) -> None:
        """Create the home and the temporary directory of a sandbox if they do not exist.

        Args:
            files: Initial files of the home, by path.
        """
        if not self.home.exists():
            draft = self.home.with_name(".home.new")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            for path, text in (files or {}).items():
                (draft / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                (draft / path).write_text(text)
            draft.rename(self.home)
        if not self.temporary.exists():
            self.temporary.mkdir(mode=0o700)
            self.temporary.chmod(0o1777)  # as programs expect of /tmp; the folder around it is closed to others

    def read_binding(self) -> Binding | None:
        """Return the binding of the workspace; None before it was first opened, or if a power cut destroyed it."""
        try:
            fields = json.loads(self._binding.read_text())
            return Binding(**{**fields, "allow": tuple(fields.get("allow", ()))})
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError):
            return None

    def write_binding(self, binding: Binding) -> None:
        """Write the binding of the workspace, atomically."""
        draft = self._binding.with_suffix(".new")
        draft.write_text(json.dumps(asdict(binding)))
        draft.replace(self._binding)

    def read_shell(self) -> ShellState | None:
        """Return the state that the shell of the first host starts with; None for a new shell's."""
        try:
            return ShellState.parse(json.loads(self._shell.read_text()))
        except (OSError, ValueError):
            return None

    def write_shell(self, shell: ShellState | None) -> None:
        """Set the state that the shell of the first host starts with, atomically."""
        if shell is None:
            self._shell.unlink(missing_ok=True)
            return
        self.create()
        draft = self._shell.with_suffix(".new")
        draft.write_text(json.dumps(shell.to_fields()))
        draft.replace(self._shell)

    def drop_used_shell(self) -> None:
        """Remove that state once an action has started: only the first host uses it, and it may contain secrets."""
        if self._shell.exists():
            with suppress(FileNotFoundError), self.journal.open("rb") as journal:
                if b"\nstart " in journal.read(LOG_TAIL_BYTES):
                    self._shell.unlink()

    def read_main_pid(self) -> int | None:
        """Return the process id that the last host announced; only the lock shows whether it is alive.

        None if no host announced one in our pid namespace; a host elsewhere can be neither seen nor signalled.
        """
        try:
            announced = json.loads(self.pid.read_text())
        except (OSError, ValueError):
            return None
        pid = announced.get("child-pid")
        return pid if isinstance(pid, int) and pid > 1 else None

    def clear_pids(self) -> None:
        """Remove the process ids of earlier hosts: the kernel reuses the numbers of pid namespaces."""
        for announced in self._folder.glob("pid-*.json"):
            announced.unlink(missing_ok=True)

    def read_log_tail(self) -> str:
        """Return the end of the last host's standard error."""
        try:
            return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def take_alive_lock(self) -> int | None:
        """Take the lock of a live host and return its descriptor; None if a host holds it."""
        return try_lock(self._alive)

    @property
    def is_alive(self) -> bool:
        """Whether a host holds its lock."""
        if not self._alive.exists():
            return False
        # A shared lock, so that concurrent checks do not take each other for a host.
        probe = try_lock(self._alive, fcntl.LOCK_SH)
        if probe is not None:
            os.close(probe)
        return probe is None

    def read_last_used(self) -> int:
        """Return when an action last started or ended, as a file time in nanoseconds; 0 if never."""
        try:
            return self.journal.stat().st_mtime_ns
        except OSError:
            return 0

    @asynccontextmanager
    async def hold_opening_lock(self) -> AsyncIterator[None]:
        """Hold the machine-wide lock for starting and ending this host."""
        descriptor = try_lock(self._opening)
        if descriptor is None:
            descriptor = await _lock(self._opening)
        try:
            yield
        finally:
            os.close(descriptor)

    def listen(self) -> socket.socket:
        """Return a listening socket at the host's address; replaces an earlier one."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._open_address() as address:
                Path(address).unlink(missing_ok=True)
                listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def connect(self) -> socket.socket:
        """Return a connection to the host.

        Raises:
            OSError: No host listens.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with self._open_address() as address:
                connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _open_address(self) -> Iterator[str]:
        """Yield a short path of the socket: the kernel accepts 108 bytes, and folders may be nested deeper."""
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{folder}/socket"
        finally:
            os.close(folder)


def try_lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Return the descriptor of a file that is now locked, created if needed; None if another one holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


async def _lock(path: Path) -> int:
    """Wait until no other worker starts or ends the host, which takes a limited time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    locked = asyncio.get_running_loop().run_in_executor(None, fcntl.flock, descriptor, fcntl.LOCK_EX)
    try:
        await asyncio.shield(locked)
    except BaseException:
        # The thread cannot be cancelled, so its lock is released once it is taken.
        locked.add_done_callback(lambda _: os.close(descriptor))
        raise
    return descriptor
