"""Entries of the inbox for tenants whose key an ingress worker has not yet."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.coordination.quarantine import Quarantine
from broker.log.event_log import EventLog
from broker.store.encryption import MasterKeys
from broker.store.store import open_store
from deckhands.ingress.context import IngressContext
from deckhands.ingress.inbox import InboxReader
from tests.inbox_parts import put
from tests.integration.test_inbox_edges import NoResults, serving, until_empty, until_replies
from tests.polling import until
from tests.stores import RealServer, emptied

OLD = f"old:{base64.b64encode(bytes(range(32))).decode()}"
NEW = f"new:{base64.b64encode(bytes(range(1, 33))).decode()}"


async def test_an_entry_waits_in_the_inbox_for_its_key(
    valkey_server: RealServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await open_store(await emptied(valkey_server.url), masters=MasterKeys(NEW))
    await EventLog(store).create(ConversationCreated(conversation_id="first"))
    file = tmp_path / "keys"
    file.write_text(OLD)
    theirs = await open_store(valkey_server.url, masters=MasterKeys(path=file))
    desk = IngressContext(theirs, NoResults())  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, "deckhands.ingress.inbox"):
        reader = InboxReader(desk, "d1")
        async with serving(reader.read(), reader.run_maintenance()):
            await put(store, {"task": "x"})
            await until(lambda: "now; retrying" in caplog.text, what="failed attempt")
            assert await Quarantine(store).list_items() == []
            file.write_text(f"{OLD}\n{NEW}")
            await until_replies(store, "shop", "accepted")
            await until_empty(store)
    await theirs.aclose()
    await store.aclose()
