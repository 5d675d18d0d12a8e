"""When to ask again, as a pure function.

Holds: OpenHands' rule: `num_retries` attempts in all, waits of 8, 16, 32, 64 seconds by default; what the provider
asks for overrides the rule, up to an hour. A call that waited as long as the provider asked and is refused again waits
at least as long as the rule says for the attempt before; otherwise a provider that always says "in a fifth of a
second" would use up all attempts within one.
Does not: wait, or draw the random number that spreads retries; the caller passes it.
"""

from __future__ import annotations

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import ModelError

RETRY_AFTER_LIMIT_SECONDS = 3_600.0
JITTER_SHARE = 0.25


def next_wait_seconds(config: LLMConfig, attempt: int, error: ModelError, *, jitter: float = 0.0) -> float | None:
    """Return how long to wait before the next attempt, or None when there should be none.

    Args:
        config: the limits.
        attempt: attempts made so far for this step, from 1.
        error: what the last of them brought.
        jitter: from 0 to 1; lengthens the wait by up to a quarter, so that many conversations do not return at once.
    """
    if not error.retryable or attempt >= config.num_retries:
        return None
    wait = wait_seconds(config, attempt, retry_after_seconds=error.retry_after_seconds)
    return wait * (1.0 + JITTER_SHARE * jitter)


def wait_seconds(config: LLMConfig, attempt: int, *, retry_after_seconds: float | None = None) -> float:
    """Return the wait after the attempt with this number, from 1, without jitter.

    `multiplier * 2 ** (attempt - 1)`, clamped; or what the provider asked for.
    """
    if retry_after_seconds is not None:
        # Differs: the original ignores Retry-After, because coming back earlier only prolongs the limit.
        asked = min(max(retry_after_seconds, 0.0), RETRY_AFTER_LIMIT_SECONDS)
        return max(asked, wait_seconds(config, attempt - 1)) if attempt > 1 else asked
    exponential = config.retry_multiplier * 2.0 ** min(attempt - 1, 32)
    return min(max(exponential, config.retry_min_wait), config.retry_max_wait)
