"""All jobs, in one table; a new job is a new line here.

A beat sends those with `every_seconds`. Jobs that must run soon after their work appears also have `has_work`: each
jobs worker asks the store, which costs a thousandth of a message through Celery.
"""

from __future__ import annotations

from typing import Any

from deckhands.operations.jobs.celery_app import JOBS_PREFIX, JOBS_QUEUE
from deckhands.operations.jobs.cleanup import remove_checkpoints, remove_orphans, trim_operations
from deckhands.operations.jobs.job import LONGEST_LIMIT_SECONDS, Job
from deckhands.operations.jobs.retiring import restore, retire
from deckhands.operations.jobs.scheduler import TICK_SECONDS, has_due_schedules, start_due_schedules
from deckhands.operations.jobs.webhook_jobs import NOTIFY_SECONDS, deliver, has_news, notify

SWEEP_SECONDS = 60.0
"""The period at which a beat sends jobs that workers run by themselves: for workers of an earlier version, which do
not, and for repairs of what no work points to."""

JOBS = (
    Job("retire", retire, every_seconds=60.0, limit_seconds=LONGEST_LIMIT_SECONDS),
    Job("orphans", remove_orphans, every_seconds=3_600.0),
    Job(
        "schedules",
        start_due_schedules,
        every_seconds=SWEEP_SECONDS,
        limit_seconds=120.0,
        retries=0,
        has_result=False,
        has_work=has_due_schedules,
        poll_seconds=TICK_SECONDS,
    ),
    Job(
        "webhooks",
        notify,
        every_seconds=SWEEP_SECONDS,
        limit_seconds=120.0,
        retries=0,
        has_result=False,
        has_work=has_news,
        poll_seconds=NOTIFY_SECONDS,
    ),
    Job("deliver", deliver, limit_seconds=1_200.0, retries=0, is_alone=False, has_result=False, is_awaited=False),
    Job("checkpoints", remove_checkpoints, every_seconds=86_400.0),
    Job("operations", trim_operations, every_seconds=86_400.0),
    Job("restore", restore, is_alone=False),
)


def schedule(jobs: tuple[Job, ...] = JOBS) -> dict[str, Any]:
    """Return Celery's `beat_schedule`. A task is dropped if no worker has started it by the time it is due again."""
    return {
        job.name: {
            "task": f"{JOBS_PREFIX}{job.name}",
            "schedule": job.every_seconds,
            "options": {"queue": JOBS_QUEUE, "expires": job.every_seconds},
        }
        for job in jobs
        if job.every_seconds is not None
    }
