"""The Celery tasks of the ingress; docs/producing-work.md describes them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, NoReturn

from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject

from broker.celery import LoopThread, log_dropped
from broker.runtime import SYSTEM_CLOCK, DataForgotten, DataLocked, DeckhandsError, UsageError
from deckhands.ingress.commands import TAKES
from deckhands.ingress.context import LOCKED_SECONDS
from deckhands.ingress.evaluations import EvaluationTasks
from deckhands.ingress.failures import RAISED, TaskExpired, TaskFailure, refusal, to_exception
from deckhands.ingress.ingress_app import (
    BACKEND_UNAVAILABLE,
    ETA_HEADER,
    EXPIRES_HEADER,
    LIMITS_HEADER,
    REFUSED_HEADER,
    RUN,
    IngressRequest,
)
from deckhands.ingress.ingress_results import KEPT_FIELDS, RETRYABLE, TaskResults, make_revoked
from deckhands.ingress.revocations import moment_in
from deckhands.ingress.runs import RunMessage, Runs
from deckhands.ingress.service import IngressWorker
from deckhands.ingress.waiting_tasks import EVALUATE

MAX_BROADCASTS = 100
"""How many revoke broadcasts may wait; further ones are refused."""
REVOCATIONS_AT_ONCE = 4
LOOK_SECONDS = 2.0
"""How long a remote control command, and all commands queued behind it, wait for the store."""
MAX_NOTES = 100
"""How many invalid messages may be recorded at the same time."""

_log = logging.getLogger(__name__)


class IngressTasks:
    """Registers the tasks of the ingress with an application, and runs them on the worker's loop."""

    def __init__(self, app: Celery, ingress: IngressWorker, loop: LoopThread, results: TaskResults) -> None:
        self._app = app
        self._worker = ingress
        self._loop = loop
        self._results = results
        self._broadcasts = threading.BoundedSemaphore(MAX_BROADCASTS)
        self._revocations = asyncio.Semaphore(REVOCATIONS_AT_ONCE)
        self._notes = threading.BoundedSemaphore(MAX_NOTES)
        self._arrived = deque[tuple[Any, Sequence[Any], Callable[[bool], None]]]()
        self._is_taking = False
        ours = self

        class Run(Task):  # type: ignore[misc]
            """One agent's whole run. Its messages never reach Celery's pool, see `take_run`."""

            name = RUN

        class Submit(Task):  # type: ignore[misc]
            """Creates a conversation; its result is the id."""

            name = "deckhands.submit"
            throws = RAISED
            Request = f"{IngressRequest.__module__}:{IngressRequest.__qualname__}"
            typing = False

            def run(self, *previous: Any, **options: Any) -> str:
                """Create the conversation."""
                task_id = self.request.id  # the loop's thread has no current task
                refused = _refusal_in(self.request)
                eta, expires, limits = (
                    getattr(self.request, name, None) for name in (ETA_HEADER, EXPIRES_HEADER, LIMITS_HEADER)
                )

                async def submit() -> str:
                    times = {"eta": moment_in(eta), "expires": moment_in(expires)}
                    asked = ours._worker.commands.submit(
                        task_id, previous, options, **times, time_limits=limits, refused=refused
                    )
                    return await asked

                found: str = ours.run_before_expiry(submit, self)
                return found

        app.register_task(Run())
        app.register_task(Submit())
        for what in TAKES:
            app.register_task(self._make_command(what))

    def take_run(self, message: Any, body: Sequence[Any], finish: Callable[[bool], None]) -> None:
        """Process the message of a run on the worker's loop, with those that arrive meanwhile. Returns at once.

        Args:
            body: positional arguments, keyword arguments, and allowed followers.
            finish: called on the loop with False when the run is recorded or refused, or with True to requeue the
                message, because no result can be stored.
        """
        self._arrived.append((message, body, finish))
        if not self._is_taking:
            self._is_taking = True
            self._begin(self._take_arrived)

    async def _take_arrived(self) -> None:
        self._is_taking = False
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        await asyncio.gather(*(self._take(*each) for each in arrived))

    async def _take(self, message: Any, body: Sequence[Any], finish: Callable[[bool], None]) -> None:
        run = to_run_message(message, body)
        failure: Exception | None = None
        try:
            while True:
                try:
                    await self._worker.runs.take(run)
                    break
                except DataForgotten:
                    raise
                except DataLocked as error:  # the message stays unacknowledged meanwhile
                    _log.warning("the task %s waits for a key: %s", ascii(run.task_id), error)
                await asyncio.sleep(LOCKED_SECONDS)
        except DeckhandsError as error:
            failure = to_exception(refusal(error))
        except Exception as error:  # noqa: BLE001  (as Celery does with any error of a task)
            _log.exception("the task %s failed", ascii(run.task_id))
            failure = error
        try:
            if failure is not None:
                await self._worker.runs.refuse(run, failure)
        except Exception as error:  # noqa: BLE001  (the outer edge: the result backend may be away)
            log_dropped("a result", error)
            finish(isinstance(error, BACKEND_UNAVAILABLE))
        else:
            finish(False)

    def query_runs(self, ask: Callable[[Runs], Coroutine[Any, Any, Any]]) -> Any:
        """Call a function of the runs for remote control, and return its result.

        Raises:
            TimeoutError: the store does not answer.
        """
        answer = self._begin(lambda: ask(self._worker.runs))
        try:
            return answer.result(LOOK_SECONDS)
        finally:
            answer.cancel()

    def revoke(self, task_ids: Sequence[str]) -> bool:
        """Stop runs, one after the other. Returns at once; False if too many calls are already waiting."""
        if not self._broadcasts.acquire(blocking=False):
            return False
        self._begin(self._revoke_each, task_ids).add_done_callback(lambda _: self._broadcasts.release())
        return True

    def note_unusable(self, task_id: str, name: str, reason: str) -> None:
        """Record an invalid message among the unreadable entries. Returns at once.

        If many are being recorded already, this one is only logged.
        """
        if not self._notes.acquire(blocking=False):
            return
        error = UsageError(f"the Celery task {ascii(name)[1:-1] or '?'}: {reason}")
        note = self._begin(lambda: self._worker.note_unusable(ascii(task_id)[1:-1], error))
        note.add_done_callback(lambda _: self._notes.release())

    def run_checked(self, ask: Any) -> Any:
        """Run a coroutine on the worker's loop.

        Raises:
            RequestRefused: the request is invalid.
        """
        try:
            return self.run_on_loop(ask)
        except UsageError as error:
            raise to_exception(refusal(error)) from None
        except DeckhandsError as error:
            raise to_exception(refusal(error)) from error

    def run_before_expiry(self, ask: Any, task: Task) -> Any:
        """Like `checked`, for a message that may have expired. Also raises the errors of `_revoke_expired`."""
        try:
            return self.run_checked(ask)
        except TaskExpired:
            _revoke_expired(self._results, task.request, task.name)

    def run_on_loop(self, ask: Any, *arguments: Any) -> Any:
        """Run a coroutine on the worker's loop and return its result. Waits while the store is unavailable."""
        return self._begin(ask, *arguments).result()

    async def _revoke_each(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            async with self._revocations:
                try:
                    await self._worker.runs.revoke(task_id)
                except Exception as error:  # noqa: BLE001  (the outer edge: whatever is wrong with one of them)
                    _log.error("the task %s could not be revoked: %s", ascii(task_id), error)

    def _begin(self, ask: Any, *arguments: Any) -> Future[Any]:
        async def asked() -> Any:
            await self._worker.wait_until_open()
            return await ask(*arguments)

        return self._loop.start_coroutine(asked())

    def _make_command(self, what: str) -> Task:
        ours = self

        class Order(Task):  # type: ignore[misc]
            """Performs a command on a conversation; see `orders`."""

            name = f"deckhands.{what}"
            throws = (TaskFailure,)
            Request = f"{IngressRequest.__module__}:{IngressRequest.__qualname__}"
            typing = False

            def run(self, *arguments: Any, **options: Any) -> dict[str, Any]:
                """Perform the command."""
                task_id = self.request.id
                refused = _refusal_in(self.request)
                eta, expires = (getattr(self.request, name, None) for name in (ETA_HEADER, EXPIRES_HEADER))

                async def carry_out() -> dict[str, Any]:
                    orders = ours._worker.commands
                    until = moment_in(expires)
                    return await orders.run(what, task_id, arguments, options, eta=eta, expires=until, refused=refused)

                found: dict[str, Any] = ours.run_before_expiry(carry_out, self)
                return found

        return Order()


def evaluate_task(evaluations: EvaluationTasks, results: TaskResults) -> Task:
    """Return the task that evaluates agents; see `evaluations`."""

    class Evaluate(Task):  # type: ignore[misc]
        """An evaluation; its result is the summary."""

        name = EVALUATE
        throws = (TaskFailure,)
        Request = f"{IngressRequest.__module__}:{IngressRequest.__qualname__}"
        typing = False
        send_events = False

        def run(self, *previous: Any, **options: Any) -> None:
            """Start the evaluation; the command that drives it completes the task."""
            request = self.request
            announce = partial(results.send_event, task_id=request.id, task=EVALUATE)
            received = cache(partial(announce, "received", **monitor_fields(request)))

            def begin() -> None:
                received()
                announce("started")

            kept = {name: getattr(request, name, None) for name in KEPT_FIELDS}
            try:
                error = _refusal_in(request)
                if error is not None:
                    raise error
                if getattr(request, ETA_HEADER, None):
                    raise UsageError(f"{EVALUATE} cannot be used with an eta: it runs immediately. Leave the eta out.")
                if any(getattr(request, LIMITS_HEADER, None) or ()):
                    raise UsageError(
                        f"{EVALUATE} cannot be used with a time limit of Celery's.",
                        remedy="Give it max_seconds, which holds for each attempt.",
                    )
                expires = moment_in(getattr(request, EXPIRES_HEADER, None))
                is_late = expires is not None and expires <= SYSTEM_CLOCK.now()
                found = evaluations.take(request.id, previous, options, kept, is_late=is_late, on_new=begin)
            except TaskExpired:
                received()
                _revoke_expired(results, request, self.name)
            except DeckhandsError as error:
                received()
                raise to_exception(refusal(error)) from None
            if found is not None and not request.ignore_result:
                failure = to_exception(refusal(found)) if isinstance(found, UsageError) else None
                results.restore_result(request.id, None if failure else found, failure=failure)
            raise Ignore

    return Evaluate()


def to_run_message(message: Any, body: Sequence[Any]) -> RunMessage:
    """Return the message of a run from Celery's.

    Args:
        body: see `IngressTasks.take_run`.
    """
    request = Context({**message.headers, **body[2]})
    eta = expires = None
    refused = _refusal_in(request)  # raised by `take`: a second message of an existing run changes nothing
    try:
        eta, expires = (moment_in(getattr(request, name, None)) for name in (ETA_HEADER, EXPIRES_HEADER))
    except UsageError as error:
        refused = error
    return RunMessage(
        task_id=request.id,
        previous=body[0],
        options=body[1],
        kept={name: getattr(request, name, None) for name in KEPT_FIELDS},
        eta=eta,
        expires=expires,
        time_limits=getattr(request, LIMITS_HEADER, None),
        refused=refused,
        shown=monitor_fields(request),
        priority=int(message.properties.get("priority") or 0),
    )


def monitor_fields(request: Any) -> dict[str, Any]:
    """Return the fields of a received message that monitors see: its arguments are cut and masked already."""
    return {
        "args": getattr(request, "argsrepr", None),
        "kwargs": getattr(request, "kwargsrepr", None),
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "retries": request.retries or 0,
        "eta": getattr(request, ETA_HEADER, None),
        "expires": getattr(request, EXPIRES_HEADER, None),
    }


def _revoke_expired(results: TaskResults, request: Any, task: str) -> NoReturn:
    """Complete an expired task, as Celery does.

    Raises:
        Ignore: the task is complete.
        Reject: the result backend is unavailable; the message is redelivered.
    """
    kept = {name: getattr(request, name, None) for name in KEPT_FIELDS}
    try:
        results.complete(request.id, kept, failure=make_revoked("expired"), task=task)
    except RETRYABLE as error:
        raise Reject(error, requeue=True) from error
    raise Ignore


def _refusal_in(request: Any) -> UsageError | None:
    """Return why the callbacks of a task are invalid; None if they are valid or absent."""
    refused = getattr(request, REFUSED_HEADER, None)
    return None if refused is None else UsageError(refused[0], remedy=refused[1])
