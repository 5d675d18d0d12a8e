"""The ids of delegates, which follow from their parent's id and the action that asks for them."""

from __future__ import annotations

from hashlib import sha256

ID_CHARS = 24


def delegate_conversation(parent_id: str, delegate_id: int) -> str:
    """Return the id of the conversation that an action's delegate is, always the same."""
    return "d" + sha256(f"{parent_id}:{delegate_id}".encode()).hexdigest()[:ID_CHARS]
