"""The `restore` job: restores an archived conversation, for clients that reach Celery but not the archive."""

from __future__ import annotations

from broker.runtime import UsageError, check_conversation_id
from deckhands.operations.jobs.job import JobServices


async def restore(services: JobServices, conversation_id: str) -> dict[str, str | bool]:
    """Restore a conversation; `restored` is false if it is in the store already. See `Client.restore` for the rest."""
    if not isinstance(conversation_id, str):
        raise UsageError(f"The conversation id {ascii(conversation_id)[:100]} is not a text.")
    is_new = await services.client.restore(check_conversation_id(conversation_id))
    return {"conversation_id": conversation_id, "restored": is_new}
