"""What can go wrong between us and a model.

    ModelError                       code, retryable, status, retry_after_seconds, provider_text, last_error
    ├── AuthenticationError          authentication       wrong, missing or unauthorised key
    ├── RateLimitError               rate_limit           too many requests or tokens              [retryable]
    ├── ContextWindowError           context_window       the prompt does not fit: condense it
    ├── ContentPolicyError           content_policy       refused by the provider's policy
    ├── OutOfCreditsError            out_of_credits       nothing left to spend
    ├── ServiceUnavailableError      service_unavailable  overloaded, unreachable, restarting      [retryable]
    ├── InternalServerError          internal             the provider failed                      [retryable]
    ├── ModelTimeoutError            timeout              too slow to connect, to begin, to end    [retryable]
    ├── BadRequestError              bad_request          refused for its form
    ├── NotFoundError                not_found            no such model or address
    ├── MalformedReplyError          malformed_reply      not the protocol's form, or cut off      [retryable]
    └── NoResponseError              no_response          a well-formed reply with nothing in it   [retryable]
    LLMConfigError                   llm_config           a setting is missing or cannot be used

Holds: `code` and `status` are stable; a cancelled call raises `asyncio.CancelledError` and none of these.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.runtime import DeckhandsError, UsageError

PROVIDER_TEXT_LIMIT_CHARS = 2_000


class ModelError(DeckhandsError):
    """A model call that brought no usable reply.

    Attributes:
        status: OpenHands' runtime status for it, or empty where OpenHands has none.
        retry_after_seconds: how long the provider asks us to wait, or None if it did not say.
        provider_text: what the provider said, at most 2,000 characters.
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
        """The error as OpenHands shows it: its status value, or `<class>: <text>` where it has none."""
        return self.status or f"{self.upstream_class}: {self.provider_text or self.message}"


class AuthenticationError(ModelError):
    """The key is missing, wrong, or may not use this model."""

    code = "authentication"
    status = "STATUS$ERROR_LLM_AUTHENTICATION"


class RateLimitError(ModelError):
    """Too many requests or tokens for the moment."""

    code = "rate_limit"
    retryable = True
    status = "CHAT_INTERFACE$AGENT_RATE_LIMITED_STOPPED_MESSAGE"


class ContextWindowError(ModelError):
    """The prompt does not fit the model. Sending it again is useless; sending less is not."""

    code = "context_window"
    upstream_class = "LLMContextWindowExceedError"


class ContentPolicyError(ModelError):
    """The provider's policy refuses the prompt or the reply."""

    code = "content_policy"
    status = "STATUS$ERROR_LLM_CONTENT_POLICY_VIOLATION"


class OutOfCreditsError(ModelError):
    """The account, or a spending limit set at the provider, has nothing left."""

    code = "out_of_credits"
    status = "STATUS$ERROR_LLM_OUT_OF_CREDITS"


class ServiceUnavailableError(ModelError):
    """The provider is overloaded, restarting or cannot be reached."""

    code = "service_unavailable"
    retryable = True
    status = "STATUS$ERROR_LLM_SERVICE_UNAVAILABLE"


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
    """The provider refuses the request for its form; the same request fails again."""

    code = "bad_request"
    upstream_class = "BadRequestError"


class NotFoundError(ModelError):
    """The provider knows no such model or address."""

    code = "not_found"
    upstream_class = "NotFoundError"


class MalformedReplyError(ModelError):
    """What came back is not the protocol's form, or was cut off. Nothing of it is used."""

    code = "malformed_reply"
    retryable = True
    upstream_class = "APIResponseValidationError"


class NoResponseError(ModelError):
    """A well-formed reply with nothing in it."""

    code = "no_response"
    retryable = True
    upstream_class = "LLMNoResponseError"


class LLMConfigError(UsageError):
    """A model setting is missing or cannot be used; the text names it and the remedy."""

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
    )
}
"""The family by code."""


class HookVeto(DeckhandsError):
    """A hook refused a model call."""

    code = "hook_veto"
