"""When to ask again."""

import pytest

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import BadRequestError, ModelError, RateLimitError
from controller_worker.providers.retry import compute_next_wait_seconds, compute_wait_seconds

CONFIG = LLMConfig(model="gpt-4o")


def test_the_waits_are_those_of_openhands() -> None:
    assert [compute_wait_seconds(CONFIG, attempt) for attempt in range(1, 7)] == [8, 16, 32, 64, 64, 64]
    small = LLMConfig(model="gpt-4o", retry_multiplier=1, retry_min_wait=3, retry_max_wait=10)
    assert [compute_wait_seconds(small, attempt) for attempt in range(1, 7)] == [3, 3, 4, 8, 10, 10]
    assert compute_wait_seconds(CONFIG, 1_000_000) == 64


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RateLimitError("slow down"), [8, 16, 32, 64, None, None]),
        (RateLimitError("slow down", retry_after_seconds=0.1), [0.1, 8, 16, 32]),
        (RateLimitError("slow down", retry_after_seconds=20.0), [20, 20, 20, 32]),
        (BadRequestError("no", retry_after_seconds=1.0), [None]),
    ],
    ids=["num_retries attempts", "refused again", "refused again after longer", "not retryable"],
)
def test_wait_of_each_attempt(error: ModelError, waits: list[float | None]) -> None:
    assert [compute_next_wait_seconds(CONFIG, attempt, error) for attempt in range(1, len(waits) + 1)] == waits


@pytest.mark.parametrize(("asked", "waited"), [(0.0, 0.0), (2.5, 2.5), (120.0, 120.0), (90_000.0, 3_600.0)])
def test_the_provider_has_the_last_word(asked: float, waited: float) -> None:
    error = RateLimitError("slow down", retry_after_seconds=asked)
    assert compute_next_wait_seconds(CONFIG, 1, error) == waited


def test_jitter_only_lengthens() -> None:
    error = RateLimitError("slow down", retry_after_seconds=10.0)
    waits = [compute_next_wait_seconds(CONFIG, 1, error, jitter=jitter) for jitter in (0.0, 0.5, 1.0)]
    assert waits == [10.0, 11.25, 12.5]
