"""Encryption on a Redis Cluster: the data keys are on one of its nodes, and all others use them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.contract.specs import Tenancy
from broker.log.event_log import EventLog
from broker.runtime.errors import DataLocked, StoreMisconfigured
from broker.store.encryption import MasterKeys
from broker.store.store import open_store
from tests.broker_parts import message
from tests.clusters import Cluster
from tests.polling import unhurried
from tests.stores import server_program

OLD = f"old:{base64.b64encode(bytes(range(32))).decode()}"
NEW = f"new:{base64.b64encode(bytes(range(1, 33))).decode()}"


async def test_keys_are_used_rotated_and_deleted_on_a_cluster(tmp_path: Path) -> None:
    async with Cluster(server_program("valkey"), tmp_path).running() as cluster:
        patience = unhurried(60)
        store = await open_store(cluster.url, shards=16, patience_seconds=patience, masters=MasterKeys(OLD))
        log, names = EventLog(store), [f"conversation-{number}" for number in range(12)]
        for name in names:
            created = ConversationCreated(conversation_id=name, tenancy=Tenancy(tenant="acme"))
            await log.create(created, [message(name)], key="k")
        assert len({store.known_keys(name).shard for name in names}) > 3
        both = await open_store(cluster.url, patience_seconds=patience, masters=MasterKeys(f"{NEW},{OLD}"))
        assert await both.encryption.rotate() == 1
        with pytest.raises(StoreMisconfigured, match="no master key"):
            await open_store(cluster.url, patience_seconds=patience, masters=MasterKeys())
        rotated = await open_store(cluster.url, patience_seconds=patience, masters=MasterKeys(NEW))
        reader = EventLog(rotated)
        assert [(await reader.read(name))[1].content for name in names] == names
        assert await both.encryption.delete_key("acme")
        last = await open_store(cluster.url, patience_seconds=patience, masters=MasterKeys(NEW))
        for name in names:
            with pytest.raises(DataLocked, match="was deleted"):
                await EventLog(last).read(name)
        for opened in (store, both, rotated, last):
            await opened.aclose()
