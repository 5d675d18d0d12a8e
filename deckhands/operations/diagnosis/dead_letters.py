"""Dead conversations: each has crashed three workers in a row, and waits for an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from broker.contract import render_error
from broker.log import ConversationRow, Conversations, Takeover
from broker.store import Store

ROWS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class DeadConversation:
    """A dead conversation, which no worker claims.

    Attributes:
        workers: the workers that died while it acted, as far as the store still knows them, the latest last.
        died: when each of them was found dead, in ISO 8601.
        last_error: the error that ended the conversation; empty if none is recorded yet.
        tenant: its tenant; empty for none.
    """

    conversation_id: str
    title: str
    workers: tuple[str, ...]
    died: tuple[str, ...] = ()
    last_error: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""


async def find_dead_conversations(
    store: Store, *, labels: Mapping[str, str] | None = None, has_causes: bool = True
) -> list[DeadConversation]:
    """Return the dead conversations, oldest first.

    Args:
        labels: only conversations with all of these labels.
        has_causes: name the workers that died with them.
    """
    wanted = labels or {}
    index = Conversations(store)
    ids = await index.list_dead_letters()
    deaths: dict[str, list[Takeover]] = {}
    for one in await index.list_takeovers() if has_causes and ids else ():
        deaths.setdefault(one.conversation_id, []).append(one)
    found = []
    for at in range(0, len(ids), ROWS_AT_ONCE):
        rows = await index.load_rows(ids[at : at + ROWS_AT_ONCE])
        chosen = [row for row in rows if wanted.items() <= row.labels.items()]
        found += [describe_death(row, deaths.get(row.conversation_id, ())) for row in chosen]
    return found


def describe_death(row: ConversationRow, takeovers: Sequence[Takeover]) -> DeadConversation:
    """Return a dead conversation with the last workers from which it was taken over."""
    latest = takeovers[-3:]
    return DeadConversation(
        row.conversation_id,
        row.title,
        tuple(death.from_worker for death in latest),
        tuple(death.at.isoformat() for death in latest),
        render_error(row.fields.get("last_error", "")),
        dict(row.labels),
        row.tenant,
    )
