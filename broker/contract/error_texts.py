"""The error keys of OpenHands' GUI as sentences for users, and the remedies of failed model calls.

Holds: a log keeps the keys as they are; every reader shows the sentence. A text that is no key is shown unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_KEY = re.compile(r"[A-Z][A-Z_]*\$[A-Z0-9_]+", re.ASCII)
_CHECK_MODEL = "Check the model's name (LLM_MODEL or --model) and LLM_BASE_URL."
_CHECK_SERVER = "Check LLM_BASE_URL and the network; NO_PROXY lists servers that are reached without a proxy."
_TRY_AGAIN = "Send a message, or resume the conversation, to try again."

REMEDIES: Mapping[str, str] = {
    "authentication": "Check LLM_API_KEY.",
    "bad_request": _CHECK_MODEL,
    "content_policy": "Change the task, or use another model.",
    "internal": "Try again later, or use another model.",
    "not_found": _CHECK_MODEL,
    "out_of_credits": "Top up the account that LLM_API_KEY belongs to.",
    "rate_limit": "Try again later, or use another key or model.",
    "service_unavailable": _CHECK_SERVER,
    "timeout": _CHECK_SERVER,
}
"""Suggestions for a failed model call, by its code."""

ERROR_KEYS: Mapping[str, tuple[str, str]] = {
    "STATUS$ERROR_LLM_AUTHENTICATION": ("The model's provider refused the API key", "authentication"),
    "STATUS$ERROR_LLM_SERVICE_UNAVAILABLE": ("The model's provider is not available", "service_unavailable"),
    "STATUS$ERROR_LLM_INTERNAL_SERVER_ERROR": ("The model's provider failed", "internal"),
    "STATUS$ERROR_LLM_OUT_OF_CREDITS": ("The account at the model's provider is used up", "out_of_credits"),
    "STATUS$ERROR_LLM_CONTENT_POLICY_VIOLATION": (
        "The content policy of the model's provider refused the call",
        "content_policy",
    ),
    "CHAT_INTERFACE$AGENT_RATE_LIMITED_STOPPED_MESSAGE": (
        "The model's provider limits the rate of calls",
        "rate_limit",
    ),
    "STATUS$ERROR_RUNTIME_DISCONNECTED": ("The connection to the workspace was lost", ""),
    "STATUS$ERROR_MEMORY": ("The agent's memory failed", ""),
    "STATUS$GIT_PROVIDER_AUTHENTICATION_ERROR": ("The Git provider refused the credentials", ""),
    "STATUS$ERROR": ("The agent stopped with an error", ""),
}
"""The sentence for each key, without its full stop, and the code of the failed model call; empty if it is none."""


def is_error_key(text: str) -> bool:
    """Return whether a text is a key of OpenHands' GUI instead of words."""
    return _KEY.fullmatch(text) is not None


def render_error(reason: str, provider_text: str = "") -> str:
    """Return the reason of an error for users: a sentence in place of a key, any other text unchanged.

    Args:
        provider_text: the provider's text about it; empty if it is unknown.
    """
    if not is_error_key(reason):
        return reason
    words = reason.partition("$")[2].replace("_", " ").lower()
    sentence, _ = ERROR_KEYS.get(reason, (f"The agent stopped with an error ({words})", ""))
    return f"{sentence}: {provider_text}" if provider_text else f"{sentence}."


def add_remedy(text: str, remedy: str) -> str:
    """Return a text and a remedy as two sentences; the text alone if it has the remedy already or there is none."""
    if not remedy or remedy in text:
        return text
    return f"{text}{'' if text.endswith(('.', '!', '?')) else '.'} {remedy}" if text else remedy


def find_error_remedy(reason: str, code: str = "") -> str:
    """Return a suggestion for an error with this reason, or of this code; empty if there is none."""
    code = code or ERROR_KEYS.get(reason, ("", ""))[1]
    return REMEDIES.get(code, _TRY_AGAIN if is_error_key(reason) else "")
