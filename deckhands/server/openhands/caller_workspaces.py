"""The workspace for a request of OpenHands' client: that of a conversation, or the caller's own.

A request below `/api/conversations/ID/` uses the workspace of that conversation. Any other request uses the workspace
of its API key: an empty one, or the directory that contains its path, if tool workers accept that directory. Such a
workspace belongs to a conversation without a task, created by the first request that needs it. So it has the properties
of any conversation: the sandbox, the node, the tenant, the record in its log.

Holds: a key reaches the workspace of another key only through a conversation that it may see, one of its tenant. A path
never leaves the workspace, because it is made relative here and the tool worker resolves it again.
Does not: touch files of the server's machine.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Annotated

from fastapi import Depends, Path

from broker.contract import ConversationCreated
from broker.coordination import list_members, serves_pool
from broker.log import Conversations
from broker.runtime import UnknownConversation, split_paths
from deckhands.client import UNNAMED_TASK, TaskSpec
from deckhands.server.conversations import submit_task
from deckhands.server.dependencies import GatewayOf, Reader, Writer
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.openhands.conversation_ids import find_conversation
from deckhands.server.problems import Problem

MOUNT = "/workspace"
"""Where programs in a sandbox see their workspace."""
MAX_PATH_BYTES = 4_096
MAX_NAME_BYTES = 255
MAX_GENERATIONS = 1_000
"""How many workspaces of one key may have been closed or archived."""
AGENT = "DummyAgent"
"""The agent of a caller's workspace: it asks no model, and it is held."""
LABELS = {"openhands": "workspace"}


@dataclass(frozen=True, slots=True)
class CallerWorkspace:
    """A workspace, and the names that its client uses for it.

    Attributes:
        directory: the directory on the tool workers' node; None for a separate workspace.
        may_open: whether a command opens it if it is not open yet.
    """

    conversation_id: str
    directory: str | None = None
    may_open: bool = False

    def to_relative(self, path: str) -> str:
        """Return a path relative to the workspace; `.` for the workspace itself.

        Raises:
            Problem: the path is not in the workspace.
        """
        return to_relative(path, [MOUNT, *filter(None, [self.directory])])


def to_relative(path: str, roots: list[str]) -> str:
    """Return a path relative to one of the names of the workspace.

    Args:
        path: relative to the workspace, or absolute.

    Raises:
        Problem: the path is invalid, or not in the workspace.
    """
    names = path.split("/")
    is_long = len(path.encode("utf-8", "replace")) > MAX_PATH_BYTES
    is_long = is_long or any(len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES for name in names)
    if is_long or ".." in names or "\\" in path or not path.isprintable():
        raise Problem(422, "bad_path", "The path cannot be used.", remedy="Write it without `..` and back-slashes.")
    plain = posixpath.normpath(path or ".")
    if not plain.startswith("/"):
        return plain
    plain = f"/{plain.lstrip('/')}"
    for root in roots:
        if PurePosixPath(plain).is_relative_to(root):
            return str(PurePosixPath(plain).relative_to(root))
    raise Problem(
        422,
        "outside_workspace",
        "The path is not in the workspace.",
        remedy=f"Name it relative to the workspace, or below {' or '.join(roots)}.",
    )


async def find_scoped(
    gateway: GatewayOf,
    principal: Writer,
    _reader: Reader,
    conversation_id: Annotated[str, Path(max_length=64, description="the UUID of a conversation, or its id")],
) -> CallerWorkspaces:
    """Return the workspace of the conversation that the path of the request names."""
    return CallerWorkspaces(gateway, principal, await find_conversation(gateway, principal, conversation_id))


async def find_own(gateway: GatewayOf, principal: Writer, _reader: Reader) -> CallerWorkspaces:
    """Return the workspaces of the request's key."""
    return CallerWorkspaces(gateway, principal)


@dataclass(frozen=True, slots=True)
class CallerWorkspaces:
    """The workspaces that a request may use.

    Attributes:
        conversation_id: the conversation that the request names; None if it names none.
    """

    gateway: Gateway
    principal: Principal
    conversation_id: str | None = None

    async def find(self, path: str = "", *, is_needed: bool = True) -> CallerWorkspace:
        """Return the workspace of a path, created if it does not exist yet.

        Args:
            path: of a file or a directory; empty for none.
            is_needed: whether to create a missing workspace.

        Raises:
            Problem: there is none, and `is_needed` is False.
        """
        if self.conversation_id is not None:
            (created,) = await self.gateway.client.log.read(self.conversation_id, until=1)
            assert isinstance(created, ConversationCreated)
            return CallerWorkspace(self.conversation_id, created.workspace.path)
        root = await self._find_root(path)
        to_relative(path, [MOUNT, *filter(None, [root])])
        return await self._find(root, is_needed=is_needed)

    async def _find(self, root: str | None, *, is_needed: bool) -> CallerWorkspace:
        for generation in range(MAX_GENERATIONS):
            found = await self._load(root, generation)
            if found is not None:
                return found
            if not await self._exists(self._name(root, generation)):
                if not is_needed:
                    raise Problem(404, "no_workspace", "The key has no workspace yet.", remedy="Run a command in it.")
                return await self._make(root, generation)
        raise Problem(409, "no_workspace", "The workspaces of the key are closed.", remedy="Use another key.")

    async def list_existing(self) -> list[CallerWorkspace]:
        """Return the existing workspaces, without creating one."""
        if self.conversation_id is not None:
            return [await self.find()]
        found = []
        for root in (None, *await self._list_roots()):
            with contextlib.suppress(Problem):
                found.append(await self._find(root, is_needed=False))
        return found

    async def _list_roots(self) -> list[str]:
        """Return the directories that tool workers accept."""
        members = await list_members(self.gateway.store)
        serving = [one.about for one in members if serves_pool(one, "bash")]
        return sorted({root for about in serving for root in split_paths(about.get("workspace_roots", ""))})

    async def _find_root(self, path: str) -> str | None:
        """Return the tool workers' directory that contains an absolute path; None if there is none."""
        if not path.startswith("/") or ".." in path.split("/"):
            return None
        plain = PurePosixPath(posixpath.normpath(path))
        roots = await self._list_roots()
        return min((root for root in roots if plain.is_relative_to(root)), key=len, default=None)

    def _name(self, root: str | None, generation: int) -> str:
        parts = (self.principal.tenant, self.principal.key.id, root or "", str(generation))
        return f"w{sha256(json.dumps(parts).encode()).hexdigest()[:31]}"

    async def _exists(self, conversation_id: str) -> bool:
        try:
            await self.gateway.tenant_of(conversation_id)
        except UnknownConversation:
            return False
        return True

    async def _load(self, root: str | None, generation: int) -> CallerWorkspace | None:
        """Return a usable workspace; None if it is missing, closed or archived."""
        name = self._name(root, generation)
        with contextlib.suppress(UnknownConversation):
            await self.gateway.require_visible(self.principal, name)
            row = await Conversations(self.gateway.store).load_row(name)
            if not row.is_closed:
                return CallerWorkspace(name, root, may_open=True)
        return None

    async def _make(self, root: str | None, generation: int) -> CallerWorkspace:
        name = self._name(root, generation)
        task = TaskSpec(
            task=UNNAMED_TASK,
            title=f"Workspace of the {self.principal.author}"[:100],
            agent=AGENT,
            headless=False,
            workspace=root,
            labels=LABELS,
        )
        own = sha256(f"openhands\n{name}".encode()).hexdigest()
        await submit_task(self.gateway, self.principal, task, own, conversation_id=name, is_held=True)
        return CallerWorkspace(name, root, may_open=True)


ScopedWorkspaces = Annotated[CallerWorkspaces, Depends(find_scoped)]
OwnWorkspaces = Annotated[CallerWorkspaces, Depends(find_own)]
