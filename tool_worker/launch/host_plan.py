"""What the host of a workspace is started with: its sandbox and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tool_worker.files.openat2_paths import Directory
from tool_worker.host.configuration import HostConfiguration
from tool_worker.launch.binding import Binding
from tool_worker.launch.egress_gate import EGRESS_PORT, proxy_environment
from tool_worker.launch.host_folder import HostFolder
from tool_worker.launch.session_programs import SessionPrograms, document_packages, document_readers
from tool_worker.sandbox.none import temporary_directory
from tool_worker.sandbox.sandbox import HOST_ID_VARIABLE, Enclosure, ResourceLimits, Sandbox


@dataclass(frozen=True, slots=True)
class HostPlans:
    """Plans the hosts of one node.

    Attributes:
        root: Directory of the node's workspaces.
        has_control_groups: Whether the kernel bounds all programs of a workspace together.

    The others: see `Workspaces`.
    """

    root: Path
    ttl_seconds: float
    idle_seconds: float
    no_change_timeout_seconds: float
    environment: Mapping[str, str]
    search_path: str | None
    programs: SessionPrograms
    limits: ResourceLimits
    has_control_groups: bool

    def plan(
        self, binding: Binding, folder: HostFolder, directory: Directory, sandbox: Sandbox
    ) -> tuple[Enclosure, HostConfiguration]:
        """Plan a host in a sandbox.

        Args:
            directory: What the path of the binding has to lead to when the sandbox is made.
        """
        can = sandbox.capabilities
        enclosure = Enclosure(
            Path(binding.path),
            binding.mount_at,
            has_network=binding.has_network,
            read_only=() if can.runs_images else (*self.programs.read_only, *document_readers()),
            temporary_bytes=self.limits.temporary_bytes,
            is_own=not binding.is_named(folder.workspace),
            image=binding.image,
            labels={"root": str(self.root), "conversation": folder.conversation_id, "host": binding.host_id},
            limits=self.limits,
            entrance=folder.entrance,
        )
        temporary = "" if can.confines_programs else str(temporary_directory(binding.host_id))
        environment = {
            **sandbox.shell_environment(enclosure),
            **(
                {}
                if can.confines_programs
                else {"TMPDIR": temporary, **({"PATH": self.search_path} if self.search_path else {})}
            ),
            **(proxy_environment() if binding.allow else {}),
            **self.environment,
            HOST_ID_VARIABLE: binding.host_id,
        }
        sessions = self.programs.in_containers if can.runs_images else self.programs.commands
        configuration = HostConfiguration(
            workspace=binding.mount_at,
            identity=list(directory.identity),
            environment=environment,
            ttl_seconds=self.ttl_seconds,
            idle_seconds=self.idle_seconds,
            no_change_timeout_seconds=self.no_change_timeout_seconds,
            resource_limits=self.limits.by_name(
                are_processes_counted_apart=can.uses_control_groups,
                is_memory_bounded=not can.uses_control_groups or self.has_control_groups,
            ),
            writable=list(sandbox.writable(enclosure)),
            announces_pid=not can.confines_programs,
            sessions={name: list(command) for name, command in sessions.items()},
            egress_port=EGRESS_PORT if binding.allow else 0,
            temporary=temporary,
            packages="" if can.runs_images else document_packages(),
        )
        return enclosure, configuration
