"""The quota that the server keeps, as providers do: token buckets for each key, filled by the second.

A call that finds no room is refused with 429 and a Retry-After; it uses nothing up. Tokens are counted when a call is
let in, by the expected usage of its reply.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Quota:
    """Limits of each key; 0 means none.

    Attributes:
        burst_seconds: how many seconds' worth may come at once.
        clock: seconds that never go backwards.
    """

    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    concurrency: int = 0
    burst_seconds: float = 2.0
    clock: Callable[[], float] = field(default=lambda: 0.0)
    _levels: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _in_flight: dict[str, int] = field(default_factory=dict)

    def enter(self, key: str, tokens: int) -> float | None:
        """Let a call in, or return for how many seconds it is refused."""
        wanted = {"requests": (1.0, self.requests_per_minute), "tokens": (float(tokens), self.tokens_per_minute)}
        now, waits, levels = self.clock(), 0.0, {}
        for what, (amount, limit) in wanted.items():
            if limit:
                flow, size = limit / 60, max(1.0, limit / 60 * self.burst_seconds)
                level, at = self._levels.get((key, what), (size, now))
                level = min(size, level + (now - at) * flow)
                levels[key, what] = (level - amount, now)
                waits = max(waits, (min(amount, size) - level) / flow)
        if self.concurrency and self._in_flight.get(key, 0) >= self.concurrency:
            waits = max(waits, 1.0)
        if waits > 0:
            return waits
        self._levels |= levels
        self._in_flight[key] = self._in_flight.get(key, 0) + 1
        return None

    def headers(self, key: str) -> dict[str, str]:
        """Return the remaining quota, as Anthropic and OpenAI do; nothing without a limit."""
        if (key, "requests") not in self._levels:
            return {}
        left = str(max(0, math.floor(self._levels[key, "requests"][0])))
        return {"anthropic-ratelimit-requests-remaining": left, "x-ratelimit-remaining-requests": left}

    def leave(self, key: str) -> None:
        """Note that a call which was let in is over."""
        self._in_flight[key] -= 1


def retry_after(seconds: float) -> str:
    """Write the header as providers do: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))
