"""What the door does with tasks outside of them: their second halves, their progress, the end of those revoked.

Holds: progress never overwrites how a task has ended.
Does not: run on an event loop. Every method blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery, states
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from redis.exceptions import WatchError

from broker.celery.door_app import QUEUE, SHOWN

RUN = "deckhands.run"
PROGRESS = "PROGRESS"
HARD_LIMIT, SOFT_LIMIT = TimeLimitExceeded.__name__, SoftTimeLimitExceeded.__name__
TIME_LIMITS: dict[str, type[Exception]] = {HARD_LIMIT: TimeLimitExceeded, SOFT_LIMIT: SoftTimeLimitExceeded}
"""What callers expect of a task whose time is up."""
FIRST_OF_ALL = 0
"""Over Redis, the lowest number is the highest priority."""


class TaskResults:
    """The tasks of a door's application."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def send_second_half(
        self, task_id: str, kept: Mapping[str, Any], *, task: str = RUN, options: Mapping[str, Any] | None = None
    ) -> None:
        """Send a task again, which finds its outcome. Idempotent: a second one does nothing.

        Args:
            kept: where the task belongs, and what people see of its arguments.
            options: the arguments that the second half needs.
        """
        message = self._app.amqp.create_task_message(
            task_id,
            task,
            (),
            dict(options or {}),
            root_id=kept.get("root_id"),
            parent_id=kept.get("parent_id"),
            group_id=kept.get("group"),
            group_index=kept.get("group_index"),
            ignore_result=bool(kept.get("ignore_result")),
        )
        message.headers[SHOWN] = kept.get("shown")
        with self._app.producer_or_acquire() as producer:
            self._app.amqp.send_task_message(producer, task, message, queue=QUEUE, priority=FIRST_OF_ALL)

    def give_up(self, task_id: str) -> None:
        """Record that a task has failed whose end Celery could not carry out, unless it has ended."""
        backend = self._app.backend
        if backend.get_state(task_id) not in states.READY_STATES:
            backend.store_result(
                task_id, RuntimeError("What follows this task could not be carried out."), states.FAILURE
            )

    def report_progress(self, task_id: str, progress: Mapping[str, Any]) -> None:
        """Let callers see how far a task has got, unless it has ended."""
        backend = self._app.backend
        key = backend.get_key_for_task(task_id)
        with backend.client.pipeline() as pipe:
            pipe.watch(key)
            found = pipe.get(key)
            if found and backend.decode_result(found).get("status") in states.READY_STATES:
                return
            meta: dict[str, Any] = {"status": PROGRESS, "result": dict(progress), "traceback": None, "children": []}
            text = backend.encode({**meta, "date_done": None, "task_id": task_id})
            pipe.multi()
            pipe.set(key, text, ex=backend.expires or None)
            pipe.publish(key, text)
            try:
                pipe.execute()
            except WatchError:
                return  # what was written in the meantime is newer
