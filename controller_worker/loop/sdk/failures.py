"""What goes wrong in the SDK, in the terms of the one table of errors that both kinds of agents have (`llm.errors`).

    what the SDK says                                  our error
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

What a text says of a prompt that is too long or of a policy counts first, as for every provider.
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
    class_of_text,
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
"""What the SDK calls an error, or the class of what it raises; anything else is `ServiceUnavailableError`."""

NOT_INSTALLED = frozenset({"CLINotFoundError", "ModuleNotFoundError", "ImportError"})
REMEDY = "Install it where controller workers run: pip install 'deckhands[claude]'."


def sdk_error(name: str, text: str) -> DeckhandsError:
    """Return our error for one of the SDK's.

    Args:
        name: the class of what it raised, or what it calls the error.
        text: what it said.
    """
    if name in NOT_INSTALLED:
        return LLMConfigError(f"The Claude Agent SDK cannot be used: {text}", remedy=REMEDY)
    found = class_of_text(text) or (ContextWindowError if is_overflow(text) else None)
    error = found or BY_NAME.get(name, ServiceUnavailableError)
    return error(f"The Claude Agent SDK failed: {text or name}", provider_text=text or name)
