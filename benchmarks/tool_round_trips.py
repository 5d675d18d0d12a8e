"""How long each tool takes for the least it can do: from the tool worker to where it is carried out, and back.

    python benchmarks/tool_round_trips.py [--sandbox bwrap|none] [--rounds 200] [--slow-rounds 20]

Prints medians and 95th percentiles as one JSON object. A round trip is what the executor waits for: the action made
into a request, the workspace host with its journal (or the function, or the MCP server), the result made into an
observation. The tools `ipython` and `browser`, which need packages of their own, are left out where these are missing.
The first call of a tool, which starts a kernel, a browser or a server, is reported separately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from time import perf_counter

from broker.contract.actions import CmdRunAction, MCPAction, OfferedToolAction, ToolCallAction
from broker.contract.browser_events import BrowseInteractiveAction
from broker.contract.code_search import CodeSearchAction
from broker.contract.events import Action, Observation
from broker.contract.file_events import FileEditAction, FileReadAction, FileReadSource, FileWriteAction
from broker.contract.observations import ErrorObservation
from broker.contract.session_events import IPythonRunCellAction
from broker.contract.tool_specs import ToolOffer
from broker.coordination.action_streams import ActionClaimed
from broker.runtime.errors import UsageError
from broker.tools.custom_tools import custom_tool
from broker.tools.mcp_config import McpServerSpec
from tool_worker.tools.mcp.launch import SandboxedLaunch
from tool_worker.tools.mcp.servers import McpServers
from tool_worker.tools.offered import OfferedTools
from tool_worker.tools.registry import find_tool
from tool_worker.tools.tool import HostRequest
from tool_worker.workspace.launch.session_programs import SessionPrograms, find_session_programs
from tool_worker.workspace.open_workspace import OpenWorkspace
from tool_worker.workspace.workspaces import Workspaces

MCP_SERVER = Path(__file__).resolve().parent.parent / "tests" / "example_mcp_server.py"
SLOW = ("ipython", "browser")
READY_LIMIT_SECONDS = 60.0


@custom_tool
async def echo(text: str) -> str:
    """Say something again."""
    return text


@custom_tool
def echo_in_a_thread(text: str) -> str:
    """Say something again, from a thread."""
    return text


class Hands:
    """Carries out actions as the executor does, one after the other."""

    def __init__(self, host: OpenWorkspace, offered: OfferedTools) -> None:
        self._host = host
        self._offered = offered
        self._ids = count(1)

    async def __call__(self, action: Action) -> Observation:
        action = action.model_copy(update={"id": next(self._ids)})
        if isinstance(action, OfferedToolAction):
            return await self._offered.call(action, ActionClaimed(1), "conversation")
        tool = find_tool(action.kind)
        request = tool.request(action)
        assert isinstance(request, HostRequest)
        result = await self._host.run(action.id, request.tool, request.arguments)
        return tool.observe(action, result.value)

    async def milliseconds(self, action: Action) -> float:
        """Carry it out and return how long it took."""
        began = perf_counter()
        observation = await self(action)
        took = (perf_counter() - began) * 1000
        if isinstance(observation, ErrorObservation) or observation.content.startswith("ERROR"):
            raise SystemExit(f"{action.kind} failed: {observation.content}")
        return took


def actions(directory: str, mcp: ToolOffer) -> dict[str, Callable[[int], Action]]:
    """Return the least that each tool can do, by name; the argument is the number of the round."""
    path = f"{directory}/a.txt"
    view = FileReadAction(path=path, impl_source=FileReadSource.OH_ACI)
    called = MCPAction(name=mcp.name, tool=mcp.key, fingerprint=mcp.fingerprint, arguments={"text": "a"})
    return {
        "bash": lambda _: CmdRunAction(command="true"),
        "write": lambda n: FileWriteAction(path=path, content=f"line {n}"),
        "read": lambda _: FileReadAction(path=path),
        "edit: view": lambda _: view,
        "edit: insert": lambda n: FileEditAction(path=path, command="insert", insert_line=0, new_str=f"line {n}"),
        "code search": lambda _: CodeSearchAction(
            question="explore_tree_structure", arguments={"start_entities": ["/"]}
        ),
        "custom: async": lambda _: ToolCallAction(name="echo", arguments={"text": "a"}),
        "custom: thread": lambda _: ToolCallAction(name="echo_in_a_thread", arguments={"text": "a"}),
        "MCP": lambda _: called,
        "ipython": lambda _: IPythonRunCellAction(code="1"),
        "browser": lambda _: BrowseInteractiveAction(browser_actions="noop(0)"),
    }


def summary(samples: Sequence[float]) -> dict[str, float]:
    ranked = sorted(samples)
    return {"p50_ms": round(statistics.median(ranked), 3), "p95_ms": round(ranked[int(len(ranked) * 0.95)], 3)}


def programs() -> tuple[SessionPrograms, list[str]]:
    """Return those session programs that this machine can start, and the pools that it cannot serve."""
    missing = []
    for pool in SLOW:
        try:
            find_session_programs([pool])
        except UsageError as error:
            print(f"without {pool}: {error}", file=sys.stderr)
            missing.append(pool)
    return find_session_programs([pool for pool in SLOW if pool not in missing]), missing


@asynccontextmanager
async def mcp_server(node: Path, offered: OfferedTools, sandbox: str) -> AsyncIterator[ToolOffer]:
    """Start a server of MCP and yield its tool `echo`."""
    spec = McpServerSpec(
        name="example",
        command=sys.executable,
        args=(str(MCP_SERVER),),
        read_only=(Path(sys.prefix), MCP_SERVER),
        tools=("echo",),
    )
    servers = McpServers([spec], offered, SandboxedLaunch(sandbox, node))
    published: list[ToolOffer] = []

    async def publish(offers: Sequence[ToolOffer]) -> None:
        published.extend(offers)

    try:
        async with asyncio.timeout(READY_LIMIT_SECONDS):
            await servers.offer(publish)
        yield next(offer for offer in published if offer.key == "example/echo")
    finally:
        await servers.aclose()


async def measure(node: Path, sandbox: str, rounds: int, slow_rounds: int) -> dict[str, object]:
    sessions, missing = programs()
    workspaces = Workspaces(node, sandbox=sandbox, programs=sessions)
    offered = OfferedTools([echo, echo_in_a_thread])
    report: dict[str, object] = {"sandbox": sandbox}
    try:
        host = await workspaces.open("conversation")
        hands = Hands(host, offered)
        directory = (await host.connection.ping()).workspace
        async with mcp_server(node / "mcp", offered, sandbox) as mcp:
            for name, action in actions(directory, mcp).items():
                if name not in missing:
                    report[name] = await _measured(hands.milliseconds, action, slow_rounds if name in SLOW else rounds)
    finally:
        for state in workspaces.list():
            await workspaces.close(state.conversation_id)
        await workspaces.aclose()
    return report


async def _measured(
    milliseconds: Callable[[Action], Awaitable[float]], action: Callable[[int], Action], rounds: int
) -> dict[str, float]:
    first = await milliseconds(action(0))
    samples = [await milliseconds(action(number)) for number in range(1, rounds + 1)]
    return {"first_ms": round(first, 1), **summary(samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", choices=["bwrap", "none"], default="bwrap")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--slow-rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        report = asyncio.run(measure(Path(root), options.sandbox, options.rounds, options.slow_rounds))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
