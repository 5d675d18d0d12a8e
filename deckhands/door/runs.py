"""`deckhands.run`, an agent's whole run as one Celery task, in two halves that hold nothing in between.

The first half begins the conversation and ends without a result. When the conversation has settled, the door sends the
task again under the same id; the second half finds the outcome and returns it, and Celery does what it does at the end
of a task: the result, callbacks, chains, chords, events.

Holds: which half a message is, the store decides and not the message; a task id begins one conversation, and has one
answer, but for a door that dies while Celery fires the callbacks: then they are sent again under the same ids.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from broker.celery.door_results import HARD_LIMIT, SOFT_LIMIT
from broker.contract.actions import ChangeAgentStateAction
from broker.contract.events import Event
from broker.contract.observations import AgentStateChangedObservation
from broker.runtime.errors import AdmissionRefused, StoreError, UsageError
from broker.runtime.failpoints import failpoint
from broker.runtime.ids import new_key
from broker.specs.agent_state import TERMINAL_STATES, AgentState, is_settled
from broker.specs.specs import PriorityName
from broker.specs.timing import Timing
from deckhands.door.callers import CELERY, Caller
from deckhands.door.desk import REVOKED, Desk, conversation_of_task
from deckhands.door.earlier_results import fields_of
from deckhands.tasks.requests import TaskRequest

MAX_SENDS = 20
"""How often a second half is sent whose task does not come to its end, a minute apart: a callback may be unusable."""
PRIORITIES: tuple[tuple[int, PriorityName], ...] = ((4, "interactive"), (6, "normal"), (9, "batch"))
"""Celery's numbers over Redis: 0 is the highest, and what every message has that names none."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunMessage:
    """One message of a run.

    Attributes:
        previous: arguments by position.
        options: arguments by name.
        kept: what Celery is to do when the task has ended, see `tasks.KEPT`.
        priority: of the message; 0: none.
        time_limits: of the message, in seconds: the hard one and the soft one; None: there are none.
        refused: why what surrounds the request cannot be used; None: it can.
    """

    task_id: str
    previous: Sequence[Any]
    options: Mapping[str, Any]
    kept: Mapping[str, Any]
    eta: datetime | None = None
    expires: datetime | None = None
    priority: int = 0
    time_limits: Sequence[Any] | None = None
    refused: UsageError | None = None

    def request(self) -> tuple[TaskRequest, str]:
        """Return what is asked for, and the exception of the time limit that bounds it; empty: none does.

        Raises:
            UsageError: it cannot be used.
        """
        if self.refused is not None:
            raise self.refused
        fields = fields_of(self.previous, self.options)
        refuse_key(fields)
        request, time_limit = within(TaskRequest.parse(fields), self.time_limits)
        if request.priority is None and self.priority:
            request = request.model_copy(update={"priority": priority_of(self.priority)})
        return request, time_limit


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run has ended, and what Celery is to do now."""

    found: Mapping[str, Any]
    kept: Mapping[str, Any]


class Runs:
    """The runs of Celery tasks."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def take(self, message: RunMessage) -> Outcome | None:
        """Begin a conversation, or return its outcome; None: there is none yet. Idempotent.

        Raises:
            UsageError: the request cannot be used; nothing was begun.
            AdmissionRefused: it cannot begin now; nothing was begun.
        """
        desk, conversation_id = self._desk, conversation_of_task(message.task_id)
        caller = await desk.callers.of(conversation_id)
        if caller is not None and (found := await self._outcome(caller)):
            return found
        if caller is not None and (caller.outcome or caller.is_answered or await desk.meta(conversation_id)):
            await self._stop_if_revoked(message.task_id)
            return None
        request, time_limit = message.request()
        kept = {**message.kept, "time_limit": time_limit}
        caller = Caller(conversation_id, CELERY, message.task_id, kept=kept, is_headless=request.headless)
        await desk.callers.keep(caller)
        if await desk.revocations.is_revoked(message.task_id):
            await desk.callers.decide(conversation_id, REVOKED)
            return await self.take(message)
        failpoint("door.before_begin")
        try:
            timing = timing_of(request, message.eta, message.expires, desk.store.clock.now())
            await desk.begin(request, conversation_id, message.task_id, awaited=CELERY, timing=timing)
        except (UsageError, AdmissionRefused):
            await desk.callers.forget(conversation_id)
            raise
        await desk.callers.keep(caller)
        failpoint("door.begun")
        await self._stop_if_revoked(message.task_id)
        return None

    async def has_answered(self, task_id: str) -> None:
        """Note that Celery has the outcome."""
        failpoint("door.before_answered")
        conversation_id = conversation_of_task(task_id)
        if await self._desk.callers.of(conversation_id) is not None:
            await self._desk.callers.answered(conversation_id)

    async def revoke(self, task_id: str) -> None:
        """Stop a run, whether it has begun or not. Idempotent; one that has ended is left alone."""
        desk, conversation_id = self._desk, conversation_of_task(task_id)
        await desk.revocations.revoke(task_id)
        caller = await desk.callers.of(conversation_id)
        if caller is None or caller.is_answered:
            return
        meta = await desk.meta(conversation_id)
        if not await desk.outcome(caller, meta):
            if meta:
                await desk.client.cancel(conversation_id)
            await desk.callers.decide(conversation_id, REVOKED)
        await self.send_second_half(caller)

    async def _stop_if_revoked(self, task_id: str) -> None:
        """Stop a run that works although its task was revoked: it began after the revocation had looked for it."""
        desk, conversation_id = self._desk, conversation_of_task(task_id)
        if not await desk.revocations.is_revoked(task_id):
            return
        meta = await desk.meta(conversation_id)
        state = meta.get("state", "")
        if not meta or (state in set(AgentState) and is_settled(AgentState(state))):
            return
        if not any(map(_ends, await desk.client.log.read(conversation_id))):  # else a person has continued it
            await desk.client.cancel(conversation_id)
            await desk.callers.decide(conversation_id, REVOKED)

    async def send_second_half(self, caller: Caller) -> None:
        """Send the second half of a run whose outcome is decided, and look again in case it gets lost."""
        desk = self._desk
        await desk.callers.look_later(caller)
        try:
            if await desk.callers.count_send(caller.conversation_id) <= MAX_SENDS:
                await self._send(caller)
                return
            await asyncio.to_thread(desk.results.give_up, caller.name)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever Celery raises; its broker may be away)
            _log.warning("the result of the task %s cannot be sent; it is tried again: %s", ascii(caller.name), error)
            return
        _log.error("Celery did not take the result of the task %s; it is given up", ascii(caller.name))
        await desk.callers.answered(caller.conversation_id)

    async def _send(self, caller: Caller) -> None:
        try:
            await asyncio.to_thread(self._desk.results.send_second_half, caller.name, caller.kept or {})
        except Exception:
            # However long the broker is away, a result that was never sent is not one that Celery did not take.
            await self._desk.callers.count_send(caller.conversation_id, by=-1)
            raise

    async def _outcome(self, caller: Caller) -> Outcome | None:
        if caller.is_answered:
            return None
        callers, conversation_id = self._desk.callers, caller.conversation_id
        text = await self._desk.outcome(caller, await self._desk.meta(conversation_id))
        if not text or not await callers.lock(conversation_id, new_key()):
            return None
        now = await callers.of(conversation_id)  # another half may have answered, and given the lock back
        return None if now is not None and now.is_answered else Outcome(json.loads(text), caller.kept or {})


def _ends(event: Event) -> bool:
    """Say whether an event asks for the end of a conversation, or reports it."""
    if isinstance(event, ChangeAgentStateAction):
        return event.agent_state is AgentState.STOPPED
    return isinstance(event, AgentStateChangedObservation) and event.agent_state in TERMINAL_STATES


def timing_of(request: TaskRequest, eta: datetime | None, expires: datetime | None, now: datetime) -> Timing:
    """Return when a conversation may begin: what the message says and what the request says both hold."""
    begins = [moment for moment in (eta, request.timing().begins(now)) if moment is not None]
    ends = [moment for moment in (expires, request.timing().ends(now)) if moment is not None]
    due = max(begins, default=None)
    if due is not None and due <= now and not ends:
        return Timing()  # it is begun at once, as a message without a time is
    return Timing(not_before=due, expires=min(ends, default=None))


def within(request: TaskRequest, time_limits: Sequence[Any] | None) -> tuple[TaskRequest, str]:
    """Return a request whose agent also keeps to Celery's time limits, and the exception of the one that bounds it.

    Args:
        time_limits: the hard and the soft one, in seconds; None and 0: there is none.

    Raises:
        UsageError: one is no time.
    """
    names = (HARD_LIMIT, SOFT_LIMIT)
    found = [(float(seconds), name) for seconds, name in zip(time_limits or (), names, strict=False) if seconds]
    for seconds, name in found:
        if not 0 < seconds < math.inf:
            which = "time_limit" if name == HARD_LIMIT else "soft_time_limit"
            raise UsageError(
                f"The {which} {seconds:g} of the task cannot be used.", remedy="Use a number of seconds above 0."
            )
    seconds, name = min(found, default=(math.inf, ""))
    if seconds >= (request.limits.max_seconds or math.inf):
        return request, ""
    return request.model_copy(update={"limits": request.limits.model_copy(update={"max_seconds": seconds})}), name


def priority_of(number: int) -> PriorityName:
    """Return our name for a priority of Celery's over Redis, 1 to 9."""
    return next((name for last, name in PRIORITIES if number <= last), "batch")


def refuse_key(fields: Mapping[str, Any]) -> None:
    """Refuse a key beside the one that the way in has already.

    Raises:
        UsageError: there is one.
    """
    if fields.get("idempotency_key") is not None:
        raise UsageError(
            "The request cannot be used: idempotency_key: the id of the task or entry is the key here.",
            remedy="Leave it out, and repeat a request under the same id.",
        )
