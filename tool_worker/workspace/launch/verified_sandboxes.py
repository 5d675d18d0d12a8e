"""The sandboxes of a node, each tested before its first use.

Holds: no program runs in a weaker sandbox than the node demands, and none before the sandbox has passed its self-test.
"""

from __future__ import annotations

import asyncio
import compileall
from pathlib import Path

from tool_worker.errors import SandboxTooWeak
from tool_worker.sandbox import (
    AUTO,
    PACKAGE_ROOT,
    ContainerSettings,
    Sandbox,
    find_sandbox,
    make_sandboxes,
    require_safe,
    run_self_test,
)
from tool_worker.workspace.launch.host_folder import HostFolder


class VerifiedSandboxes:
    """The sandboxes that a node's workspaces may use.

    Args:
        demanded: `auto` (the best that works here), or a name; a weaker one is allowed only if this is `none`.
        root: Directory of the node's workspaces.
    """

    def __init__(self, demanded: str, root: Path, containers: ContainerSettings) -> None:
        self._containers = containers
        self._demanded = demanded
        self._root = root
        self._files = root / ".sandbox"
        self._known = make_sandboxes(self._files, containers)
        self._verified: dict[str, Sandbox] = {}
        self._choosing = asyncio.Lock()

    async def get(self, name: str) -> Sandbox:
        """Return a sandbox that this node allows, after its self-test, which runs once per object.

        Raises:
            SandboxError: It is too weak for the node, does not work here, or fails its self-test.
        """
        async with self._choosing:
            name = self._demanded if name == AUTO else name
            if name not in self._verified:
                chosen = await asyncio.to_thread(self._verify, name)
                self._verified[name] = self._verified[chosen.name] = chosen
            return self._verified[name]

    def get_unverified(self, name: str) -> Sandbox:
        """Return a sandbox without a test, to end workspaces that already run in it."""
        return self._known[name]

    def choose_image(self, sandbox: Sandbox, wanted: str) -> str:
        """Return the image of a workspace, or "" for a sandbox without images.

        Raises:
            WorkspaceRefused: The image is not allowed.
        """
        return self._containers.choose_image(wanted) if sandbox.capabilities.runs_images else ""

    def _verify(self, name: str) -> Sandbox:
        sandbox = find_sandbox(name, self._files, self._containers)
        sandbox.remove_dead(self._root, lambda conversation_id: HostFolder(self._root, conversation_id).is_alive)
        if sandbox.capabilities.confines_programs:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_safe(run_self_test(sandbox, self._files))
        elif self._demanded != sandbox.name:
            raise SandboxTooWeak(
                f"This node does not use the sandbox {name}.",
                remedy="Set DECKHANDS_SANDBOX=none on the node to allow it.",
            )
        # Inside the sandbox the code's directory is read-only, so hosts would compile it at every start.
        compileall.compile_dir(PACKAGE_ROOT / "tool_worker" / "host", quiet=2)
        return sandbox
