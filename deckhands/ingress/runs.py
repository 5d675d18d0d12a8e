"""`deckhands.run`, an agent's whole run as one Celery task, in two parts with no process held in between.

The message of the task starts the conversation and ends without a result. When the conversation has settled, an ingress
worker completes the task in its own process: it stores the result and sends callbacks, chains and chords as Celery
does. This needs no second message, so results do not queue behind new tasks.

Holds: a task id starts one conversation and has one outcome. If the broker or the result backend is unavailable,
completion is retried until it succeeds. If a worker crashes during completion, another one sends the callbacks again
under the same ids. A message redelivered after the end stores the result again if it was lost, and sends no callback.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from broker.contract import (
    TERMINAL_STATES,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    Event,
    PriorityName,
    Timing,
    is_settled,
)
from broker.runtime import AdmissionRefused, UsageError, failpoint, make_extra
from deckhands.client import TaskSpec, derive_task_conversation_id
from deckhands.ingress.callers import CELERY, Caller
from deckhands.ingress.context import EXPIRED, REVOKED, SUCCESS, Answer, IngressContext, find_start_ms
from deckhands.ingress.earlier_results import follow
from deckhands.ingress.failures import to_exception, unusable_callback
from deckhands.ingress.ingress_app import RUN
from deckhands.ingress.ingress_results import HARD_LIMIT, RETRYABLE, SOFT_LIMIT, Ending, make_revoked

COMPLETIONS_AT_ONCE = 8
"""How many tasks with followers are completed at the same time."""
MAX_SHOWN = 100
MAX_READ = 1_000
"""The maximum number of runs in an answer of remote control, and of callers read per shard for it."""
PRIORITIES: tuple[tuple[int, PriorityName], ...] = ((4, "interactive"), (6, "normal"), (9, "batch"))
"""Celery's priorities over Redis: 0 is the highest, and the default of messages without one."""


_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunMessage:
    """One message of a run.

    Attributes:
        previous: positional arguments.
        options: keyword arguments.
        kept: the fields that Celery needs when the task completes, see `KEPT_FIELDS`.
        priority: the priority of the message; 0 for none.
        time_limits: the hard and the soft limit of the message, in seconds; None for no limit.
        refused: why the properties of the message are invalid; None if they are valid.
        shown: the fields that monitors see.
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
    shown: Mapping[str, Any] = field(default_factory=dict)

    def request(self) -> tuple[TaskSpec, bytes | None, str]:
        """Return the request, the file for its workspace, and the time limit that bounds it.

        The time limit is the name of its exception; empty if none bounds the run.

        Raises:
            UsageError: the request is invalid.
        """
        if self.refused is not None:
            raise self.refused
        following = follow(self.previous, self.options)
        refuse_key(following.fields)
        request, time_limit = with_time_limits(TaskSpec.parse(following.fields), self.time_limits)
        if request.priority is None and self.priority:
            request = request.model_copy(update={"priority": priority_of(self.priority)})
        return request, following.archive, time_limit


class Runs:
    """The runs of Celery tasks.

    Calls of many runs share their round trips: commands of concurrent coroutines are sent together, and so are the
    events that are announced meanwhile.
    """

    def __init__(self, context: IngressContext) -> None:
        self._context = context
        self._threads = ThreadPoolExecutor(COMPLETIONS_AT_ONCE, thread_name_prefix="completion")
        self._events = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._has_events = False

    async def take(self, message: RunMessage) -> None:
        """Start a conversation. Idempotent: a second message completes or repeats a run that has ended.

        Raises:
            UsageError: the request is invalid; nothing was started.
            AdmissionRefused: the conversation cannot start now; nothing was started.
        """
        context = self._context
        conversation_id = derive_task_conversation_id(message.task_id)
        caller, meta, (score,) = await context.load(conversation_id, context.revocations.find_score(message.task_id))
        is_revoked = score is not None
        if caller is not None and not context.may_answer(caller):
            raise UsageError(
                f"The task id {ascii(message.task_id)[:100]} is that of a task of another Celery broker.",
                remedy="Send the task under another id.",
            )
        if caller is not None and (caller.outcome or caller.is_answered or meta):
            if is_revoked:
                await self._stop_revoked(message.task_id)
            await self._answer_again(caller, message)
            return
        try:
            request, archive, time_limit = message.request()
        except UsageError:
            self._announce("received", message.task_id, **message.shown)
            raise
        shown = {name: message.shown.get(name) for name in ("args", "kwargs")}
        caller = Caller(
            conversation_id,
            CELERY,
            message.task_id,
            kept={**message.kept, "time_limit": time_limit, "shown": shown},
            is_headless=request.headless,
            broker=context.broker,
        )
        if is_revoked or context.has_expired(message.expires):
            await context.callers.add(caller)
            self._announce("received", message.task_id, **message.shown)
            await context.callers.decide(conversation_id, REVOKED if is_revoked else EXPIRED)
            await self.complete(conversation_id)
            return
        failpoint("ingress.before_begin")
        try:
            spec = request.with_timing(timing_of(request, message.eta, message.expires, context.store.clock.now()))
            is_new = await context.start_conversation(
                spec, conversation_id, message.task_id, caller=caller, archive=archive
            )
        except (UsageError, AdmissionRefused):
            self._announce("received", message.task_id, **message.shown)
            raise
        failpoint("ingress.begun")
        if is_new:
            self._announce("received", message.task_id, **message.shown)
        else:
            await context.callers.add(caller)
        if await context.revocations.is_revoked(message.task_id):  # after the check above, and before the start
            await self._stop_revoked(message.task_id)

    async def refuse(self, message: RunMessage, failure: Exception) -> None:
        """Complete the task of a message that starts no conversation.

        Raises:
            OSError, OperationalError, RedisError: the broker or the result backend is unavailable; try again later.
        """
        ending = Ending(message.task_id, message.kept, failure=failure, unusable=lambda _: failure)
        await self._in_thread(partial(self._context.results.settle, ending))

    async def revoke(self, task_id: str) -> None:
        """Stop a run, started or not. Idempotent; a run that has ended does not change."""
        context = self._context
        conversation_id = derive_task_conversation_id(task_id)
        await context.revocations.revoke(task_id)
        caller, meta, _ = await context.load(conversation_id)
        if caller is None or caller.is_answered or not context.may_answer(caller):
            return
        if not await context.find_answer(caller, meta):
            if meta:
                await context.client.cancel(conversation_id)
            await context.callers.decide(conversation_id, REVOKED)
        await self.complete(conversation_id)

    async def _stop_revoked(self, task_id: str) -> None:
        """Stop a run whose task is revoked, because it may have started after the revocation looked for it."""
        context = self._context
        conversation_id = derive_task_conversation_id(task_id)
        meta = await context.meta(conversation_id)
        state = meta.get("state", "")
        if not meta or (state in set(AgentState) and is_settled(AgentState(state))):
            return
        if not any(map(_ends, await context.client.log.read(conversation_id))):  # otherwise a user has continued it
            await context.client.cancel(conversation_id)
            await context.callers.decide(conversation_id, REVOKED)

    async def complete(self, conversation_id: str) -> None:
        """Complete the task of a run whose outcome is decided; do nothing if it is undecided. Idempotent."""
        caller, meta, _ = await self._context.load(conversation_id)
        if caller is None or caller.is_answered or not self._context.may_answer(caller):
            return
        answer = await self._context.find_answer(caller, meta)
        if answer is not None:
            await self.complete_all([answer])

    async def complete_all(self, answers: Sequence[Answer]) -> None:
        """Complete the tasks of runs that have ended. Idempotent. A failed one does not affect the others.

        If the broker or the result backend is unavailable, or this worker crashes, the sweep over callers tries again.
        """
        callers = self._context.callers
        taken = await asyncio.gather(
            *(callers.take_answer(answer.caller, answer.outcome, answer.started_ms) for answer in answers),
            return_exceptions=True,
        )
        endings = []
        for answer, found in zip(answers, taken, strict=True):
            if isinstance(found, BaseException):
                self._log_failure(answer.caller.conversation_id, found)
            elif found is not None:
                outcome, is_first_start = found
                if is_first_start and answer.started_ms:
                    self._announce("started", answer.caller.name, timestamp=answer.started_ms / 1000)
                endings.append(_ending_of(answer, json.loads(outcome)))
        if not endings:
            return
        failpoint("ingress.before_result")
        settled = await self._settle_all(endings)
        failpoint("ingress.before_answered")
        marked = await asyncio.gather(*map(callers.mark_answered, settled), return_exceptions=True)
        repeated = [conversation_id for conversation_id, found in zip(settled, marked, strict=True) if found is True]
        restored = await asyncio.gather(*map(self._repeat, repeated), return_exceptions=True)
        for conversation_id, error in zip([*settled, *repeated], [*marked, *restored], strict=True):
            if isinstance(error, BaseException):
                self._log_failure(conversation_id, error)

    async def _settle_all(self, endings: Sequence[Ending]) -> list[str]:
        """Settle tasks, those without followers together, and return the conversations of the settled ones."""
        results = self._context.results
        plain = [ending for ending in endings if ending.is_plain]
        alone = [ending for ending in endings if not ending.is_plain]
        settled = list[str]()
        try:
            stored = await self._in_thread(partial(results.store_all, plain)) if plain else []
        except RETRYABLE as error:
            _log.warning("cannot complete %d tasks now; retrying: %s", len(plain), error)
            stored, plain = [], []
        for ending, is_stored in zip(plain, stored, strict=True):
            if is_stored:
                kind, task_id, fields = results.describe_end(ending)
                self._announce(kind, task_id, **fields)
                settled.append(ending.conversation_id)
            else:
                alone.append(ending)
        errors = await asyncio.gather(
            *(self._in_thread(partial(results.settle, ending)) for ending in alone), return_exceptions=True
        )
        for ending, raised in zip(alone, errors, strict=True):
            if raised is None:
                settled.append(ending.conversation_id)
            elif isinstance(raised, RETRYABLE):
                _log.warning("cannot complete the task %s now; retrying: %s", ascii(ending.task_id), raised)
            else:
                self._log_failure(ending.conversation_id, raised)
        return settled

    async def in_flight(self, *, has_started: bool) -> list[dict[str, Any]]:
        """Return unfinished runs as Celery's remote control shows tasks; every ingress worker returns the same.

        Args:
            has_started: return those whose agents work; otherwise those that have not started.
        """
        found = list[Caller]()
        others = 0
        shards = self._context.store.all_shards
        for waiting, more in await asyncio.gather(
            *(self._context.callers.waiting(names, limit=MAX_READ) for names in shards)
        ):
            found += [caller for caller in waiting if self._is_shown(caller) and bool(caller.started_ms) == has_started]
            others += more
        if len(found) > MAX_SHOWN or others:
            rest = max(0, len(found) - MAX_SHOWN)
            _log.warning("the answer omits %d runs, and %d that were not read", rest, others)
        return [_info_of(caller) for caller in found[:MAX_SHOWN]]

    async def query(self, task_ids: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the tasks that are unfinished runs, each with its Celery state."""
        found = {}
        for task_id in task_ids:
            caller = await self._context.callers.of(derive_task_conversation_id(task_id))
            if caller is not None and self._is_shown(caller) and not (caller.outcome or caller.is_answered):
                found[task_id] = ("active" if caller.started_ms else "reserved", _info_of(caller))
        return found

    def _is_shown(self, caller: Caller) -> bool:
        return caller.kind == CELERY and self._context.may_answer(caller)

    async def announce_start(self, caller: Caller) -> None:
        """Send the event that an agent has started, once over all workers, with the time from the log."""
        if caller.kind != CELERY or caller.started_ms is not None:
            return
        started_ms = find_start_ms(await self._context.client.log.read(caller.conversation_id))
        if started_ms and await self._context.callers.note_start(caller.conversation_id, started_ms):
            self._announce("started", caller.name, timestamp=started_ms / 1000)

    def _announce(self, kind: str, task_id: str, **fields: Any) -> None:
        """Send an event, together with the others of this turn of the loop. Events are sent in this order."""
        self._context.results.queue_event(kind, task_id, **fields)
        if not self._has_events:
            self._has_events = True
            asyncio.get_running_loop().call_soon(self._send_events)

    def _send_events(self) -> None:
        self._has_events = False
        self._events.submit(self._context.results.send_queued_events)

    async def _answer_again(self, caller: Caller, message: RunMessage) -> None:
        """Answer a repeated message: complete its task, or store a lost result again."""
        conversation_id = caller.conversation_id
        is_result_wanted = not message.kept.get("ignore_result")
        if not caller.is_answered:
            if is_result_wanted:  # another worker may be completing the task, and have stored its result already
                await self._context.callers.note_repeat(conversation_id)
            await self.complete(conversation_id)
        if is_result_wanted:
            await self._repeat(conversation_id)

    async def _repeat(self, conversation_id: str) -> None:
        """Store the result of a completed task again if it is gone, because its producer may not have received it."""
        caller = await self._context.callers.of(conversation_id)
        if caller is not None and caller.is_answered and caller.outcome:
            value, failure = _parse_outcome(json.loads(caller.outcome))
            await self._in_thread(partial(self._context.results.restore_result, caller.name, value, failure=failure))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _log_failure(self, conversation_id: str, error: BaseException) -> None:
        text = "cannot answer the caller of conversation %s"
        _log.error(text, conversation_id, exc_info=error, extra=make_extra(conversation_id))


def _ending_of(answer: Answer, outcome: Mapping[str, Any]) -> Ending:
    """Return the end of a task whose answer was taken."""
    caller = answer.caller
    value, failure = _parse_outcome(outcome)
    updated, runtime_seconds = (outcome.get("summary") or {}).get("updated"), None
    if answer.started_ms and updated:
        runtime_seconds = max(0.0, datetime.fromisoformat(updated).timestamp() - answer.started_ms / 1000)
    return Ending(
        caller.name,
        caller.kept or {},
        value,
        failure,
        unusable=lambda error: to_exception(unusable_callback(error, caller.conversation_id)),
        runtime_seconds=runtime_seconds,
        conversation_id=caller.conversation_id,
    )


def _parse_outcome(outcome: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """Return the result and the failure of a task from its outcome."""
    if outcome["status"] == SUCCESS:
        return outcome["summary"], None
    if "failure" in outcome:
        return None, to_exception(outcome["failure"])
    return None, make_revoked(str(outcome.get("reason", "")))


def _info_of(caller: Caller) -> dict[str, Any]:
    """Return a run as Celery's remote control shows a task."""
    shown = (caller.kept or {}).get("shown") or {}
    return {
        "id": caller.name,
        "name": RUN,
        "args": shown.get("args"),
        "kwargs": shown.get("kwargs"),
        "type": RUN,
        "time_start": caller.started_ms / 1000 if caller.started_ms else None,
        "acknowledged": True,
        "delivery_info": {},
        "worker_pid": None,
        "conversation_id": caller.conversation_id,
    }


def _ends(event: Event) -> bool:
    """Return whether an event requests the end of a conversation, or reports it."""
    if isinstance(event, ChangeAgentStateAction):
        return event.agent_state is AgentState.STOPPED
    return isinstance(event, AgentStateChangedObservation) and event.agent_state in TERMINAL_STATES


def timing_of(request: TaskSpec, eta: datetime | None, expires: datetime | None, now: datetime) -> Timing:
    """Return when a conversation may start: the times of the message and of the request both apply."""
    begins = [moment for moment in (eta, request.timing().earliest_start(now)) if moment is not None]
    ends = [moment for moment in (expires, request.timing().latest_start(now)) if moment is not None]
    due = max(begins, default=None)
    if due is not None and due <= now and not ends:
        return Timing()  # it starts at once, like a message without a time
    return Timing(not_before=due, expires=min(ends, default=None))


def with_time_limits(request: TaskSpec, time_limits: Sequence[Any] | None) -> tuple[TaskSpec, str]:
    """Return a request whose agent also observes Celery's time limits, and the exception of the limit that bounds it.

    Args:
        time_limits: the hard and the soft one, in seconds; None and 0 mean no limit.

    Raises:
        UsageError: a limit is not a duration.
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
    """Return our name of Celery's priority over Redis, 1 to 9."""
    return next((name for last, name in PRIORITIES if number <= last), "batch")


def refuse_key(fields: Mapping[str, Any]) -> None:
    """Refuse an idempotency key in the request: the id of the task or entry is the key.

    Raises:
        UsageError: the request has a key.
    """
    if fields.get("idempotency_key") is not None:
        raise UsageError(
            "The request cannot be used: idempotency_key: the id of the task or entry is the key here.",
            remedy="Leave it out, and repeat a request under the same id.",
        )
