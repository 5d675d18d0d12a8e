"""The family, and the table from a client's exceptions to it. The clients themselves: tests/integration/test_llm_*."""

from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from broker.testing.manual_clock import ManualClock
from controller_worker.providers.errors import MODEL_ERRORS, ModelError, RateLimitError
from controller_worker.providers.wires.provider_errors import (
    MASK,
    StreamedError,
    parse_retry_after_seconds,
    to_model_error,
)


class StatusError(Exception):
    """Has what the clients' exceptions have in common."""

    def __init__(self, text: str, status_code: int, body: object = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status_code = status_code
        self.body = body
        self.litellm_response_headers = headers or {}


def test_codes_retries_and_statuses() -> None:
    shown = {code: (error.retryable, error("text").last_error) for code, error in MODEL_ERRORS.items()}
    assert shown == {
        "authentication": (False, "STATUS$ERROR_LLM_AUTHENTICATION"),
        "rate_limit": (True, "CHAT_INTERFACE$AGENT_RATE_LIMITED_STOPPED_MESSAGE"),
        "context_window": (False, "LLMContextWindowExceedError: text"),
        "content_policy": (False, "STATUS$ERROR_LLM_CONTENT_POLICY_VIOLATION"),
        "out_of_credits": (False, "STATUS$ERROR_LLM_OUT_OF_CREDITS"),
        "service_unavailable": (True, "STATUS$ERROR_LLM_SERVICE_UNAVAILABLE"),
        "internal": (True, "STATUS$ERROR_LLM_INTERNAL_SERVER_ERROR"),
        "timeout": (True, "Timeout: text"),
        "bad_request": (False, "BadRequestError: text"),
        "not_found": (False, "NotFoundError: text"),
        "malformed_reply": (True, "APIResponseValidationError: text"),
        "no_response": (True, "LLMNoResponseError: text"),
        "tokens_missing": (False, "APIError: text"),
    }


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "bad_request"), (401, "authentication"), (402, "out_of_credits"), (403, "authentication"),
        (404, "not_found"), (408, "timeout"), (409, "service_unavailable"), (413, "context_window"),
        (418, "bad_request"), (422, "bad_request"), (429, "rate_limit"), (500, "internal"), (501, "internal"),
        (502, "service_unavailable"), (503, "service_unavailable"), (504, "timeout"), (529, "service_unavailable"),
        (599, "internal"),
    ],
)  # fmt: skip
def test_statuses(status: int, code: str) -> None:
    assert to_model_error(StatusError("text", status)).code == code


@pytest.mark.parametrize(
    "text",
    [
        "litellm.ContextWindowExceededError: too much",
        "Prompt is too long: 210000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 198000 + 8192 > 200000",
        "Please reduce the length of the messages.",
        "the request exceeds the available context size. try increasing it",
        "Context length exceeded",
        "SambanovaException - Maximum context length is 8192",
    ],
)
def test_the_context_window_texts_of_openhands(text: str) -> None:
    error = to_model_error(StatusError(text, 500))
    assert (error.code, error.retryable) == ("context_window", False)
    assert error.last_error == f"LLMContextWindowExceedError: {text}"


@pytest.mark.parametrize(
    "text",
    [
        "'max_tokens' is too large: 8192. This model's maximum context length is 8192 tokens and your request has 1210.",
        "The prompt (total length 25938) is too long to fit into the model (context length 4096).",
        "The decoder prompt (length 25938) is longer than the maximum model length of 4096.",
        "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
        "Requested token count exceeds the model's maximum context length of 131072 tokens.",
        "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens).",
        "request (8123 tokens) exceeds the available context size (4096 tokens), try increasing it",
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        "Input is too long for requested model.",
        "Your input exceeds the context window of this model. Please adjust your input and try again.",
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens and 512 `max_new_tokens`",
        "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
        "This model's maximum prompt length is 131072 but the request contains 150000 tokens.",
        "You passed 9001 input tokens and requested 1000. However, the model's context length is only 8192 tokens.",
        "Trying to keep the first 15857 tokens when context the overflows. However, the model is loaded with 4096.",
        "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 13055).",
        "Cannot truncate prompt with n_keep (15028) >= n_ctx (7424)",
        "prompt too long; exceeded max context length by 4021 tokens",
        "the input length exceeds the context length",
        "input exceeds maximum context length",
        "Prompt length (9000) exceeds maximum input length (8192)",
        "Prompt length 9000 is greater than max_seq_len 8192",
        "Invalid request: Your request exceeded model token limit: 262144 (requested: 291351)",
        "total message size 2306631 exceeds limit 2097152",
        "invalid params, context window exceeds limit (2013)",
        "Prompt exceeds max length",
        "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 30720]",
        "This endpoint's maximum context length is 32768 tokens. However, you requested about 40000 tokens.",
        "Unable to submit request because the input token count is 33000 but the model only supports up to 32768.",
        "prompt token count of 100000 exceeds the limit of 65536",
        "too many tokens: total number of tokens in the prompt cannot exceed 4081",
        "Total tokens of image and text exceed max message tokens",
        "Input Tokens Exceeded: Number of input tokens exceeds maximum length.",
        "the number of input tokens 9000 cannot exceed the total tokens limit 8192 for this model",
        "Prompt has 5000 tokens, but the configured context size is 4096 tokens",
        "Requested tokens (5000) exceed context window of 4096",
        "max_tokens must be at least 1, got -3021.",
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 300000 tokens.",
        "Context size has been exceeded.",
        "Error code: 400 - context_length_exceeded",
        # Not listed: recognised by their text
        "Reached context length of 4096 tokens with this model, which does not support mid-generation overflow.",
        "The engine prompt length 1327246 exceeds the max_model_len 1048576. Please reduce prompt.",
        "The sum of prompt length (130000.0) and max_tokens (4096) must not exceed max_model_len 131072",
        "Input validation error: `inputs` must have less than 3072 tokens. Given: 4000",
        "default_max_tokens (-100) should be greater than 0, default_max_tokens (-100) = max_seq_len (4096) - 4196",
        "prompt too long; exceeded context length by 200 tokens",
        "Input token length 200000 exceeds the model's maximum of 131072",
        "The total number of tokens (input + output) exceeds the model's context window",
        "Input length 140000 exceeds the maximum length 131072",
        "Error: prompt is longer than the context window",
        "input is too long for this model",
        "too many tokens",
        "Current length is 8900 while limit is 8192",
    ],
)
def test_the_context_window_texts_of_other_servers(text: str) -> None:
    for status in (400, 500):
        assert to_model_error(StatusError(text, status)).code == "context_window"


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        (
            "You have reached your specified API usage limits. You will regain access on 2026-12-01.",
            400,
            "out_of_credits",
        ),
        ("Insufficient Balance", 402, "out_of_credits"),
        ("Invalid prompt: your prompt was flagged as potentially violating our usage policy.", 400, "content_policy"),
        ("The request was rejected because it was considered high risk", 400, "content_policy"),
        ("Rate limit reached: too many tokens per minute. Limit 30000, requested 31000.", 429, "rate_limit"),
        ("max_tokens exceeds the limit of 8192", 400, "bad_request"),
        ("max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens", 400, "bad_request"),
        ("max_tokens is too large: 200000. This model supports at most 128000 completion tokens.", 400, "bad_request"),
        ("The maximum tokens you requested exceeds the model limit of 4096.", 400, "bad_request"),
        ("messages.1.content.0.image: image is too large", 400, "bad_request"),
        ("Too many tokens, please wait before trying again.", 429, "rate_limit"),
        (
            "This request would exceed your organization's rate limit of 30,000 input tokens per minute",
            429,
            "rate_limit",
        ),
        ("You exceeded your current quota, please check your plan and billing details.", 429, "rate_limit"),
        ("Request too large for gpt-4o on tokens per min (TPM): Limit 3, Requested 4.", 429, "context_window"),
        ("The usage limit has been reached", 429, "out_of_credits"),
        ("You've hit your usage limit. Upgrade to Pro or try again in 3 hours.", 429, "out_of_credits"),
        ("Your account org-1 is suspended, please check your plan and billing details", 429, "out_of_credits"),
        ("This key is over its limit: Key limit exceeded (total limit).", 403, "out_of_credits"),
        ("Your team has either used all available credits or reached its spending limit.", 403, "out_of_credits"),
        ("Invalid prompt: we've limited access to this content for safety reasons.", 400, "content_policy"),
        ("This request has been flagged for potentially high-risk cyber activity.", 400, "content_policy"),
        ("Content Exists Risk", 400, "content_policy"),
        ("Input data may contain inappropriate content.", 400, "content_policy"),
        ("Invalid prompt: messages must not be empty", 400, "bad_request"),
        ("The limit of the input list is exceeded", 400, "bad_request"),
        ("max_tokens must be at least 1, got 0.", 400, "bad_request"),
        ("the maximum context length is 8192", 400, "bad_request"),  # half of a joined text
        ("invalid response object", 200, "malformed_reply"),
    ],
)
def test_texts_that_say_something_else(text: str, status: int, code: str) -> None:
    assert to_model_error(StatusError(text, status)).code == code


@pytest.mark.parametrize("is_list", [False, True])
def test_a_delay_that_google_puts_into_the_body(is_list: bool) -> None:
    kind = {"@type": "type.googleapis.com/google.rpc.RetryInfo"}
    body = {"error": {"code": 429, "details": [{"@type": "x"}, 7, kind | {"retryDelay": "20.5s"}]}}
    error = StatusError("slow", 429, [body] if is_list else body)
    assert to_model_error(error).retry_after_seconds == 20.5
    for odd in ("soon", None, -3, "9" * 30 + "s"):
        odd_body = {"error": {"details": [kind | {"retryDelay": odd}]}}
        assert to_model_error(StatusError("slow", 429, odd_body)).retry_after_seconds is None


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"message": "quota", "code": "insufficient_quota"}, "out_of_credits"),
        ({"error": {"message": "pay", "type": "billing_error"}}, "out_of_credits"),
        ({"message": "long", "code": "context_length_exceeded"}, "context_window"),
        ({"error": {"message": "long", "type": "exceed_context_size_error", "code": 400}}, "context_window"),
        ({"message": "no", "code": "content_filter"}, "content_policy"),
        ({"message": "slow", "code": "rate_limit_exceeded"}, "rate_limit"),
    ],
)
def test_codes_in_the_body_win_over_the_status(body: dict[str, object], code: str) -> None:
    error = to_model_error(StatusError("outer", 429, body))
    assert error.code == code
    assert error.provider_text in ("quota", "pay", "long", "no", "slow")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "slow", "code": 429}, "rate_limit"),
        ({"message": "no", "type": "BadRequestError", "code": 400}, "bad_request"),
        ({"message": "down", "code": "502"}, "service_unavailable"),
        ({"message": "what", "code": 7}, "internal"),
        ("prompt is too long: 9 > 8", "context_window"),
        ("insufficient balance", "out_of_credits"),
    ],
)
def test_a_status_or_text_within_a_stream(error: Any, code: str) -> None:
    found = to_model_error(StreamedError({"error": error}))
    assert found.code == code
    assert found.provider_text == (error if isinstance(error, str) else error["message"])


def test_a_body_that_is_all_of_the_text_is_read() -> None:
    body = '{"error": {"message": "no money", "code": "insufficient_quota"}}'
    for text in (body, str(body.encode())):
        wrapper = StatusError("litellm.RateLimitError: DeepseekException - …", 429)
        error = to_model_error(caused(wrapper, StatusError(text, 429)))
        assert (error.code, error.provider_text) == ("out_of_credits", "no money")
    for text in ("{", '{"error": "no money"}', "{}", '{"a":' * 100_000, "b'{", "b'{'.x", "b'" + "(" * 100_000):
        assert to_model_error(StatusError(text, 429)).code == "rate_limit"


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_the_innermost_cause_tells_what_a_wrapper_hides() -> None:
    error = to_model_error(caused(StatusError("internal error", 500), TimeoutError("read timed out")))
    assert (error.code, error.message) == ("timeout", "internal error (read timed out)")
    refused = caused(TimeoutError("timed out"), ConnectionRefusedError("refused"))
    assert to_model_error(refused).code == "service_unavailable"


def test_our_own_errors_pass_unchanged() -> None:
    ours = RateLimitError("slow", retry_after_seconds=3.0)
    assert to_model_error(caused(StatusError("wrapped", 500), ours)) is ours


def test_unknown_errors_are_not_retried() -> None:
    error = to_model_error(KeyError("x"))
    assert (type(error), error.code, error.retryable) == (ModelError, "model_error", False)


def test_secrets_are_masked_and_texts_are_short() -> None:
    error = to_model_error(StatusError("Incorrect key sk-12345 " + "x" * 10_000, 401), secrets=["sk-12345", "key", ""])
    assert str(error).startswith(f"Incorrect key {MASK} xxx")
    assert len(error.provider_text) == 2_000
    assert error.remedy == "Check LLM_API_KEY."


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = StatusError("a", 429), StatusError("b", 500)
    first.__cause__, second.__cause__ = second, first
    assert to_model_error(first).code == "rate_limit"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "20s"}, 20.0),
        ({"retry-after": "1m"}, 60.0),
        ({"retry-after": "Fri, 31 Dec 99999 23:59:59 GMT"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 -9999"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00"}, 0.0),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    now = ManualClock().now()
    assert parse_retry_after_seconds(headers, now) == seconds
    assert to_model_error(StatusError("slow", 429, headers=headers), now=now).retry_after_seconds == seconds


def test_retry_after_as_a_date() -> None:
    now = ManualClock().now()
    due = format_datetime(now + timedelta(seconds=90), usegmt=True)
    assert parse_retry_after_seconds({"retry-after": due}, now) == 90.0
    assert parse_retry_after_seconds({"retry-after": due}, None) is None
