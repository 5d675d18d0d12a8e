"""One table of errors for both kinds of agents."""

import pytest

from broker.runtime.errors import DeckhandsError
from controller_worker.loop.sdk.sdk_errors import BY_NAME, to_model_error
from controller_worker.providers.errors import MODEL_ERRORS

TABLE = {
    "authentication_failed": ("authentication", False),
    "billing_error": ("out_of_credits", False),
    "rate_limit": ("rate_limit", True),
    "overloaded": ("service_unavailable", True),
    "server_error": ("internal", True),
    "invalid_request": ("bad_request", False),
    "model_not_found": ("not_found", False),
    "max_output_tokens": ("malformed_reply", True),
    "CLIJSONDecodeError": ("malformed_reply", True),
    "MessageParseError": ("malformed_reply", True),
    "TimeoutError": ("timeout", True),
    "CLIConnectionError": ("service_unavailable", True),
    "ProcessError": ("service_unavailable", True),
    "ResultError": ("service_unavailable", True),
    "CLINotFoundError": ("llm_config", False),
    "ModuleNotFoundError": ("llm_config", False),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_the_sdk_says(name: str) -> None:
    error = to_model_error(name, "it said so")
    assert isinstance(error, DeckhandsError)
    assert (error.code, error.retryable) == TABLE[name]
    assert "it said so" in str(error)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("prompt is too long: 210000 tokens > 200000 maximum", "context_window"),
        ("Output blocked by content filtering policy", "content_policy"),
    ],
)
def test_what_its_text_says_of_a_prompt_counts_first(text: str, code: str) -> None:
    assert to_model_error("invalid_request", text).code == code


def test_every_error_of_the_table_exists_for_legacy_agents() -> None:
    assert {error.code for error in BY_NAME.values()} <= set(MODEL_ERRORS)
