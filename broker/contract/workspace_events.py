"""Events about a workspace itself: that it is to be opened, and what came of it."""

from __future__ import annotations

from typing import ClassVar, Literal

from broker.contract.events import Action, Observation


class OpenWorkspaceAction(Action):
    """Put into the workspace what it is to begin with, see `WorkspaceSpec.source`."""

    kind: Literal["action.open_workspace"] = "action.open_workspace"
    runnable: ClassVar[bool] = True

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return "Opening the workspace"


class WorkspaceOpenedObservation(Observation):
    """The workspace holds what it is to begin with; the content says what that is.

    Attributes:
        commit: of a repository.
        files: entries of every kind.
        size_bytes: of all regular files.
    """

    kind: Literal["observation.workspace_opened"] = "observation.workspace_opened"
    commit: str = ""
    files: int = 0
    size_bytes: int = 0

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content


class WorkspaceFailedObservation(Observation):
    """The workspace could not be opened; the content says why.

    Attributes:
        code: the class of the error, lower_snake_case.
    """

    kind: Literal["observation.workspace_failed"] = "observation.workspace_failed"
    code: str = ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.content
