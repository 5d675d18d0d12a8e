"""Starts workspace hosts so that they outlive the tool worker, and ends them reliably.

Holds:
    - A host leads its own session and has no tie to its starter: no signal at the parent's death, no terminal, no open
      descriptor.
    - It listens before it runs, so that its starter can connect immediately.
    - When `end_host` returns, no process of the workspace is left.
    - A host that cannot inherit descriptors fetches them through a socket, once. Only a process that sees the socket's
      mount can connect, because its folder is closed to others.
Does not: keep a service manager from killing the whole control group of a tool worker; its unit must not request that.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from tool_worker.errors import HostLost, WorkspaceUnavailable, wait_to_completion
from tool_worker.host.configuration import (
    ALIVE_FD,
    FILTER_FD,
    HISTORY_FD,
    JOURNAL_FD,
    LISTENER_FD,
    OPTIONS_FD,
    PID_FD,
    HostConfiguration,
)
from tool_worker.host.descendants import find_children
from tool_worker.sandbox import (
    WRAPPER_COMMAND,
    ControlGroups,
    Enclosure,
    GroupLimits,
    HostDescriptors,
    ResourceLimits,
    Sandbox,
    bind_for_all,
    find_interpreter,
    make_system_call_filter,
    open_in_memory,
    open_private,
    spawn,
)
from tool_worker.workspace.launch.host_connection import HostConnection
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.shell_state import ShellState

END_GRACE_SECONDS = 3.0
DEATH_LIMIT_SECONDS = 10.0
LIMIT_AFTER_SECONDS = 0.008
LOCK_POLL_SECONDS = 0.02
NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
"""The kernel's errors for a pid without a process: the process ended, or a thread has the number now."""
HANDOVER_LIMIT_SECONDS = 60.0
ENTRANCE_MODE = 0o755
"""Of the directory around an entrance: the host may run as any user, and the folder around it is closed to others."""
ACCEPT_POLL_SECONDS = 0.2


def start_host(
    folder: HostFolder, sandbox: Sandbox, enclosure: Enclosure, configuration: HostConfiguration, alive_fd: int
) -> int:
    """Start a host and return the id of the started process: the sandbox's outer process, or the host.

    Blocks until the program runs, and for a second or so if the sandbox does not inherit descriptors.

    Args:
        alive_fd: The held lock of a live host, which the host inherits; the caller closes its own descriptor.

    Raises:
        OSError: The host cannot be started.
    """
    main_module = f"{sandbox.code_root}/tool_worker/host/__main__.py"
    program = [find_interpreter(), "-I", "-S", main_module, folder.conversation_id]
    options = sandbox.options(enclosure)
    command = list(sandbox.command(program, options, HostDescriptors(PID_FD, OPTIONS_FD, FILTER_FD)))
    # A host that fetches its descriptors also installs our filter itself: the filter of a container engine is unknown.
    calls_refused = (
        sandbox.system_call_filter if sandbox.capabilities.inherits_descriptors else make_system_call_filter()
    )
    folder.clear_pids()
    with ExitStack() as closing:
        listener = closing.enter_context(folder.listen())
        sources = {
            0: open_in_memory(closing, configuration.encode()),
            ALIVE_FD: alive_fd,
            2: open_private(closing, folder.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            LISTENER_FD: listener.fileno(),
            JOURNAL_FD: open_private(closing, folder.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND),
            HISTORY_FD: open_private(closing, folder.history, os.O_RDWR | os.O_CREAT | os.O_APPEND),
            PID_FD: open_private(closing, folder.pid, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            FILTER_FD: open_in_memory(closing, calls_refused),
            OPTIONS_FD: open_in_memory(closing, b"".join(option.encode() + b"\0" for option in options)),
        }
        if not sandbox.capabilities.inherits_descriptors:
            assert enclosure.entrance is not None
            limit_seconds = sandbox.capabilities.start_limit_seconds
            return start_and_hand_over(command, enclosure.entrance, sources, sources[2], limit_seconds)
        return spawn(command, sources)


def limit_host(folder: HostFolder, groups: ControlGroups, host_id: str, limits: ResourceLimits) -> None:
    """Put a host into its control group, before its first request, to limit all its later processes.

    Idempotent. Blocks for about ten milliseconds the first time.
    """
    main = folder.read_main_pid()
    if main is not None:
        groups.enclose(host_id, [main, *find_children(main)], GroupLimits(limits.memory_bytes, limits.processes))


@asynccontextmanager
async def limit_while_starting(bound: Callable[[], None]) -> AsyncIterator[None]:
    """Limit a host in the background while it starts, so that little work is left once it has answered.

    This waits a little, because a start inside a group costs up to a third more CPU. Processes started meanwhile may be
    missed, and errors are ignored, so the host must be limited again once it has answered.
    """

    async def begin() -> None:
        await asyncio.sleep(LIMIT_AFTER_SECONDS)
        with suppress(OSError):
            await asyncio.to_thread(bound)

    beginning = asyncio.create_task(begin())
    try:
        yield
    finally:
        await wait_to_completion(beginning)


async def interrupt_host(folder: HostFolder, action_id: int | None) -> bool:
    """Stop an action in the live host, if any; see `HostConnection.interrupt`.

    Raises:
        OSError, HostLost: The host does not answer.
    """
    if not folder.is_alive:
        return False
    try:
        connection = await HostConnection.attach(folder.conversation_id, folder.connect())
        try:
            return await connection.interrupt(action_id)
        finally:
            await connection.detach()
    except (OSError, HostLost):
        if await wait_until_dead(folder, DEATH_LIMIT_SECONDS):
            return False  # the host was ending, with all its programs
        raise


async def capture_shell(folder: HostFolder) -> ShellState | None:
    """Return the state of a live host's idle shell; None if there is no host, or if it does not answer."""
    if not folder.is_alive:
        return None
    try:
        connection = await HostConnection.attach(folder.conversation_id, folder.connect())
    except (OSError, WorkspaceUnavailable):
        return None
    try:
        return await connection.capture_shell()
    except HostLost:
        return None
    finally:
        await connection.detach()


async def end_host(folder: HostFolder, sandbox: Sandbox, host_id: str) -> None:
    """End all processes of the workspace: request the host to close, then kill. Idempotent.

    The caller holds `folder.opening()`.

    Raises:
        WorkspaceUnavailable: A process could not be killed: the kernel keeps it, or it is in another container.
    """
    pid = folder.read_main_pid()
    with _open_pidfd(pid) as main, _open_pidfd(_find_outer_process(pid)) as outer:
        # The process id is the host's only while the lock is held; later it may be reused.
        if folder.is_alive:
            with suppress(OSError), folder.connect() as connection:
                connection.send(b'{"op":"close","request":0}\n')
            if main is None:
                await _wait_for_release(folder, END_GRACE_SECONDS)
            elif not await _wait_for_death(main, END_GRACE_SECONDS):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(main, signal.SIGKILL)
            for descriptor in (main, outer):
                if descriptor is not None and not await _wait_for_death(descriptor, DEATH_LIMIT_SECONDS):
                    raise WorkspaceUnavailable(f"The host of {folder.conversation_id} cannot be killed.")
            if main is None and folder.is_alive:
                await asyncio.to_thread(sandbox.kill_stragglers, host_id)
                await _wait_for_release(folder, DEATH_LIMIT_SECONDS)
            if main is None and folder.is_alive:
                raise WorkspaceUnavailable(f"The host of {folder.conversation_id} cannot be killed from here.")
    await asyncio.to_thread(sandbox.kill_stragglers, host_id)


async def wait_until_dead(folder: HostFolder, limit_seconds: float) -> bool:
    """Wait for a host that is ending by itself, including its sandbox; return whether it has ended."""
    pid = folder.read_main_pid()
    with _open_pidfd(pid) as main, _open_pidfd(_find_outer_process(pid)) as outer:
        if main is None:
            await _wait_for_release(folder, limit_seconds)
        elif folder.is_alive:
            deaths = [await _wait_for_death(found, limit_seconds) for found in (main, outer) if found is not None]
            if all(deaths):  # the outer process is not found if the main one was already dead; it holds the lock, too
                await _wait_for_release(folder, limit_seconds)
    return not folder.is_alive


def reap(pid: int) -> bool:
    """Collect the exit status of a child process; return whether it is collected or the process is not our child."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _find_outer_process(pid: int | None) -> int | None:
    """Return the process outside the namespaces that waits for `pid`, if there is one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        parent = int(fields[1])
        is_sandbox = Path(f"/proc/{parent}/comm").read_text().strip() == WRAPPER_COMMAND
    except OSError:
        return None
    return parent if is_sandbox else None


@contextmanager
def _open_pidfd(pid: int | None) -> Iterator[int | None]:
    """Yield a pidfd, which stays tied to the process even if its id is reused; None if there is no process."""
    try:
        descriptor = None if pid is None else os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in NO_PROCESS:
            raise
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


async def _wait_for_release(folder: HostFolder, limit_seconds: float) -> None:
    """Wait for the end of a host whose processes are not visible here, such as one in another container."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_seconds):
            while folder.is_alive:  # noqa: ASYNC110  (a kernel lock has no notification)
                await asyncio.sleep(LOCK_POLL_SECONDS)


async def _wait_for_death(pidfd: int, limit_seconds: float) -> bool:
    """Wait until all threads of a process have ended; for a namespace's first process, all others in it end, too."""
    loop = asyncio.get_running_loop()
    died = asyncio.Event()
    loop.add_reader(pidfd, died.set)
    try:
        async with asyncio.timeout(limit_seconds):
            await died.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


def start_and_hand_over(
    command: Sequence[str],
    entrance: Path,
    sources: Mapping[int, int],
    log: int,
    limit_seconds: float = HANDOVER_LIMIT_SECONDS,
) -> int:
    """Run a command that starts a host elsewhere, pass the host its descriptors, and return the command's pid.

    Blocks for a second or so.

    Args:
        sources: Our descriptors, by their number in the host.
        log: Receives the command's output.
        limit_seconds: How long the host may take to connect.

    Raises:
        OSError: The host did not connect. The command has ended.
    """
    if not entrance.parent.is_dir():
        entrance.parent.unlink(missing_ok=True)  # a socket was there before it had a directory
    entrance.parent.mkdir(exist_ok=True)
    entrance.parent.chmod(ENTRANCE_MODE)  # whatever our mask is
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        bind_for_all(listener, entrance)
        listener.listen(1)
        listener.settimeout(ACCEPT_POLL_SECONDS)
        try:
            pid = os.posix_spawn(
                command[0],
                list(command),
                {},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
            )
            with _open_pidfd(pid) as starter:
                assert starter is not None
                try:
                    _hand_over(listener, sources, pid, limit_seconds)
                except BaseException:
                    _end_starter(starter)  # before the entrance is gone, by which it knows that the host has started
                    raise
        finally:
            entrance.unlink(missing_ok=True)
    return pid


def _end_starter(starter: int) -> None:
    """End and reap a command by its pidfd, so that it starts no host later. It may first remove what it has started."""
    ended = select.poll()
    ended.register(starter, select.POLLIN)
    with suppress(ProcessLookupError, ChildProcessError):  # it has ended, and was reaped
        signal.pidfd_send_signal(starter, signal.SIGTERM)
        if not ended.poll(END_GRACE_SECONDS * 1000):
            signal.pidfd_send_signal(starter, signal.SIGKILL)
        os.waitid(os.P_PIDFD, starter, os.WEXITED)


def _hand_over(listener: socket.socket, sources: Mapping[int, int], pid: int, limit_seconds: float) -> None:
    """Serve the first client; give up if the command fails."""
    taker = None
    has_ended = False
    for _ in range(int(limit_seconds / ACCEPT_POLL_SECONDS)):
        with suppress(TimeoutError):
            taker, _ = listener.accept()
            break
        if not has_ended:
            ended, status = os.waitpid(pid, os.WNOHANG)
            has_ended = bool(ended)
            if has_ended and status:
                raise ConnectionAbortedError("the container was not started")
    if taker is None:
        raise TimeoutError("the process of the sandbox did not fetch the descriptors of the host")
    with taker:
        taker.settimeout(HANDOVER_LIMIT_SECONDS)
        socket.send_fds(taker, [bytes(sources)], list(sources.values()))
        if not taker.recv(1):
            raise ConnectionAbortedError("the host did not take its descriptors")
