"""Recognizes the texts of providers' errors. No other module reads these texts.

Holds: a listed text or code takes precedence over the status. Unlisted wordings of an overflow are recognised by common
phrases, if the status allows an overflow.
Does not: find the text in an exception; `provider_errors` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from controller_worker.providers.errors import (
    AuthenticationError,
    ContentPolicyError,
    ContextWindowError,
    MalformedReplyError,
    ModelError,
    NoResponseError,
    OutOfCreditsError,
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
    """Return whether a refused or failed request's text says that the prompt is too long."""
    lower = text.lower()
    return _TOO_LONG.search(lower) is not None and _REPLY_LIMIT.search(lower) is None
