"""What a door worker reads of its environment."""

from __future__ import annotations

from typing import Self

from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings


class DoorSettings(BrokerSettings):
    """The settings of a door worker."""

    @classmethod
    def of_worker(cls) -> Self:
        """Read the settings of this process.

        Raises:
            UsageError: a value cannot be used.
        """
        settings = cls.from_env()
        arm(settings)
        return settings
