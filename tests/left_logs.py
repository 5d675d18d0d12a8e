"""Verifies every log that a test leaves in a store, whatever the test was about.

Holds: a log that breaks a rule of `broker/log/specification.py` fails the test, with the sentence that says why.
Does not: demand that a conversation has ended; a log is checked as far as it goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from broker.log.selection import ConversationQuery, Selection
from broker.runtime.errors import DataForgotten
from deckhands.client.client import Client
from tests.polling import unhurried

LIMIT_SECONDS = 120.0


async def verify_left_logs(client: Client, *, forged: Collection[str] = ()) -> None:
    """Fail unless each log in the store holds, but for those of these conversations, which the test has forged."""
    broken = []
    async with asyncio.timeout(unhurried(LIMIT_SECONDS)):
        async for page in ConversationQuery(client.store, Selection()).iterate_pages():
            for row in page:
                if row.conversation_id not in forged:
                    try:
                        found = await client.verify(row.conversation_id)
                    except DataForgotten:  # its tenant's key was deleted
                        continue
                    broken += [f"{found.source}, event {each.event_id}: {each.text}" for each in found.violations]
    assert not broken, "the test left logs that do not hold:\n" + "\n".join(broken)
