"""Overwritten deliveries of webhooks in the store: a reader of the delivery log sees the others.

Threat: every client with the rights of a worker or of the gateway in the store may forge them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.operations.webhooks.repository import UnknownWebhook, WebhookRepository
from deckhands.operations.webhooks.webhook import SETTLED, Delivery

FORGED = (b"", b"{}", b"[]", b"\xff\x00", b'{"id": 1}', b"nonsense")


async def test_deliveries_that_cannot_be_read_are_left_out(
    valkey_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path))
    book = WebhookRepository(valkey_store, Client(valkey_store).secrets)
    hook, _ = await book.add("acme", "https://app.example/hook", (SETTLED,))
    names = [f"msg_{number:032x}" for number in range(len(FORGED) + 1)]
    for number, name in enumerate(names):
        delivery = Delivery(
            id=name, conversation_id="c-1", event_id=number + 1, type=SETTLED, body="{}", planned=book.now()
        )
        assert await book.plan(hook, delivery) == "planned"
    sent = valkey_store.all_shards[0].webhook_deliveries(hook.id, "sent")
    for name, text in zip(names, FORGED, strict=False):
        await valkey_store.connection.call("HSET", sent, name, text)
        with pytest.raises(UnknownWebhook):
            await book.redeliver(hook.id, name)
    assert [found.id for found in await book.deliveries(hook.id, limit=50)] == names[-1:]
