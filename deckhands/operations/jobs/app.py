"""The Celery application of jobs: `celery -A deckhands.operations.jobs.app worker -Q deckhands.jobs`, and `… beat`."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from broker.celery import add_loop
from broker.runtime import BrokerSettings, arm
from deckhands.operations.jobs.celery_app import make_jobs_app
from deckhands.operations.jobs.service import JobsService
from deckhands.operations.jobs.table import JOBS, schedule
from deckhands.operations.jobs.tasks import make_sender, register

settings = BrokerSettings.from_env()
arm(settings)
app = make_jobs_app(settings.celery_url, settings.result_url, schedule())
service = JobsService(settings, make_sender(app), JOBS)
loop_thread = add_loop(app, service)
register(app, service, loop_thread, JOBS)


@inspect_command(name="conversations")  # type: ignore[untyped-decorator]
def conversations(_state: Any) -> list[str]:
    """Return an empty list, because jobs own no conversation."""
    return []
