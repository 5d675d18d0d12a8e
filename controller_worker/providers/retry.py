"""Computes when to retry, as a pure function.

Holds: retries follow OpenHands' rule: `num_retries` attempts in all, with waits of 8, 16, 32, 64 seconds by default. A
wait requested by the provider overrides the rule, up to an hour. If a call waited as requested and is refused again, it
waits at least as long as the rule's wait for the previous attempt. Otherwise a provider that always asks for 0.2
seconds would use up all attempts within one second.
Does not: wait, or draw the random number that spreads retries; the caller passes it.
"""

from __future__ import annotations

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import ModelError

RETRY_AFTER_LIMIT_SECONDS = 3_600.0
JITTER_SHARE = 0.25


def compute_next_wait_seconds(
    config: LLMConfig, attempt: int, error: ModelError, *, jitter: float = 0.0
) -> float | None:
    """Return the wait before the next attempt in seconds; None if there is no further attempt.

    Args:
        config: the limits.
        attempt: attempts made so far for this step, from 1.
        error: the error of the latest attempt.
        jitter: from 0 to 1; lengthens the wait by up to a quarter, so that many conversations do not retry at once.
    """
    if not error.retryable or attempt >= config.num_retries:
        return None
    wait = compute_wait_seconds(config, attempt, retry_after_seconds=error.retry_after_seconds)
    return wait * (1.0 + JITTER_SHARE * jitter)


def compute_wait_seconds(config: LLMConfig, attempt: int, *, retry_after_seconds: float | None = None) -> float:
    """Return the wait after the attempt with this number, from 1, without jitter.

    It is the wait that the provider requested, else `multiplier * 2 ** (attempt - 1)`, clamped.
    """
    if retry_after_seconds is not None:
        # Differs: the original ignores Retry-After. Retrying earlier only prolongs the limit.
        asked = min(max(retry_after_seconds, 0.0), RETRY_AFTER_LIMIT_SECONDS)
        return max(asked, compute_wait_seconds(config, attempt - 1)) if attempt > 1 else asked
    exponential = config.retry_multiplier * 2.0 ** min(attempt - 1, 32)
    return min(max(exponential, config.retry_min_wait), config.retry_max_wait)
