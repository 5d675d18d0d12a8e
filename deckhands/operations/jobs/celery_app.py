"""The Celery application of jobs: the tasks `deckhands.jobs.*` on the queue of that name, and the beat that sends them.

Holds: a job whose worker died comes back after `VISIBILITY_SECONDS`, which is longer than any job may take. What is
under way is kept under separate keys, so that this time concerns no other application on the same broker. However many
beats there are, one sends: it holds a lock, and another takes over when the lock lapses.
Does not: keep what Celery's broker loses. A periodic job is sent again when it is due again.
Keys, in Celery's broker: `deckhands:beat:*`.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.worker.request import Request

from broker.celery import TRANSPORT_OPTIONS, KeptMessages, make_app, split_login

JOBS_QUEUE = "deckhands.jobs"
JOBS_PREFIX = "deckhands.jobs."
JOBS_CONCURRENCY = 4
VISIBILITY_SECONDS = 1_800
MUTEX_SECONDS = 10
"""How long a worker that dies while it looks for what others have left keeps others from looking."""
PLACES = {name: f"deckhands.jobs:{name}" for name in ("unacked", "unacked_index", "unacked_mutex")}
SCHEDULER = "deckhands.operations.jobs.beat_scheduler:JobScheduler"
BEAT_KEYS = "deckhands:beat:"
BEAT_TURN_SECONDS = 2.0
"""How long a beat sleeps at most, and how often one that waits looks at the lock."""
BEAT_LOCK_SECONDS = 10
"""After this time without a turn of the beat that sends, another one sends."""


class JobRequest(Request):  # type: ignore[misc]
    """A job's message; remote control shows its arguments as they are written in it, and cut."""

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002  (Celery's)
        """Return what remote control shows."""
        found: dict[str, Any] = super().info(safe=True)
        return found


def make_jobs_app(broker_url: str, result_url: str, schedule: dict[str, Any]) -> Celery:
    """Make the Celery application of jobs.

    Args:
        broker_url: see `make_app`.
        result_url: where results are kept, as kombu writes it.
        schedule: Celery's `beat_schedule`: what a beat sends, and how often.
    """
    (result_backend, login), (_, beat_login) = split_login(result_url), split_login(broker_url)
    return make_app(
        "jobs",
        broker_url,
        KeptMessages,
        result_backend=result_backend,
        redis_backend_credential_provider=login,
        result_serializer="json",
        result_accept_content=["json"],
        result_backend_thread_safe=True,
        task_ignore_result=False,
        task_default_queue=JOBS_QUEUE,
        task_routes={f"{JOBS_PREFIX}*": {"queue": JOBS_QUEUE}, "deckhands.*": {"queue": "deckhands"}},
        worker_send_task_events=True,
        task_send_sent_event=True,
        worker_enable_remote_control=True,
        broker_transport_options=TRANSPORT_OPTIONS
        | {"visibility_timeout": VISIBILITY_SECONDS, "unacked_mutex_expire": MUTEX_SECONDS}
        | {f"{name}_key": key for name, key in PLACES.items()},
        beat_schedule=schedule,
        beat_scheduler=SCHEDULER,
        beat_max_loop_interval=BEAT_TURN_SECONDS,
        redbeat_redis_options={"socket_timeout": 5.0, "socket_connect_timeout": 5.0, "retry_period": -1}
        | ({"credential_provider": beat_login} if beat_login else {}),
        redbeat_key_prefix=BEAT_KEYS,
        redbeat_lock_timeout=BEAT_LOCK_SECONDS,
    )


def run_beat(app: Celery) -> None:
    """Send what the application's schedule says, until this process is asked to stop.

    Ends with an error if another beat has taken the lock over; its supervisor starts it again, and it waits.
    """
    app.Beat(quiet=True, max_interval=BEAT_TURN_SECONDS, loglevel="INFO", redirect_stdouts=False).run()
