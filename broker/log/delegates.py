"""The ids of delegates, derived from the parent's id and the action that starts the delegate."""

from __future__ import annotations

from hashlib import sha256

ID_CHARS = 24


def make_delegate_id(parent_id: str, delegate_id: int) -> str:
    """Return the id of the delegate that an action starts. Always the same for the same action."""
    return "d" + sha256(f"{parent_id}:{delegate_id}".encode()).hexdigest()[:ID_CHARS]
