"""Runs one program confined until it ends; a tool worker uses it for git on untrusted files.

Holds: the program sees only the given directories of the machine. It ends, with all its child processes, at its time
limit, when the task that waits for it is cancelled, and with the tool worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from tool_worker.errors import WorkspaceTooLarge, WorkspaceUnavailable
from tool_worker.sandbox import Enclosure, Sandbox, open_in_memory

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
