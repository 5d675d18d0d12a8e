"""Converts the exceptions of all provider clients to our errors.

Exceptions are recognised by class name and HTTP status. Importing four libraries to compare classes would cost seconds,
and httpx, httpx2, openai, anthropic, aiohttp and litellm agree on the names.

No other module reads the texts of providers' errors.

Holds: every exception of a client becomes a `ModelError`. A text never contains one of the given secrets. A listed text
or code takes precedence over the status. Unlisted wordings of an overflow are recognised by common phrases, if the
status allows an overflow.
Does not: decide about retries. Each error class defines whether it is retryable.
"""

from __future__ import annotations

import ast
import contextlib
import email.utils
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from controller_worker.providers.errors import (
    PROVIDER_TEXT_LIMIT_CHARS,
    AuthenticationError,
    BadRequestError,
    ContentPolicyError,
    ContextWindowError,
    InternalServerError,
    MalformedReplyError,
    ModelError,
    ModelTimeoutError,
    NoResponseError,
    NotFoundError,
    OutOfCreditsError,
    RateLimitError,
    ServiceUnavailableError,
    UnreachableError,
)

CONTEXT_WINDOW_TEXTS = (
    "contextwindowexceedederror",
    "prompt is too long",
    "input length and `max_tokens` exceed context limit",
    "please reduce the length of",
    "the request exceeds the available context size",
    "context length exceeded",
)
"""As in OpenHands, plus `sambanovaexception` together with `maximum context length`."""
OTHER_CONTEXT_WINDOW_TEXTS = (
    # vLLM and most others; vLLM; SGLang
    *("model's maximum context l", "too long to fit into the model", "longer than the maximum model length"),
    *("is longer than the model's context length", "exceeds the maximum allowed length"),
    # llama.cpp; Gemini; Bedrock; OpenAI; TGI; Mistral; xAI
    *("exceeds the available context size", "exceeds the maximum number of tokens allowed"),
    *("input is too long for requested model", "exceeds the context window", "`inputs` tokens + `max_new_tokens` must"),
    *("too large for model with", "model's maximum prompt length"),
    # newer vLLM; LM Studio (three); Ollama (three); TensorRT-LLM; TabbyAPI
    *("the model's context length is only", "greater than the context length", "tokens when context the overflows"),
    *("cannot truncate prompt with n_keep", "exceeded max context length", "input length exceeds"),
    *("exceeds maximum context length", "exceeds maximum input length", "greater than max_seq_len"),
    # Two of Kimi, then of MiniMax, GLM (two), DashScope, OpenRouter, Vertex, Copilot, Cohere
    *("exceeded model token limit", "total message size&exceeds limit", "context window exceeds limit"),
    *("prompt exceeds max length", "model_context_window_exceeded", "range of input length should be"),
    *("endpoint's maximum context length", "token count is&but the model only supports up to"),
    *("prompt token count of&exceeds the limit of", "tokens in the prompt cannot exceed"),
    *(
        "exceed max message tokens",
        "input tokens exceeded",
        "too many input tokens",
        "number of input tokens&cannot exceed",
    ),
    # llama-cpp-python; vLLM, whose room for a reply is what the prompt leaves; OpenAI; LM Studio; gateways
    *("exceed context window of", "max_tokens must be at least 1, got -", "input tokens exceed the configured limit"),
    *("context size has been exceeded", "context_length_exceeded"),
    *("but the configured context size is", "maximum allowed input length of", "exceeds the context length"),
)
"""Texts of servers that are called directly here. OpenHands calls them through litellm, which knows most texts."""

_BY_TEXT: tuple[tuple[tuple[str, ...], type[ModelError]], ...] = (
    ((*CONTEXT_WINDOW_TEXTS, *OTHER_CONTEXT_WINDOW_TEXTS), ContextWindowError),
    (("sambanovaexception&maximum context length",), ContextWindowError),
    (("exceededbudget", "credit balance is too low", "reached your specified api usage limits"), OutOfCreditsError),
    (("insufficient balance", "your account&is suspended", "key limit exceeded"), OutOfCreditsError),
    (("usage limit reached", "usage limit has been reached", "hit your usage limit"), OutOfCreditsError),
    (("usage limit exceeded", "hard limit has been reached", "account is in good standing"), OutOfCreditsError),
    (("used all available credits", "you have insufficient quota"), OutOfCreditsError),
    (("contentpolicyviolationerror", "content filtering policy", "content management policy"), ContentPolicyError),
    (("flagged as potentially violating", "considered high risk", "flagged for potentially"), ContentPolicyError),
    (("content exists risk", "may contain inappropriate content", "content for safety reasons"), ContentPolicyError),
    # A quota per minute that is smaller than the prompt: no wait helps
    (("request too large for&tokens per min",), ContextWindowError),
    (("could not resolve authentication method", "api_key client option must be set"), AuthenticationError),
    # The openai client without a key; litellm without one, for most of its providers
    (("missing credentials. please pass", "api key - a call is being made", "missing api key"), AuthenticationError),
    (("missing gemini api key", "missing xai api key"), AuthenticationError),
    (("empty or invalid response from llm endpoint",), MalformedReplyError),
    (("closed the responses stream before any terminal event",), MalformedReplyError),
    (("unknown items in responses api response: []",), NoResponseError),
)
"""Error classes by text in lower case; `&` joins texts that must all occur."""

BY_PROVIDER_CODE: Mapping[str, type[ModelError]] = {
    "context_length_exceeded": ContextWindowError,
    "exceed_context_size_error": ContextWindowError,
    "insufficient_quota": OutOfCreditsError,
    "billing_error": OutOfCreditsError,
    "enforced_spend_limit_reached": OutOfCreditsError,
    "contract_spend_limit_reached": OutOfCreditsError,
    "content_policy_violation": ContentPolicyError,
    "content_filter": ContentPolicyError,
    "1261": ContextWindowError,  # GLM
    "usage_limit_reached": OutOfCreditsError,
    "billing_hard_limit_reached": OutOfCreditsError,
    "exceeded_current_quota_error": OutOfCreditsError,  # Kimi
    "Arrearage": OutOfCreditsError,  # DashScope
    "data_inspection_failed": ContentPolicyError,  # DashScope
    "cyber_policy": ContentPolicyError,
    "model_max_prompt_tokens_exceeded": ContextWindowError,
    "string_above_max_length": ContextWindowError,
}
"""Error classes by the machine-readable code, or else the type, in the body of an error reply."""

_TOO_LONG = re.compile(
    # The prompt is too long; the request was too large for the model (but not a picture in it)
    r"\b(prompt|input|conversation|request|messages)( is| are| was| were)? too (long|large)\b"
    # … exceeds …, … is longer than … the limit of a model
    r"|\b(prompt|input|context|conversation|messages|tokens?)\b.{0,80}"
    r"\b(exceeds?|exceeded|longer than|greater than|larger than|more than|over)\b.{0,40}"
    r"\b(context (window|length|size)|max_model_len|max_seq_len|model's max\w*|maximum( input)? length)\b"
    r"|\b(prompt|input|context) (token |tokens )?(count|length|size|limit)\b.{0,20} (exceeds?|exceeded)\b"
    r"|\b(token limit exceeded|too many (input |prompt )?tokens|reached context length of)\b"
    r"|\b(must|should) (not exceed|have less than|be (less than|below|at most))\b.{0,20}\b(max_model_len|\d+ tokens)\b"
    r"|\binputs tokens \+ max_new_tokens must\b|= max_seq_len \(|\bcurrent length is \d+ while limit is \d+",
    re.ASCII | re.DOTALL,
)
"""Matches the common wordings of an overflow, in lower case."""
_REPLY_LIMIT = re.compile(r"\bmax_(completion_|output_)?tokens\b.{0,20}(too large|exceeds|: \d+ >)", re.ASCII)
"""Matches an error about the reply's limit, which a shorter prompt does not fix."""


def classify_text(text: str) -> type[ModelError] | None:
    """Return the error class of a listed text, or None."""
    lower = text.lower()
    for needles, error_class in _BY_TEXT:
        if any(all(part in lower for part in needle.split("&")) for needle in needles):
            return error_class
    return None


def is_overflow(text: str) -> bool:
    """Return whether the error text of a request says that the prompt is too long."""
    lower = text.lower()
    return _TOO_LONG.search(lower) is not None and _REPLY_LIMIT.search(lower) is None


CHAIN_LIMIT = 20
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)?", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
MASK = "<secret-hidden>"
MASKED_FROM_CHARS = 8
"""A shorter key is not masked: it is no secret, and the mask would replace ordinary words."""

_BY_CLASS: tuple[tuple[frozenset[str], type[ModelError]], ...] = (
    (frozenset({"ContextWindowExceededError"}), ContextWindowError),
    (frozenset({"ContentPolicyViolationError"}), ContentPolicyError),
    (frozenset({"BudgetExceededError", "PaymentRequiredError"}), OutOfCreditsError),
    (frozenset({"RequestUnsendable"}), BadRequestError),
    (frozenset({"APITimeoutError", "TimeoutException", "TimeoutError"}), ModelTimeoutError),
    (frozenset({"JSONDecodeError", "APIResponseValidationError", "UnicodeDecodeError"}), MalformedReplyError),
    (frozenset({"TransportError", "ClientError", "ConnectionError"}), UnreachableError),
    (frozenset({"APIConnectionError", "RequestFailed"}), UnreachableError),
)
"""Error classes by the class names of a cause and its bases, in this order."""

_BY_STREAMED_TYPE: Mapping[str, type[ModelError]] = {
    "invalid_request_error": BadRequestError,
    "authentication_error": AuthenticationError,
    "permission_error": AuthenticationError,
    "not_found_error": NotFoundError,
    "request_too_large": ContextWindowError,
    "rate_limit_error": RateLimitError,
    "rate_limit_exceeded": RateLimitError,
    "timeout_error": ModelTimeoutError,
    "overloaded_error": ServiceUnavailableError,
}
"""Error classes by the type of an error in a stream, whose only status is in its body. Any other type counts as the
provider's failure."""

_BY_STATUS: Mapping[int, type[ModelError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: OutOfCreditsError,
    403: AuthenticationError,
    404: NotFoundError,
    408: ModelTimeoutError,
    409: ServiceUnavailableError,
    413: ContextWindowError,
    422: BadRequestError,
    429: RateLimitError,
    500: InternalServerError,
    502: ServiceUnavailableError,
    503: ServiceUnavailableError,
    504: ModelTimeoutError,
    529: ServiceUnavailableError,
}

_REMEDIES: Mapping[type[ModelError], str] = {
    AuthenticationError: "Check LLM_API_KEY.",
    NotFoundError: "Check LLM_MODEL and LLM_BASE_URL.",
    OutOfCreditsError: "Top up the account, or raise its limit at the provider.",
}


PROVIDER_FAILED_REASONS = ("error", "insufficient_system_resource", "network_error")
"""Stop reasons that mean a failed provider: at OpenRouter and others, DeepSeek, GLM."""


class StreamedError(Exception):
    """An error in place of a reply, with the body of an error reply.

    It is an event of a stream or, from some gateways, a reply with status 200.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__("The provider failed within its reply.")
        self.body = body


def is_failure(reply: Mapping[str, Any]) -> bool:
    """Return whether a reply or a chunk is an error, in the formats of most servers, older vLLM and gateways."""
    if reply.get("error") or "error" in (reply.get("type"), reply.get("object")):
        return True
    return isinstance(reply.get("message"), str) and "code" in reply and "choices" not in reply


def find_choice_failure(reply: Mapping[str, Any]) -> StreamedError | None:
    """Return the error that OpenRouter puts into a choice next to the partial text; None without one.

    litellm treats such a reply as complete and keeps the error in a separate field.
    """
    choices = reply.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping):
        return None
    corner = first.get("provider_specific_fields")
    reported = first.get("error") or (corner.get("error") if isinstance(corner, Mapping) else None)
    if not reported and first.get("finish_reason") not in PROVIDER_FAILED_REASONS:
        return None
    return StreamedError({"error": reported or {"message": "The provider failed within its reply."}})


class BatchedError(Exception):
    """An error as the result of one call of a batch, with the status and body of an error reply."""

    def __init__(self, body: Mapping[str, Any], status_code: int) -> None:
        super().__init__(str(body.get("message") or "The provider failed within a batch."))
        self.body = body
        self.status_code = status_code


_NO_CONNECTION = frozenset(
    {
        *("ClientConnectorError", "ClientConnectorDNSError", "ClientProxyConnectionError"),
        *("ConnectError", "ConnectionRefusedError"),
    }
)
URL_LIMIT_CHARS = 300


def to_model_error(error: BaseException, *, secrets: Sequence[str] = (), now: datetime | None = None) -> ModelError:
    """Convert an exception of a provider's client to our error.

    Args:
        error: the exception; a `ModelError` anywhere in its chain of causes is returned unchanged.
        secrets: texts to mask, such as the key.
        now: the time of the answer, for a Retry-After that is a date; None if there are no headers.
    """
    chain = _list_causes(error)
    for link in chain:
        if isinstance(link, ModelError):
            return link
    text = _find_text(chain, secrets)
    error_class = _classify(chain, text)
    if error_class is NotFoundError and not any(map(_find_message, chain)) and (url := _find_url(chain)):
        text = f"{text} (asked at {url})"
    return error_class(
        text,
        provider_text=text,
        retry_after_seconds=_find_retry_after_seconds(chain, now),
        remedy=_REMEDIES.get(error_class, ""),
    )


def _classify(chain: Sequence[BaseException], text: str) -> type[ModelError]:
    listed = classify_text(text)
    if listed is not None:
        return listed
    for code in _provider_codes(chain):
        if code in BY_PROVIDER_CODE:
            return BY_PROVIDER_CODE[code]
    by_cause = _classify_cause(chain)
    if by_cause in (BadRequestError, InternalServerError) and is_overflow(text):
        return ContextWindowError
    return by_cause


def _classify_cause(chain: Sequence[BaseException]) -> type[ModelError]:
    """Return the error class for the exceptions and the status."""
    if any(isinstance(link, StreamedError) for link in chain):
        known = (_BY_STREAMED_TYPE[code] for code in _provider_codes(chain) if code in _BY_STREAMED_TYPE)
        return next(known, None) or _BY_STATUS.get(_find_status_in_body(chain), InternalServerError)
    # The innermost cause is the most specific: some clients wrap a refused connection into a timeout.
    for link in reversed(chain):
        names = {cls.__name__ for cls in type(link).__mro__}
        for class_names, error_class in _BY_CLASS:
            if names & class_names:
                return error_class
    status = next((value for link in chain if isinstance(value := getattr(link, "status_code", None), int)), 0)
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if 200 <= status < 300:
        return MalformedReplyError  # a reply that the client could not parse
    if 300 <= status < 400:
        return NotFoundError
    if status >= 500:
        return InternalServerError
    return BadRequestError if status >= 400 else ModelError


def _list_causes(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < CHAIN_LIMIT:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _find_text(chain: Sequence[BaseException], secrets: Sequence[str]) -> str:
    """Return the provider's error text; without an error reply, the innermost exception."""
    said = next((text for link in chain if (text := _find_message(link))), None)
    # Some clients report a refused connection as a timeout.
    refused = [str(link) for link in chain if type(link).__name__ in _NO_CONNECTION and str(link)]
    if said is None and refused:
        said = refused[0]
    if said is None:
        first = chain[0]
        last = chain[-1]
        said = str(first) or type(first).__name__
        if last is not first and str(last) and str(last) not in said:
            said += f" ({' '.join(str(last).split())})"
    said = said.partition("\nTraceback (most recent call last)")[0]  # litellm quotes this when the key is missing
    return mask_secrets(said, secrets)[:PROVIDER_TEXT_LIMIT_CHARS]


def mask_secrets(text: str, secrets: Sequence[str]) -> str:
    """Return a text with the secrets masked."""
    for secret in secrets:
        if len(secret) >= MASKED_FROM_CHARS:
            text = text.replace(secret, MASK)
    return text


def _find_url(chain: Sequence[BaseException]) -> str:
    """Return the URL of the request without query and password; empty if no exception has it."""
    for link in chain:
        if type(link).__module__.startswith("litellm"):  # for other clients' errors, litellm makes up an address
            continue
        request = getattr(getattr(link, "response", None), "request", None) or getattr(link, "request", None)
        parts = urlsplit(str(getattr(request, "url", "")))
        if parts.hostname:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:URL_LIMIT_CHARS]
    return ""


def _find_message(error: BaseException) -> str | None:
    body = getattr(error, "body", None)
    if isinstance(body, Mapping) and isinstance(body.get("error"), str):  # the format of Ollama and LM Studio
        return body["error"] or None
    message = _find_in_body(error, "message")
    return message if isinstance(message, str) and message else None


def _provider_codes(chain: Sequence[BaseException]) -> list[str]:
    found = (_find_in_body(link, name) for link in chain for name in ("code", "type"))
    further = (getattr(link, "error_code", None) for link in chain)
    return [code for code in (*found, *further) if isinstance(code, str)]


def _find_status_in_body(chain: Sequence[BaseException]) -> int:
    """Return the status that vLLM, OpenRouter and others put into an error as its code; 0 for none."""
    codes = (str(_find_in_body(link, "code")) for link in chain)
    return next((int(code) for code in codes if len(code) == 3 and code.isdecimal()), 0)


def _find_in_body(error: BaseException, name: str) -> Any:
    """Return a field of the error reply. Anthropic nests it in `error`; the openai client has unpacked it."""
    body = getattr(error, "body", None) or _parse_body_text(error)
    if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping):
        body = body["error"]
    return body.get(name) if isinstance(body, Mapping) else None


def _parse_body_text(error: BaseException) -> Any:
    """Return the error reply's body, if the exception's text consists of it, as with litellm's own HTTP client.

    For a streamed call, that text is the repr of the bytes.
    """
    text = str(error)
    if text.startswith(("b'", 'b"')):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, AttributeError):
            text = ast.literal_eval(text).decode(errors="replace")
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _find_retry_after_seconds(chain: Sequence[BaseException], now: datetime | None) -> float | None:
    for link in chain:
        response_headers = getattr(getattr(link, "response", None), "headers", None)
        for headers in (getattr(link, "litellm_response_headers", None), response_headers):
            if isinstance(headers, Mapping):
                seconds = parse_retry_after_seconds(headers, now)
                if seconds is not None:
                    return seconds
    for link in chain:
        seconds = _find_retry_delay_seconds(getattr(link, "body", None) or _parse_body_text(link))
        if seconds is not None:
            return seconds
    return None


def parse_retry_after_seconds(headers: Mapping[str, str], now: datetime | None) -> float | None:
    """Parse `retry-after-ms` or `Retry-After` (seconds or an HTTP date). Never negative; None if absent or unreadable.

    Args:
        headers: with case-insensitive or lower-case names.
        now: the time to compare an HTTP date with; None to ignore dates.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        seconds = _parse_duration_seconds(headers.get(name), unit)
        if seconds is not None:
            return seconds
    if now is None:
        return None
    try:
        due = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
        return max((due.replace(tzinfo=due.tzinfo or UTC) - now).total_seconds(), 0.0)
    except (ValueError, OverflowError, TypeError):  # not a date, or one outside of the calendar
        return None


def _parse_duration_seconds(text: Any, unit: float = 1.0) -> float | None:
    """Parse a duration such as `7`, `0.5`, `20s` or `250ms`; None for anything else."""
    found = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    return float(found[1]) * (_UNITS[found[2]] if found[2] else unit) if found else None


def _find_retry_delay_seconds(body: Any) -> float | None:
    """Return the `retryDelay` in the details of a Google error, which may be in a list with one element."""
    if isinstance(body, list) and body:
        body = body[0]
    error = body.get("error", body) if isinstance(body, Mapping) else None
    details = error.get("details") if isinstance(error, Mapping) else None
    for detail in details if isinstance(details, list) else ():
        seconds = _parse_duration_seconds(detail.get("retryDelay")) if isinstance(detail, Mapping) else None
        if seconds is not None:
            return seconds
    return None
