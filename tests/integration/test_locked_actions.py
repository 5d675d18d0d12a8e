"""Actions of encrypted conversations at a tool worker that has not their key."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.contract.events import ConversationCreated
from broker.log.event_log import EventLog
from broker.store.encryption import MasterKeys
from broker.store.store import Store, open_store
from tests.broker_parts import CID, claim, command, enter
from tests.polling import until
from tests.stores import RealServer, emptied
from tool_worker.settings import load_tool_settings
from tool_worker.worker.consumer import ToolConsumer
from tool_worker.workspace.workspaces import Workspaces

OLD = f"old:{base64.b64encode(bytes(range(32))).decode()}"
NEW = f"new:{base64.b64encode(bytes(range(1, 33))).decode()}"


@asynccontextmanager
async def working(store: Store, node_dir: Path) -> AsyncIterator[None]:
    """Run a tool worker."""
    settings = load_tool_settings({"DECKHANDS_NODE": "node-1", "DECKHANDS_NODE_DIR": str(node_dir)})
    workspaces = Workspaces(settings.node_dir, sandbox="none")
    stop = asyncio.Event()
    session = ToolConsumer(settings).start_session(store, workspaces)
    task = asyncio.create_task(session.run(stop, on_beat=lambda _: None))
    try:
        yield
    finally:
        stop.set()
        await task
        await workspaces.close(CID)
        await workspaces.aclose()


async def dispatched(url: str) -> Store:
    """Open a store with an encrypted conversation whose action waits for a tool worker."""
    store = await open_store(url, masters=MasterKeys(OLD))
    log = EventLog(store)
    await log.create(ConversationCreated(conversation_id=CID))
    await enter(store, "w1")
    await enter(store, "t0", node="another")  # makes the stream
    await log.append_as_owner(await claim(store, "w1"), [command()], expected_last_id=1, dispatch=[0])
    return store


async def count_pending(store: Store) -> int:
    return int((await store.call("XPENDING", store.all_shards[0].actions("pool:bash"), "tools"))[0])


async def test_an_action_is_answered_when_its_key_arrives(valkey_server: RealServer, tmp_path: Path) -> None:
    store = await dispatched(await emptied(valkey_server.url))
    file = tmp_path / "keys"
    file.write_text(NEW)
    theirs = await open_store(valkey_server.url, masters=MasterKeys(path=file))
    async with working(theirs, tmp_path / "node"):
        await until(lambda: is_delivered(store), what="delivery of the action")
        assert not await EventLog(store).is_answered(CID, 2)
        file.write_text(f"{NEW}\n{OLD}")
        await until(lambda: EventLog(store).is_answered(CID, 2), what="answer")
        assert await count_pending(store) == 0
    await theirs.aclose()
    await store.aclose()


async def test_an_action_whose_key_was_deleted_leaves_its_stream(valkey_server: RealServer, tmp_path: Path) -> None:
    store = await dispatched(await emptied(valkey_server.url))
    await store.encryption.delete_key("")
    theirs = await open_store(valkey_server.url, masters=MasterKeys(OLD))
    async with working(theirs, tmp_path / "node"):
        await until(lambda: is_past(store), what="acknowledgement of the action")
    assert not await EventLog(store).is_answered(CID, 2)
    await theirs.aclose()
    await store.aclose()


async def is_delivered(store: Store) -> bool:
    return await count_pending(store) == 1


async def is_past(store: Store) -> bool:
    """Whether the worker has read the action, and its entry is acknowledged."""
    (flat,) = await store.call("XINFO", "GROUPS", store.all_shards[0].actions("pool:bash"))
    group = dict(zip(flat[::2], flat[1::2], strict=True))
    return group[b"last-delivered-id"] != b"0-0" and group[b"pending"] == 0
