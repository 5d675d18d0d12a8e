"""Celery tasks as tools: the agent calls a task of the user's own application, on the user's own workers.

    refund = celery_tool("shop.tasks.refund", Refund, "Pay an order back.", app="shop.celery:app")

Holds: a call sends a task once, under a task id that is unique to the call. After a crash, the result of that task is
awaited; the task is not sent again unless it is declared `idempotent`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import cache
from typing import Any

from pydantic import BaseModel

from broker.celery import SentTaskState, TaskSender
from broker.contract import OutcomePolicy, OutcomeUnknownObservation, ToolOffer
from broker.runtime import UsageError
from broker.tools.custom_tools import DEFAULT_TIMEOUT_SECONDS, CustomTool, ToolContext, ToolFailed

FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5
OUTCOME_UNKNOWN = (
    "The worker that sent this task ended before its result was recorded, and the task has left none since. "
    "It may have run, or may still run: check before you repeat it."
)

_log = logging.getLogger(__name__)


def celery_tool(
    task: str,
    parameters: type[BaseModel] | dict[str, Any],
    description: str,
    *,
    app: str = "",
    broker_url: str = "",
    backend_url: str = "",
    queue: str | None = None,
    name: str = "",
    pool: str = "",
    outcome: OutcomePolicy | str = OutcomePolicy.CHECKABLE,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    may_terminate: bool = False,
) -> CustomTool:
    """Create a tool from a Celery task.

    Args:
        task: Its name, as registered by its workers.
        parameters: Its keyword arguments: a model, which validates them, or a JSON Schema, which is only shown.
        description: For the model.
        app: The application, `module:attribute`, imported on the first call; alternatively, give both URLs.
        queue: The queue; None for the application's routing.
        name: For the model; the last part of the task's name if empty.
        pool: The tool workers that may send it; empty for those that hold the conversation's workspace.
        outcome: The recovery after a tool worker's death: `checkable` waits for the result of the sent task,
            `idempotent` sends it again if it has left no result, `at_most_once` does neither.
        timeout_seconds: How long to wait for a result. A task that has not started by then is revoked.
        may_terminate: Whether a stopped or late call terminates the child process that runs its task, including any
            other task that the process has taken since. Otherwise, a started task continues.

    Raises:
        UsageError: neither an application nor both URLs are given.
    """
    if not app and not (broker_url and backend_url):
        raise UsageError(
            f"No application is given for the task {task}.", remedy="Give `app`, or `broker_url` and `backend_url`."
        )
    policy = OutcomePolicy(outcome)
    own_name = name or task.rpartition(".")[2]
    model = parameters if isinstance(parameters, type) else None
    reach = {"app": app, "broker_url": broker_url, "backend_url": backend_url}
    calls = _Calls(task, queue, timeout_seconds, may_terminate=may_terminate, reach=reach)
    return CustomTool(
        offer=ToolOffer(
            key=own_name,
            name=own_name,
            description=description,
            parameters=parameters.model_json_schema() if isinstance(parameters, type) else parameters,
            pool=pool,
            outcome=policy,
        ),
        action=model,
        run=calls.run,
        check=calls.check if policy is OutcomePolicy.CHECKABLE else None,
        # The wait itself has the limit; this one covers a broker that does not answer.
        timeout_seconds=timeout_seconds + 30.0,
    )


class _Calls:
    """Sends one task and waits for its results."""

    def __init__(
        self, task: str, queue: str | None, timeout_seconds: float, *, may_terminate: bool, reach: dict[str, str]
    ) -> None:
        self._task = task
        self._queue = queue
        self._timeout_seconds = timeout_seconds
        self._may_terminate = may_terminate
        self._sender = cache(lambda: TaskSender(**reach))

    async def run(self, arguments: Any, context: ToolContext) -> Any:
        """Send the task unless it was sent before and left a result, then wait for the result."""
        task_id = _task_id(context)
        given = arguments.model_dump(mode="json") if isinstance(arguments, BaseModel) else arguments
        sender = await asyncio.to_thread(self._sender)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        found = await self._load_state(sender, task_id, deadline)
        if found is None:
            raise ToolFailed(
                f"The results of the task {self._task} could not be reached within {self._timeout_seconds:g} seconds; "
                "this call has not sent it."
            )
        if not found.is_known:
            try:
                await asyncio.to_thread(sender.send, self._task, given, task_id=task_id, queue=self._queue)
            except Exception as error:  # noqa: BLE001  (a broker's library may raise anything after it has sent)
                text = f"The task {self._task} may have been sent: {type(error).__name__}: {error}. "
                return OutcomeUnknownObservation(content=text + "It may run: check before you repeat it.")
        state = await self._wait_or_revoke(sender, context, deadline)
        if state is None:
            await self._revoke(sender, task_id)
            raise ToolFailed(
                f"The task {self._task} has not ended within {self._timeout_seconds:g} seconds.",
                remedy="If it has started, it continues: check before you repeat it.",
            )
        return self._result_of(state)

    async def check(self, arguments: Any, context: ToolContext) -> Any:  # noqa: ARG002  (the protocol's)
        """Wait for the result of the task that an earlier worker has sent or was about to send."""
        sender = await asyncio.to_thread(self._sender)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        state = await self._wait_or_revoke(sender, context, deadline)
        return OutcomeUnknownObservation(content=OUTCOME_UNKNOWN) if state is None else self._result_of(state)

    async def _wait_or_revoke(self, sender: TaskSender, context: ToolContext, deadline: float) -> SentTaskState | None:
        task_id = _task_id(context)
        try:
            return await self._load_state(sender, task_id, deadline, is_ended=True)
        except asyncio.CancelledError:
            # Not on a worker shutdown: the next worker waits for the same task.
            if context.is_cancelled:
                await self._revoke(sender, task_id)
            raise

    async def _load_state(
        self, sender: TaskSender, task_id: str, deadline: float, *, is_ended: bool = False
    ) -> SentTaskState | None:
        """Return the state of a task; None if it is unavailable until the deadline.

        Args:
            is_ended: wait for the end of the task.

        Raises:
            ToolFailed: its result cannot be read.
        """
        pause = FIRST_PAUSE_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    # Celery's backend may be away for a while, and the task runs meanwhile.
                    with suppress(*sender.connection_errors):
                        state = await asyncio.to_thread(sender.load_state, task_id)
                        if state.is_ready or not is_ended:
                            return state
                    await asyncio.sleep(pause)  # not every backend can notify of a result
                    pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        except TimeoutError:
            return None
        except Exception as error:
            text = f"The result of the task {self._task} cannot be read: {type(error).__name__}: {error}"
            raise ToolFailed(text, remedy="It may have taken effect: check before you repeat it.") from error

    async def _revoke(self, sender: TaskSender, task_id: str) -> None:
        """Revoke a task if its broker can be reached; otherwise the task may run."""
        try:
            await asyncio.to_thread(sender.revoke, task_id, may_terminate=self._may_terminate)
        except sender.connection_errors as error:
            _log.warning("the task %s could not be revoked: %s", task_id, error)

    def _result_of(self, state: SentTaskState) -> Any:
        if state.is_unsure:
            text = f"The result of the task {self._task} could not be stored: {state.error}. "
            return OutcomeUnknownObservation(content=text + "It may have run: check before you repeat it.")
        if state.error:
            raise ToolFailed(f"The task {self._task} failed: {state.error}")
        return state.value


def _task_id(context: ToolContext) -> str:
    return f"deckhands-{context.idempotency_key}"
