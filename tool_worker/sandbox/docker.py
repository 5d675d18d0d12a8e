"""The docker sandbox: one container per workspace, through this machine's engine and its command line.

A process started by an engine inherits no descriptors from us. The host gets its descriptors through a socket, which
is mounted as its `ENTRANCE`, answers one caller and is then useless (see `launch/host_launch`).

Holds:
    - A container has no network unless one was requested, no capability and no way to gain one. It has a read-only
      root and limits for memory, processes and CPU. It runs as the owner of its workspace, who is not root.
    - Its labels name its workspace. Through them it is found, and removed when its host is gone.
Does not: fetch images. Does not protect against users who can reach the engine, which amounts to being root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tool_worker.errors import SandboxUnavailable, WorkspaceRefused
from tool_worker.sandbox.containers import CODE_ROOT, HOME, HOST_NAME, ContainerSettings, change_owner, find_owner
from tool_worker.sandbox.sandbox import (
    HOST_CODE,
    PACKAGE_ROOT,
    SYSTEM_PATH,
    Capabilities,
    Enclosure,
    HostDescriptors,
    find_interpreter,
    make_agent_environment,
)

ENTRANCE = f"{CODE_ROOT}/entrance"
LIMIT_SECONDS = 60.0
LABEL = "deckhands"

# The first process of a container exposes its image's environment to all others in it; this one clears it.
_WITHOUT_ENVIRONMENT = "import os,sys; os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {})"


class DockerSandbox:
    """Runs programs in containers; a `Sandbox`."""

    name = "docker"
    code_root = CODE_ROOT
    capabilities = Capabilities(confines_programs=True, inherits_descriptors=False, runs_images=True)
    reach = "their own workspace and container; where a conversation was given the network, that of the engine's bridge"
    system_call_filter = b""  # the engine brings its own; the host adds ours (see `host/descriptor_receiver`)

    def __init__(self, containers: ContainerSettings) -> None:
        self._containers = containers

    def reason_unavailable(self) -> str | None:
        """See `Sandbox.reason_unavailable`."""
        if problem := self._containers.find_image_problem():
            return problem
        image = self._containers.images[0]
        try:
            self._ask("version", "--format", "{{.Server.Version}}")
            if not self._ask("image", "ls", "--quiet", image).strip():
                return f"the engine has no image {image}: docker pull {image}"
        except (OSError, subprocess.SubprocessError) as error:
            return f"no docker engine answers: {_render_reason(error)}"
        return None

    def shell_environment(self, enclosure: Enclosure) -> Mapping[str, str]:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.shell_environment`."""
        return make_agent_environment(HOME)

    def keeps_home(self, enclosure: Enclosure) -> bool:
        """See `Sandbox.keeps_home`. Only the container's user could write there or remove its files."""
        owner = enclosure.workspace.stat().st_uid
        return os.geteuid() in (0, owner)

    def keeps_temporary(self, enclosure: Enclosure) -> bool:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.keeps_temporary`."""
        return True

    def writable(self, enclosure: Enclosure) -> Sequence[str]:
        """See `Sandbox.writable`."""
        return [enclosure.mount_at, "/tmp", HOME, "/dev"]  # noqa: S108  (inside the container)

    def forbidden_addresses(self) -> Sequence[str]:
        """See `Sandbox.forbidden_addresses`."""
        return ()

    def options(self, enclosure: Enclosure) -> Sequence[str]:
        """See `Sandbox.options`.

        Raises:
            WorkspaceRefused: the directory is root's, or the image may not be used.
        """
        image = self._containers.choose_image(enclosure.image)
        return [*self._bounds(enclosure), *_make_mounts(enclosure), *_make_labels(enclosure), "--", image]

    def command(
        self, program: Sequence[str], options: Sequence[str], descriptors: HostDescriptors | int | None = None
    ) -> Sequence[str]:
        """See `Sandbox.command`."""
        own = ["python3", *program[1:]] if program[0] == find_interpreter() else list(program)
        if isinstance(descriptors, HostDescriptors):
            arriving = ["python3", "-I", "-S", f"{self.code_root}/tool_worker/host/descriptor_receiver.py", ENTRANCE]
            return [*self._engine(), "run", "--detach", *options, *arriving, *own[1:]]
        if descriptors is not None:
            own = ["python3", "-I", "-S", "-c", _WITHOUT_ENVIRONMENT, *own[1:]]
            return [*self._engine(), "run", *options, *own]
        return [*self._engine(), "run", "--interactive", *options, *own]

    def kill_stragglers(self, host_id: str) -> None:
        """See `Sandbox.kill_stragglers`."""
        self._remove(f"{LABEL}.host={host_id}", lambda _: True)

    def remove_dead(self, root: Path, is_alive: Callable[[str], bool]) -> None:
        """See `Sandbox.remove_dead`."""
        self._remove(f"{LABEL}.root={root}", lambda conversation_id: not is_alive(conversation_id))

    def _remove(self, label: str, is_wanted: Callable[[str], bool]) -> None:
        form = f'{{{{.ID}}}} {{{{.Label "{LABEL}.conversation"}}}}'
        try:
            listed = self._ask("ps", "--all", "--filter", f"label={label}", "--format", form)
            found = [line.split(" ", 1) for line in listed.splitlines()]
            victims = [words[0] for words in found if is_wanted(words[1] if len(words) > 1 else "")]
            if victims:
                self._ask("rm", "--force", *victims)
        except (OSError, subprocess.SubprocessError) as error:
            # A container that removes itself meanwhile is fine.
            if "is already in progress" not in (text := _render_reason(error)) and "No such container" not in text:
                raise SandboxUnavailable(f"Cannot remove containers: {text}") from error

    def _ask(self, *arguments: str) -> str:
        asked = [*self._engine(), *arguments]
        done = subprocess.run(asked, env={}, check=True, capture_output=True, timeout=LIMIT_SECONDS)  # noqa: S603
        return done.stdout.decode("utf-8", "replace")

    def _engine(self) -> list[str]:
        executable = shutil.which("docker", path=SYSTEM_PATH) or "/usr/bin/docker"
        return [executable, *(("--host", self._containers.engine) if self._containers.engine else ())]

    def _bounds(self, enclosure: Enclosure) -> Iterator[str]:
        user, group = find_owner(enclosure)
        yield from ("--rm", "--pull", "never", "--user", f"{user}:{group}", "--hostname", HOST_NAME)
        yield from ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--ipc", "private")
        yield from ("--log-driver", "none", "--ulimit", "core=0", "--entrypoint", "")
        yield from ("--network", "bridge" if enclosure.has_network else "none", "--workdir", enclosure.mount_at)
        limits = enclosure.limits
        if limits.memory_bytes is not None:
            yield from ("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes))
        if limits.processes is not None:
            yield from ("--pids-limit", str(limits.processes))
        if self._containers.cpus is not None:
            yield from ("--cpus", f"{self._containers.cpus:g}")
        yield from ("--tmpfs", "/sys:ro")  # the machine's devices, including those accessible to its groups
        size = f"rw,exec,nosuid,nodev,size={enclosure.temporary_bytes}"
        kept = {"/tmp": enclosure.temporary, HOME: enclosure.home}  # noqa: S108  (inside the container)
        modes = {"/tmp": "mode=1777", HOME: f"uid={user},gid={group},mode=700"}  # noqa: S108
        for path, source in kept.items():
            if source is None:
                yield from ("--tmpfs", f"{path}:{size},{modes[path]}")
            else:
                change_owner(source, user, group)
                yield from _make_mount(source, path, is_writable=True)
        yield from ("--shm-size", str(enclosure.temporary_bytes))
        for name in enclosure.environment_names:
            yield from ("--env", name)


def _make_mounts(enclosure: Enclosure) -> Iterator[str]:
    package = PACKAGE_ROOT / "tool_worker"
    code = f"{DockerSandbox.code_root}/tool_worker"
    yield from _make_mount(enclosure.workspace, enclosure.mount_at, is_writable=True)
    for name in HOST_CODE:
        yield from _make_mount(package / name, f"{code}/{name}")
    for path in enclosure.read_only:
        yield from _make_mount(path, str(path))
    if enclosure.entrance is not None:
        yield from _make_mount(enclosure.entrance, ENTRANCE)


def _make_mount(source: Path, target: str, *, is_writable: bool = False) -> tuple[str, str]:
    # The engine parses the option as comma-separated values.
    if set(f"{source}{target}") & set(',"\r\n'):
        raise WorkspaceRefused(
            f"{str(source)!r} cannot be mounted in a container.", remedy="Use a path without commas and quotes."
        )
    return "--mount", f"type=bind,source={source},target={target}{'' if is_writable else ',readonly'}"


def _make_labels(enclosure: Enclosure) -> Iterator[str]:
    for name, value in enclosure.labels.items():
        yield from ("--label", f"{LABEL}.{name}={value}")


def _render_reason(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    return stderr.decode("utf-8", "replace").strip() if stderr else str(error)
