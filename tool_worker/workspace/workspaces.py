"""The workspaces of one node: each is a directory and the host process that works in it.

Holds:
    - A conversation has one host, even if several tool workers of the node open it at once.
    - A workspace keeps its directory, sandbox and network for life. A missing directory is an error; it is never
      silently replaced by an empty one. If the directory is swapped while it is opened, the host detects this and ends
      before any command runs.
Does not: delete directories or journals; `close` ends processes only.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath

from broker.contract import WorkspaceSpec
from broker.runtime import check_conversation_id
from tool_worker.errors import HostLost, SandboxError, WorkspaceUnavailable, wait_to_completion
from tool_worker.sandbox import AUTO, ContainerSettings, ControlGroups, ResourceLimits, Sandbox
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.launch.host_connection import HostConnection
from tool_worker.workspace.launch.host_folder import MOUNT_AT, Binding, HostFolder
from tool_worker.workspace.launch.host_launch import (
    end_host,
    interrupt_host,
    limit_host,
    limit_while_starting,
    reap,
    start_host,
    wait_until_dead,
)
from tool_worker.workspace.launch.host_plan import GitIdentity, HostPlans
from tool_worker.workspace.launch.session_programs import SessionPrograms
from tool_worker.workspace.launch.start_slots import StartSlots
from tool_worker.workspace.launch.verified_sandboxes import VerifiedSandboxes
from tool_worker.workspace.named_directories import NamedDirectories, make_unwritable_notice
from tool_worker.workspace.node_capacity import NodeCapacity, free_capacity
from tool_worker.workspace.open_workspace import OPEN_ATTEMPTS, OpenWorkspace

SERVED_NO_CHANGE_TIMEOUT_SECONDS = 10.0
ENDING_LIMIT_SECONDS = 10.0
DETACH_SECONDS = 60.0
SESSION_IDLE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class WorkspaceState:
    """One workspace on this node."""

    conversation_id: str
    path: str
    sandbox: str
    is_alive: bool


@dataclass(slots=True)
class _Attached:
    """This worker's connection to a workspace, and the lock for opening and closing it."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: HostConnection | None = None
    binding: Binding | None = None
    notice: str = ""


class Workspaces:
    """Opens and closes the workspaces of a node; one object serves all conversations of a tool worker.

    Args:
        root: Directory of the node's workspaces. Tool workers of one node share it.
        sandbox: The sandbox that the node demands: `auto` (the best that works here), `bwrap`, `docker`, or `none`. A
            conversation may ask for a weaker one only if this is `none`.
        ttl_seconds: How long a host lives while no worker is attached and no action runs.
        idle_seconds: How long a host lives while nothing runs in it, not even a background job.
        no_change_timeout_seconds: A command is answered after this long without output.
        environment: Variables of every shell; they override those of the sandbox.
        search_path: `PATH` of shells without a sandbox; None for the system's.
        programs: The session programs of every workspace, and the paths that their sandbox must show.
        limits: Limits of every shell and its programs.
        gate: The network access that workspaces may get.
        containers: Settings of the `docker` sandbox.
        capacity: Free resources of the machine. If they are scarce, sessions end before another one starts.
        named: The directories that conversations may name.
        git_identity: Git's author where no other one is configured.
    """

    def __init__(
        self,
        root: Path,
        *,
        sandbox: str = AUTO,
        ttl_seconds: float = 3600.0,
        idle_seconds: float = SESSION_IDLE_SECONDS,
        no_change_timeout_seconds: float = SERVED_NO_CHANGE_TIMEOUT_SECONDS,
        environment: Mapping[str, str] | None = None,
        search_path: str | None = None,
        programs: SessionPrograms | None = None,
        limits: ResourceLimits | None = None,
        gate: EgressGate | None = None,
        containers: ContainerSettings | None = None,
        capacity: NodeCapacity | None = None,
        named: NamedDirectories | None = None,
        git_identity: GitIdentity | None = None,
    ) -> None:
        self._root = root.absolute()
        self._bindings = Bindings(self._root, named or NamedDirectories())
        self._limits = limits or ResourceLimits()
        self._gate = gate or EgressGate()
        self._capacity = capacity or NodeCapacity()
        found = ControlGroups.find()
        self._groups = found if isinstance(found, ControlGroups) else None
        self._plans = HostPlans(
            self._root,
            ttl_seconds=ttl_seconds,
            idle_seconds=idle_seconds,
            no_change_timeout_seconds=no_change_timeout_seconds,
            environment=environment or {},
            search_path=search_path,
            programs=programs or SessionPrograms(),
            limits=self._limits,
            has_control_groups=self._groups is not None,
            git_identity=git_identity or GitIdentity(),
        )
        self._attached: dict[str, _Attached] = {}
        self._sandboxes = VerifiedSandboxes(sandbox, self._root, containers or ContainerSettings())
        self._started: set[int] = set()
        self._start_slots = StartSlots(self._root)
        self._freeing_capacity = asyncio.Lock()
        self._is_closed = False

    async def open(
        self,
        conversation_id: str,
        spec: WorkspaceSpec | None = None,
        *,
        tenant: Callable[[], Awaitable[str]] | None = None,
    ) -> OpenWorkspace:
        """Open a workspace; starts its host if none answers.

        Args:
            spec: Requirements of the conversation. The image is used only the first time; the source is for
                `WorkspaceOpener`. None for an existing workspace as it is, or for the defaults the first time.
            tenant: Returns the tenant of the conversation; called only the first time, and only for a named directory.

        Raises:
            WorkspaceLost: The directory does not exist.
            WorkspaceRefused: The directory may not be a workspace.
            WorkspaceConflict: The workspace was first opened with another specification.
            SandboxError: The sandbox is too weak for the node, does not work here, or fails its self-test.
            EgressRefused: The specification asks for more network access than the node allows.
            WorkspaceUnavailable: No host could be started, or `aclose` was called; retryable.
            UsageError: The conversation id is invalid.
        """
        attached = self._attached.setdefault(check_conversation_id(conversation_id), _Attached())
        async with attached.turn:
            if self._is_closed:
                raise WorkspaceUnavailable(f"The workspace of {conversation_id} is left to other tool workers.")
            if attached.connection is not None and not attached.connection.is_open:
                await attached.connection.detach()
                attached.connection = None
            if attached.binding is not None and spec is not None:
                attached.binding.check_spec(spec)
            if attached.connection is None:
                folder = HostFolder(self._root, conversation_id)
                folder.create()
                async with folder.hold_opening_lock():
                    attached.binding, directory = await self._bind(folder, spec, tenant)
                    with directory:
                        attached.notice = self._make_notice(folder, attached.binding, directory)
                        attached.connection = await self._attach(folder, attached.binding, directory)
            binding = attached.binding
            connection = attached.connection
            assert binding is not None
            if binding.allow:
                folder = HostFolder(self._root, conversation_id)
                proxy = await self._gate.ensure_proxy(folder, binding.allow, connection)
                if proxy is not None:
                    self._started.add(proxy)
            return OpenWorkspace(
                conversation_id,
                connection,
                lambda: self._reopen(conversation_id),
                is_confined=self._sandboxes.get_unverified(binding.sandbox).capabilities.confines_programs,
            )

    def take_notice(self, conversation_id: str) -> str:
        """Return the notice for the model about an attached workspace and clear it; "" if there is none."""
        attached = self._attached.setdefault(conversation_id, _Attached())
        notice, attached.notice = attached.notice, ""
        return notice

    def _make_notice(self, folder: HostFolder, binding: Binding, directory: Directory) -> str:
        can = self._sandboxes.get_unverified(binding.sandbox).capabilities
        if not binding.is_named(folder.workspace) or can.runs_images:  # a container runs as the owner
            return ""
        return make_unwritable_notice(directory, binding.path, is_confined=can.confines_programs)

    async def get_demanded_sandbox(self) -> Sandbox:
        """Return the sandbox of conversations that name none, after its self-test. Idempotent.

        Raises:
            SandboxError: It does not work here or fails its self-test; opening a workspace would fail for the same
                reason.
        """
        return await self._sandboxes.get(AUTO)

    async def sees_mounts(self, sandbox: str) -> bool:
        """Return whether the programs of a sandbox see the mounts of this process; False if it cannot be used."""
        try:
            return (await self._sandboxes.get(sandbox)).capabilities.inherits_descriptors
        except SandboxError:
            return False

    async def interrupt(self, conversation_id: str, action_id: int | None) -> bool:
        """Stop an action; without an id, the shell's current command. Return whether anything ran. Starts no host.

        Raises:
            OSError, HostLost: The host does not answer.
        """
        return await interrupt_host(HostFolder(self._root, check_conversation_id(conversation_id)), action_id)

    async def close(self, conversation_id: str) -> None:
        """End the host and all processes of the workspace; on return, none of them is left. Idempotent.

        Raises:
            WorkspaceUnavailable: A killed process has not ended yet; retryable.
        """
        folder = HostFolder(self._root, check_conversation_id(conversation_id))
        attached = self._attached.setdefault(conversation_id, _Attached())
        async with attached.turn:
            if folder.exists:
                async with folder.hold_opening_lock():
                    binding = folder.read_binding()
                    if binding is not None:
                        await end_host(folder, self._sandboxes.get_unverified(binding.sandbox), binding.host_id)
            # Last: the host uses the connection to answer pending actions.
            if attached.connection is not None:
                await attached.connection.detach()
                attached.connection = None
        await self._reap()

    def list(self) -> tuple[WorkspaceState, ...]:
        """Return all workspaces that were ever opened on this node, sorted by conversation id."""
        return tuple(self._iter_states())

    async def detach_idle(self, idle_seconds: float = DETACH_SECONDS) -> None:
        """Detach from hosts that were idle for this long; a host's time to live starts when it is detached."""
        await self._reap()
        now = asyncio.get_running_loop().time()
        for attached in list(self._attached.values()):
            connection = attached.connection
            if connection is None or attached.turn.locked() or not connection.is_idle:
                continue
            if now - connection.last_used >= idle_seconds:
                attached.connection = None
                await connection.detach()

    async def aclose(self) -> None:
        """Detach from all hosts, which keep running, and refuse further opens. Idempotent."""
        self._is_closed = True
        for attached in self._attached.values():
            if attached.connection is not None:
                await attached.connection.detach()
                attached.connection = None
        await self._reap()

    def _iter_states(self) -> Iterator[WorkspaceState]:
        if not self._root.is_dir():
            return
        for entry in sorted(self._root.iterdir()):
            folder = HostFolder(self._root, entry.name)
            binding = folder.read_binding()
            if binding is not None:
                yield WorkspaceState(entry.name, binding.path, binding.sandbox, folder.is_alive)

    async def _reopen(self, conversation_id: str) -> HostConnection:
        return (await self.open(conversation_id)).connection

    async def _bind(
        self, folder: HostFolder, spec: WorkspaceSpec | None, tenant: Callable[[], Awaitable[str]] | None
    ) -> tuple[Binding, Directory]:
        """Return the binding of a workspace, created if new and checked otherwise, and its opened directory."""
        binding = folder.read_binding()
        is_bound = binding is not None
        if binding is None:
            binding = await self._new_binding(folder, spec or WorkspaceSpec())
        elif spec is not None:
            binding.check_spec(spec)
        is_whose_unknown = binding.tenant is None and binding.is_named(folder.workspace) and tenant is not None
        if is_whose_unknown:
            assert tenant is not None
            binding = replace(binding, tenant=await tenant())
        open_directory = self._bindings.open if is_bound and not is_whose_unknown else self._bindings.bind
        return binding, await _open_in_thread(partial(open_directory, folder, binding))

    async def _new_binding(self, folder: HostFolder, spec: WorkspaceSpec) -> Binding:
        chosen = await self._sandboxes.get(spec.sandbox)
        image = self._sandboxes.choose_image(chosen, spec.image)
        is_confined = chosen.capabilities.confines_programs
        self._gate.check(spec.allow, has_network=spec.network, is_confined=is_confined)
        if spec.path is None:
            folder.workspace.mkdir(mode=0o700, exist_ok=True)
        directory = str(folder.workspace if spec.path is None else PurePosixPath(spec.path))
        return Binding(
            path=directory,
            # Our own directories have the same path on every node, so that a conversation can move to another node. A
            # user's directory keeps its path: virtual environments and build trees contain it.
            mount_at=MOUNT_AT if spec.path is None and is_confined else directory,
            sandbox=chosen.name,
            has_network=spec.network,
            host_id=secrets.token_hex(16),
            allow=spec.allow,
            image=image,
        )

    async def _attach(self, folder: HostFolder, binding: Binding, directory: Directory) -> HostConnection:
        """Connect to the live host, or start one; the caller holds `folder.opening()`."""
        failure: Exception | None = None
        for _ in range(OPEN_ATTEMPTS):
            alive_fd = folder.take_alive_lock()
            try:
                if alive_fd is None:
                    return await self._connect(folder, binding)
                return await self._start(folder, binding, directory, alive_fd)
            except (OSError, HostLost) as error:
                # A host that is ending still holds its lock but accepts no connections.
                failure = error
                if not await wait_until_dead(folder, ENDING_LIMIT_SECONDS):
                    break
        # if this fails, its error is more specific
        (await _open_in_thread(partial(self._bindings.open, folder, binding))).close()
        text = f"The host of {folder.conversation_id} cannot be reached: {failure} {folder.read_log_tail()}"
        raise WorkspaceUnavailable(text.strip()) from failure

    async def _connect(self, folder: HostFolder, binding: Binding) -> HostConnection:
        """Connect to a host, and put it into its control group if that is not done yet."""
        connection = await HostConnection.attach(folder.conversation_id, folder.connect())
        try:
            await asyncio.to_thread(self._limit, folder, binding)
        except BaseException:
            await connection.detach()
            raise
        return connection

    def _limit(self, folder: HostFolder, binding: Binding) -> None:
        if (
            self._groups is not None
            and self._sandboxes.get_unverified(binding.sandbox).capabilities.uses_control_groups
        ):
            limit_host(folder, self._groups, binding.host_id, self._limits)

    async def _start(self, folder: HostFolder, binding: Binding, directory: Directory, alive_fd: int) -> HostConnection:
        """Start a host, pass it the lock and connect to it; closes our descriptor of the lock.

        A container or a pod takes no slot: its start waits for its engine, longer than it uses this node's processors.
        """
        async with AsyncExitStack() as held:
            with ExitStack() as lock:
                lock.callback(os.close, alive_fd)
                sandbox = await self._sandboxes.get(binding.sandbox)
                if sandbox.capabilities.inherits_descriptors:
                    await held.enter_async_context(self._start_slots.hold())
                async with self._freeing_capacity:
                    if (shortage := self._capacity.find_shortage()) is not None:
                        await free_capacity(
                            (HostFolder(self._root, entry.name) for entry in self._root.iterdir()), shortage
                        )
                await self._reap()
                enclosure, configuration = self._plans.plan(binding, folder, directory, sandbox)
                if folder.read_main_pid() is not None:
                    await asyncio.to_thread(sandbox.kill_stragglers, binding.host_id)
                starting = asyncio.ensure_future(
                    asyncio.to_thread(start_host, folder, sandbox, enclosure, configuration, alive_fd)
                )
                starting.add_done_callback(partial(self._note_start, lock.pop_all()))
                await wait_to_completion(starting)
            async with limit_while_starting(partial(self._limit, folder, binding)):
                return await self._connect(folder, binding)

    def _note_start(self, lock: ExitStack, starting: asyncio.Future[int]) -> None:
        """Remember the process, even if its start was cancelled meanwhile, and close our descriptor of the lock."""
        lock.close()
        if not starting.cancelled() and starting.exception() is None:
            self._started.add(starting.result())

    async def _reap(self) -> None:
        left = {pid for pid in self._started if not reap(pid)}
        have_ended = left != self._started
        self._started = left
        if have_ended and self._groups is not None:
            await asyncio.to_thread(self._groups.drop_empty)


async def _open_in_thread(open_directory: Callable[[], Directory]) -> Directory:
    opening = asyncio.ensure_future(asyncio.to_thread(open_directory))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        # The thread cannot be cancelled, so its directory is closed once it is open.
        opening.add_done_callback(_close_result)
        raise


def _close_result(opening: asyncio.Future[Directory]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
