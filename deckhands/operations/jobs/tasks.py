"""Jobs as Celery tasks: `deckhands.jobs.<name>`, with retries, a time limit and a result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from inspect import signature
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject

from broker.celery import LoopThread
from broker.runtime import DeckhandsError
from deckhands.operations.jobs.celery_app import JOBS_PREFIX, JOBS_QUEUE, JobRequest
from deckhands.operations.jobs.job import Job
from deckhands.operations.jobs.service import JobsService

EXPIRES_SECONDS = 60.0
FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0

_log = logging.getLogger(__name__)


class JobFailed(Exception):
    """A job failed; Celery's result holds the message and a code."""


def make_sender(app: Celery) -> Callable[[str, tuple[Any, ...]], None]:
    """Return a function that sends a job without a result; the job is dropped if not started within a minute."""

    def send(name: str, arguments: tuple[Any, ...]) -> None:
        app.send_task(f"{JOBS_PREFIX}{name}", arguments, queue=JOBS_QUEUE, ignore_result=True, expires=EXPIRES_SECONDS)

    return send


def register(app: Celery, service: JobsService, loop: LoopThread, jobs: tuple[Job, ...]) -> None:
    """Register jobs with an application."""
    for job in jobs:
        app.register_task(_task(job, service, loop))


def _task(job: Job, service: JobsService, loop: LoopThread) -> Task:
    class JobTask(Task):  # type: ignore[misc]
        """Runs one job on the loop of its worker."""

        name = f"{JOBS_PREFIX}{job.name}"
        throws = (JobFailed,)
        max_retries = job.retries
        ignore_result = not job.has_result
        send_events = job.has_result
        Request = f"{JobRequest.__module__}:{JobRequest.__qualname__}"
        typing = False

        def run(self, *arguments: Any, **options: Any) -> Any:
            """Run the job."""
            try:
                signature(job.run).bind(None, *arguments, **options)
            except TypeError as error:
                raise JobFailed(f"The arguments do not fit: {error}.", "usage") from None
            done = loop.start_coroutine(
                service.run_job(job.name, lambda services: job.run_within_limits(services, *arguments, **options))
            )
            if not job.is_awaited:
                done.add_done_callback(lambda ended: _log_failure(job, ended))
                return None
            try:
                return done.result()
            except CancelledError:  # this worker is stopping; another one, or this one after its restart, runs the job
                raise Reject("its worker stops", requeue=True) from None
            except DeckhandsError as error:
                if error.retryable and self.request.retries < job.retries:
                    raise self.retry(countdown=_pause(self.request.retries)) from error
                raise JobFailed(str(error), error.code) from None
            except TimeoutError as error:
                raise JobFailed(f"The job has taken longer than {job.limit_seconds:g} s.", "time_limit") from error
            except OSError as error:
                if self.request.retries < job.retries:
                    raise self.retry(countdown=_pause(self.request.retries)) from error
                raise JobFailed(f"{type(error).__name__}: {error}", "os_error") from error

    return JobTask()


def _log_failure(job: Job, ended: Future[Any]) -> None:
    """Log the failure of a job that is not awaited."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        _log.warning("the job %s failed: %s: %s", job.name, type(error).__name__, error)


def _pause(tried: int) -> float:
    return min(FIRST_RETRY_SECONDS * 2.0**tried, LONGEST_RETRY_SECONDS)
