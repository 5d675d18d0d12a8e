"""What the cache counts."""

from dataclasses import dataclass


@dataclass
class Statistics:
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of lookups that were served from the cache, 0.0 before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0
