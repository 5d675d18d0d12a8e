"""Runs one action and appends exactly one observation for it.

The order is: claimed in the store, run by the workspace host (which journals begin and result by action id), appended
under the action's id. When a worker dies, the next one continues after the last of these steps that happened.

Holds: nothing that ran is run again unless its outcome policy allows it; no failure of a tool or a workspace leaves an
action without an observation; an unknown outcome is reported as unknown.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import traceback
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from broker.contract import codec
from broker.contract.events import Action, ConfirmationStatus, ConversationCreated, Event, Observation, WorkspaceUse
from broker.contract.observations import (
    ErrorObservation,
    OutcomeUnknownObservation,
    SurveyObservation,
)
from broker.contract.offered_tools import OfferedToolAction
from broker.contract.tool_specs import OutcomePolicy
from broker.contract.workspace_events import OpenWorkspaceAction, WorkspaceFailedObservation, WorkspaceOpenedObservation
from broker.coordination.action_streams import (
    ActionClaimed,
    ActionDelivery,
    ActionReclaimed,
    ClaimOutcome,
    ControlDelivery,
)
from broker.coordination.crash_attribution import NOT_SUSPECTED, CrashAttribution
from broker.coordination.figures import Figures
from broker.log.event_log import EventLog
from broker.log.lost_tails import name_gap
from broker.runtime.errors import (
    CorruptEntry,
    DeckhandsError,
    EventsLost,
    EventUnfit,
    OutcomeUnknown,
    StoreError,
    StoreTooNew,
    StoreUnavailable,
    UnknownKind,
)
from broker.runtime.failpoints import failpoint
from broker.secrets.secrets import SecretsLocked
from broker.tools.custom_tools import ToolContext
from tool_worker.errors import HostLost, SourceUnusable, WorkspaceLost
from tool_worker.host.protocol import NEVER_STARTED
from tool_worker.tools.offered import OfferedTools
from tool_worker.tools.registry import tool_for
from tool_worker.tools.tool import HostRequest, answering, instead_of
from tool_worker.worker.fingerprints import fingerprint_of
from tool_worker.worker.journal_check import NOT_CARRIED_OUT, check_journal, log_reused_number
from tool_worker.worker.node.quota import Quota
from tool_worker.worker.node.usage_bounds import UsageBounds
from tool_worker.worker.proxy_refusals import refused_in, with_refusals
from tool_worker.worker.running_calls import RunningCalls
from tool_worker.worker.stop_orders import StopOrders
from tool_worker.worker.transfer_service import TransferService
from tool_worker.workspace.checkpoints.checkpointing import Checkpointing
from tool_worker.workspace.launch.host_connection import HostResult
from tool_worker.workspace.open_workspace import OpenWorkspace
from tool_worker.workspace.opening.workspace_opener import WorkspaceOpener
from tool_worker.workspace.workspaces import Workspaces

MAX_ATTEMPTS = 3

LOST_WITH_HOST = (
    "The process that ran this action ended before the result was recorded. "
    "The action may have taken effect, wholly or in part. Check before you repeat it."
)
LOST_BY_REBOOT = (
    "The machine was restarted after this action was assigned, and the record of what ran may be incomplete. "
    "The action may have taken effect, wholly or in part. Check before you repeat it."
)
_log = logging.getLogger(__name__)


class Executor:
    """Carries out what a tool worker is handed.

    Attributes:
        refusals: how often proxies have refused a host to a workspace, the same one once for each action.
    """

    def __init__(
        self,
        log: EventLog,
        workspaces: Workspaces,
        *,
        worker_id: str,
        offered: OfferedTools | None = None,
        checkpointing: Checkpointing | None = None,
        opener: WorkspaceOpener | None = None,
        transfer_service: TransferService | None = None,
        quota: Quota | None = None,
        held: UsageBounds | None = None,
        figures: Figures | None = None,
    ) -> None:
        self._log = log
        self._workspaces = workspaces
        self._offered = offered or OfferedTools(())
        self._worker_id = worker_id
        self._checkpointing = checkpointing
        self._opener = opener
        self._transfer_service = transfer_service
        self._calls = RunningCalls(log.is_answered)
        self._quota = quota
        self._held = held
        self._figures = figures or Figures()
        self._stop_orders = StopOrders(log.is_answered)
        self.refusals = 0

    async def execute(
        self,
        delivery: ActionDelivery,
        claim: ClaimOutcome,
        attribution: CrashAttribution = NOT_SUSPECTED,
        *,
        refusal: DeckhandsError | None = None,
    ) -> None:
        """Run a claimed action and append its observation.

        Idempotent: a repeated delivery finds the action settled, in other hands, or its result in the journal.

        Args:
            attribution: of an action that workers have died with.
            refusal: the answer to the action in place of running it.
        """
        if not isinstance(claim, ActionClaimed | ActionReclaimed):
            return
        try:
            await attribution.act()
            # One that another worker had may have begun: the host knows, and an order reaches it there.
            heard = self._stop_orders.heard(delivery.conversation_id, delivery.action_id)
            with heard if isinstance(claim, ActionClaimed) else nullcontext():
                await self._carry_out(delivery, claim, attribution, refusal)
        finally:
            attribution.end_turn()

    async def _carry_out(
        self,
        delivery: ActionDelivery,
        claim: ActionClaimed | ActionReclaimed,
        attribution: CrashAttribution,
        refusal: DeckhandsError | None,
    ) -> None:
        failpoint("tool.after_claim")
        observation = await self._observe(delivery, claim, attribution, refusal)
        self._figures.add("actions", label=observation.kind)
        failpoint("tool.before_append")
        try:
            await self._append(self._log, delivery, observation)
        except EventUnfit as error:
            text = f"The action ran, but its result cannot be recorded: {error}"
            await self._append(self._log, delivery, instead_of(observation, text, error))
        except SecretsLocked as error:
            text = f"The result of this action cannot be recorded, because nothing can be hidden in it: {error}"
            # This text itself has nothing to hide.
            await self._append(EventLog(self._log.store), delivery, instead_of(observation, text, error))
        failpoint("tool.after_append")
        if self._checkpointing is not None and delivery.workspace.path is None:
            await self._checkpointing.note_result(delivery.conversation_id, observation.workspace_use)

    async def _append(self, log: EventLog, delivery: ActionDelivery, observation: Observation) -> None:
        # What could not be read has no checksum to go by.
        is_unread = isinstance(observation, ErrorObservation) and observation.error_id == CorruptEntry.code
        checksum = "" if is_unread else codec.checksum_of(delivery.entry)
        try:
            await log.append_observation(
                delivery.conversation_id,
                observation,
                worker_id=self._worker_id,
                place=delivery.place,
                checksum=checksum,
            )
        except EventsLost as lost:
            _log.warning("an action is not in its log any more: %s", lost.message)
            await name_gap(self._log, lost, noticed_by="the tool worker that carried it out")

    async def execute_control(self, order: ControlDelivery) -> None:
        """Stop a running action, or end a workspace. Idempotent."""
        if order.order in ("close", "cancel"):
            self._stop_orders.note(order.conversation_id, order.action_id)
        if order.order == "close":
            await self._workspaces.close(order.conversation_id)
            if self._checkpointing is not None:
                await self._checkpointing.save_last(order.conversation_id)
        elif order.order == "transfer" and self._transfer_service is not None:
            await self._transfer_service.transfer(order.conversation_id, order.token)
        elif order.order == "cancel" and not self._calls.stop(order.conversation_id, order.action_id):
            if self._opener is not None:
                self._opener.stop(order.conversation_id)
            await self._workspaces.interrupt(order.conversation_id, order.action_id)

    async def _observe(
        self,
        delivery: ActionDelivery,
        claim: ActionClaimed | ActionReclaimed,
        attribution: CrashAttribution,
        refusal: DeckhandsError | None,
    ) -> Observation:
        try:
            action = await self._action(delivery)
        except (CorruptEntry, StoreTooNew, UnknownKind) as error:
            return ErrorObservation(content=str(error), error_id=error.code, cause=delivery.action_id)
        status = getattr(action, "confirmation_state", ConfirmationStatus.CONFIRMED)
        if status is not ConfirmationStatus.CONFIRMED:
            text = "The action was not run: it has not been confirmed."
            return answering(action, ErrorObservation(content=text, error_id="not_confirmed"))
        if refusal is not None:
            text = f"The action was not run. {refusal}"
            is_opening = isinstance(action, OpenWorkspaceAction)
            failed = WorkspaceFailedObservation(content=text, code=refusal.code)
            return answering(action, failed if is_opening else ErrorObservation(content=text, error_id=refusal.code))
        try:
            if claim.attempt > MAX_ATTEMPTS:
                text = f"The action was abandoned after {MAX_ATTEMPTS} workers died with it. It may have taken effect."
                return answering(action, OutcomeUnknownObservation(content=text))
            return answering(action, await self._run(delivery, action, claim, attribution))
        except StoreError:
            raise
        except DeckhandsError as error:
            return answering(action, ErrorObservation(content=str(error), error_id=error.code))
        except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an observation)
            await self._note_failure(delivery.conversation_id, action)
            text = f"The action could not be run: {type(error).__name__}: {error}"
            return answering(action, ErrorObservation(content=text))

    async def _run(
        self,
        delivery: ActionDelivery,
        action: Action,
        claim: ActionClaimed | ActionReclaimed,
        attribution: CrashAttribution,
    ) -> Observation:
        if isinstance(action, OfferedToolAction):
            failpoint("tool.before_run")
            context = ToolContext(delivery.conversation_id, action.id, fingerprint=fingerprint_of(action))
            call = self._offered.call(action, claim, delivery.conversation_id, context)
            answer = await self._calls.run(context, call)
            failpoint("tool.after_result")
            return answer
        if isinstance(action, OpenWorkspaceAction) and self._opener is not None:
            return await self._opened(delivery)
        tool = tool_for(action.kind)
        if tool is None:
            return ErrorObservation(content=f"This worker has no tool for {action.kind}.")
        request = tool.request(action)
        if not isinstance(request, HostRequest):
            return request
        spec = delivery.workspace
        if self._checkpointing is not None and spec.path is None:
            cid, moves = delivery.conversation_id, claim.moves
            checkpointing = self._checkpointing
            if await checkpointing.has_moved_away(cid, moves):
                await self._workspaces.close(cid)
                await checkpointing.discard(cid)
            fingerprint = fingerprint_of(action)
            notice = await checkpointing.recover(cid, action.id, spec.source, fingerprint=fingerprint, moves=moves)
            if notice is not None:
                return ErrorObservation(content=notice, error_id=WorkspaceLost.code)
        host = await self._workspaces.open(
            delivery.conversation_id, spec, tenant=functools.partial(self._tenant, delivery.conversation_id)
        )
        unsandboxed = None if host.is_confined else True
        fingerprint = fingerprint_of(action)
        if await check_journal(self._log, host, action, fingerprint):
            return OutcomeUnknownObservation(content=NOT_CARRIED_OUT, unsandboxed=unsandboxed)
        failpoint("tool.before_run")
        may_repeat = action.outcome is OutcomePolicy.IDEMPOTENT
        if isinstance(claim, ActionReclaimed) and not may_repeat and await _may_have_run_before_reboot(host, action):
            return OutcomeUnknownObservation(content=LOST_BY_REBOOT, unsandboxed=unsandboxed)
        arguments = await self._with_secrets(delivery.conversation_id, request, claim)
        await attribution.rest()  # while the host acts, nothing of it can end this worker
        ask = functools.partial(
            host.run, action.id, request.tool, arguments, may_repeat=may_repeat, fingerprint=fingerprint
        )
        running = self._stop_orders.run(host, action.id, ask)
        quota = self._quota
        result = await (_within_quota(quota, host, action.id, running) if quota is not None else running)
        await attribution.act()
        failpoint("tool.after_result")
        if result.is_other:
            await log_reused_number(self._log, action, delivery.conversation_id)
            return OutcomeUnknownObservation(content=NOT_CARRIED_OUT, unsandboxed=unsandboxed)
        if result.is_unknown:
            return OutcomeUnknownObservation(content=LOST_WITH_HOST, unsandboxed=unsandboxed)
        observation = with_refusals(tool.observe(action, result.value), refused := refused_in(result.value))
        self.refusals += len(refused)
        is_bounded = observation.workspace_use is WorkspaceUse.CHANGED
        notice = await quota.notice(delivery.conversation_id) if quota is not None and is_bounded else ""
        held_notice = self._held.take_notice(delivery.conversation_id) if self._held is not None else ""
        first_notice = self._workspaces.take_notice(delivery.conversation_id) if is_bounded else ""
        notice = "\n".join(filter(None, (notice, held_notice, first_notice)))
        changes: dict[str, Any] = {"unsandboxed": True} if unsandboxed else {}
        changes |= {"content": f"{observation.content}\n{notice}"} if notice else {}
        if unsandboxed and isinstance(observation, SurveyObservation):
            changes["scripts"] = ()  # a repository's scripts are not trusted
        return observation.model_copy(update=changes) if changes else observation

    async def _opened(self, delivery: ActionDelivery) -> Observation:
        """Open a workspace that begins with something, and save it as it is then."""
        assert self._opener is not None
        source = delivery.workspace.source
        if source is None:
            return WorkspaceFailedObservation(content="The workspace has no source to open.", code="source_unusable")
        failpoint("tool.before_run")
        try:
            opened = await self._opener.open(delivery.conversation_id, source)
        except (StoreUnavailable, OutcomeUnknown):
            raise
        except (DeckhandsError, OSError) as error:
            code = error.code if isinstance(error, DeckhandsError) else SourceUnusable.code
            return WorkspaceFailedObservation(content=f"The workspace could not be opened. {error}", code=code)
        if self._checkpointing is not None:
            await self._checkpointing.save_original(delivery.conversation_id)
        return WorkspaceOpenedObservation(
            content=opened.text, commit=opened.commit, files=opened.files, size_bytes=opened.size_bytes
        )

    async def _with_secrets(
        self, conversation_id: str, request: HostRequest, claim: ActionClaimed | ActionReclaimed
    ) -> Mapping[str, Any]:
        """Return a request's arguments, with those secrets in a command's environment that the command names."""
        secrets = self._log.secrets
        is_command = request.tool == "acp" or (request.tool == "bash" and not request.arguments["is_input"])
        if secrets is None or not is_command:
            return request.arguments
        command = request.arguments["command"]
        wanted = await secrets.wanted_by(conversation_id, command, claimed=claim.secrets)
        return {**request.arguments, "env": wanted} if wanted else request.arguments

    async def _tenant(self, conversation_id: str) -> str:
        created = (await self._log.read(conversation_id, until=1))[0]
        tenancy = created.tenancy if isinstance(created, ConversationCreated) else None
        return tenancy.tenant if tenancy is not None else ""

    async def _note_failure(self, conversation_id: str, action: Action) -> None:
        """Log the exception that is being dealt with; its text may hold what a command was given."""
        text = traceback.format_exc()
        if self._log.secrets is not None:
            text = (await self._log.secrets.masker(conversation_id)).text(text)
        _log.error("action %s of %s\n%s", action.id, conversation_id, text)

    async def _action(self, delivery: ActionDelivery) -> Action:
        event = await self._log.blobs.whole(delivery.conversation_id, self._decoded(delivery))
        assert isinstance(event, Action)
        return event

    def _decoded(self, delivery: ActionDelivery) -> Event:
        return codec.decode(delivery.entry, delivery.action_id)


async def _within_quota(
    quota: Quota, host: OpenWorkspace, action_id: int, running: Coroutine[Any, Any, HostResult]
) -> HostResult:
    """Wait for an action, and stop it when it makes the workspace too large."""
    acting = asyncio.ensure_future(running)
    watching = asyncio.ensure_future(quota.until_exceeded(host.conversation_id))
    try:
        await asyncio.wait({acting, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not acting.done():
            with suppress(HostLost):
                await host.interrupt(action_id)
        return await acting
    finally:
        acting.cancel()
        watching.cancel()


async def _may_have_run_before_reboot(host: OpenWorkspace, action: Action) -> bool:
    """Say whether an action that a dead worker had claimed is missing from a journal that a reboot may have cut."""
    status = await host.status(action.id)
    return status.state == NEVER_STARTED and not status.is_certain
