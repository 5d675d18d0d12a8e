"""What a worker of jobs and a beat read of their environment."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings


class JobsSettings(BrokerSettings):
    """The settings of a worker of jobs, and of a beat."""

    celery_result_url: Annotated[
        str, Field(description="where results of Celery tasks are kept; empty: in Celery's broker")
    ] = ""

    @classmethod
    def of_worker(cls) -> Self:
        """Read the settings of this process.

        Raises:
            UsageError: a value cannot be used.
        """
        settings = cls.from_env()
        arm(settings)
        return settings

    @property
    def result_url(self) -> str:
        """Where results are kept."""
        return self.celery_result_url or self.celery_url
