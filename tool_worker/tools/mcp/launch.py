"""Starts the program of an MCP server in a separate sandbox, with a separate directory.

Holds: the program sees neither a workspace nor the tool worker's files, and an agent's programs see neither it nor its
secrets.
Differs: the original runs it in the agent's own sandbox, where every command can read its secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from broker.tools import McpServerSpec
from tool_worker.sandbox import ContainerSettings, Enclosure, Sandbox, find_sandbox
from tool_worker.tools.mcp.connection import ProgramLaunch
from tool_worker.tools.mcp.program_files import ProgramFiles, find_program_files
from tool_worker.workspace import EgressGate, make_proxied_command, proxy_environment, run_proxy

MOUNT_AT = "/server"
_FILTER_FD = 9


class SandboxedLaunch:
    """Starts servers in the sandbox that the node demands.

    Args:
        demanded: `auto`, `bwrap`, `docker` or `none`, as for workspaces.
        node_dir: Directory below which the servers' directories are created.
        gate: Rules of the servers' proxies.
        search_path: Search path for programs that the system does not have.
        closed: Directories that programs do not see by default: those that agents can write to, and our own.
    """

    def __init__(
        self,
        demanded: str,
        node_dir: Path,
        *,
        gate: EgressGate | None = None,
        containers: ContainerSettings | None = None,
        search_path: str = "",
        closed: Sequence[Path] = (),
    ) -> None:
        self._demanded = demanded
        self._node_dir = node_dir
        self._gate = gate or EgressGate()
        self._containers = containers
        self._search_path = search_path
        self._closed = (node_dir, *closed)
        self._sandbox: Sandbox | None = None

    def __call__(self, spec: McpServerSpec) -> ProgramLaunch:
        """Return how to start a server. The first call tests the sandbox, which takes a moment.

        Raises:
            SandboxUnavailable: The node's sandbox does not work here.
            EgressRefused: The server's hosts are limited, and there is no sandbox to enforce it.
            UsageError: The program's virtual environment is in a directory that agents can write to.
        """
        files = self._node_dir.absolute() / ".sandbox"
        if self._sandbox is None:
            self._sandbox = find_sandbox(self._demanded, files, self._containers)
        sandbox = self._sandbox
        directory = files / "mcp" / spec.name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = files / "mcp" / f"{spec.name}.log"
        mount_at = MOUNT_AT if sandbox.capabilities.confines_programs else str(directory)
        # Not our own gate: its ceiling is for conversations, and this list is the operator's.
        EgressGate().check(spec.allow, has_network=False, is_confined=sandbox.capabilities.confines_programs)
        address = files / "mcp" / f"{spec.name}.out" / "socket"
        needed = self._find_program_files(spec, sandbox)
        read_only = (*spec.read_only, *needed.read_only, *([address] if spec.allow else []))
        enclosure = Enclosure(directory, mount_at, has_network=spec.network, read_only=read_only, is_own=True)
        program = [needed.command, *spec.args]
        environment = {**sandbox.shell_environment(enclosure), "LOGNAME": "agent"}
        program_egress: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        if spec.allow:
            program = make_proxied_command(sandbox, address, program)
            environment |= proxy_environment()
            refusals = files / "mcp" / f"{spec.name}.egress.log"
            program_egress = partial(run_proxy, address, self._gate, spec.allow, log=refusals, name=spec.name)
        environment |= spec.env
        options = sandbox.options(replace(enclosure, environment_names=tuple(environment)))
        if not sandbox.system_call_filter:
            return ProgramLaunch(sandbox.command(program, options), environment, log, program_egress)
        filter_file = files / "mcp" / "filter"
        filter_file.write_bytes(sandbox.system_call_filter)
        # The SDK starts a command line and passes no descriptors: a shell opens the filter and executes the sandbox.
        opening = ["/bin/sh", "-c", f'exec {_FILTER_FD}<"$0"; exec "$@"', str(filter_file)]
        return ProgramLaunch(
            [*opening, *sandbox.command(program, options, _FILTER_FD)], environment, log, program_egress
        )

    def _find_program_files(self, spec: McpServerSpec, sandbox: Sandbox) -> ProgramFiles:
        if sandbox.capabilities.runs_images:  # the image has its own programs
            return ProgramFiles(spec.command)
        is_confined = sandbox.capabilities.confines_programs
        closed = self._closed if is_confined else ()
        return find_program_files(spec.command, search_path=self._search_path, shown=spec.read_only, closed=closed)
