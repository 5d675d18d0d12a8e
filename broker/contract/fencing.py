"""Fencing: the right to append to a conversation as its owner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right to append to a conversation as its owner, while the token is current."""

    conversation_id: str
    worker_id: str
    token: str
