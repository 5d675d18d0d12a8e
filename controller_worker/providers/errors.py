"""Errors of model calls.

    ModelError                       code, retryable, status, retry_after_seconds, provider_text, last_error
    ├── AuthenticationError          authentication       wrong, missing or unauthorised key
    ├── RateLimitError               rate_limit           too many requests or tokens              [retryable]
    ├── ContextWindowError           context_window       the prompt does not fit: condense it
    ├── ContentPolicyError           content_policy       refused by the provider's policy
    ├── OutOfCreditsError            out_of_credits       nothing left to spend
    ├── ServiceUnavailableError      service_unavailable  overloaded, unreachable, restarting      [retryable]
    │   └── UnreachableError         service_unavailable  no connection                            [retryable]
    ├── InternalServerError          internal             the provider failed                      [retryable]
    ├── ModelTimeoutError            timeout              too slow to connect, to answer or to end [retryable]
    ├── BadRequestError              bad_request          the request is invalid
    ├── NotFoundError                not_found            no such model or address
    ├── MalformedReplyError          malformed_reply      violates the protocol, or cut off        [retryable]
    ├── TokensMissingError           tokens_missing       no exact tokens, which a rollout needs
    └── NoResponseError              no_response          a well-formed reply without content      [retryable]
    LLMConfigError                   llm_config           a setting is missing or cannot be used

Holds: `code` and `status` are stable. A cancelled call raises `asyncio.CancelledError` and none of these.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.runtime import DeckhandsError, UsageError

PROVIDER_TEXT_LIMIT_CHARS = 2_000


class ModelError(DeckhandsError):
    """A model call without a usable reply.

    Attributes:
        status: OpenHands' runtime status for it; empty if OpenHands has none.
        retry_after_seconds: the wait that the provider asked for; None if it did not ask for one.
        provider_text: the provider's error text, at most 2,000 characters.
    """

    code = "model_error"
    status: str = ""
    upstream_class: str = "APIError"

    def __init__(
        self, message: str, *, provider_text: str = "", retry_after_seconds: float | None = None, remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.provider_text = provider_text[:PROVIDER_TEXT_LIMIT_CHARS]
        self.retry_after_seconds = retry_after_seconds

    @property
    def last_error(self) -> str:
        """The error as OpenHands shows it: its status value, or `<class>: <text>` if it has none."""
        return self.status or f"{self.upstream_class}: {self.provider_text or self.message}"


class AuthenticationError(ModelError):
    """The key is missing, wrong, or not authorised for this model."""

    code = "authentication"
    status = "STATUS$ERROR_LLM_AUTHENTICATION"


class RateLimitError(ModelError):
    """Too many requests or tokens at the moment."""

    code = "rate_limit"
    retryable = True
    status = "CHAT_INTERFACE$AGENT_RATE_LIMITED_STOPPED_MESSAGE"


class ContextWindowError(ModelError):
    """The prompt exceeds the model's window. Resending it fails again; a shorter prompt may work."""

    code = "context_window"
    upstream_class = "LLMContextWindowExceedError"


class ContentPolicyError(ModelError):
    """The provider's policy refuses the prompt or the reply."""

    code = "content_policy"
    status = "STATUS$ERROR_LLM_CONTENT_POLICY_VIOLATION"


class OutOfCreditsError(ModelError):
    """The account, or a spending limit set at the provider, is exhausted."""

    code = "out_of_credits"
    status = "STATUS$ERROR_LLM_OUT_OF_CREDITS"


class ServiceUnavailableError(ModelError):
    """The provider is overloaded, restarting or cannot be reached."""

    code = "service_unavailable"
    retryable = True
    status = "STATUS$ERROR_LLM_SERVICE_UNAVAILABLE"


class UnreachableError(ServiceUnavailableError):
    """The provider's address has no server that answers, or the connection broke."""


class InternalServerError(ModelError):
    """The provider failed."""

    code = "internal"
    retryable = True
    status = "STATUS$ERROR_LLM_INTERNAL_SERVER_ERROR"


class ModelTimeoutError(ModelError):
    """The connection, the first byte or the whole reply took too long."""

    code = "timeout"
    retryable = True
    upstream_class = "Timeout"


class BadRequestError(ModelError):
    """The provider rejects the request as invalid. The same request fails again."""

    code = "bad_request"
    upstream_class = "BadRequestError"


class NotFoundError(ModelError):
    """The provider knows no such model or address."""

    code = "not_found"
    upstream_class = "NotFoundError"


class MalformedReplyError(ModelError):
    """The reply violates the protocol or was cut off. It is discarded."""

    code = "malformed_reply"
    retryable = True
    upstream_class = "APIResponseValidationError"


class NoResponseError(ModelError):
    """A well-formed reply without content."""

    code = "no_response"
    retryable = True
    upstream_class = "LLMNoResponseError"


class TokensMissingError(ModelError):
    """The reply has no exact tokens, which a rollout records.

    Either the server or the configured backend does not return them.
    """

    code = "tokens_missing"


class LLMConfigError(UsageError):
    """A model setting is missing or cannot be used. The text names the setting and the remedy."""

    code = "llm_config"


MODEL_ERRORS: Mapping[str, type[ModelError]] = {
    error.code: error
    for error in (
        AuthenticationError,
        RateLimitError,
        ContextWindowError,
        ContentPolicyError,
        OutOfCreditsError,
        ServiceUnavailableError,
        InternalServerError,
        ModelTimeoutError,
        BadRequestError,
        NotFoundError,
        MalformedReplyError,
        NoResponseError,
        TokensMissingError,
    )
}
"""Error classes by code."""


class HookVeto(DeckhandsError):
    """A hook refused a model call."""

    code = "hook_veto"
