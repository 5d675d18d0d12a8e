"""When to ask again."""

from __future__ import annotations

import pytest

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import BadRequestError, RateLimitError
from controller_worker.providers.retry import compute_next_wait_seconds, compute_wait_seconds

CONFIG = LLMConfig(model="gpt-4o")


def test_the_waits_are_those_of_openhands() -> None:
    assert [compute_wait_seconds(CONFIG, attempt) for attempt in range(1, 7)] == [8, 16, 32, 64, 64, 64]


def test_a_small_multiplier_is_raised_to_the_least_wait() -> None:
    config = LLMConfig(model="gpt-4o", retry_multiplier=1, retry_min_wait=3, retry_max_wait=10)
    assert [compute_wait_seconds(config, attempt) for attempt in range(1, 7)] == [3, 3, 4, 8, 10, 10]


@pytest.mark.parametrize(("asked", "waited"), [(0.0, 0.0), (2.5, 2.5), (120.0, 120.0), (90_000.0, 3_600.0)])
def test_the_provider_has_the_last_word(asked: float, waited: float) -> None:
    error = RateLimitError("slow down", retry_after_seconds=asked)
    assert compute_next_wait_seconds(CONFIG, 1, error) == waited


@pytest.mark.parametrize(("asked", "waits"), [(0.1, [0.1, 8, 16, 32]), (20.0, [20, 20, 20, 32])])
def test_who_is_refused_again_waits_longer_than_the_provider_said(asked: float, waits: list[float]) -> None:
    error = RateLimitError("slow down", retry_after_seconds=asked)
    assert [compute_next_wait_seconds(CONFIG, attempt, error) for attempt in range(1, 5)] == waits


def test_num_retries_is_the_number_of_attempts() -> None:
    error = RateLimitError("slow down")
    assert [compute_next_wait_seconds(CONFIG, attempt, error) for attempt in range(1, 7)] == [8, 16, 32, 64, None, None]


def test_what_is_not_retryable_is_not_retried() -> None:
    assert compute_next_wait_seconds(CONFIG, 1, BadRequestError("no", retry_after_seconds=1.0)) is None


def test_jitter_only_lengthens() -> None:
    error = RateLimitError("slow down", retry_after_seconds=10.0)
    assert [compute_next_wait_seconds(CONFIG, 1, error, jitter=jitter) for jitter in (0.0, 0.5, 1.0)] == [
        10.0,
        11.25,
        12.5,
    ]


def test_a_huge_attempt_does_not_overflow() -> None:
    assert compute_wait_seconds(CONFIG, 1_000_000) == 64
