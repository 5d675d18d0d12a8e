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

from broker.contract import ErrorObservation, MCPAction, MCPQuestionObservation, Observation, OfferedToolAction
from broker.runtime import failpoint, make_traceparent
from broker.tools import ToolContext
from tool_worker.tools import OfferedTools, RemoteContext
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
    offered: OfferedTools, calls: RunningCalls, run: ActionRun, rest: RestOfAction
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
        asks=run.action.asks if isinstance(run.action, MCPAction) else None,
        answers=run.action.answers if isinstance(run.action, MCPAction) else None,
    )
    call = offered.call(run.action, run.claim, run.conversation_id, context)
    answer = await calls.run(context, call)
    run.is_stopped = run.is_stopped or context.is_cancelled
    run.is_abandoned = isinstance(answer, ErrorObservation) and answer.error_id == ABANDONED
    failpoint("tool.after_result")
    return answer


async def forget_remote_work(run: ActionRun, rest: RestOfAction) -> Observation:
    """Remove the record of work elsewhere once the action has its observation.

    If another worker wrote the observation, the record belongs to that worker or to the action that continues it.
    """
    observation = await rest(run)
    if run.work is not None and run.is_recorded:
        await run.work.forget(is_continued=isinstance(observation, MCPQuestionObservation))
    return observation
