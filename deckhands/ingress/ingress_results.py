"""Completes ingress tasks in the ingress worker itself: results, chords, callbacks, events, progress.

Nothing of this uses the ingress queue, so no result waits behind new tasks.

Holds: progress never overwrites the final state of a task. Followers are sent before the result is stored, under ids
derived from the task, so a completion that is repeated after a crash sends the same tasks.
Does not: run on an event loop. Every method blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from celery import Celery, Task, signals, states
from celery._state import _task_stack
from celery.app.task import Context
from celery.canvas import group, maybe_signature
from celery.contrib.abortable import ABORTED
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.utils.saferepr import saferepr
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
from deckhands.ingress.ingress_app import BACKEND_UNAVAILABLE

RUN = "deckhands.run"
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


class TaskResults:
    """The tasks of the ingress application."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._worker_name: str | None = None
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
        """Do everything that Celery does at the end of a task: callbacks or errbacks, chain, result, chord, event.

        Idempotent under the task id, except that callbacks are sent again, under the same ids.

        Args:
            kept: the fields `KEPT` of the task's message.
            value: return value of the task, unless it has failed.
            failure: the error of the task; the value of `revoked` if it was revoked.

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
            self._send_end_event(ending, value, failure, runtime_seconds)
        finally:
            ending.request_stack.pop()
            _task_stack.pop()

    def send_event(self, kind: str, task_id: str, *, task: str = RUN, **fields: Any) -> None:
        """Send an event of a task, such as `received`. If the broker is unavailable, only log a warning.

        Celery itself sends none for a task whose agent works longer than its message is held.
        """
        dispatcher = self._app.events.default_dispatcher
        try:
            with dispatcher(hostname=self._worker_name) as events:
                policy = self._app.conf.task_publish_retry_policy
                events.send(f"task-{kind}", uuid=task_id, name=task, retry=True, retry_policy=policy, **fields)
        except RETRYABLE as error:  # a missing event must not fail the task
            _log.warning("the event %s of the task %s cannot be sent: %s", kind, ascii(task_id), error)

    def settle(
        self,
        task_id: str,
        kept: Mapping[str, Any],
        value: Any = None,
        *,
        failure: Exception | None = None,
        unusable: Callable[[Exception], Exception],
        task: str = RUN,
        runtime_seconds: float | None = None,
    ) -> None:
        """Complete a task. If its followers are invalid, fail the task, and send the remaining valid ones.

        Args:
            unusable: converts the error of an invalid follower to the failure of the task.

        Raises:
            OSError, OperationalError, RedisError: the broker or the result backend is unavailable; try again later.
        """
        for dropped in (None, *DROP_ORDER):
            rest = {name: found for name, found in kept.items() if name not in (dropped or ())}
            try:
                self.complete(task_id, rest, value, failure=failure, task=task, runtime_seconds=runtime_seconds)
            except Exception as error:
                if is_temporary(error) or dropped is FOLLOWERS:
                    raise
                if dropped is None:
                    _log.error("the followers of the task %s cannot be sent: %r", ascii(task_id), error)
                    value, failure = None, unusable(error)
            else:
                return

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
            meta: dict[str, Any] = {"status": PROGRESS, "result": dict(progress), "traceback": None, "children": []}
            text = backend.encode({**meta, "date_done": None, "task_id": task_id})
            pipe.multi()
            pipe.set(key, text, ex=backend.expires or None)
            pipe.publish(key, text)
            with suppress(WatchError):  # the concurrent write is newer
                pipe.execute()
        return False

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

    def _send_end_event(
        self, ending: Task, value: Any, failure: Exception | None, runtime_seconds: float | None
    ) -> None:
        state = _find_state(failure)
        event: dict[str, Any] = {"traceback": None, "exception": repr(failure)}
        if state == states.SUCCESS:
            event = {"result": saferepr(value, ending.resultrepr_maxsize), "runtime": runtime_seconds}
        elif state == states.REVOKED:
            reason = str(failure)
            event = {"terminated": reason == "terminated", "signum": None, "expired": reason == "expired"}
        kinds = {states.SUCCESS: "succeeded", states.FAILURE: "failed", states.REVOKED: "revoked"}
        self.send_event(kinds[state], ending.request.id, task=ending.name, **event)

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
