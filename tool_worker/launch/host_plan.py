"""What the host of a workspace is started with: what its sandbox shows it, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tool_worker.files.openat2_paths import Directory
from tool_worker.host.configuration import HostConfiguration
from tool_worker.launch.binding import Binding
from tool_worker.launch.egress_gate import EGRESS_PORT, proxy_environment
from tool_worker.launch.host_folder import HostFolder
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.none import temporary_directory
from tool_worker.sandbox.sandbox import HOST_ID_VARIABLE, Enclosure, ResourceLimits, Sandbox


class HostPlans:
    """Plans the hosts of one node.

    Args:
        root: Directory of the node's workspaces.
        are_grouped: Whether the kernel bounds all programs of a workspace together.

    The others: see `Workspaces`.
    """

    def __init__(
        self,
        root: Path,
        *,
        ttl_seconds: float,
        idle_seconds: float,
        no_change_timeout_seconds: float,
        environment: Mapping[str, str],
        search_path: str | None,
        read_only: tuple[Path, ...],
        sessions: Mapping[str, Sequence[str]],
        container_sessions: Mapping[str, Sequence[str]],
        limits: ResourceLimits,
        are_grouped: bool,
    ) -> None:
        self._root = root
        self._ttl_seconds = ttl_seconds
        self._idle_seconds = idle_seconds
        self._no_change_timeout_seconds = no_change_timeout_seconds
        self._environment = dict(environment)
        self._search_path = {"PATH": search_path} if search_path else {}
        self._read_only = read_only
        self._sessions = {name: list(command) for name, command in sessions.items()}
        self._container_sessions = {name: list(command) for name, command in container_sessions.items()}
        self._limits = limits
        self._are_grouped = are_grouped

    def plan(
        self, binding: Binding, folder: HostFolder, directory: Directory, sandbox: Sandbox
    ) -> tuple[Enclosure, HostConfiguration]:
        """Plan a host in a sandbox.

        Args:
            directory: What the path of the binding has to lead to when the sandbox is made.
        """
        workspace = Path(binding.path)
        enclosure = Enclosure(
            workspace,
            binding.mount_at,
            has_network=binding.has_network,
            read_only=self._read_only if sandbox.inherits_descriptors else (),
            temporary_bytes=self._limits.temporary_bytes,
            is_own=not binding.is_named(folder.workspace),
            image=binding.image,
            labels={"root": str(self._root), "conversation": folder.conversation_id, "host": binding.host_id},
            limits=self._limits,
            entrance=folder.entrance,
        )
        is_bwrap = sandbox.name == BubblewrapSandbox.name
        temporary = "" if sandbox.is_confining else str(temporary_directory(binding.host_id))
        environment = {
            **sandbox.shell_environment(enclosure),
            **({} if sandbox.is_confining else {"TMPDIR": temporary, **self._search_path}),
            **(proxy_environment() if binding.allow else {}),
            **self._environment,
            HOST_ID_VARIABLE: binding.host_id,
        }
        configuration = HostConfiguration(
            workspace=binding.mount_at,
            identity=list(directory.identity),
            environment=environment,
            ttl_seconds=self._ttl_seconds,
            idle_seconds=self._idle_seconds,
            no_change_timeout_seconds=self._no_change_timeout_seconds,
            resource_limits=self._limits.by_name(
                are_processes_counted_apart=is_bwrap, is_memory_bounded=not is_bwrap or self._are_grouped
            ),
            writable=list(sandbox.writable(enclosure)),
            announces_pid=not sandbox.is_confining,
            sessions=self._sessions if sandbox.inherits_descriptors else self._container_sessions,
            egress_port=EGRESS_PORT if binding.allow else 0,
            temporary=temporary,
        )
        return enclosure, configuration
