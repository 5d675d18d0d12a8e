"""Runs one action and appends exactly one observation for it.

The order is: claimed in the store, run by the workspace host (which journals begin and result by action id), appended
under the action's id. When a worker dies, the next one continues after the last of these steps that happened.

Holds: nothing that ran is run again unless its outcome policy allows it; no failure of a tool or a workspace leaves an
action without an observation; an unknown outcome is reported as unknown.
"""

from __future__ import annotations

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
from broker.runtime import DeckhandsError, Tracing, make_chain, open_tracing
from tool_worker.tools import OfferedTools
from tool_worker.worker.node.quota import Quota
from tool_worker.worker.node.usage_bounds import UsageBounds
from tool_worker.worker.steps.action_run import ActionRun
from tool_worker.worker.steps.answers import answer_failures, limit_attempts, read_action, refuse, require_confirmation
from tool_worker.worker.steps.attribution import rest_while_host_acts, take_turn
from tool_worker.worker.steps.host import make_request, observe, run_on_host
from tool_worker.worker.steps.journal import check_journal
from tool_worker.worker.steps.notices import Notices
from tool_worker.worker.steps.recording import Recorder
from tool_worker.worker.steps.running_calls import RunningCalls, call_offered_tool
from tool_worker.worker.steps.secrets import pass_secrets
from tool_worker.worker.steps.spans import Spans
from tool_worker.worker.steps.stop_orders import StopOrders
from tool_worker.worker.steps.workspace import fill_workspace, open_workspace, recover_workspace
from tool_worker.worker.transfer_service import TransferService
from tool_worker.workspace import Checkpointing, WorkspaceOpener, Workspaces


class Executor:
    """Passes each claimed action through two chains: one around the action, one around the call of its host."""

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
        spans: Tracing | None = None,
    ) -> None:
        self._workspaces = workspaces
        self._checkpointing = checkpointing
        self._opener = opener
        self._transfer_service = transfer_service
        self._calls = RunningCalls(log.is_answered)
        self._stop_orders = StopOrders(log.is_answered)
        self._notices = Notices(workspaces, quota, held)
        offered = offered or OfferedTools(())
        recorder = Recorder(log, worker_id=worker_id, checkpointing=checkpointing, figures=figures or Figures())
        traced = Spans(spans or open_tracing("tool"), worker_id)
        around_host = make_chain(
            [
                # Outermost: only the host acts below, and nothing of that can end this worker.
                rest_while_host_acts,
                # Around the wait for the host, which it ends when the workspace grows too large.
                quota.stop_excess if quota is not None else None,
                # Next to the host: an order counts until the moment in which the action starts.
                self._stop_orders.obey,
            ],
            last=run_on_host,
        )
        self._run = make_chain(
            [
                # Outermost: until its observation is in the log, a death of this worker counts against the action.
                take_turn,
                # Before anything else waits: an order may come while the workspace is still being opened.
                self._stop_orders.listen,
                # Around the append, so that the span ends when others can see the observation.
                traced.trace_action,
                # Outside every step that answers: exactly one observation is appended, whichever step it is from.
                recorder.record,
                # First of those that answer: the others need the action.
                partial(read_action, log),
                # Outside every step that may fail: a failure below is the answer to an action that is known.
                partial(answer_failures, log),
                # Before anything has an effect: an unconfirmed action, or one that no node serves, has none.
                require_confirmation,
                refuse,
                # Before the tool: the next attempt might kill the next worker.
                limit_attempts,
                # Inside all refusals: a tool that is not run has no span.
                traced.trace_tool,
                # Before the workspace: custom tools run in this worker and need none.
                partial(call_offered_tool, offered, self._calls),
                # Before the workspace is opened: a source can fill only a new one.
                partial(fill_workspace, opener, checkpointing) if opener is not None else None,
                # Before the workspace is opened: an action without a request needs none.
                make_request,
                # Before `open_workspace`, which would start an empty workspace where a checkpoint is missing.
                partial(recover_workspace, checkpointing, workspaces) if checkpointing is not None else None,
                # Around all that the host is asked: it marks each observation of a host without a sandbox.
                partial(open_workspace, workspaces, log),
                # Outside the journal: an action that does not run takes no notice, and the next one gets it.
                self._notices.add,
                # Before secrets leave the store: an outdated action is not run.
                partial(check_journal, log),
                # Last: only the host sees them.
                partial(pass_secrets, log),
            ],
            last=partial(observe, log, around_host),
        )

    @property
    def refusals(self) -> int:
        """How often proxies have refused a host to a workspace, the same one once for each action."""
        return self._notices.refusals

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
        if isinstance(claim, ActionClaimed | ActionReclaimed):
            await self._run(ActionRun(delivery, claim, attribution, refusal))

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
