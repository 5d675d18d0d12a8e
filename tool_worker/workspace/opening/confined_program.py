"""Runs one program confined until it ends; a tool worker uses it for git on untrusted files.

A program that may reach some hosts, such as a clone or an MCP server's program, gets an egress proxy.

Holds: the program sees only the given directories of the machine. It ends, with all its child processes, at its time
limit, with the tool worker, or when the waiting task is cancelled. The proxy runs before the program starts, and ends
with its connection or with the tool worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tool_worker.errors import WorkspaceTooLarge, WorkspaceUnavailable
from tool_worker.sandbox import Enclosure, Sandbox, bind_for_all, find_interpreter, open_in_memory
from tool_worker.workspace.launch.egress_gate import EGRESS_PORT, EgressGate, start_proxy

CHECK_SECONDS = 0.5
MAX_COMPLAINT_BYTES = 4_000


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program: exit code, standard output, and the end of its standard error."""

    code: int
    output: bytes
    complaint: str


async def run_confined(
    sandbox: Sandbox,
    enclosure: Enclosure,
    program: Sequence[str],
    *,
    environment: Mapping[str, str],
    limit_seconds: float,
    output_limit_bytes: int = 2**20,
    look: Callable[[], object] | None = None,
) -> ProgramResult:
    """Run a program and wait for its end.

    Args:
        environment: Added to the sandbox's environment.
        look: Called twice a second in a thread meanwhile; an exception from it ends the program.

    Raises:
        WorkspaceUnavailable: The program took too long, or cannot be started.
        WorkspaceTooLarge: The program wrote more than the limit to its standard output.
    """
    with ExitStack() as closing:
        filter_fd = open_in_memory(closing, sandbox.system_call_filter) if sandbox.system_call_filter else None
        variables = {**sandbox.shell_environment(enclosure), **environment}
        enclosure = replace(enclosure, environment_names=tuple(variables))
        try:
            running = await asyncio.create_subprocess_exec(
                *sandbox.command(program, sandbox.options(enclosure), filter_fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=variables,
                cwd=enclosure.workspace,
                pass_fds=() if filter_fd is None else (filter_fd,),
                start_new_session=True,
            )
        except OSError as error:
            raise WorkspaceUnavailable(f"{program[0]} cannot be started: {error.strerror}.") from error
    assert running.stdout is not None
    assert running.stderr is not None
    try:
        async with asyncio.timeout(limit_seconds), asyncio.TaskGroup() as group:
            output = group.create_task(_read(running.stdout, output_limit_bytes))
            complaint = group.create_task(_read_end(running.stderr))
            looking = group.create_task(_call_periodically(look))
            code = await running.wait()
            looking.cancel()
    except TimeoutError as error:
        raise WorkspaceUnavailable(f"{program[0]} did not end within {limit_seconds:g} seconds.") from error
    except BaseExceptionGroup as group_of_errors:
        raise group_of_errors.exceptions[0] from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        # Read to the end: with an unread pipe, asyncio does not notice the end of the process.
        await running.communicate()
    return ProgramResult(code, output.result(), complaint.result())


async def _read(stream: asyncio.StreamReader, limit_bytes: int) -> bytes:
    chunks, size = [], 0
    while chunk := await stream.read(2**16):
        size += len(chunk)
        if size > limit_bytes:
            raise WorkspaceTooLarge(f"There is more than {limit_bytes:,} bytes of it.")
        chunks.append(chunk)
    return b"".join(chunks)


async def _read_end(stream: asyncio.StreamReader) -> str:
    end = b""
    while chunk := await stream.read(2**16):
        end = (end + chunk)[-MAX_COMPLAINT_BYTES:]
    return end.decode("utf-8", "replace").strip()


async def _call_periodically(look: Callable[[], object] | None) -> None:
    while look is not None:
        await asyncio.sleep(CHECK_SECONDS)
        await asyncio.to_thread(look)


START_LIMIT_SECONDS = 30.0
REFUSALS_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ProgramEgress:
    """The settings with which a program reaches the network.

    Attributes:
        proxy: Address of the proxy.
        read_only: Paths that its sandbox must show.
        wrap: Turns its command line into one that connects to the proxy first.
        log: File with the proxy's refusals.
    """

    proxy: str
    read_only: tuple[Path, ...]
    wrap: Callable[[Sequence[str]], list[str]]
    log: Path

    def read_last_refusal(self) -> str:
        """Return the reason of the proxy's last refusal, or "" if there was none."""
        with suppress(OSError), self.log.open("rb") as file:
            for line in reversed(file.read(REFUSALS_LIMIT_BYTES).splitlines()):
                with suppress(ValueError, TypeError, LookupError):
                    return str(json.loads(line)["why"])
        return ""


def make_proxied_command(sandbox: Sandbox, address: Path, program: Sequence[str]) -> list[str]:
    """Return a command line that sets up the connection to the proxy by a socket, and then executes the program."""
    leader = f"{sandbox.code_root}/tool_worker/host/egress_launcher.py"
    return [find_interpreter(), "-I", "-S", leader, str(EGRESS_PORT), str(address), *program]


@asynccontextmanager
async def run_proxy(
    address: Path, gate: EgressGate, allow: Sequence[str], *, log: Path, name: str
) -> AsyncIterator[None]:
    """Run a proxy for one program that connects to this address, for the duration of the block.

    The socket file exists when the block starts.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    ours, theirs = socket.socketpair()
    with listening, ours, theirs:
        address.parent.mkdir(mode=0o700, exist_ok=True)
        bind_for_all(listening, address)  # the program may run as any user; the folder is closed to all others
        listening.listen(1)
        listening.setblocking(False)
        started: list[int] = []

        async def start() -> None:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                program, _ = await asyncio.get_running_loop().sock_accept(listening)
            with program:
                lent = await asyncio.to_thread(_receive_socket, program)
                try:
                    settings = gate.make_settings(allow)
                    started.append(start_proxy(theirs.fileno(), lent, settings, log=log, name=name))
                finally:
                    os.close(lent)
                program.send(b".")

        starting = asyncio.create_task(start(), name=f"way out of {name}")
        try:
            yield
        finally:
            starting.cancel()
            with suppress(asyncio.CancelledError, OSError, TimeoutError):
                await starting
            for pid in started:
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, pid, 0)
            await asyncio.to_thread(address.unlink, missing_ok=True)


@asynccontextmanager
async def open_program_egress(
    sandbox: Sandbox, folder: Path, gate: EgressGate, allow: Sequence[str], *, name: str
) -> AsyncIterator[ProgramEgress]:
    """Give one program network access for the duration of the block.

    A program without a sandbox has to use the proxy voluntarily; nothing prevents other connections.

    Args:
        folder: Created here, for files shared by the program and its proxy.
    """
    await asyncio.to_thread(folder.mkdir, mode=0o700, exist_ok=True)
    log = folder / "log"
    if sandbox.capabilities.confines_programs:
        address = folder / "out" / "socket"
        async with run_proxy(address, gate, allow, log=log, name=name):
            proxied = partial(make_proxied_command, sandbox, address)
            yield ProgramEgress(f"http://127.0.0.1:{EGRESS_PORT}", (address,), proxied, log)
        return
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = start_proxy(theirs.fileno(), listener.fileno(), gate.make_settings(allow), log=log, name=name)
        try:
            yield ProgramEgress(f"http://127.0.0.1:{listener.getsockname()[1]}", (), list, log)
        finally:
            os.kill(proxy, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, proxy, 0)


def _receive_socket(program: socket.socket) -> int:
    program.settimeout(START_LIMIT_SECONDS)
    _, descriptors, _, _ = socket.recv_fds(program, 1, 1)
    if not descriptors:
        raise ConnectionAbortedError("the program sent no socket")
    return descriptors[0]
