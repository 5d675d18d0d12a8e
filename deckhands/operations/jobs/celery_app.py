"""The Celery application of jobs: the tasks `deckhands.jobs.*` on the queue of that name, and the beat that sends them.

Holds: if a job's worker died, the job comes back after `VISIBILITY_SECONDS`, which is longer than any job may take.
Unacknowledged messages have their own keys, so that this time affects no other application on the same broker. Of
several beats, only the one with the lock sends; another takes over when the lock expires.
Does not: keep messages that Celery's broker loses. A periodic job is sent again when it is next due.
Keys, in Celery's broker: `deckhands:beat:*`.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from celery import Celery, signals
from celery.beat import Service
from celery.worker.request import Request

from broker.celery import TRANSPORT_OPTIONS, CeleryWorker, SafeMessages, make_app, split_login

JOBS_QUEUE = "deckhands.jobs"
JOBS_PREFIX = "deckhands.jobs."
JOBS_CONCURRENCY = 4
JOBS_WORKER = CeleryWorker(
    "deckhands.operations.jobs.app",
    "jobs",
    {"queues": [JOBS_QUEUE], "concurrency": JOBS_CONCURRENCY, "task_events": True},
)
VISIBILITY_SECONDS = 1_800
RESTORE_SECONDS = 4
"""The interval between two checks for messages of workers that have died; also that at which a busy worker shows life,
see `taken_entries`."""
RESTORE_MUTEX_SECONDS = 10
"""If a worker dies while it restores unacknowledged messages, no other worker restores them for this time."""
BROKER_KEYS = {name: f"deckhands.jobs:{name}" for name in ("unacked", "unacked_index", "unacked_mutex")}
SCHEDULER = "deckhands.operations.jobs.beat_scheduler:JobScheduler"
BEAT_KEYS = "deckhands:beat:"
BEAT_TURN_SECONDS = 4.0
"""Maximum sleep of a beat, and the interval at which a waiting beat checks the lock. It outlasts a failed turn."""
BEAT_PAUSE_SECONDS = 2.0
"""How long a beat beside a worker waits before it starts again."""
BEAT_LOCK_SECONDS = 10
"""If the sending beat has no tick for this time, another one takes over."""

_log = logging.getLogger(__name__)


class JobRequest(Request):  # type: ignore[misc]
    """A job's message. Remote control shows its arguments as they are in the message, truncated."""

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002  (Celery's)
        """Return the fields for remote control."""
        found: dict[str, Any] = super().info(safe=True)
        return found


def make_jobs_app(broker_url: str, result_url: str, schedule: dict[str, Any]) -> Celery:
    """Make the Celery application of jobs.

    Args:
        broker_url: see `make_app`.
        result_url: the result backend, in kombu's format.
        schedule: Celery's `beat_schedule`: the jobs that a beat sends, and their intervals.
    """
    result_backend, login = split_login(result_url)
    _, beat_login = split_login(broker_url)
    return make_app(
        "jobs",
        broker_url,
        SafeMessages,
        result_backend=result_backend,
        redis_backend_credential_provider=login,
        result_serializer="json",
        result_accept_content=["json"],
        result_backend_thread_safe=True,
        task_ignore_result=False,
        task_default_queue=JOBS_QUEUE,
        task_routes={f"{JOBS_PREFIX}*": {"queue": JOBS_QUEUE}, "deckhands.*": {"queue": "deckhands"}},
        worker_send_task_events=True,
        worker_enable_remote_control=True,
        broker_transport_options=TRANSPORT_OPTIONS
        | {"visibility_timeout": VISIBILITY_SECONDS, "unacked_mutex_expire": RESTORE_MUTEX_SECONDS}
        | {"unacked_restore_interval": RESTORE_SECONDS}
        | {f"{name}_key": key for name, key in BROKER_KEYS.items()},
        beat_schedule=schedule,
        beat_scheduler=SCHEDULER,
        beat_max_loop_interval=BEAT_TURN_SECONDS,
        redbeat_redis_options={"socket_timeout": 5.0, "socket_connect_timeout": 5.0, "retry_period": -1}
        | ({"credential_provider": beat_login} if beat_login else {}),
        redbeat_key_prefix=BEAT_KEYS,
        redbeat_lock_timeout=BEAT_LOCK_SECONDS,
    )


def run_beat_until(is_over: threading.Event) -> None:
    """Send the periodic jobs until the event is set, in a thread beside a jobs worker, with its application.

    A failure of the beat, such as an unavailable broker, affects nothing else; the beat is restarted.
    """
    from deckhands.operations.jobs.app import app

    while not is_over.is_set():
        service = Service(app, max_interval=BEAT_TURN_SECONDS, scheduler_cls=SCHEDULER)
        try:
            scheduler = service.scheduler  # imports celery-redbeat, which then hears the signal
            signals.beat_init.send(sender=service)  # it waits here for the lock
            while not is_over.wait(scheduler.tick()):
                pass
            service.sync()  # gives the lock back
        except Exception:  # noqa: BLE001  (the outer edge: the workers beside it must not end)
            _log.exception("the beat failed; it starts again")
            is_over.wait(BEAT_PAUSE_SECONDS)


def run_beat(app: Celery) -> None:
    """Send the jobs of the application's schedule until this process is asked to stop.

    Ends with an error if another beat has taken the lock over. Its supervisor then restarts it, and it waits.
    """
    app.Beat(quiet=True, max_interval=BEAT_TURN_SECONDS, loglevel="INFO", redirect_stdouts=False).run()
