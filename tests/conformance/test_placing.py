"""Placing workspaces on nodes, while others delete the conversations."""

from __future__ import annotations

from dataclasses import replace

from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.specs import WorkspaceNeeds
from broker.coordination.action_streams import ActionDelivery
from broker.coordination.membership import Membership
from broker.coordination.placement import NodeOffer
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.broker_parts import CID
from tests.conversation_hands import WatchedConnection
from tool_worker.worker.placement import ClaimNow, NodePlacement

GPU = WorkspaceSpec(needs=WorkspaceNeeds(labels=("gpu",)))
DELIVERY = ActionDelivery(CID, 2, b"", GPU, "deck:{0}:act:pool:bash|1-0")


async def placed(store: Store, connection: WatchedConnection) -> None:
    offer = NodeOffer(labels=("gpu",)).model_dump_json()
    about = {"node": "n1", "pools": "bash", "offer": offer}
    await Membership(store, "tool-1", "tool", about=about, ttl_seconds=60.0).register()
    await EventLog(store).create(ConversationCreated(conversation_id=CID, workspace=GPU))
    watched = replace(store, connection=connection)
    assert isinstance(await NodePlacement(watched, NodeOffer()).bind_node(DELIVERY), ClaimNow)


async def test_a_workspace_is_placed_once(store: Store) -> None:
    await placed(store, WatchedConnection(store.connection))
    meta = store.known_keys(CID).meta
    assert await store.connection.call("HGET", meta, "node") == b"n1"
    await store.connection.call("HSET", meta, "node", "n2")
    assert await store.call_function("deck_bind_node", (store.known_keys(CID).root,), "n1") == ["bound", b"n2"]


async def test_nothing_is_left_of_a_conversation_that_is_deleted_meanwhile(store: Store) -> None:
    connection = WatchedConnection(store.connection)
    connection.before["deck_now"] = lambda: Deletion(store).delete(CID, last_id=1)
    await placed(store, connection)
    assert await store.connection.call("EXISTS", store.known_keys(CID).meta) == 0
