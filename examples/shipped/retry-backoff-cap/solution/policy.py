"""How often, and how long between."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    attempts: int = 5
    first: float = 0.5
    longest: float = 8.0
    on: tuple = (OSError,)

    def waits(self):
        """Return the seconds before the second attempt, the third, and so on."""
        wait = self.first
        for _ in range(self.attempts - 1):
            yield min(wait, self.longest)
            wait = wait * 2
