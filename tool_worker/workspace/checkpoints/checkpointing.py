"""Decides when workspaces are saved, and restores them on a node that does not have them.

Holds:
    - A workspace that is not on this node is restored, or reported as lost. The first action that needs it does not
      run; its observation reports the state of the files. No action runs in an empty or outdated directory without
      that notice. A fork that starts with exactly the files and the shell of its event needs none.
    - A workspace with a layer is mounted while it is saved.
    - One worker at a time saves a workspace; saving does not block other conversations.
Does not: save directories that users named by path.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from broker.contract import GitSource, UploadedSource, WorkspaceUse
from broker.log import EventLog
from broker.runtime import CorruptEntry, DataLocked, StoreMisconfigured, is_conversation_id
from broker.secrets import SecretsLocked
from tool_worker.errors import CheckpointCorrupt, CheckpointsUnavailable, SourceUnusable, WorkspaceError
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoint, Checkpoints, SavedFiles
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.staging import create_staging_async
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import capture_shell
from tool_worker.workspace.launch.shell_state import ShellState
from tool_worker.workspace.layers import (
    CopyMethod,
    LayerLost,
    Layers,
    attach,
    detach,
    is_present,
    move_away,
    open_workspace,
)
from tool_worker.workspace.opening.workspace_opener import BASE, WorkspaceOpener

NOTHING_SAVED = "The node of this workspace saves no checkpoints."
REMEMBERED_WORKSPACES = 500
SHELL_LIMIT_SECONDS = 60.0
MOVES = "moves"
SAVING = "saving.lock"
NOTE = "recovery.json"

GONE = (
    "Later changes, everything in the home (installed packages, settings, keys) and in /tmp, shell variables and "
    "running programs are lost: install again what you need. The action was not run."
)
RESTORED = "The files of this workspace were restored from {which}. {gone}"
OWN = "the last checkpoint"
OWN_AT = "the last checkpoint, which was saved after event {event}"
OF_SOURCE = (
    "a checkpoint of the conversation that this one was forked from. It does not say when it was saved, and may be "
    "later than the fork"
)
BEFORE_FORK = (
    "a checkpoint of the conversation that this one was forked from, as they were after event {event}; the fork is at "
    "event {at}"
)
AFTER_FORK = (
    "a checkpoint of the conversation that this one was forked from, as they were after event {event}. That is later "
    "than the fork at event {at}: they contain changes that this conversation has not made"
)
REOPENED = (
    "The files of this workspace were lost, and there is no checkpoint of them. The workspace was set up again from "
    f"its original source. {GONE}"
)
LOST = (
    "The files of this workspace are lost, and there is no checkpoint of them. The workspace, its home and "
    "/tmp are empty now. The action was not run."
)
OUT_OF_REACH = "The files of this workspace cannot be restored now ({error}). The action was not run: try again."

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _SaveState:
    """The state of a workspace between two checkpoints."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    files: SavedFiles = field(default_factory=SavedFiles)
    changes: int = 0


@dataclass(frozen=True, slots=True)
class _Recovery:
    """What is known about an action whose workspace is not on this node.

    Attributes:
        may_be_unchanged: Whether no earlier workspace of the conversation is known to be lost.
        may_mount: Whether the programs of the workspace see mounts of this process.
    """

    conversation_id: str
    action_id: int
    fingerprint: str
    source: GitSource | UploadedSource | None
    may_be_unchanged: bool
    may_mount: bool


class Checkpointing:
    """Saves and restores the workspaces of one node.

    Args:
        root: Directory of the node's workspaces.
        checkpoints: Storage of checkpoints; if None, nothing is saved, and workspaces not on this node are lost.
        every: Number of actions with possible file changes between two checkpoints.
        bases: Storage of the workspaces' original states; None to save none.
        opener: Opens workspaces without a checkpoint again from their source; None to report them as lost.
        layers: The layers of the node; by default, those below `root`.
    """

    def __init__(
        self,
        log: EventLog,
        root: Path,
        checkpoints: Checkpoints | None,
        *,
        every: int,
        bases: Checkpoints | None = None,
        opener: WorkspaceOpener | None = None,
        layers: Layers | None = None,
    ) -> None:
        self._log = log
        self._root = root
        self._checkpoints = checkpoints
        self._bases = bases
        self._opener = opener
        self._every = every
        self._layers = layers or Layers(root)
        self._states: OrderedDict[str, _SaveState] = OrderedDict()

    async def recover(
        self,
        conversation_id: str,
        action_id: int,
        source: GitSource | UploadedSource | None = None,
        *,
        fingerprint: str = "",
        moves: int = 0,
        may_mount: bool = True,
    ) -> str | None:
        """Make sure that a workspace is in the state that its conversation expects.

        Args:
            source: Source of the workspace.
            fingerprint: Fingerprint of the action, see `compute_fingerprint`.
            moves: See `has_moved_away`.
            may_mount: Whether the programs of the workspace see mounts of this process.

        Returns:
            None if the workspace is as expected; else the text that answers the action instead of running it. Another
            call for the same action returns the same text; later actions get None. Idempotent.

        Raises:
            CheckpointsUnavailable: The checkpoint cannot be read or restored now; the next action tries again.
            WorkspaceUnavailable: The workspace has a layer that cannot be mounted.
        """
        directory = self._directory(conversation_id)
        recovery = _Recovery(conversation_id, action_id, fingerprint, source, moves == 0, may_mount)
        try:
            await asyncio.to_thread(attach, directory.parent)
        except LayerLost as error:
            recovery = replace(recovery, may_be_unchanged=False)
            _log.error("cannot use the workspace of %s: %s", conversation_id, error)
            await self.discard(conversation_id)
        if directory.exists():
            return self._read_note(recovery)
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with create_staging_async(directory.parent) as removed:
            _move_leftovers(HostFolder(self._root, conversation_id), removed)
        directory.with_name(MOVES).write_text(str(moves))
        notice = await self._recover_files(recovery)
        # From now on, this is an ordinary workspace, even if it is empty.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return notice

    async def has_moved_away(self, conversation_id: str, moves: int) -> bool:
        """Return whether the conversation has continued on another node since it last used this workspace.

        Args:
            moves: How often the conversation was moved away from a lost node.
        """
        # If the workspace has moved more often than the store knows, the store has lost its tail, and this is the
        # latest.
        is_here = is_present(self._root / conversation_id)
        return is_here and _read_moves(self._directory(conversation_id)) < moves

    async def discard(self, conversation_id: str) -> None:
        """Remove a workspace that has continued on another node. Its processes must have ended."""
        directory = self._directory(conversation_id)
        async with create_staging_async(directory.parent) as removed:
            await asyncio.to_thread(move_away, directory.parent, removed)
            _move_leftovers(HostFolder(self._root, conversation_id), removed)
            self._states.pop(conversation_id, None)

    async def _recover_files(self, recovery: _Recovery) -> str | None:
        conversation_id = recovery.conversation_id
        source_id, at = await self._find_fork_source(conversation_id)
        try:
            saved = await self._find(conversation_id, source_id, at)
            if saved is not None:
                is_exact = await self._is_exact(recovery, saved, at)
                restored = None if is_exact else make_restored_notice(saved, at)
                # Written before the files: after a crash, the next worker of this action gives the same notice.
                self._write_note(recovery, restored)
                HostFolder(self._root, conversation_id).write_shell(saved.shell_state if is_exact else None)
                if await self._restore(recovery, saved):
                    return restored
        except CheckpointsUnavailable:
            if source_id is not None or await self._log.is_workspace_used(conversation_id):
                raise
        if recovery.source is not None and self._opener is not None:
            self._write_note(recovery, REOPENED)
            try:
                await self._opener.open(conversation_id, recovery.source)
            except (OSError, WorkspaceError, CorruptEntry) as error:
                _log.error("cannot reopen the workspace of %s: %s", conversation_id, error)
            else:
                return REOPENED
        notice = LOST if await self._log.is_workspace_used(conversation_id) else None
        self._write_note(recovery, notice)
        return notice

    async def save_original(self, conversation_id: str) -> None:
        """Save a newly opened workspace and its original state. A failure is logged."""
        if self._checkpoints is None:
            return
        base = self._directory(conversation_id).with_name(BASE)
        try:
            await self.save(conversation_id)
            if self._bases is not None and base.is_dir():
                await asyncio.to_thread(self._bases.save, conversation_id, base, SavedFiles())
        except (OSError, WorkspaceError) as error:
            _log.warning("cannot save the workspace of %s: %s", conversation_id, error)

    async def find_original(self, conversation_id: str) -> Path | None:
        """Return the path of a workspace's original state, restored if needed; None if it is not known.

        Raises:
            OSError, CheckpointCorrupt: It was saved and cannot be restored.
        """
        base = self._directory(conversation_id).with_name(BASE)
        if not base.is_dir() and self._bases is not None:
            source_id, _ = await self._find_fork_source(conversation_id)
            with suppress(FileExistsError):
                if await asyncio.to_thread(_find_checkpoint, self._bases, conversation_id, source_id, None) is not None:
                    await asyncio.to_thread(self._bases.restore, conversation_id, base)
        return base if base.is_dir() else None

    async def _find_fork_source(self, conversation_id: str) -> tuple[str | None, int | None]:
        """Return the conversation that this one was forked from, and the event of the fork."""
        # Either `<conversation>@<event>` or the conversation alone; an imported trajectory has another form.
        source_id, _, at = (await self._log.load_origin(conversation_id)).partition("@")
        if not is_conversation_id(source_id):
            return None, None
        return source_id, int(at) if at.isascii() and at.isdigit() else None

    async def has_source(self, conversation_id: str) -> bool:
        """Return whether a workspace was created from a source."""
        return (await self._log.load_workspace(conversation_id)).source is not None

    async def save_upload(self, conversation_id: str) -> None:
        """Save a workspace after a change that no event of the log shows: a fork would lack it. A failure is logged."""
        self._get_state(conversation_id).changes += 1
        await self._try_to_save(conversation_id)

    async def note_result(self, conversation_id: str, use: WorkspaceUse) -> None:
        """Count an observation with a possible change, and save the workspace when a checkpoint is due.

        A failure is logged: the actions themselves have succeeded, and the next one tries again.
        """
        if self._checkpoints is None or use is WorkspaceUse.NONE:
            return
        HostFolder(self._root, conversation_id).drop_used_shell()
        if use is not WorkspaceUse.CHANGED:
            return
        kept = self._get_state(conversation_id)
        kept.changes += 1
        if kept.changes < self._every or kept.turn.locked():
            return
        await self._try_to_save(conversation_id)

    async def _try_to_save(self, conversation_id: str) -> None:
        try:
            await self.save(conversation_id)
        except (OSError, WorkspaceError) as error:
            _log.warning("cannot save the workspace of %s: %s", conversation_id, error)

    async def save(self, conversation_id: str) -> Checkpoint | None:
        """Save a workspace now. Returns None if it is a named directory or if nothing is saved here.

        Raises:
            WorkspaceTooLarge, OSError: See `Checkpoints.save`.
        """
        directory = self._directory(conversation_id)
        folder = HostFolder(self._root, conversation_id)
        if self._checkpoints is None or not is_present(directory.parent):
            return None
        kept = self._get_state(conversation_id)
        async with kept.turn:
            changes = kept.changes
            event = await self._log.load_last_id(conversation_id)
            shell = await self._capture_shell(conversation_id)
            loop = asyncio.get_running_loop()

            def get_shell() -> ShellState | None:
                """Return the state of the shell if no action has started while the files were read."""
                if shell is None:
                    return None
                seen = asyncio.run_coroutine_threadsafe(capture_shell(folder), loop).result(SHELL_LIMIT_SECONDS)
                return replace(shell, event=event) if seen is not None and seen.newest == shell.newest else None

            save = partial(self._checkpoints.save, conversation_id, known=kept.files, event=event, get_shell=get_shell)
            saved = await asyncio.to_thread(_save_locked, directory.parent, save)
            kept.changes -= changes
        return saved

    async def find_saved(self, conversation_id: str, at: int | None = None) -> tuple[Checkpoints, list[int]]:
        """Return the storage, and the events of a conversation's checkpoints; with `at`, those up to it.

        Raises:
            SourceUnusable: Nothing is saved here, or not at or before the event.
            CheckpointsUnavailable: The storage cannot be read.
        """
        if self._checkpoints is None:
            raise SourceUnusable(NOTHING_SAVED, remedy="Start its tool workers with DECKHANDS_CHECKPOINTS.")
        kept = await asyncio.to_thread(self._checkpoints.list_events, conversation_id)
        found = [event for event in kept if at is None or event <= at]
        if at is not None and not found:
            first = f"the first are saved after event {kept[0]}" if kept else "there is no checkpoint of its workspace"
            raise SourceUnusable(
                f"The conversation has no files as of event {at}: {first}.", remedy="Choose a later event."
            )
        return self._checkpoints, found

    async def save_last(self, conversation_id: str) -> None:
        """Save a workspace whose processes have ended, unless it continued on another node. A failure is logged.

        It is saved even without counted changes, because other workers of the node may have changed it.
        """
        if self._checkpoints is None or await self.has_moved_away(
            conversation_id, await self._log.count_moves(conversation_id)
        ):
            return
        folder = HostFolder(self._root, conversation_id)
        try:
            await self.save(conversation_id)
            if folder.exists:
                async with folder.hold_opening_lock():
                    if not folder.is_alive:  # a sandbox would keep its own mount of it
                        await asyncio.to_thread(detach, self._root / conversation_id)
        except (OSError, WorkspaceError) as error:
            _log.warning("cannot save the workspace of %s: %s", conversation_id, error)

    async def _find(self, conversation_id: str, source_id: str | None, at: int | None) -> Checkpoint | None:
        """Find the checkpoint of a workspace; a fork first gets a checkpoint of its source."""
        if self._checkpoints is None:
            return None
        try:
            return await asyncio.to_thread(_find_checkpoint, self._checkpoints, conversation_id, source_id, at)
        except (FileNotFoundError, CheckpointCorrupt) as error:
            _log.error("cannot restore the workspace of %s: %s", conversation_id, error)
            return None
        except (OSError, CheckpointsUnavailable) as error:
            raise CheckpointsUnavailable(OUT_OF_REACH.format(error=error)) from error

    async def _is_exact(self, recovery: _Recovery, saved: Checkpoint, at: int | None) -> bool:
        """Return whether a fork at this event has the files and the shell of its checkpoint.

        It does if the actions that had started by then are those that have results in the fork's part of the log, and
        no action has used the fork's own workspace. A tool worker that may not read logs does not know, and returns
        False.
        """
        shell = saved.shell_state
        if not saved.source or shell is None or saved.event is None or at is None or at < saved.event:
            return False
        if not recovery.may_be_unchanged:
            return False
        try:
            events = await self._log.read(recovery.conversation_id, after=max(0, min(shell.newest, saved.event) - 1))
        except (StoreMisconfigured, DataLocked, CorruptEntry):
            return False
        is_answered = not shell.newest or any(event.cause == shell.newest and event.id <= at for event in events)
        has_changed = any(
            event.workspace_use is WorkspaceUse.CHANGED and event.cause is not None and event.cause > shell.newest
            for event in events
        )
        return is_answered and not has_changed

    async def _restore(self, recovery: _Recovery, saved: Checkpoint) -> bool:
        """Restore a workspace, that of a fork from a layer if possible; return whether there was a sound checkpoint."""
        assert self._checkpoints is not None
        conversation_id, method = recovery.conversation_id, CopyMethod.COPY
        if saved.source:
            method = await asyncio.to_thread(self._layers.find_method, may_mount=recovery.may_mount)
        restore: Callable[[], object]
        if method is CopyMethod.COPY:
            restore = partial(self._checkpoints.restore, conversation_id, self._directory(conversation_id))
        else:
            write = partial(self._checkpoints.write_files, conversation_id)
            restore = partial(self._layers.create_workspace, conversation_id, saved.tree, method, write)
        try:
            await asyncio.to_thread(restore)
        except FileExistsError:
            return True  # another worker of this node was faster
        except (FileNotFoundError, CheckpointCorrupt) as error:
            _log.error("cannot restore the workspace of %s: %s", conversation_id, error)
            return False
        except (OSError, CheckpointsUnavailable) as error:
            raise CheckpointsUnavailable(OUT_OF_REACH.format(error=error)) from error
        return True

    async def _capture_shell(self, conversation_id: str) -> ShellState | None:
        """Return the state of a workspace's shell, without the conversation's secrets; None if it is not known."""
        shell = await capture_shell(HostFolder(self._root, conversation_id))
        if shell is None or self._log.secrets is None:
            return shell
        try:
            masker = await self._log.secrets.load_masker(conversation_id)
        except SecretsLocked:
            return None
        return replace(shell, script=masker.mask_text(shell.script))

    def _write_note(self, recovery: _Recovery, notice: str | None) -> None:
        note_path = self._directory(recovery.conversation_id).with_name(NOTE)
        note_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fields = {"action_id": recovery.action_id, "fingerprint": recovery.fingerprint, "notice": notice}
        note_path.write_text(json.dumps(fields))

    def _read_note(self, recovery: _Recovery) -> str | None:
        """Return the answer that a dead worker gave to this action but may not have appended."""
        try:
            note = json.loads(self._directory(recovery.conversation_id).with_name(NOTE).read_text())
        except (OSError, ValueError):
            return None
        # older notes have no fingerprint
        noted_key = (note["action_id"], note.get("fingerprint") or recovery.fingerprint)
        notice: str | None = note["notice"] if noted_key == (recovery.action_id, recovery.fingerprint) else None
        return notice

    def _directory(self, conversation_id: str) -> Path:
        return self._root / conversation_id / "workspace"

    def _get_state(self, conversation_id: str) -> _SaveState:
        kept = self._states.pop(conversation_id, None) or _SaveState()
        self._states[conversation_id] = kept
        while len(self._states) > REMEMBERED_WORKSPACES:
            self._states.popitem(last=False)
        return kept


def _move_leftovers(folder: HostFolder, removed: Path) -> None:
    """Move away the home, temporary files and history of a removed workspace."""
    for path in (folder.home, folder.temporary, folder.history):
        with suppress(FileNotFoundError):
            path.rename(removed / path.name)


def make_restored_notice(saved: Checkpoint, at: int | None) -> str:
    """Return the notice for the model about restored files.

    Args:
        at: The event of the fork, if the conversation is a fork.
    """
    if not saved.source:
        which = OWN if saved.event is None else OWN_AT
    elif saved.event is None or at is None:
        which = OF_SOURCE
    else:
        which = BEFORE_FORK if saved.event <= at else AFTER_FORK
    return RESTORED.format(which=which.format(event=saved.event, at=at), gone=GONE)


def _save_locked(folder: Path, save: Callable[[Directory], Checkpoint]) -> Checkpoint:
    # A lock among the workers of the node: an older state must not overwrite a newer one.
    with (folder / SAVING).open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with open_workspace(folder) as directory:
            return save(directory)


def _find_checkpoint(
    checkpoints: Checkpoints, conversation_id: str, source_id: str | None, at: int | None
) -> Checkpoint | None:
    is_there = checkpoints.has(conversation_id) or (
        source_id is not None and checkpoints.copy(source_id, conversation_id, at=at)
    )
    return checkpoints.describe(conversation_id) if is_there else None


def _read_moves(directory: Path) -> int:
    try:
        return int(directory.with_name(MOVES).read_text())
    except (OSError, ValueError):
        return 0
