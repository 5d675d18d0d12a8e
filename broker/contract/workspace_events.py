"""Events about a workspace itself: requests to open it and to survey its instructions and skills, and their results."""

from __future__ import annotations

from typing import ClassVar, Literal

from broker.contract.events import Action, Observation
from broker.contract.tool_specs import McpAddress, OutcomePolicy


class OpenWorkspaceAction(Action):
    """Put the initial content into the workspace; see `WorkspaceSpec.source`."""

    answered_by: ClassVar[tuple[str, ...]] = ("observation.workspace_opened", "observation.workspace_failed")

    kind: Literal["action.open_workspace"] = "action.open_workspace"
    sentence_template: ClassVar[str] = "Opening the workspace"
    runnable: ClassVar[bool] = True
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.IDEMPOTENT
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False


class SurveyAction(Action):
    """Read the workspace's instructions for agents: AGENTS.md, skills and the like.

    It changes nothing, except that skills of the task are installed first.

    Attributes:
        servers: the MCP servers of the task whose tools are to be listed, by their names; None for none.
        with_skills: the agent reads the skills of the workspace.
        skills: the sources of the task's skills, which are installed in the workspace first; None for none.
    """

    kind: Literal["action.survey"] = "action.survey"
    runnable: ClassVar[bool] = True
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.IDEMPOTENT
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_users: ClassVar[bool] = False
    servers: dict[str, McpAddress] | None = None
    with_skills: bool = True
    skills: tuple[str, ...] | None = None


class DigestWorkspaceAction(Action):
    """Compute a digest of the workspace's files, to see whether they change. It changes nothing."""

    answered_by: ClassVar[tuple[str, ...]] = ("observation.workspace_digest",)

    kind: Literal["action.digest_workspace"] = "action.digest_workspace"
    runnable: ClassVar[bool] = True
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.IDEMPOTENT
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_users: ClassVar[bool] = False


class WorkspaceDigestObservation(Observation):
    """The digest of a workspace's files.

    Attributes:
        digest: empty if it could not be computed; the content then tells why.
    """

    kind: Literal["observation.workspace_digest"] = "observation.workspace_digest"
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_users: ClassVar[bool] = False
    digest: str = ""


class WorkspaceOpenedObservation(Observation):
    """The workspace holds its initial content; `content` describes it.

    Attributes:
        commit: the commit of a repository.
        files: the number of entries of every kind.
        size_bytes: the total size of all regular files.
    """

    kind: Literal["observation.workspace_opened"] = "observation.workspace_opened"
    is_shown_to_model: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "{content}"
    commit: str = ""
    files: int = 0
    size_bytes: int = 0


class WorkspaceFailedObservation(Observation):
    """The workspace could not be opened; the content gives the reason.

    Attributes:
        code: the class of the error, lower_snake_case.
    """

    kind: Literal["observation.workspace_failed"] = "observation.workspace_failed"
    is_problem: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "{content}"
    code: str = ""
