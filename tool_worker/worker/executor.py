"""Runs one action and appends exactly one observation for it.

The order is: claim in the store, run on the workspace host (which journals the start and the result by action id),
append under the action's id. After a worker's death, the next worker continues after the last completed step.

Holds: an action that ran is run again only if its outcome policy allows it. Every failure of a tool or a workspace
becomes the action's observation. An unknown outcome is reported as unknown.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from broker.coordination import (
    NOT_SUSPECTED,
    ActionClaimed,
    ActionDelivery,
    ActionReclaimed,
    ClaimOutcome,
    ControlDelivery,
    CrashAttribution,
    Figures,
)
from broker.log import EventLog
from broker.runtime import CorruptEntry, DeckhandsError, Tracing, make_chain, open_tracing
from broker.tools import AllowedServers
from tool_worker.tools import FreeSlot, OfferedTools, RemoteWork, TaskServers
from tool_worker.worker.node.quota import WorkspaceQuota
from tool_worker.worker.node.usage_bounds import UsageBounds
from tool_worker.worker.steps.action_run import ActionRun
from tool_worker.worker.steps.answers import answer_failures, limit_attempts, read_action, refuse, require_confirmation
from tool_worker.worker.steps.attribution import rest_while_host_acts, take_turn
from tool_worker.worker.steps.host import make_request, observe, pass_variables, run_on_host
from tool_worker.worker.steps.journal import check_journal
from tool_worker.worker.steps.notices import Notices
from tool_worker.worker.steps.recording import Recorder
from tool_worker.worker.steps.running_calls import (
    RunningCalls,
    call_offered_tool,
    drop_question,
    forget_remote_work,
    list_server_tools,
)
from tool_worker.worker.steps.spans import Spans
from tool_worker.worker.steps.stop_orders import StopOrders
from tool_worker.worker.steps.workspace import fill_workspace, install_skills, open_workspace, recover_workspace
from tool_worker.worker.terminal_service import TerminalService
from tool_worker.worker.transfer_service import TransferService
from tool_worker.workspace import Checkpointing, SkillInstaller, WorkspaceOpener, Workspaces


class Executor:
    """Passes each claimed action through two middleware chains: around the action, and around the host call."""

    def __init__(
        self,
        log: EventLog,
        workspaces: Workspaces,
        *,
        worker_id: str,
        offered: OfferedTools | None = None,
        servers: TaskServers | None = None,
        checkpointing: Checkpointing | None = None,
        opener: WorkspaceOpener | None = None,
        installer: SkillInstaller | None = None,
        transfer_service: TransferService | None = None,
        terminal_service: TerminalService | None = None,
        quota: WorkspaceQuota | None = None,
        held: UsageBounds | None = None,
        figures: Figures | None = None,
        spans: Tracing | None = None,
    ) -> None:
        self._log = log
        self._workspaces = workspaces
        self._checkpointing = checkpointing
        self._opener = opener
        self._transfer_service = transfer_service
        self._terminal_service = terminal_service
        self._calls = RunningCalls(log.is_answered)
        self._stop_orders = StopOrders(log.is_answered)
        self._notices = Notices(workspaces, quota, held)
        offered = offered or OfferedTools(())
        servers = servers or TaskServers(AllowedServers(), offered=offered)
        self._drop_question = partial(drop_question, log, offered, servers)
        recorder = Recorder(log, worker_id=worker_id, checkpointing=checkpointing, figures=figures or Figures())
        traced = Spans(spans or open_tracing("tool"), worker_id, log)
        around_host = make_chain(
            [
                # Outermost: below it, only the host acts, and the host cannot kill this worker.
                rest_while_host_acts,
                # Around the wait for the host: it ends the wait when the workspace grows too large.
                quota.stop_excess if quota is not None else None,
                # Next to the host: a stop order is obeyed until the moment the action starts.
                self._stop_orders.obey,
            ],
            last=run_on_host,
        )
        self._run = make_chain(
            [
                # Outermost: until its observation is in the log, a death of this worker counts against the action.
                take_turn,
                # Before any step that waits: a stop order may arrive while the workspace is being opened.
                self._stop_orders.listen,
                # Around the append, so that the span ends when the observation is visible.
                traced.trace_action,
                # Around the append: until then, another worker may need the record.
                forget_remote_work,
                # Outside every step that answers, so that exactly one observation is appended.
                recorder.record,
                # First of the answering steps: the others need the action.
                partial(read_action, log),
                # Outside every step that may fail: a failure becomes the answer to the decoded action.
                partial(answer_failures, log),
                # Before any side effect: an action that is unconfirmed, or that no node serves, must have none.
                require_confirmation,
                refuse,
                # Before the tool: the next attempt might kill the next worker.
                limit_attempts,
                # Inside all refusals: a refused action has no tool span.
                traced.trace_tool,
                # Before the workspace: custom tools run in this worker and need none.
                partial(call_offered_tool, offered, servers, self._calls, log=log),
                # Around the survey: the servers of skills are known from its answer.
                partial(list_server_tools, servers),
                # Before the workspace is opened: only a new workspace can be filled from a source.
                partial(fill_workspace, opener, checkpointing) if opener is not None else None,
                # Before the workspace is opened: an action without a request needs no workspace.
                make_request,
                # Before `open_workspace`, which would start an empty workspace where a checkpoint is missing.
                partial(recover_workspace, checkpointing, workspaces) if checkpointing is not None else None,
                # Around all calls of the host: it marks each observation of a host without a sandbox.
                partial(open_workspace, workspaces, log),
                # Before the survey runs: it reads what is installed.
                partial(install_skills, installer, log) if installer is not None else None,
                # Outside the journal check: an action that does not run leaves the notice for the next one.
                self._notices.add,
                # Before secrets are read from the store: an outdated action does not run.
                partial(check_journal, log),
                # Last: only the host receives secrets.
                partial(pass_variables, log),
            ],
            last=partial(observe, log, around_host),
        )

    @property
    def refusals(self) -> int:
        """Number of times that egress proxies refused a host to a workspace; each host counts once per action."""
        return self._notices.refusals

    async def execute(
        self,
        delivery: ActionDelivery,
        claim: ClaimOutcome,
        attribution: CrashAttribution = NOT_SUSPECTED,
        *,
        refusal: DeckhandsError | None = None,
        free_slot: FreeSlot = nullcontext,
    ) -> None:
        """Run a claimed action and append its observation.

        Idempotent: on a redelivery, the action is already settled, claimed by another worker, or in the journal.

        Args:
            attribution: Counts the worker deaths during this action.
            refusal: If given, the answer to the action; the action does not run.
            free_slot: Frees the action's slot while it waits for work elsewhere.

        Raises:
            DataLocked: The action is encrypted, and this process has no key for it.
        """
        if isinstance(claim, ActionClaimed | ActionReclaimed):
            try:
                entry = await self._log.decrypt_entry(delivery.conversation_id, delivery.entry, delivery.action_id)
            except CorruptEntry:
                entry = b""  # `read_action` answers it
            work = RemoteWork(
                self._log.store,
                delivery.conversation_id,
                delivery.action_id,
                secrets=self._log.secrets,
                attribution=attribution,
                free_slot=free_slot,
            )
            await self._run(ActionRun(delivery, claim, attribution, entry, refusal, work))

    async def execute_control(self, order: ControlDelivery) -> None:
        """Stop a running action, end a workspace, transfer its files, or open a terminal in it. Idempotent."""
        if order.order in ("close", "cancel"):
            self._stop_orders.record(order.conversation_id, order.action_id, location=order.location)
        if order.order == "close":
            await self._workspaces.close(order.conversation_id)
            if self._checkpointing is not None:
                await self._checkpointing.save_last(order.conversation_id)
        elif order.order == "transfer" and self._transfer_service is not None:
            await self._transfer_service.transfer(order.conversation_id, order.token)
        elif order.order == "terminal" and self._terminal_service is not None:
            self._terminal_service.start(order.conversation_id, order.token)
        elif order.order == "cancel" and not self._calls.stop(order.conversation_id, order.action_id):
            await self._drop_question(order)
            if self._opener is not None:
                self._opener.stop(order.conversation_id)
            await self._workspaces.interrupt(order.conversation_id, order.action_id)
