"""Helpers for tests of workspace hosts: a terminal with few words, gates made of FIFOs, and a look at /proc."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.programs import command_of
from tool_worker.sandbox.docker import ContainerSettings
from tool_worker.settings import load_tool_settings
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.open_workspace import OpenWorkspace
from tool_worker.workspace.workspaces import Workspaces

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Output:
    """One answer of the tool `bash`."""

    content: str
    exit_code: int
    prefix: str
    suffix: str
    state: str
    fields: dict[str, Any]


class Terminal:
    """Runs commands in a workspace under action ids 1, 2, 3, …"""

    def __init__(self, workspace: OpenWorkspace) -> None:
        self.workspace = workspace
        self.ids = itertools.count(1)

    async def __call__(self, command: str, **arguments: Any) -> Output:
        result = await self.workspace.run(next(self.ids), "bash", {"command": command, **arguments})
        return output(dict(result.value))

    async def settled(self) -> None:
        """Wait until no command runs in the shell."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while (await self.workspace.connection.ping()).is_shell_busy:
                await asyncio.sleep(0)

    async def type(self, text: str, **arguments: Any) -> Output:
        return await self(text, is_input=True, **arguments)


def output(value: dict[str, Any]) -> Output:
    metadata = value["metadata"]
    return Output(
        value["content"],
        metadata["exit_code"],
        metadata["prefix"],
        metadata["suffix"],
        value["state"],
        {**value, **metadata},
    )


@asynccontextmanager
async def opened(root: Path, *, sandbox: str = "none", **settings: Any) -> AsyncIterator[Workspaces]:
    """Yield the workspaces of a node and end all their processes afterwards."""
    workspaces = Workspaces(root, sandbox=sandbox, **settings)
    try:
        yield workspaces
    finally:
        await workspaces.aclose()
        for state in workspaces.list():
            await workspaces.close(state.conversation_id)


class Gate:
    """A FIFO in the workspace: a command can report through it, or be held by it."""

    def __init__(self, directory: Path, name: str) -> None:
        path = directory / name
        os.mkfifo(path)
        # Open at both ends, so that neither we nor a command waits for the other to open it.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    async def wait(self) -> str:
        """Wait until a command writes (`echo x > gate`)."""
        await ready(self._descriptor)
        return os.read(self._descriptor, 4096).decode().strip()

    def open(self) -> None:
        """Let a command continue that reads (`read x < gate`)."""
        os.write(self._descriptor, b"go\n")


def client(
    root: Path,
    sandbox: str,
    conversation_id: str,
    action_id: int,
    command: str,
    *,
    image: str = "",
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a new session that runs one command as a tool worker would, and prints the result as JSON.

    Args:
        variables: The settings of a tool worker; its containers are used instead of those with the image.
    """
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(root), sandbox, conversation_id, str(action_id), command, image],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        start_new_session=True,
    )


async def answer(running: subprocess.Popen[str]) -> dict[str, Any]:
    """Return a client's output."""
    printed, _ = await asyncio.to_thread(running.communicate, timeout=LIMIT_SECONDS)
    assert running.returncode == 0
    return json.loads(printed)


def processes(root: Path, conversation_id: str) -> list[psutil.Process]:
    """Return the processes of a workspace: the host, its descendants, and the sandbox's outer process."""
    host = psutil.Process(main_pid(root, conversation_id))
    found = [host, *host.children(recursive=True)]
    parent = host.parent()
    return [*found, parent] if parent is not None and parent.name() == "bwrap" else found


def main_pid(root: Path, conversation_id: str) -> int:
    pid = HostFolder(root, conversation_id).read_main_pid()
    assert pid is not None
    return pid


def alive(found: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def sleeping(root: Path, conversation_id: str) -> list[str]:
    """Return the arguments of the live `sleep` processes of a workspace, sorted."""
    commands = map(command_of, processes(root, conversation_id))
    return sorted(command[1] for command in commands if command[:1] == ["sleep"])


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    await ready(descriptor)
    os.close(descriptor)


async def ready(descriptor: int) -> None:
    """Wait until a descriptor is readable."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            await event.wait()
    finally:
        loop.remove_reader(descriptor)


async def _main() -> None:
    root, sandbox, conversation_id, action_id, command, image = sys.argv[1:]
    containers = ContainerSettings((image,)) if image else load_tool_settings().containers
    workspaces = Workspaces(Path(root), sandbox=sandbox, containers=containers)
    workspace = await workspaces.open(conversation_id)
    result = await workspace.run(int(action_id), "bash", {"command": command, "timeout": LIMIT_SECONDS})
    sys.stdout.write(json.dumps({**result.value, "is_unknown": result.is_unknown, "is_replayed": result.is_replayed}))
    await workspaces.aclose()


if __name__ == "__main__":
    asyncio.run(_main())
