"""Prepares the workspace of an action: fills it from its source, restores it from its checkpoint, opens it.

Holds: an action never runs in a workspace that lacks the writes of earlier actions. If no sandbox confined an action,
its observation says so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from broker.contract import (
    ErrorObservation,
    Observation,
    OpenWorkspaceAction,
    SurveyAction,
    SurveyObservation,
    WorkspaceFailedObservation,
    WorkspaceOpenedObservation,
)
from broker.log import EventLog
from broker.runtime import DeckhandsError, OutcomeUnknown, StoreUnavailable, failpoint
from tool_worker.errors import SkillsUnavailable, SourceUnusable, WorkspaceLost
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction
from tool_worker.workspace import Checkpointing, SkillInstaller, WorkspaceOpener, Workspaces


async def fill_workspace(
    opener: WorkspaceOpener, checkpointing: Checkpointing | None, run: ActionRun, rest: RestOfAction
) -> Observation:
    """Fill a new workspace from its source, and save its original state."""
    if not isinstance(run.action, OpenWorkspaceAction):
        return await rest(run)
    source = run.delivery.workspace.source
    if source is None:
        return WorkspaceFailedObservation(content="The workspace has no source to open.", code="source_unusable")
    failpoint("tool.before_run")
    try:
        opened = await opener.open(run.conversation_id, source)
    except (StoreUnavailable, OutcomeUnknown):
        raise
    except (DeckhandsError, OSError) as error:
        code = error.code if isinstance(error, DeckhandsError) else SourceUnusable.code
        return WorkspaceFailedObservation(content=f"The workspace could not be opened. {error}", code=code)
    if checkpointing is not None:
        await checkpointing.save_original(run.conversation_id)
    return WorkspaceOpenedObservation(
        content=opened.text, commit=opened.commit, files=opened.files, size_bytes=opened.size_bytes
    )


async def recover_workspace(
    checkpointing: Checkpointing, workspaces: Workspaces, run: ActionRun, rest: RestOfAction
) -> Observation:
    """Restore a workspace that is not on this node; report lost files instead of running the action."""
    spec = run.delivery.workspace
    if spec.path is None:
        moves = run.claim.moves
        if await checkpointing.has_moved_away(run.conversation_id, moves):
            await workspaces.close(run.conversation_id)
            await checkpointing.discard(run.conversation_id)
        notice = await checkpointing.recover(
            run.conversation_id,
            run.action.id,
            spec.source,
            fingerprint=run.fingerprint,
            moves=moves,
            may_mount=await workspaces.sees_mounts(spec.sandbox),
        )
        if notice is not None:
            return ErrorObservation(content=notice, error_id=WorkspaceLost.code)
    return await rest(run)


async def open_workspace(workspaces: Workspaces, log: EventLog, run: ActionRun, rest: RestOfAction) -> Observation:
    """Open the workspace, and mark the observation if no sandbox confines it."""
    run.host = await workspaces.open(
        run.conversation_id, run.delivery.workspace, tenant=partial(log.load_tenant, run.conversation_id)
    )
    observation = await rest(run)
    if run.host.is_confined:
        return observation
    changes: dict[str, Any] = {"unsandboxed": True}
    if isinstance(observation, SurveyObservation):
        changes["scripts"] = ()  # a repository's scripts are untrusted
    return observation.model_copy(update=changes)


async def install_skills(installer: SkillInstaller, log: EventLog, run: ActionRun, rest: RestOfAction) -> Observation:
    """Install the skills that the task names, before the survey reads those of the workspace."""
    if not isinstance(run.action, SurveyAction) or not run.action.skills:
        return await rest(run)
    try:
        tenant = await log.load_tenant(run.conversation_id)
        left_out = await installer.install(run.conversation_id, run.action.skills, tenant)
    except SkillsUnavailable as error:
        return SurveyObservation(failure=str(error), failure_code=error.code)
    observation = await rest(run)
    if not isinstance(observation, SurveyObservation):
        return observation
    named = (*left_out, *(observation.left_out or ())) or None
    return observation.model_copy(update={"has_installed": True, "left_out": named})
