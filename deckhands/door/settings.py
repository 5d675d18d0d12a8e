"""What a door worker reads of its environment."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings


class DoorSettings(BrokerSettings):
    """The settings of a door worker."""

    celery_result_url: Annotated[
        str, Field(description="where the door keeps results of Celery tasks; empty: in Celery's broker")
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
