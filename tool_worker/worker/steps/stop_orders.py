"""Orders to stop actions that have not started.

Their workspace is still being opened, or another worker received the order.

Holds: an action does not start if this worker received an order to stop it. Neither does an action that another worker
had before, if the log already answers it. If the log answers any other action, that action is stopped after it has run
for a second.
Does not: stop running actions; the host does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from broker.contract import Observation
from broker.coordination import ActionClaimed
from broker.runtime import StoreError
from tool_worker.errors import HostLost, StoppedBeforeStart
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction, RestOfHostCall
from tool_worker.workspace import HostResult, OpenWorkspace

ANSWER_CHECK_SECONDS = 1.0

_Key = tuple[str, int]


class StopOrders:
    """The stop orders to one worker.

    Args:
        is_answered: Returns whether an action, given by conversation and id, has its observation.
    """

    def __init__(self, is_answered: Callable[[str, int], Awaitable[bool]]) -> None:
        self._is_answered = is_answered
        self._runs: dict[_Key, ActionRun] = {}
        self._is_stopped: dict[_Key, bool] = {}
        self._checks: set[asyncio.Task[bool]] = set()

    async def listen(self, run: ActionRun, rest: RestOfAction) -> Observation:
        """Accept stop orders for an action while this worker has it.

        An action that another worker had may already be running; the order then reaches it through the host.
        """
        key = (run.conversation_id, run.delivery.action_id)
        self._runs[key] = run
        if isinstance(run.claim, ActionClaimed):
            self._is_stopped[key] = False
        try:
            return await rest(run)
        finally:
            self._runs.pop(key, None)
            self._is_stopped.pop(key, None)

    def record(self, conversation_id: str, action_id: int = 0, *, location: str = "") -> None:
        """Record the order to stop an action, or all actions of the conversation if `action_id` is 0.

        Args:
            location: the order's entry, `<stream>|<milliseconds>-<number>`, whose time is the store's.
        """
        millis = location.rpartition("|")[2].partition("-")[0]
        for key, run in self._runs.items():
            if key[0] == conversation_id and action_id in (0, key[1]):
                run.is_stopped = True
                if run.stop_ordered_ms is None and millis.isdecimal():
                    run.stop_ordered_ms = int(millis)
                if key in self._is_stopped:
                    self._is_stopped[key] = True

    async def obey(self, run: ActionRun, rest: RestOfHostCall) -> HostResult:
        """Start an action unless it was ordered to stop; after a second, stop it if the log already answers it.

        Raises:
            StoppedBeforeItBegan: The action was ordered to stop.
        """
        host = run.host
        action_id = run.action.id
        is_stopped = self._is_stopped.get((host.conversation_id, action_id))
        if is_stopped is None:  # another worker had the action, and the stop order may have come between the two
            is_stopped = await self._stop_if_answered(run, host)
        if is_stopped:
            raise StoppedBeforeStart

        def look() -> None:
            looking = asyncio.create_task(self._stop_if_answered(run, host))
            self._checks.add(looking)
            looking.add_done_callback(self._checks.discard)

        timer = asyncio.get_running_loop().call_later(ANSWER_CHECK_SECONDS, look)
        try:
            return await rest(run)
        finally:
            timer.cancel()

    async def _stop_if_answered(self, run: ActionRun, host: OpenWorkspace) -> bool:
        """Stop an action if the log answers it; return whether the log does."""
        is_answered = False
        with contextlib.suppress(HostLost, StoreError):
            action_id = run.action.id
            is_answered = await self._is_answered(host.conversation_id, action_id)
            if is_answered:
                run.is_stopped = True
                await host.interrupt(action_id)
        return is_answered
