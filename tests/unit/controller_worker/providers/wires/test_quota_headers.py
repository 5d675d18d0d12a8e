"""The remaining quota in providers' headers, and when it matters."""

import pytest

from broker.limits.quotas import QuotaTable
from controller_worker.providers.wires.reply import parse_quota_left


def test_anthropic() -> None:
    headers = {
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-remaining": "49",
        "anthropic-ratelimit-requests-reset": "2026-03-01T12:00:00Z",
        "anthropic-ratelimit-input-tokens-remaining": "30000",
        "anthropic-ratelimit-output-tokens-remaining": "8000",
        "anthropic-ratelimit-tokens-remaining": "38000",
    }
    assert parse_quota_left(headers) == {"requests": 49, "input": 30_000, "output": 8_000, "tokens": 38_000}


def test_openai_and_through_litellm() -> None:
    headers = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-remaining-tokens": "149984"}
    assert parse_quota_left(headers) == {"requests": 0, "tokens": 149_984}
    behind = {f"llm_provider-{name}": value for name, value in headers.items()}
    assert parse_quota_left(behind, prefix="llm_provider-") == {"requests": 0, "tokens": 149_984}


@pytest.mark.parametrize("text", ["", "-1", "many", "1.5", "²"])
def test_invalid_counts_are_left_out(text: str) -> None:
    assert parse_quota_left({"x-ratelimit-remaining-requests": text}) == {}


@pytest.mark.parametrize(
    ("left", "is_short"),
    [({}, False), ({"requests": 100}, False), ({"requests": 99}, True), ({"tokens": 0}, False), ({"other": 0}, False)],
)
def test_only_less_than_may_be_used_at_once_is_short(left: dict[str, int], is_short: bool) -> None:
    quota = QuotaTable.parse('[[quota]]\nmodel = "m"\nrequests_per_minute = 6000').pools[0].quotas[0]
    assert quota.is_below_burst(left) is is_short
