"""What can go wrong with a workspace.

    WorkspaceError
    ├── WorkspaceUnavailable     no host could be started or reached                    [retryable]
    │   └── HostLost             the host ended, or went silent, while it was asked     [retryable]
    ├── WorkspaceLost            its directory is gone
    ├── WorkspaceRefused         a directory that may not be a workspace
    ├── WorkspaceConflict        asked for with another directory, sandbox or network than it was opened with
    ├── SourceUnusable           what it is to begin with cannot be cloned, unpacked or recorded
    ├── FileUnfit                a file that cannot be taken out of or put into a workspace
    ├── WorkspaceTooLarge        holds more than may be saved or handed out
    ├── CheckpointCorrupt        the saved copy is damaged
    ├── CheckpointsUnavailable   where copies are saved cannot be used now              [retryable]
    ├── HostRefused              the host did not begin the action; carries the host's code
    ├── EgressRefused            asks for more of the network than the node gives
    └── SandboxError
        ├── SandboxUnavailable   does not work on this machine
        ├── SandboxTooWeak       weaker than this node demands
        └── SandboxUnsafe        the self-test got out of it

Holds: whatever of these is raised before an action was begun leaves no trace of the action.
"""

from __future__ import annotations

from broker.runtime import DeckhandsError


class WorkspaceError(DeckhandsError):
    """The workspace cannot serve the call."""

    code = "workspace"


class WorkspaceUnavailable(WorkspaceError):
    """No host could be started or reached; nothing was begun."""

    code = "workspace_unavailable"
    retryable = True


class HostLost(WorkspaceUnavailable):
    """The host ended, or went silent, while it was asked; its journal knows what became of the action."""

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
    """The workspace asks for more of the network than the node gives."""

    code = "egress_refused"


class SourceUnusable(WorkspaceError):
    """What a workspace is to begin with, or began with, is not available."""

    code = "source_unusable"


class FileUnfit(WorkspaceError):
    """The file is of a kind or size that is not taken."""

    code = "file_unfit"


class WorkspaceTooLarge(WorkspaceError):
    """The workspace holds more than may be saved or handed out."""

    code = "workspace_too_large"


class CheckpointCorrupt(WorkspaceError):
    """The saved copy of a workspace is damaged."""

    code = "checkpoint_corrupt"


class CheckpointsUnavailable(WorkspaceError):
    """The place of checkpoints cannot be used now, or not for this one; what it held before stays."""

    code = "checkpoints_unavailable"
    retryable = True


class HostRefused(WorkspaceError):
    """The host did not begin the action.

    Attributes:
        code: the host's own: `bad_arguments`, `unknown_tool`, `too_many_actions`, `journal_unavailable`, …
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
    """A weaker sandbox was asked for than this node demands."""

    code = "sandbox_too_weak"


class SandboxUnsafe(SandboxError):
    """The self-test got out of the sandbox."""

    code = "sandbox_unsafe"


class StoppedBeforeItBegan(DeckhandsError):
    """An action was ordered to stop while its workspace was being opened."""

    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("The action was not run: it was stopped before it began.")
