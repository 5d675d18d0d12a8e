"""Opens workspaces that are created from a repository or an archive.

    <root>/<conversation>/workspace/     appears atomically
    <root>/<conversation>/base.git/      its original state, for `Changes.since`
    <root>/<conversation>/opened.json    the result of the opening

Holds: a workspace is opened once, no matter how often it is requested. A failure leaves no files behind. The leftovers
of a killed worker are removed by the next opening of the conversation, or by the reaper.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from broker.contract import GitSource, UploadedSource
from broker.coordination import StoredFiles
from broker.log import EventLog
from broker.runtime import counted
from tool_worker.errors import SourceUnusable
from tool_worker.sandbox import Sandbox
from tool_worker.workspace.files.file_tree import TreeLimits, measure
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.staging import async_staging_in, put, remove
from tool_worker.workspace.files.unpacking import Unpacking
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.opening.repositories import Repositories, host_of, is_installed, require_git
from tool_worker.workspace.opening.repository_roots import RepositoryRoots, address_of

WORKSPACE, BASE, OPENED = "workspace", "base.git", "opened.json"


@dataclass(frozen=True, slots=True)
class Opened:
    """The result of opening a workspace; see `WorkspaceOpenedObservation`."""

    text: str
    commit: str
    files: int
    size_bytes: int


class WorkspaceOpener:
    """Opens the workspaces of one node.

    Args:
        root: Directory of the node's workspaces.
        sandbox: Returns the node's sandbox, see `Workspaces.demanded_sandbox`.
        limits: Limits of a workspace's original content.
        gate: Network access of clones; None for all public hosts.
        roots: Directories below which local repositories may be cloned; None for none.
    """

    def __init__(
        self,
        log: EventLog,
        root: Path,
        stored_files: StoredFiles,
        sandbox: Callable[[], Awaitable[Sandbox]],
        limits: TreeLimits | None = None,
        *,
        gate: EgressGate | None = None,
        roots: RepositoryRoots | None = None,
    ) -> None:
        self._log = log
        self._root = root.absolute()
        self._stored_files = stored_files
        self._sandbox = sandbox
        self._limits = limits or TreeLimits()
        self._gate = gate or EgressGate()
        self._roots = roots or RepositoryRoots()
        self._under_way: dict[str, asyncio.Task[Opened]] = {}

    async def open(self, conversation_id: str, source: GitSource | UploadedSource) -> Opened:
        """Fill a workspace if it does not exist yet. Idempotent.

        Raises:
            SourceUnusable, FileUnfit, WorkspaceTooLarge, WorkspaceUnavailable, StoreError, SandboxError: See each
                error.
            OSError: The node's disk is full, or the like.
        """
        running = self._under_way.get(conversation_id)
        if running is None:
            running = asyncio.create_task(self._open(conversation_id, source), name=f"open {conversation_id}")
            self._under_way[conversation_id] = running
            running.add_done_callback(lambda _: self._under_way.pop(conversation_id, None))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise SourceUnusable("The opening of the workspace was stopped.") from None
            running.cancel()
            raise

    def stop(self, conversation_id: str) -> None:
        """Stop an opening in progress."""
        if conversation_id in self._under_way:
            self._under_way[conversation_id].cancel()

    async def _open(self, conversation_id: str, source: GitSource | UploadedSource) -> Opened:
        folder = self._root / conversation_id
        workspace = folder / WORKSPACE
        if workspace.exists():
            return _opened(folder / OPENED)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with async_staging_in(folder) as staging:
            for name in (WORKSPACE, BASE):
                (staging / name).mkdir(mode=0o700)
            opened = await self._fill(conversation_id, source, staging / WORKSPACE, staging / BASE)
            if not workspace.exists():
                (staging / OPENED).write_text(json.dumps(asdict(opened)))
                (staging / OPENED).replace(folder / OPENED)
                if (folder / BASE).exists():
                    await asyncio.to_thread(remove, folder / BASE)
                # The workspace comes last: once it exists, its other files exist, too.
                for name in (BASE, WORKSPACE):
                    with contextlib.suppress(FileExistsError):
                        put(staging / name, folder / name)
            return opened

    async def _fill(
        self, conversation_id: str, source: GitSource | UploadedSource, workspace: Path, base: Path
    ) -> Opened:
        repositories = Repositories(await self._sandbox(), self._gate)
        commit = ""
        if isinstance(source, GitSource):
            require_git()
            local = None
            if urlsplit(source.url).scheme == "file":
                local = await asyncio.to_thread(self._roots.found, source.url, node_dir=self._root)
            else:
                self._gate.check((host_of(source),), has_network=False, is_confined=True)
            password = await self._password(conversation_id, source)
            commit = await repositories.clone(source, workspace, self._limits, password=password, local=local)
        else:
            content = await self._stored_files.fetch(conversation_id, source.parcel)
            if source.format == "bundle":
                commit = await self._clone_bundle(repositories, content, source, workspace)
            else:
                await asyncio.to_thread(self._unpack, content, source, workspace)
        if is_installed():
            await repositories.record(workspace, base)
        files, size = await asyncio.to_thread(measure, workspace, self._limits)
        at = f" at commit {commit[:12]}" if commit else ""
        held = f"{counted(files, 'file')}, {counted(size, 'byte')}"
        return Opened(f"The workspace holds {source.title}{at}: {held}.", commit, files, size)

    async def _password(self, conversation_id: str, source: GitSource) -> str:
        if not source.secret:
            return ""
        held = self._log.secrets
        values = await held.wanted_by(conversation_id, source.secret) if held is not None else {}
        if source.secret not in values:
            raise SourceUnusable(
                f"The conversation has no secret {source.secret}, which the repository needs.",
                remedy=f"Add it by `deckhands secret {conversation_id} {source.secret}`, and resume.",
            )
        return values[source.secret]

    async def _clone_bundle(
        self, repositories: Repositories, content: bytes, source: UploadedSource, workspace: Path
    ) -> str:
        require_git()
        file = workspace.with_name("source.bundle")
        await asyncio.to_thread(file.write_bytes, content)
        cloned = GitSource(url=address_of(file), ref=source.ref)
        try:
            commit = await repositories.clone(cloned, workspace, self._limits, address=source.name, local=file)
        except SourceUnusable as error:
            raise SourceUnusable(error.message.replace(cloned.url, source.name)) from error
        finally:
            file.unlink()
        if not commit:
            raise SourceUnusable(f"{source.name} cannot be cloned: there is no commit in it.")
        return commit

    def _unpack(self, content: bytes, source: UploadedSource, workspace: Path) -> None:
        assert source.format != "bundle"
        with Directory(workspace) as directory:
            Unpacking(directory, self._limits).unpack(content, source.format)


def _opened(file: Path) -> Opened:
    try:
        return Opened(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return Opened("The workspace is open.", "", 0, 0)
