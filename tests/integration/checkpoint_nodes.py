"""Nodes with a tool worker that saves and restores workspaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import Event, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.coordination.transfers import Transfers
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from broker.store.store import Store
from deckhands.client.forking import build_fork
from tests.integration.workspace_hosts import opened
from tests.polling import until
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.worker.executor import Executor
from tool_worker.worker.transfer_service import TransferService
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints
from tool_worker.workspace.checkpoints.checkpointing import Checkpointing
from tool_worker.workspace.files.overlay_mounts import unmount_below
from tool_worker.workspace.files.staging import remove_tree
from tool_worker.workspace.layers import CopyMethod, Layers, find_copy_method
from tool_worker.workspace.named_directories import NamedDirectories

T = TypeVar("T")
CID = "conversation"
SHARING = "[This conversation is a fork. Its files are those of the original"
PREPARE = (
    "mkdir -p src/deep && echo one > src/deep/file && ln -s deep/file src/link && cd src && "
    "export TOKENS='a  b\nc' PATH=$PWD/bin:$PATH && greet() { echo \"hello $1\"; } && export -f greet && "
    "alias shout='echo LOUD' && umask 027 && plain=lost"
)


class Node:
    """A node with a tool worker on it."""

    def __init__(self, log: EventLog, root: Path, executor: Executor, checkpointing: Checkpointing) -> None:
        self.log, self.root, self.executor, self.checkpointing = log, root, executor, checkpointing

    async def run(
        self, command: str, *, spec: WorkspaceSpec | None = None, conversation_id: str = CID, moves: int = 0
    ) -> Event:
        await self.log.append(conversation_id, [CmdRunAction(command=command)])
        action = (await self.log.read(conversation_id))[-1]
        entry = await self.log.load_entry(conversation_id, action.id)
        delivery = ActionDelivery(conversation_id, action.id, entry, spec or WorkspaceSpec(), "")
        await self.executor.execute(delivery, ActionClaimed(1, moves))
        return (await self.log.read(conversation_id))[-1]


@asynccontextmanager
async def node(
    log: EventLog, root: Path, place: Path | None, *, every: int = 2, sandbox: str = "bwrap", may_mount: bool = True
) -> AsyncIterator[Node]:
    checkpoints = Checkpoints(f"file://{place}", SystemClock()) if place is not None else None
    checkpointing = Checkpointing(log, root, checkpoints, every=every, layers=Layers(root, may_mount=may_mount))
    async with opened(root, sandbox=sandbox, named=NamedDirectories([root.parent / "project"])) as workspaces:
        yield Node(log, root, Executor(log, workspaces, worker_id="tool-1", checkpointing=checkpointing), checkpointing)


async def no_sandbox() -> Sandbox:
    raise AssertionError("no sandbox is needed")


async def serve(
    one: Node,
    store: Store,
    request: Coroutine[Any, Any, T],
    *,
    of: str = CID,
    sandbox: Callable[[], Awaitable[Sandbox]] = no_sandbox,
) -> T:
    """Let the node serve a transfer that the request of a user orders, and return the answer to the user."""
    names, call = store.known_keys(of), store.connection.call
    await call("HSET", names.meta, "node", "one")
    asking = asyncio.create_task(request)
    stream = names.shard.actions("node:one")
    await until(lambda: call("XLEN", stream))
    [(entry, fields)] = await call("XRANGE", stream, "-", "+")
    bindings = Bindings(one.root, NamedDirectories())
    service = TransferService(Transfers(store), one.root, one.checkpointing, sandbox, bindings)
    await service.transfer(of, fields[-1].decode())
    await call("XDEL", stream, entry)
    return await asking


def printed(event: Event) -> str:
    assert isinstance(event, CmdOutputObservation)
    return event.content


def can_mount(directory: Path) -> bool:
    """Return whether overlays can be mounted below a new directory."""
    directory.mkdir(parents=True, exist_ok=True)
    found = find_copy_method(directory)
    remove_tree(directory)
    return found is CopyMethod.OVERLAY


@contextmanager
def node_with_overlays(directory: Path) -> Iterator[Path]:
    """Yield the directory of a node that can mount overlays; skip the test where there is none."""
    if not can_mount(directory / "trial"):
        pytest.skip("this process may not mount overlays")
    root = directory / "node"
    root.mkdir()
    yield root
    unmount_below(root)


async def fork(log: EventLog, name: str, *, at: int | None = None, of: str = CID) -> None:
    """Fork a conversation at an event, or at its end."""
    events = (await log.read(of))[:at]
    await log.create_from(build_fork(events, name), events[1:], key=name)


@asynccontextmanager
async def prepared(log: EventLog, root: Path, command: str = PREPARE, *, may_mount: bool = True) -> AsyncIterator[Node]:
    """Yield a node with a conversation whose workspace is prepared and saved."""
    async with node(log, root, root.parent / "place", every=1, may_mount=may_mount) as one:
        done = await one.run(command)
        assert isinstance(done, CmdOutputObservation)
        assert done.metadata.exit_code == 0, done.content
        yield one


def prefix(event: Event) -> str:
    """Return the notice before a command's output."""
    assert isinstance(event, CmdOutputObservation), event
    return event.metadata.prefix
