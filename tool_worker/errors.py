"""The errors of workspaces.

    WorkspaceError ├── WorkspaceUnavailable no host could be started or reached [retryable] │ └── HostLost the host
    ended or stopped answering during a request [retryable] ├── WorkspaceLost its directory is gone ├── WorkspaceRefused
    the directory may not be a workspace ├── WorkspaceConflict opened before with another directory, sandbox or network
    ├── SourceUnusable its source cannot be cloned, unpacked or recorded ├──
    SkillsUnavailable skills of the task cannot be installed ├── FileUnfit a file that cannot be copied out
    of or into a workspace ├── WorkspaceTooLarge exceeds the limits of saving or transferring ├── CheckpointCorrupt the
    saved copy is damaged ├── CheckpointsUnavailable the storage of checkpoints cannot be used now [retryable] ├──
    HostRefused the host did not start the action; carries the host's code ├── EgressRefused asks for more network
    access than the node allows └── SandboxError ├── SandboxUnavailable does not work on this machine ├── SandboxTooWeak
    weaker than this node demands └── SandboxUnsafe the self-test escaped from it

`wait_to_completion` awaits work to its end even if the awaiting task is cancelled.

Holds: if one of these is raised before an action starts, the action has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from broker.runtime import DeckhandsError


class WorkspaceError(DeckhandsError):
    """The workspace cannot serve the call."""

    code = "workspace"


class WorkspaceUnavailable(WorkspaceError):
    """No host could be started or reached; the action did not start."""

    code = "workspace_unavailable"
    retryable = True


class HostLost(WorkspaceUnavailable):
    """The host ended or stopped answering during a request; its journal has the action's outcome."""

    code = "host_lost"


class WorkspaceLost(WorkspaceError):
    """The directory of the workspace is gone."""

    code = "workspace_lost"


class WorkspaceRefused(WorkspaceError):
    """The directory may not be a workspace."""

    code = "workspace_refused"


class WorkspaceConflict(WorkspaceError):
    """The workspace was opened with another directory, sandbox or network."""

    code = "workspace_conflict"


class EgressRefused(WorkspaceError):
    """The workspace asks for more network access than the node allows."""

    code = "egress_refused"


class SourceUnusable(WorkspaceError):
    """The source or the original state of a workspace is not available."""

    code = "source_unusable"


class SkillsUnavailable(WorkspaceError):
    """Skills that a task names are not allowed, cannot be fetched, or cannot be used."""

    code = "skills_unavailable"


class FileUnfit(WorkspaceError):
    """The kind or the size of the file is not accepted."""

    code = "file_unfit"


class WorkspaceTooLarge(WorkspaceError):
    """The workspace exceeds the limits of saving or transferring."""

    code = "workspace_too_large"


class CheckpointCorrupt(WorkspaceError):
    """The saved copy of a workspace is damaged."""

    code = "checkpoint_corrupt"


class CheckpointsUnavailable(WorkspaceError):
    """The storage of checkpoints is unavailable, or refuses this one; its earlier content stays."""

    code = "checkpoints_unavailable"
    retryable = True


class HostRefused(WorkspaceError):
    """The host did not start the action.

    Attributes:
        code: The host's own code: `bad_arguments`, `unknown_tool`, `too_many_actions`, `journal_unavailable`, …
    """

    def __init__(self, code: str, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable


class SandboxError(WorkspaceError):
    """The sandbox cannot be used."""

    code = "sandbox"


class SandboxUnavailable(SandboxError):
    """The sandbox does not work on this machine."""

    code = "sandbox_unavailable"


class SandboxTooWeak(SandboxError):
    """The requested sandbox is weaker than this node demands."""

    code = "sandbox_too_weak"


class SandboxUnsafe(SandboxError):
    """The self-test escaped from the sandbox."""

    code = "sandbox_unsafe"


class StoppedBeforeStart(DeckhandsError):
    """An action was ordered to stop while its workspace was being opened."""

    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("The action was not run: it was stopped before it began.")


_T = TypeVar("_T")


async def wait_to_completion(work: Awaitable[_T]) -> _T:
    """Await work, such as a start in a thread. However often it is cancelled, wait for the end before raising."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()
