"""Why a conversation waits, in one word, as its controller writes it into the index.

Holds: controllers write no other reason. Listings, metrics and explanations of waits use these values.
"""

from __future__ import annotations

from enum import StrEnum


class WaitReason(StrEnum):
    """Why a conversation waits. The values are stable."""

    SCHEDULED = "scheduled"
    """Its start time."""
    TOOL = "tool"
    """A tool worker that runs its action."""
    DELEGATE = "delegate"
    """Its delegates."""
    RATE_LIMIT = "rate_limit"
    """Its turn at a quota, or the next attempt after a provider refused a call for its own quota."""
    BUDGET = "waiting_for_budget"
    """Funds in a budget account."""
    BATCH = "batch"
    """A batch of calls at a provider."""
    NEWER_WORKER = "newer_worker"
    """A worker of the version that wrote the latest events of its log."""
    LOCKED = "locked"
    """A worker with the master key that decrypts its log."""
    PINNED_VERSION = "pinned_version"
    """A controller worker of the version that it is pinned to."""
    SERVICE_UNAVAILABLE = "service_unavailable"
    """The next attempt after the provider was unavailable. The values below are the same for other errors."""
    INTERNAL = "internal"
    TIMEOUT = "timeout"
    MALFORMED_REPLY = "malformed_reply"
    NO_RESPONSE = "no_response"
