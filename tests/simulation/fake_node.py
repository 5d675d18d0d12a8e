"""A node without a machine: workspace hosts that journal what they run and outlive the tool workers, on virtual time.

Holds: what stands here stands for the workspace host and for nothing else; the order of claim, run and append is the
tool worker's own. Every execution is noted outside of the system.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.virtual_loop import SimulatedProcess, VirtualLoop
from tool_worker.host.protocol import NEVER_STARTED, RECORDED, RUNNING
from tool_worker.launch.host_connection import ActionStatus, HostResult
from tool_worker.sandbox.none import NoSandbox

RUN_SECONDS = 0.2


@dataclass
class Node:
    """What is left on a machine when its tool worker dies.

    Attributes:
        executions: conversation and action of every execution, in order.
        remembers: False: there is no journal, and whoever asks runs the action anew.
    """

    loop: VirtualLoop
    executions: list[tuple[str, int]] = field(default_factory=list)
    results: dict[tuple[str, int], asyncio.Future[Mapping[str, Any]]] = field(default_factory=dict)
    remembers: bool = True
    run_seconds: float = RUN_SECONDS

    def __post_init__(self) -> None:
        self.host = SimulatedProcess("host")

    def begin(self, conversation_id: str, action_id: int, command: str) -> asyncio.Future[Mapping[str, Any]]:
        """Run an action, or attach to it, or look its result up."""
        key = (conversation_id, action_id)
        if key not in self.results or not self.remembers:
            self.executions.append(key)
            self.results[key] = self.loop.create_future()
            self.loop.call_later(self.run_seconds, self._end, key, command, context=self.host.context)
        return self.results[key]

    def interrupt(self, conversation_id: str, action_id: int) -> None:
        """Stop an action that runs."""
        key = (conversation_id, action_id)
        if key in self.results and not self.results[key].done():
            self.results[key].set_result(_result("^C", 130))

    def _end(self, key: tuple[str, int], command: str) -> None:
        if not self.results[key].done():
            self.results[key].set_result(_result(f"{command} of {key[1]}", 0))


def _result(content: str, exit_code: int) -> Mapping[str, Any]:
    return {"content": content, "metadata": {"exit_code": exit_code, "pid": 7, "working_dir": "/workspace"}}


class FakeWorkspaces:
    """A tool worker's view of a node: what it needs of `Workspaces`."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def open(self, conversation_id: str, *_: Any, **__: Any) -> _FakeWorkspace:
        await asyncio.sleep(0)
        return _FakeWorkspace(self._node, conversation_id)

    async def interrupt(self, conversation_id: str, action_id: int) -> bool:
        self._node.interrupt(conversation_id, action_id)
        return True

    async def close(self, conversation_id: str) -> None:
        await asyncio.sleep(0)

    async def demanded_sandbox(self) -> NoSandbox:
        return NoSandbox()  # for git, which nothing here needs

    async def detach_idle(self) -> None:
        return


@dataclass
class _FakeWorkspace:
    node: Node
    conversation_id: str
    is_confined: bool = True
    checked_at: int = 0
    gap_id: int = 0

    async def newest(self) -> tuple[int, str] | None:
        return None

    async def run(
        self, action_id: int, tool: str, arguments: Mapping[str, Any], *, may_repeat: bool, fingerprint: str
    ) -> HostResult:
        future = self.node.begin(self.conversation_id, action_id, str(arguments.get("command")))
        return HostResult(action_id, await asyncio.shield(future))

    async def status(self, action_id: int, *, fingerprint: str = "") -> ActionStatus:
        future = self.node.results.get((self.conversation_id, action_id))
        if future is None:
            return ActionStatus(NEVER_STARTED)
        return (
            ActionStatus(RECORDED, HostResult(action_id, future.result())) if future.done() else ActionStatus(RUNNING)
        )
