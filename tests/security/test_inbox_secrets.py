"""What an entry of the inbox that cannot be used has of secrets is not kept with it, where all who operate read it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from broker.coordination.quarantine import Quarantine
from broker.store import keys
from broker.store.store import Store
from deckhands.ingress.context import IngressContext
from deckhands.ingress.inbox import InboxReader
from tests.integration.test_inbox_edges import NoResults, serving, until_empty

CANARY = "c4n4ry-of-the-inbox"
REQUEST = {"task": "deploy", "secrets": {"TOKEN": CANARY}}


@pytest.mark.parametrize(
    ("fields", "is_shown"),
    [
        ({"v": "1", "request": json.dumps(REQUEST | {"no_such_field": 1})}, True),
        ({"v": "1", "request": json.dumps([REQUEST])}, True),
        ({"v": "1", "request": json.dumps({"task": "", "agent": {"secrets": {"secrets": [CANARY]}}})}, True),
        ({"v": "1", "request": '{"task": "", "secr\\u0065ts": {"TOKEN": "' + CANARY + '"}}'}, True),
        ({"v": "1", "request": json.dumps(REQUEST)[:-1]}, False),
        ({"v": "1", "request": '{"secr\\u0065ts": {"TOKEN": "' + CANARY}, False),
        ({"v": "1", "Request": json.dumps(REQUEST)}, True),
        ({"v": "1", "request": json.dumps({"task": "", "Secrets": {"TOKEN": CANARY}})}, True),
        ({"v": "1", "task": "deploy", "secrets": json.dumps({"TOKEN": CANARY})}, True),
        ({"v": "2", "request": json.dumps(REQUEST)}, True),
        ({"v": "1", "request": json.dumps({"task": "deploy", "workspace": "nowhere"})}, True),
    ],
)
async def test_secrets_of_an_unusable_entry_are_not_kept(
    valkey_store: Store, fields: Mapping[str, str], is_shown: bool
) -> None:
    await valkey_store.connection.call("XADD", keys.INBOX, "*", *(part for item in fields.items() for part in item))
    async with serving(InboxReader(IngressContext(valkey_store, NoResults()), "d1").read()):  # type: ignore[arg-type]
        await until_empty(valkey_store)
    (kept,) = await Quarantine(valkey_store).list_items()
    assert CANARY not in kept.held
    assert ("task" in kept.held) is is_shown
