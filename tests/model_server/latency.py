"""How long a reply takes: always as long, or log-normal around a median, decided by a name in the request.

Holds: the same name and the same turn always take as long, so a test knows beforehand what is ideal.
"""

import random
import re
from dataclasses import dataclass

_NAME = re.compile(rb"latency-key=([A-Za-z0-9._-]{1,64})")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of replies.

    Attributes:
        median: seconds; None: as in the script.
        sigma: of the normal distribution that the logarithm has; 0: every reply takes `median`.
    """

    median: float | None = None
    sigma: float = 0.0

    def of(self, name: str, turn: int) -> float | None:
        """Return the seconds of one reply."""
        if self.median is None or not self.sigma or not name:
            return self.median
        return self.median * random.Random(f"{name}/{turn}").lognormvariate(0.0, self.sigma)

    def of_request(self, body: bytes, turn: int) -> float | None:
        """Return the seconds of the reply to a request whose task has `latency-key=NAME`."""
        if not self.sigma:
            return self.median
        found = _NAME.search(body)
        return self.of(found[1].decode() if found else "", turn)
