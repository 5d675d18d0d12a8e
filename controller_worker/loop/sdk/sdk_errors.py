"""Errors of the SDK, translated into the error table that both kinds of agents share (`providers.errors`).

    error of the SDK                                   our error
    authentication_failed, oauth_org_not_allowed       AuthenticationError
    billing_error                                      OutOfCreditsError
    rate_limit                                         RateLimitError            [retryable]
    overloaded                                         ServiceUnavailableError   [retryable]
    server_error                                       InternalServerError       [retryable]
    invalid_request                                    BadRequestError
    model_not_found                                    NotFoundError
    max_output_tokens, CLIJSONDecodeError,
        MessageParseError                              MalformedReplyError       [retryable]
    TimeoutError                                       ModelTimeoutError         [retryable]
    CLIConnectionError, ProcessError, ResultError,
        a program that has ended                       ServiceUnavailableError   [retryable]
    CLINotFoundError, a package that is not installed  LLMConfigError

As for every provider, a text about a prompt that is too long or about a policy takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.runtime import DeckhandsError
from controller_worker.providers import (
    AuthenticationError,
    BadRequestError,
    ContextWindowError,
    InternalServerError,
    LLMConfigError,
    MalformedReplyError,
    ModelError,
    ModelTimeoutError,
    NotFoundError,
    OutOfCreditsError,
    RateLimitError,
    ServiceUnavailableError,
    classify_text,
    is_overflow,
)

BY_NAME: Mapping[str, type[ModelError]] = {
    "authentication_failed": AuthenticationError,
    "oauth_org_not_allowed": AuthenticationError,
    "billing_error": OutOfCreditsError,
    "rate_limit": RateLimitError,
    "overloaded": ServiceUnavailableError,
    "server_error": InternalServerError,
    "invalid_request": BadRequestError,
    "model_not_found": NotFoundError,
    "max_output_tokens": MalformedReplyError,
    "CLIJSONDecodeError": MalformedReplyError,
    "MessageParseError": MalformedReplyError,
    "TimeoutError": ModelTimeoutError,
}
"""By the SDK's name of an error or the class of its exception; any other is `ServiceUnavailableError`."""

NOT_INSTALLED = frozenset({"CLINotFoundError", "ModuleNotFoundError", "ImportError"})
REMEDY = "Install it where controller workers run: pip install 'deckhands[claude]'."


def to_model_error(name: str, text: str) -> DeckhandsError:
    """Return our error for an error of the SDK.

    Args:
        name: the class of the exception, or the SDK's name of the error.
        text: its message.
    """
    if name in NOT_INSTALLED:
        return LLMConfigError(f"The Claude Agent SDK cannot be used: {text}", remedy=REMEDY)
    found = classify_text(text) or (ContextWindowError if is_overflow(text) else None)
    error = found or BY_NAME.get(name, ServiceUnavailableError)
    return error(f"The Claude Agent SDK failed: {text or name}", provider_text=text or name)
