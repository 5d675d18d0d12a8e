"""Decides when workspaces are saved, and restores them on a node that does not have them.

Holds:
    - A workspace that is not on this node is restored, or reported as lost. The first action that needs it does not
      run; its observation reports the state of the files. No action runs in an empty or outdated directory without
      that notice. A fork that starts with exactly the files and the shell of its event needs none.
    - A workspace with a layer is mounted before it is used.
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
from tool_worker.workspace.files.staging import create_staging_async
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import capture_shell
from tool_worker.workspace.launch.shell_state import ShellState
from tool_worker.workspace.layers import CopyMethod, LayerLost, Layers, attach, detach, move_away
from tool_worker.workspace.opening.workspace_opener import BASE, WorkspaceOpener

NOTHING_SAVED = "The node of this workspace saves no checkpoints."
REMEMBERED_WORKSPACES = 500
SHELL_LIMIT_SECONDS = 60.0
MOVES = "moves"
SAVING = "saving.lock"

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


class Checkpointing:
    """Saves and restores the workspaces of one node.

    Args:
        root: Directory of the node's workspaces.
        checkpoints: Storage of checkpoints; if None, nothing is saved, and workspaces not on this node are lost.
        every: Number of actions with possible file changes between two checkpoints.
        bases: Storage of the workspaces' original states; None to save none.
        opener: Opens workspaces without a checkpoint again from their source; None to report them as lost.
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
    ) -> None:
        self._log = log
        self._root = root
        self._checkpoints = checkpoints
        self._bases = bases
        self._opener = opener
        self._every = every
        self._layers = Layers(root)
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
        try:
            await asyncio.to_thread(attach, directory.parent)
        except LayerLost as error:
            _log.error("cannot use the workspace of %s: %s", conversation_id, error)
            await self.discard(conversation_id)
        note_path = directory.with_name("recovery.json")
        action_key = (action_id, fingerprint)
        if directory.exists():
            return _read_note(action_key, note_path)
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with create_staging_async(directory.parent) as removed:
            _move_leftovers(HostFolder(self._root, conversation_id), removed)
        directory.with_name(MOVES).write_text(str(moves))
        notice = await self._recover_files(conversation_id, action_key, note_path, source, may_mount=may_mount)
        # From now on, this is an ordinary workspace, even if it is empty.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return notice

    async def has_moved_away(self, conversation_id: str, moves: int) -> bool:
        """Return whether the conversation has continued on another node since it last used this workspace.

        Args:
            moves: How often the conversation was moved away from a lost node.
        """
        directory = self._directory(conversation_id)
        # If the workspace has moved more often than the store knows, the store has lost its tail, and this is the
        # latest.
        return directory.exists() and _read_moves(directory) < moves

    async def discard(self, conversation_id: str) -> None:
        """Remove a workspace that has continued on another node. Its processes must have ended."""
        directory = self._directory(conversation_id)
        async with create_staging_async(directory.parent) as removed:
            await asyncio.to_thread(move_away, directory.parent, removed)
            _move_leftovers(HostFolder(self._root, conversation_id), removed)
            self._states.pop(conversation_id, None)

    async def _recover_files(
        self,
        conversation_id: str,
        action_key: tuple[int, str],
        note_path: Path,
        source: GitSource | UploadedSource | None,
        *,
        may_mount: bool,
    ) -> str | None:
        source_id, at = await self._find_fork_source(conversation_id)
        try:
            saved = await self._find(conversation_id, source_id, at)
            if saved is not None:
                is_exact = await self._is_exact(conversation_id, saved, at)
                restored = None if is_exact else make_restored_notice(saved, at)
                # Written before the files: after a crash, the next worker of this action gives the same notice.
                _write_note(note_path, action_key, restored)
                HostFolder(self._root, conversation_id).write_shell(saved.shell if is_exact else None)
                if await self._restore(conversation_id, saved, may_mount=may_mount):
                    return restored
        except CheckpointsUnavailable:
            if source_id is not None or await self._log.is_workspace_used(conversation_id):
                raise
        if source is not None and self._opener is not None:
            _write_note(note_path, action_key, REOPENED)
            try:
                await self._opener.open(conversation_id, source)
            except (OSError, WorkspaceError, CorruptEntry) as error:
                _log.error("cannot reopen the workspace of %s: %s", conversation_id, error)
            else:
                return REOPENED
        notice = LOST if await self._log.is_workspace_used(conversation_id) else None
        _write_note(note_path, action_key, notice)
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

    def note_change(self, conversation_id: str) -> None:
        """Count a change that was not made by an action."""
        self._get_state(conversation_id).changes += 1

    async def note_result(self, conversation_id: str, use: WorkspaceUse) -> None:
        """Count an observation with a possible change, and save the workspace when a checkpoint is due.

        A failure is logged: the actions themselves have succeeded, and the next one tries again.
        """
        if self._checkpoints is None or use is not WorkspaceUse.CHANGED:
            return
        kept = self._get_state(conversation_id)
        kept.changes += 1
        if kept.changes < self._every or kept.turn.locked():
            return
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
        if self._checkpoints is None or not directory.is_dir():
            return None
        await asyncio.to_thread(attach, directory.parent)
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
                return shell if seen is not None and seen.newest == shell.newest else None

            save = partial(
                self._checkpoints.save, conversation_id, directory, kept.files, event=event, get_shell=get_shell
            )
            saved = await asyncio.to_thread(_save_locked, directory, save)
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
        try:
            await self.save(conversation_id)
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

    async def _is_exact(self, conversation_id: str, saved: Checkpoint, at: int | None) -> bool:
        """Return whether a fork at this event would have the files and the shell of its checkpoint.

        It does if the actions that had started by then are those that have results in the fork's part of the log. A
        tool worker that may not read logs does not know, and returns False.
        """
        shell = saved.shell
        if not saved.source or shell is None or saved.event is None or at is None or at < saved.event:
            return False
        try:
            events = await self._log.read(conversation_id, after=max(0, min(shell.newest, saved.event) - 1), until=at)
        except (StoreMisconfigured, DataLocked, CorruptEntry):
            return False
        is_answered = not shell.newest or any(event.cause == shell.newest for event in events)
        later = (event for event in events if event.cause is not None and event.cause > shell.newest)
        return is_answered and not any(event.workspace_use is WorkspaceUse.CHANGED for event in later)

    async def _restore(self, conversation_id: str, saved: Checkpoint, *, may_mount: bool) -> bool:
        assert self._checkpoints is not None
        try:
            if saved.source:
                await asyncio.to_thread(self._create_fork, conversation_id, saved, may_mount=may_mount)
            else:
                await asyncio.to_thread(self._checkpoints.restore, conversation_id, self._directory(conversation_id))
        except FileExistsError:
            return True  # another worker of this node was faster
        except (FileNotFoundError, CheckpointCorrupt) as error:
            _log.error("cannot restore the workspace of %s: %s", conversation_id, error)
            return False
        except (OSError, CheckpointsUnavailable) as error:
            raise CheckpointsUnavailable(OUT_OF_REACH.format(error=error)) from error
        return True

    def _create_fork(self, conversation_id: str, saved: Checkpoint, *, may_mount: bool) -> None:
        """Create the workspace of a fork, which shares the files of its checkpoint with other forks if possible."""
        assert self._checkpoints is not None
        method = self._layers.find_method(may_mount=may_mount)
        if method is CopyMethod.COPY:
            self._checkpoints.restore(conversation_id, self._directory(conversation_id))
        else:
            restore = partial(self._checkpoints.write_files, conversation_id)
            self._layers.create_workspace(conversation_id, saved.tree, method, restore)

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


def _save_locked(directory: Path, save: Callable[[], Checkpoint]) -> Checkpoint:
    # A lock among the workers of the node: an older state must not overwrite a newer one.
    with directory.with_name(SAVING).open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return save()


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


def _write_note(note_path: Path, action_key: tuple[int, str], notice: str | None) -> None:
    note_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    action_id, fingerprint = action_key
    note_path.write_text(json.dumps({"action_id": action_id, "fingerprint": fingerprint, "notice": notice}))


def _read_note(action_key: tuple[int, str], note_path: Path) -> str | None:
    """Return the answer that a dead worker gave to this action but may not have appended."""
    try:
        note = json.loads(note_path.read_text())
    except (OSError, ValueError):
        return None
    noted_key = (note["action_id"], note.get("fingerprint") or action_key[1])  # older notes have no fingerprint
    notice: str | None = note["notice"] if noted_key == action_key else None
    return notice
