"""The reach of the property tests: at every push the same examples, in `make soak` new ones and more of them.

Holds: a push passes or fails for its changes, not for the findings of a random number; no example fails for
being slow on a busy machine.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

PUSH, SOAK = "push", "soak"
SOAK_FACTOR, PUSH_SHARE = 10, 3
"""How many times as many examples `make soak` tries as a test names, and which part of them a push tries: a third."""

TOO_SLOW = [HealthCheck.too_slow]

settings.register_profile(
    PUSH,
    max_examples=100 // PUSH_SHARE,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=TOO_SLOW,
)
settings.register_profile(
    SOAK, max_examples=100 * SOAK_FACTOR, deadline=None, print_blob=True, suppress_health_check=TOO_SLOW
)


def examples(count: int) -> int:
    """Return how many examples a test tries that names `count`."""
    return count * SOAK_FACTOR if settings.get_current_profile_name() == SOAK else -(-count // PUSH_SHARE)
