"""Plans the start of a workspace's host: its sandbox and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tool_worker.host.configuration import HostConfiguration
from tool_worker.sandbox import (
    DOCUMENT_PACKAGES,
    HOST_ID_VARIABLE,
    Enclosure,
    ResourceLimits,
    Sandbox,
    find_document_packages,
    find_temporary_directory,
)
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.launch.egress_gate import EGRESS_PORT, proxy_environment
from tool_worker.workspace.launch.host_folder import Binding, HostFolder
from tool_worker.workspace.launch.session_programs import SessionPrograms

GIT_CONFIGURATION = ".config/git/config"
"""Path below the home; a user's `git config --global` and a repository's settings override it."""
MEMORY_OF_ALL = (
    "[A program was killed or refused memory. All programs of this workspace together may use {size}, files in "
    "/dev/shm included; one that takes more is killed.]"
)
MEMORY_OF_EACH = (
    "[A program was killed or refused memory. Each program may use {size}; one that asks for more is refused.]"
)
KEPT = "all other files, and the history of undo_edit"
KEPT_WITHOUT_TEMPORARY = "the files of the workspace and of the home, and the history of undo_edit"
KEPT_WITH_HOME = "the files of the workspace, of the home and of /tmp, and the history of undo_edit"
MAX_IDENTITY_CHARS = 200


@dataclass(frozen=True, slots=True)
class HostPlans:
    """Plans the hosts of one node.

    Attributes:
        root: Directory of the node's workspaces.
        has_control_groups: Whether the kernel limits all programs of a workspace together.

    For the other arguments, see `Workspaces`.
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
    git_identity: GitIdentity

    def plan(
        self, binding: Binding, folder: HostFolder, directory: Directory, sandbox: Sandbox
    ) -> tuple[Enclosure, HostConfiguration]:
        """Plan a host in a sandbox.

        Args:
            directory: The directory that the binding's path must lead to when the sandbox is created.
        """
        can = sandbox.capabilities
        packages = None if can.runs_images else find_document_packages()
        readers = [packages / name for name in DOCUMENT_PACKAGES] if packages and not can.packages_at else []
        enclosure = Enclosure(
            Path(binding.path),
            binding.mount_at,
            has_network=binding.has_network,
            read_only=() if can.runs_images else (*self.programs.read_only, *readers),
            temporary_bytes=self.limits.temporary_bytes,
            is_own=not binding.is_named(folder.workspace),
            image=binding.image,
            labels={"root": str(self.root), "conversation": folder.conversation_id, "host": binding.host_id},
            limits=self.limits,
            entrance=folder.entrance,
        )
        temporary = "" if can.confines_programs else str(find_temporary_directory(binding.host_id))
        environment = {
            **sandbox.shell_environment(enclosure),
            **(
                {}
                if can.confines_programs
                else {"TMPDIR": temporary, **({"PATH": self.search_path} if self.search_path else {})}
            ),
            **({} if can.confines_programs else self._write_git_configuration(folder)),
            **(proxy_environment() if binding.allow else {}),
            **self.environment,
            HOST_ID_VARIABLE: binding.host_id,
        }
        if sandbox.keeps_home(enclosure):
            folder.create_home({GIT_CONFIGURATION: self.git_identity.configuration()})
            temporary_folder = folder.temporary if sandbox.keeps_temporary(enclosure) else None
            enclosure = replace(enclosure, home=folder.home, temporary=temporary_folder)
        shell = folder.read_shell()
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
            memory=self._make_memory_notice(sandbox),
            lost=_describe_lost(enclosure, temporary),
            kept=_describe_kept(enclosure),
            packages=(can.packages_at or str(packages)) if packages else "",
            shell_state=shell.move_to(binding.mount_at).to_fields() if shell is not None else None,
        )
        return enclosure, configuration

    def _make_memory_notice(self, sandbox: Sandbox) -> str:
        can = sandbox.capabilities
        limit = self.limits.memory_bytes
        if limit is None or not can.confines_programs:
            return ""
        is_of_each = can.uses_control_groups and not self.has_control_groups
        return (MEMORY_OF_EACH if is_of_each else MEMORY_OF_ALL).format(size=_format_size(limit))

    def _write_git_configuration(self, folder: HostFolder) -> Mapping[str, str]:
        """Return the variables that add the identity to the machine's configuration, for sandboxes without our home."""
        system = "[include]\n\tpath = /etc/gitconfig\n"
        folder.git_configuration.write_text(self.git_identity.configuration() + system)
        return {"GIT_CONFIG_SYSTEM": str(folder.git_configuration)}


def _describe_lost(enclosure: Enclosure, temporary: str) -> str:
    if temporary:
        return f", and the temporary files in {temporary}"
    if enclosure.home is None:
        return ", and the files of the home and of /tmp"
    return "" if enclosure.temporary is not None else ", and the files of /tmp"


def _describe_kept(enclosure: Enclosure) -> str:
    if enclosure.home is None:
        return KEPT
    return KEPT_WITH_HOME if enclosure.temporary is not None else KEPT_WITHOUT_TEMPORARY


def _format_size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes >> 20} MiB"


@dataclass(frozen=True, slots=True)
class GitIdentity:
    """Git's author in a workspace that configures none; git chooses an empty name or email address itself.

    Raises:
        ValueError: One of them has a character that git rejects or interprets.
    """

    name: str = "deckhands"
    email: str = "deckhands@localhost"

    def __post_init__(self) -> None:
        """Check that both are single lines of text."""
        for text in (self.name, self.email):
            if len(text) > MAX_IDENTITY_CHARS or not all(character.isprintable() for character in text):
                raise ValueError(
                    f"{text[:MAX_IDENTITY_CHARS]!r} is not a line of up to {MAX_IDENTITY_CHARS} characters"
                )

    def configuration(self) -> str:
        """Return the identity in the format of git's configuration files."""
        lines = [f"\t{key} = {_quote(text)}\n" for key, text in (("name", self.name), ("email", self.email)) if text]
        return "".join(("[user]\n", *lines)) if lines else ""


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
