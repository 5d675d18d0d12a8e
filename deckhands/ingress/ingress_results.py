"""Completes ingress tasks in the ingress worker itself: results, chords, callbacks, events, progress.

None of this uses the ingress queue, so no result waits behind new tasks.

Holds: progress never overwrites the final state of a task. Followers are sent before the result is stored, under ids
derived from the task, so a completion that is repeated after a crash sends the same tasks.
Does not: run on an event loop. Every method blocks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task, signals, states
from celery._state import _task_stack
from celery.app.task import Context
from celery.canvas import group, maybe_signature
from celery.contrib.abortable import ABORTED
from celery.events import Event, get_exchange
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.utils.saferepr import saferepr
from celery.utils.time import utcoffset
from redis.exceptions import (
    AskError,
    AuthenticationWrongNumberOfArgsError,
    ClusterDownError,
    ExecAbortError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
    WatchError,
)

from deckhands.ingress.canvas import FOLLOWERS
from deckhands.ingress.ingress_app import BACKEND_UNAVAILABLE, RUN

KEPT_FIELDS = (*FOLLOWERS, "root_id", "parent_id", "group", "group_index", "ignore_result")
"""The fields of a task's message that its completion needs."""
PROGRESS = "PROGRESS"
HARD_LIMIT, SOFT_LIMIT = TimeLimitExceeded.__name__, SoftTimeLimitExceeded.__name__
TIME_LIMITS: dict[str, type[Exception]] = {HARD_LIMIT: TimeLimitExceeded, SOFT_LIMIT: SoftTimeLimitExceeded}
"""The errors that callers expect of a task that exceeds its time limit."""
RETRYABLE = (*BACKEND_UNAVAILABLE, RedisError)
"""Errors of the result backend or the broker after which a retry may succeed, see `is_temporary`."""
TEMPORARY = (
    *(AskError, AuthenticationWrongNumberOfArgsError, ClusterDownError, ExecAbortError, NoScriptError),
    *(OutOfMemoryError, ReadOnlyError, TryAgainError),
)
TEMPORARY_CODES = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")
"""Replies that a server gives to any client for a while. All others concern the command and are permanent."""
MAX_CAUSES = 10
DROP_ORDER = ((), ("callbacks", "errbacks", "chain"), FOLLOWERS)
"""The followers that are given up, step by step. The chord is last, because other tasks wait for its count."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a task.

    Attributes:
        kept: the fields `KEPT_FIELDS` of the task's message.
        value: its return value, unless it has failed.
        failure: its error; the value of `make_revoked` if it was revoked.
        unusable: converts the error of an invalid follower to the failure of the task.
        conversation_id: of a run; empty if there is none.
    """

    task_id: str
    kept: Mapping[str, Any]
    value: Any = None
    failure: Exception | None = None
    unusable: Callable[[Exception], Exception] = lambda error: error
    task: str = RUN
    runtime_seconds: float | None = None
    conversation_id: str = ""

    @property
    def is_plain(self) -> bool:
        """Return whether its result is all that is left to do."""
        return self.failure is None and not any(self.kept.get(name) for name in FOLLOWERS)


class TaskResults:
    """The tasks of the ingress application."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._worker_name: str | None = None
        self._events = deque[Any]()
        self._sending = threading.Lock()
        signals.celeryd_init.connect(self._set_worker_name, weak=False)

    def complete(
        self,
        task_id: str,
        kept: Mapping[str, Any],
        value: Any = None,
        *,
        failure: Exception | None = None,
        task: str = RUN,
        runtime_seconds: float | None = None,
    ) -> None:
        """Do all that Celery does at the end of a task: callbacks or errbacks, chain, result, chord, event.

        Idempotent under the task id, except that callbacks are sent again, under the same ids. See `Ending` for the
        arguments.

        Raises:
            OSError, OperationalError, RedisError: the broker or the result backend is unavailable; try again later.
            Exception: a follower is invalid; do not retry.
        """
        request = Context(
            {name: kept.get(name) for name in KEPT_FIELDS},
            id=task_id,
            task=task,
            hostname=self._worker_name,
            called_directly=False,
            delivery_info={},
            args=(),
            kwargs={},
        )
        ending = self._find_task(task)
        _task_stack.push(ending)
        ending.request_stack.push(request)
        try:
            self._complete(request, value, failure)
        finally:
            ending.request_stack.pop()
            _task_stack.pop()
        ended = Ending(task_id, kept, value, failure, task=task, runtime_seconds=runtime_seconds)
        kind, _, fields = self.describe_end(ended)
        self.send_event(kind, task_id, **fields)

    def send_event(self, kind: str, task_id: str, *, task: str = RUN, **fields: Any) -> None:
        """Send an event of a task, such as `received`, after the queued ones.

        Celery itself sends none for a task whose agent works longer than its message is held.
        """
        self.queue_event(kind, task_id, task=task, **fields)
        self.send_queued_events()

    def queue_event(self, kind: str, task_id: str, *, task: str = RUN, **fields: Any) -> None:
        """Queue an event for `send_queued_events`."""
        facts = {"hostname": self._worker_name, "pid": os.getpid(), "utcoffset": utcoffset()}
        self._events.append(
            Event(f"task-{kind}", clock=self._app.clock.forward(), uuid=task_id, name=task, **facts, **fields)
        )

    def send_queued_events(self) -> None:
        """Send the queued events in one message, as Celery's workers do. If the broker is unavailable, drop them."""
        with self._sending:
            batch = [self._events.popleft() for _ in range(len(self._events))]
            if not batch:
                return
            key = "task.multi" if len(batch) > 1 else batch[0]["type"].replace("-", ".")
            try:
                with self._app.amqp.producer_pool.acquire(block=True) as producer:
                    exchange = get_exchange(producer.connection, name=self._app.conf.event_exchange)
                    producer.publish(
                        batch if len(batch) > 1 else batch[0],
                        routing_key=key,
                        exchange=exchange.name,
                        declare=[exchange],
                        serializer=self._app.conf.event_serializer,
                        headers={"hostname": self._worker_name},
                        delivery_mode=1,
                        retry=True,
                        retry_policy=self._app.conf.task_publish_retry_policy,
                    )
            except RETRYABLE as error:  # a missing event must not fail the task
                _log.warning("%d events of tasks cannot be sent: %s", len(batch), error)

    def store_all(self, endings: Sequence[Ending]) -> list[bool]:
        """Store the results of plain endings together, and return for each whether this was done.

        For any other ending, call `settle`. A result that is already stored stays.

        Raises:
            OSError, OperationalError, RedisError: the result backend is unavailable; try again later.
        """
        found: list[bool] = self._app.backend.ensure(self._store_all, (endings,))
        return found

    def settle(self, ending: Ending) -> None:
        """Complete a task. If its followers are invalid, fail the task, and send the remaining valid ones.

        Raises:
            OSError, OperationalError, RedisError: the broker or the result backend is unavailable; try again later.
        """
        value, failure = ending.value, ending.failure
        for dropped in (None, *DROP_ORDER):
            rest = {name: found for name, found in ending.kept.items() if name not in (dropped or ())}
            facts: dict[str, Any] = {"task": ending.task, "runtime_seconds": ending.runtime_seconds}
            try:
                self.complete(ending.task_id, rest, value, failure=failure, **facts)
            except Exception as error:
                if is_temporary(error) or dropped is FOLLOWERS:
                    raise
                if dropped is None:
                    _log.error("the followers of the task %s cannot be sent: %r", ascii(ending.task_id), error)
                    value, failure = None, ending.unusable(error)
            else:
                return

    def describe_end(self, ending: Ending) -> tuple[str, str, dict[str, Any]]:
        """Return the kind, the task id and the fields of the event of an end."""
        failure, state = ending.failure, _find_state(ending.failure)
        event: dict[str, Any] = {"traceback": None, "exception": repr(failure)}
        if state == states.SUCCESS:
            longest = self._find_task(ending.task).resultrepr_maxsize
            event = {"result": saferepr(ending.value, longest), "runtime": ending.runtime_seconds}
        elif state == states.REVOKED:
            reason = str(failure)
            event = {"terminated": reason == "terminated", "signum": None, "expired": reason == "expired"}
        kinds = {states.SUCCESS: "succeeded", states.FAILURE: "failed", states.REVOKED: "revoked"}
        return kinds[state], ending.task_id, {"task": ending.task, **event}

    def restore_result(self, task_id: str, value: Any = None, *, failure: Exception | None = None) -> None:
        """Store the result of a task again if it was lost or has expired. Followers are not sent again."""
        backend = self._app.backend
        if backend.get_state(task_id) not in states.READY_STATES:
            backend.store_result(task_id, value if failure is None else failure, _find_state(failure))

    def report_progress(self, task_id: str, progress: Mapping[str, Any]) -> bool:
        """Publish the progress of a task that has not ended. Return whether its caller has aborted it."""
        backend = self._app.backend
        key = backend.get_key_for_task(task_id)
        with backend.client.pipeline() as pipe:
            pipe.watch(key)
            found = pipe.get(key)
            status = backend.decode_result(found).get("status") if found else states.PENDING
            if status == ABORTED or status in states.READY_STATES:
                return bool(status == ABORTED)
            text = self._encode_meta(task_id, PROGRESS, dict(progress))
            pipe.multi()
            pipe.set(key, text, ex=backend.expires or None)
            pipe.publish(key, text)
            with suppress(WatchError):  # the concurrent write is newer
                pipe.execute()
        return False

    def _store_all(self, endings: Sequence[Ending]) -> list[bool]:
        backend, now = self._app.backend, self._app.now().isoformat()
        keys = [backend.get_key_for_task(ending.task_id) for ending in endings]
        with backend.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.get(key)
            are_stored = list(map(self._is_success, endings, pipe.execute(raise_on_error=False)))
            for ending, key, is_stored in zip(endings, keys, are_stored, strict=True):
                if is_stored is False:
                    names = {"group_id": "group", "parent_id": "parent_id"}
                    about = {name: ending.kept[field] for name, field in names.items() if ending.kept.get(field)}
                    text = self._encode_meta(ending.task_id, states.SUCCESS, ending.value, date_done=now, **about)
                    pipe.set(key, text, ex=backend.expires or None)
                    pipe.publish(key, text)
            replies = pipe.execute(raise_on_error=False)[::2]
        written = iter(not isinstance(reply, Exception) for reply in replies)
        return [next(written) if is_stored is False else bool(is_stored) for is_stored in are_stored]

    def _is_success(self, ending: Ending, found: Any) -> bool | None:
        """Return whether a task's value in the backend is a success, which needs no write; None if it is unreadable."""
        if ending.kept.get("ignore_result"):
            return True
        try:
            return found is not None and bool(self._app.backend.decode_result(found)["status"] == states.SUCCESS)
        except Exception:  # noqa: BLE001  (another program wrote it: it is anything)
            return None

    def _encode_meta(
        self, task_id: str, status: str, result: Any, *, date_done: str | None = None, **about: Any
    ) -> Any:
        meta = {"status": status, "result": result, "traceback": None, "children": [], "date_done": date_done, **about}
        return self._app.backend.encode({**meta, "task_id": task_id})

    def _complete(self, request: Context, value: Any, failure: Exception | None) -> None:
        backend = self._app.backend
        is_stored = not request.ignore_result
        if isinstance(failure, TaskRevokedError):
            backend.mark_as_revoked(request.id, str(failure), request=request, store_result=is_stored)
        elif failure is not None:
            backend.mark_as_failure(request.id, failure, request=request, store_result=is_stored)
        else:
            # Before the result is stored, because it lists them as children.
            self._send_following(request, value)
            backend.mark_as_done(request.id, value, request, is_stored)

    def _send_following(self, request: Context, value: Any) -> None:
        """Send the callbacks and the next task of the chain, as Celery's tracer does."""
        options = {"parent_id": request.id, "root_id": request.root_id or request.id}
        following = [maybe_signature(callback, app=self._app) for callback in request.callbacks or ()]
        groups = [found for found in following if isinstance(found, group)]
        single = [found for found in following if not isinstance(found, group)]
        for found in groups + ([group(single, app=self._app)] if len(single) > 1 else single):
            found.apply_async((value,), **options)
        if request.chain:
            *rest, following_task = request.chain
            maybe_signature(following_task, app=self._app).apply_async((value,), chain=rest, **options)

    def _find_task(self, name: str) -> Task:
        """Return the task object; registers one for an evaluation's command, which has none."""
        if name not in self._app.tasks:
            self._app.register_task(type("Ending", (Task,), {"name": name, "run": lambda: None})())
        return self._app.tasks[name]

    def _set_worker_name(self, sender: str, **_: Any) -> None:
        self._worker_name = sender


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed. A command that the broker refuses is refused again."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if isinstance(cause, ResponseError):
            return isinstance(cause, TEMPORARY) or str(cause).startswith(TEMPORARY_CODES)
        cause = cause.__cause__ if cause is not None else None
    return isinstance(error, RETRYABLE)


def make_revoked(reason: str) -> Exception:
    """Return the failure of a revoked task. The reason is `terminated` or `expired`."""
    error: Exception = TaskRevokedError(reason)
    return error


def _find_state(failure: Exception | None) -> str:
    if failure is None:
        return str(states.SUCCESS)
    return str(states.REVOKED if isinstance(failure, TaskRevokedError) else states.FAILURE)
