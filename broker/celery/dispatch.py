"""Sends tasks to users' own Celery applications and follows them. The only sender of Celery tasks.

Holds: a task is sent as JSON under an id that the sender chooses, so that later requests refer to the same task.
Does not: run on an event loop. Every method blocks and belongs in a thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.result import AsyncResult
from kombu.exceptions import EncodeError, OperationalError
from redis import exceptions as redis_errors

from broker.celery.app import make_connection_settings
from broker.runtime import UsageError, explain_passing, find_missing_variable

READY_STATES = frozenset({"SUCCESS", "FAILURE", "REVOKED"})


@dataclass(frozen=True, slots=True)
class SentTaskState:
    """The status of a task in the result backend.

    Attributes:
        is_known: False if it was never sent, waits in its queue, or runs without reporting so.
        is_ready: it has ended.
        error: how it failed; empty if it succeeded or has not ended.
        is_unsure: the error is one of a broker, a result backend, or the encoding. Celery records it for a task that
            ran and whose result could not be stored, too.
        value: its return value.
    """

    is_known: bool
    is_ready: bool
    error: str = ""
    is_unsure: bool = False
    value: Any = None


class TaskSender:
    """A client of one of the user's Celery applications.

    Args:
        app: where it is defined, `module:attribute`; empty if the URLs suffice.
        broker_url: the broker of its workers.
        backend_url: their result backend.

    Raises:
        UsageError: there is no such application, or it keeps no results.
    """

    def __init__(self, *, app: str = "", broker_url: str = "", backend_url: str = "") -> None:
        self._app = _import_app(app) if app else Celery("deckhands.tools", set_as_current=False)
        if not app:
            addresses = make_connection_settings(broker_url, backend_url)
            self._app.conf.update(addresses, task_serializer="json", accept_content=["json"])
        if self._app.conf.result_backend in (None, "", "disabled://"):
            raise UsageError(
                "A Celery task without a result backend cannot be a tool.",
                remedy="Configure a result backend for the app.",
            )

    @property
    def connection_errors(self) -> tuple[type[Exception], ...]:
        """The errors of a broker or result backend that cannot be reached at the moment."""
        return (OSError, *self._recorded_errors)

    @property
    def _recorded_errors(self) -> tuple[type[Exception], ...]:
        """The connection errors that tasks do not raise for files and sockets of their own."""
        own = getattr(self._app.backend, "connection_errors", ())
        libraries = (each for each in own if each.__module__ != "builtins")
        return (OperationalError, redis_errors.ConnectionError, redis_errors.TimeoutError, *libraries)

    def send(self, task: str, arguments: Mapping[str, Any], *, task_id: str, queue: str | None) -> None:
        """Send a task. Its worker runs it once for each time it is sent."""
        options = {"queue": queue} if queue else {}
        self._app.send_task(
            task, kwargs=dict(arguments), task_id=task_id, serializer="json", ignore_result=False, **options
        )

    def load_state(self, task_id: str) -> SentTaskState:
        """Return the status of a task."""
        result = AsyncResult(task_id, app=self._app)
        state = result.state
        if state == "SUCCESS":
            return SentTaskState(is_known=True, is_ready=True, value=result.result)
        if state in READY_STATES:
            found = result.result
            error = f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else str(found)
            is_unsure = isinstance(found, (EncodeError, *self._recorded_errors))
            return SentTaskState(is_known=True, is_ready=True, error=error or state, is_unsure=is_unsure)
        return SentTaskState(is_known=state != "PENDING", is_ready=False)

    def revoke(self, task_id: str, *, may_terminate: bool = False) -> None:
        """Prevent a task from starting. A running task continues, unless its process may be terminated."""
        self._app.control.revoke(task_id, terminate=may_terminate)


def _import_app(name: str) -> Celery:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute or "app")
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"There is no Celery application {name!r}: {error}.", remedy="Write module:attribute."
        ) from error
    except Exception as error:  # importing a user's module may raise anything
        if variable := find_missing_variable(error):
            raise UsageError(
                f"The Celery application {name!r} reads the environment variable {variable}, which this worker lacks.",
                remedy=explain_passing(variable),
            ) from error
        raise
    if not isinstance(found, Celery):
        raise UsageError(f"{name} is not a Celery application.", remedy="Write module:attribute.")
    return found
