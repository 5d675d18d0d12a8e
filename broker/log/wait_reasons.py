"""What a conversation waits for, in one word, as its controller writes it into the index.

Holds: a controller writes no other reason; whatever lists, counts or explains waits takes its words from here.
"""

from __future__ import annotations

from enum import StrEnum


class WaitReason(StrEnum):
    """What a conversation waits for; the values are stable."""

    SCHEDULED = "scheduled"
    """The time at which it begins."""
    TOOL = "tool"
    """An action that a tool worker carries out."""
    DELEGATE = "delegate"
    """The agents that it has handed tasks to."""
    RATE_LIMIT = "rate_limit"
    """Its turn at a quota; or the next attempt, after a provider has refused a call for its own quota."""
    BUDGET = "waiting_for_budget"
    """Money in an account."""
    BATCH = "batch"
    """A batch of calls at a provider."""
    NEWER_WORKER = "newer_worker"
    """A worker of the version that has written to its log."""
    SERVICE_UNAVAILABLE = "service_unavailable"
    """The next attempt, after the provider was away. So are the others below, each for its error."""
    INTERNAL = "internal"
    TIMEOUT = "timeout"
    MALFORMED_REPLY = "malformed_reply"
    NO_RESPONSE = "no_response"


RETRIES = frozenset(
    {
        WaitReason.RATE_LIMIT,
        WaitReason.SERVICE_UNAVAILABLE,
        WaitReason.INTERNAL,
        WaitReason.TIMEOUT,
        WaitReason.MALFORMED_REPLY,
        WaitReason.NO_RESPONSE,
    }
)
"""Those that are the code of a failed model call, which is made again."""
