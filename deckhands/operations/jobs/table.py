"""All jobs, in one table. A beat sends those with `every_seconds`; a new job is one more line here."""

from __future__ import annotations

from typing import Any

from deckhands.operations.jobs.celery_app import JOBS_PREFIX, JOBS_QUEUE
from deckhands.operations.jobs.checkpoints import remove_checkpoints
from deckhands.operations.jobs.job import LONGEST_LIMIT_SECONDS, Job
from deckhands.operations.jobs.orphans import remove_orphans
from deckhands.operations.jobs.retiring import restore, retire
from deckhands.operations.jobs.scheduler import TICK_SECONDS, start_due_schedules
from deckhands.operations.jobs.webhook_jobs import NOTIFY_SECONDS, deliver, notify

JOBS = (
    Job("retire", retire, every_seconds=60.0, limit_seconds=LONGEST_LIMIT_SECONDS),
    Job("orphans", remove_orphans, every_seconds=3_600.0),
    Job("schedules", start_due_schedules, every_seconds=TICK_SECONDS, limit_seconds=120.0, retries=0, has_result=False),
    Job("webhooks", notify, every_seconds=NOTIFY_SECONDS, limit_seconds=120.0, retries=0, has_result=False),
    Job("deliver", deliver, limit_seconds=1_200.0, retries=0, is_alone=False, has_result=False, is_awaited=False),
    Job("checkpoints", remove_checkpoints, every_seconds=86_400.0),
    Job("restore", restore, is_alone=False),
)


def schedule(jobs: tuple[Job, ...] = JOBS) -> dict[str, Any]:
    """Return Celery's `beat_schedule`. A task that no worker has started when it is next due is dropped."""
    return {
        job.name: {
            "task": f"{JOBS_PREFIX}{job.name}",
            "schedule": job.every_seconds,
            "options": {"queue": JOBS_QUEUE, "expires": job.every_seconds},
        }
        for job in jobs
        if job.every_seconds is not None
    }
