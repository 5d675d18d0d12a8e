"""The running calls of custom tools in this worker, so that they can be stopped.

Holds: a stopped call is notified within a second, or within ten seconds while it waits for work elsewhere. A call
counts as stopped also if the log already answers it, whichever worker got the order. Coroutines are cancelled; threads
and remote tasks are asked to stop.
Does not: append anything; the call was answered when it was stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from broker.contract import (
    ErrorObservation,
    MCPAction,
    MCPQuestionObservation,
    Observation,
    OfferedToolAction,
    SurveyAction,
    SurveyObservation,
)
from broker.coordination import ControlDelivery
from broker.log import EventLog
from broker.runtime import DeckhandsError, failpoint, make_traceparent
from broker.tools import ToolContext, ToolFailed
from tool_worker.tools import CallProgress, OfferedTools, RemoteContext, RemoteWork, TaskServers
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction

CHECK_SECONDS = 0.5
LONGEST_CHECK_SECONDS = 8.0
"""Between two looks at the store for a call that waits for work elsewhere; a worker may have a thousand of them."""
STOP_LIMIT_SECONDS = 5.0

_log = logging.getLogger(__name__)

ABANDONED = "abandoned"
"""The `error_id` of a stopped call that still runs. The log does not get it: it has answered the call before."""

CallKey = tuple[str, int, str]
"""Conversation id, action id and fingerprint."""


class RunningCalls:
    """The calls of one worker.

    Args:
        is_answered: Returns whether an action, given by conversation and id, has its observation.
        stop_seconds: How long a stopped call may take to clean up; after that it is abandoned.
    """

    def __init__(
        self, is_answered: Callable[[str, int], Awaitable[bool]], *, stop_seconds: float = STOP_LIMIT_SECONDS
    ) -> None:
        self._is_answered = is_answered
        self._stop_seconds = stop_seconds
        self._running: dict[CallKey, tuple[asyncio.Task[Observation], ToolContext]] = {}

    async def run(self, context: ToolContext, call: Coroutine[Any, Any, Observation]) -> Observation:
        """Run a call until it ends or is stopped."""
        key = (context.conversation_id, context.action_id, context.fingerprint)
        task = asyncio.create_task(call, name=f"call {key[1]} of {key[0]}")
        self._running[key] = (task, context)
        try:
            pause = CHECK_SECONDS
            while not (await asyncio.wait({task}, timeout=pause))[0]:
                work = context.work if isinstance(context, RemoteContext) else None
                is_waiting = work is not None and work.is_parked
                pause = min(2 * pause, LONGEST_CHECK_SECONDS) if is_waiting else CHECK_SECONDS
                if context.is_cancelled or await self._is_answered(*key[:2]):
                    self.stop(*key[:2])
                    break
            if context.is_cancelled:
                return await _wait_for_stopped(task, self._stop_seconds)
            return task.result()
        finally:
            # When the worker stops, the next worker takes the call over, so the call does not count as cancelled.
            task.cancel()
            del self._running[key]

    def stop(self, conversation_id: str, action_id: int) -> bool:
        """Stop a call; return whether it was running here. Idempotent."""
        found = [call for key, call in self._running.items() if key[:2] == (conversation_id, action_id)]
        for task, context in found:
            context.cancelled.set()
            task.cancel()
        return bool(found)


async def _wait_for_stopped(task: asyncio.Task[Observation], limit_seconds: float) -> Observation:
    done, _ = await asyncio.wait({task}, timeout=limit_seconds)
    if not done:
        _log.warning("%s does not stop; it is abandoned", task.get_name())
        return ErrorObservation(content="The call was stopped, and has not ended.", error_id=ABANDONED)
    if not task.cancelled() and task.exception() is None:
        return task.result()
    return ErrorObservation(content="The call was stopped.", error_id="cancelled")


async def call_offered_tool(
    offered: OfferedTools,
    servers: TaskServers,
    calls: RunningCalls,
    run: ActionRun,
    rest: RestOfAction,
    *,
    log: EventLog,
) -> Observation:
    """Call a custom tool, which runs in this worker and needs no workspace."""
    if not isinstance(run.action, OfferedToolAction):
        return await rest(run)
    failpoint("tool.before_run")
    traceparent = run.traceparent or run.action.traceparent or make_traceparent(run.conversation_id)
    context = RemoteContext(
        run.conversation_id,
        run.action.id,
        fingerprint=run.fingerprint,
        traceparent=traceparent,
        work=run.work,
        progress=CallProgress(log, run.conversation_id, run.action.id),
        asks=run.action.asks if isinstance(run.action, MCPAction) else None,
        answers=run.action.answers if isinstance(run.action, MCPAction) else None,
    )
    answer = await calls.run(context, _call(offered, servers, run, context))
    run.is_stopped = run.is_stopped or context.is_cancelled
    run.is_abandoned = isinstance(answer, ErrorObservation) and answer.error_id == ABANDONED
    failpoint("tool.after_result")
    return answer


async def _call(offered: OfferedTools, servers: TaskServers, run: ActionRun, context: RemoteContext) -> Observation:
    action = run.action
    assert isinstance(action, OfferedToolAction)
    if not isinstance(action, MCPAction) or action.server is None:
        return await offered.call(action, run.claim, run.conversation_id, context)
    try:
        async with servers.use_tool(run.conversation_id, action, run.work) as tool:
            return await offered.call(action, run.claim, run.conversation_id, context, tool=tool)
    except ToolFailed as error:
        return ErrorObservation(content=str(error), error_id=error.code)


async def drop_question(log: EventLog, offered: OfferedTools, servers: TaskServers, order: ControlDelivery) -> None:
    """End the server's task behind a question that was dropped: its action is answered, and nothing was sent back.

    Idempotent. A failure is logged: the server ends the task when its own time is over.
    """
    conversation_id, action_id = order.conversation_id, order.action_id
    try:
        action = await log.decode_entry(conversation_id, order.entry, action_id) if order.entry else None
        if not isinstance(action, MCPAction) or action.asks is None:
            return
        if not await log.is_answered(conversation_id, action_id):
            return
        work = RemoteWork(log.store, conversation_id, action_id, secrets=log.secrets)
        context = RemoteContext(conversation_id, action_id, work=work, asks=action.asks)
        if action.server is None:
            await offered.drop(action, context)
            return
        async with servers.use_tool(conversation_id, action) as tool:
            await offered.drop(action, context, tool=tool)
    except DeckhandsError as error:
        _log.warning("the question of action %d of %s is not dropped: %s", action_id, conversation_id, error)


async def list_server_tools(servers: TaskServers, run: ActionRun, rest: RestOfAction) -> Observation:
    """Add to a survey the tools of the MCP servers that the task and the skills of its workspace name."""
    answer, action = await rest(run), run.action
    if not isinstance(action, SurveyAction) or not isinstance(answer, SurveyObservation):
        return answer
    return await servers.add_offers(run.conversation_id, answer, action.servers or {}, with_skills=action.with_skills)


async def forget_remote_work(run: ActionRun, rest: RestOfAction) -> Observation:
    """Remove the record of work elsewhere once the action has its observation.

    If another worker wrote the observation, the record belongs to that worker or to the action that continues it.
    """
    observation = await rest(run)
    if run.work is not None and run.is_recorded:
        await run.work.forget(is_continued=isinstance(observation, MCPQuestionObservation))
    return observation
