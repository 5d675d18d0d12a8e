"""Opens workspaces that are created from a repository or an archive.

    <root>/<conversation>/workspace/     appears atomically
    <root>/<conversation>/base.git/      its original state, for `Changes.compare`
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
from broker.runtime import format_count
from tool_worker.errors import SourceUnusable
from tool_worker.sandbox import Sandbox
from tool_worker.workspace.files.file_tree import TreeLimits, measure
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.staging import create_staging_async, move_into_place, remove_tree
from tool_worker.workspace.files.unpacking import Unpacking
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.opening.repositories import (
    RepositoryRoots,
    SandboxedGit,
    is_git_installed,
    parse_host,
    require_git,
    to_git_address,
)

WORKSPACE, BASE, OPENED = "workspace", "base.git", "opened.json"


@dataclass(frozen=True, slots=True)
class OpenResult:
    """The result of opening a workspace; see `WorkspaceOpenedObservation`."""

    text: str
    commit: str
    files: int
    size_bytes: int


class WorkspaceOpener:
    """Opens the workspaces of one node.

    Args:
        root: Directory of the node's workspaces.
        sandbox: Returns the node's sandbox, see `Workspaces.get_demanded_sandbox`.
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
        self._in_flight: dict[str, asyncio.Task[OpenResult]] = {}

    async def open(self, conversation_id: str, source: GitSource | UploadedSource) -> OpenResult:
        """Fill a workspace if it does not exist yet. Idempotent.

        Raises:
            SourceUnusable, FileUnfit, WorkspaceTooLarge, WorkspaceUnavailable, StoreError, SandboxError: See each
                error.
            OSError: The node's disk is full, or the like.
        """
        running = self._in_flight.get(conversation_id)
        if running is None:
            running = asyncio.create_task(self._open(conversation_id, source), name=f"open {conversation_id}")
            self._in_flight[conversation_id] = running
            running.add_done_callback(lambda _: self._in_flight.pop(conversation_id, None))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise SourceUnusable("The opening of the workspace was stopped.") from None
            running.cancel()
            raise

    def stop(self, conversation_id: str) -> None:
        """Stop an opening in progress."""
        if conversation_id in self._in_flight:
            self._in_flight[conversation_id].cancel()

    async def _open(self, conversation_id: str, source: GitSource | UploadedSource) -> OpenResult:
        folder = self._root / conversation_id
        workspace = folder / WORKSPACE
        if workspace.exists():
            return _read_result(folder / OPENED)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with create_staging_async(folder) as staging:
            for name in (WORKSPACE, BASE):
                (staging / name).mkdir(mode=0o700)
            opened = await self._fill(conversation_id, source, staging / WORKSPACE, staging / BASE)
            if not workspace.exists():
                (staging / OPENED).write_text(json.dumps(asdict(opened)))
                (staging / OPENED).replace(folder / OPENED)
                if (folder / BASE).exists():
                    await asyncio.to_thread(remove_tree, folder / BASE)
                # The workspace comes last: once it exists, its other files exist, too.
                for name in (BASE, WORKSPACE):
                    with contextlib.suppress(FileExistsError):
                        move_into_place(staging / name, folder / name)
            return opened

    async def _fill(
        self, conversation_id: str, source: GitSource | UploadedSource, workspace: Path, base: Path
    ) -> OpenResult:
        repositories = SandboxedGit(await self._sandbox(), self._gate)
        commit = ""
        if isinstance(source, GitSource):
            require_git()
            local = None
            if urlsplit(source.url).scheme == "file":
                local = await asyncio.to_thread(self._roots.find_repository, source.url, node_dir=self._root)
            else:
                self._gate.check((parse_host(source),), has_network=False, is_confined=True)
            password = await self._find_password(conversation_id, source)
            commit = await repositories.clone(source, workspace, self._limits, password=password, local=local)
        else:
            content = await self._stored_files.fetch(conversation_id, source.parcel)
            if source.format == "bundle":
                commit = await self._clone_bundle(repositories, content, source, workspace)
            else:
                await asyncio.to_thread(self._unpack, content, source, workspace)
        if is_git_installed():
            await repositories.record(workspace, base)
        files, size = await asyncio.to_thread(measure, workspace, self._limits)
        at = f" at commit {commit[:12]}" if commit else ""
        held = f"{format_count(files, 'file')}, {format_count(size, 'byte')}"
        return OpenResult(f"The workspace holds {source.title}{at}: {held}.", commit, files, size)

    async def _find_password(self, conversation_id: str, source: GitSource) -> str:
        if not source.secret:
            return ""
        held = self._log.secrets
        values = await held.find_named(conversation_id, source.secret) if held is not None else {}
        if source.secret not in values:
            raise SourceUnusable(
                f"The conversation has no secret {source.secret}, which the repository needs.",
                remedy=f"Add it by `deckhands secret {conversation_id} {source.secret}`, and resume.",
            )
        return values[source.secret]

    async def _clone_bundle(
        self, repositories: SandboxedGit, content: bytes, source: UploadedSource, workspace: Path
    ) -> str:
        require_git()
        file = workspace.with_name("source.bundle")
        await asyncio.to_thread(file.write_bytes, content)
        cloned = GitSource(url=to_git_address(file), ref=source.ref)
        try:
            commit = await repositories.clone(cloned, workspace, self._limits, address=source.name, local=file)
        except SourceUnusable as error:
            raise SourceUnusable(error.message.replace(cloned.url, source.name)) from error
        finally:
            file.unlink()
        if not commit:
            raise SourceUnusable(f"{source.name} cannot be cloned: it has no commit.")
        return commit

    def _unpack(self, content: bytes, source: UploadedSource, workspace: Path) -> None:
        assert source.format != "bundle"
        with Directory(workspace) as directory:
            Unpacking(directory, self._limits).unpack(content, source.format)


def _read_result(file: Path) -> OpenResult:
    try:
        return OpenResult(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return OpenResult("The workspace is open.", "", 0, 0)
