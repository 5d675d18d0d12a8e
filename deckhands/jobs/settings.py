"""What a worker of jobs and a beat read of their environment."""

from __future__ import annotations

from typing import Self

from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings


class JobsSettings(BrokerSettings):
    """The settings of a worker of jobs, and of a beat."""

    @classmethod
    def of_worker(cls) -> Self:
        """Read the settings of this process.

        Raises:
            UsageError: a value cannot be used.
        """
        settings = cls.from_env()
        arm(settings)
        return settings
