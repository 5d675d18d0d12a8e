"""Failed transfers: no answer, or an invalid one."""

from __future__ import annotations

import asyncio

import pytest

from broker.coordination.transfers import TransferFailed, TransferRequest, Transfers
from broker.store.store import Store
from tests.broker_parts import begin
from tests.polling import until

CID = "aaa"
UPLOAD = TransferRequest(what="upload", path="a.txt")


async def on_node(store: Store) -> str:
    """Create a conversation whose workspace is on a node, and return the node's action stream."""
    await begin(store, CID)
    names = store.known_keys(CID)
    await store.connection.call("HSET", names.meta, "node", "n1")
    return names.shard.actions("node:n1")


async def token_in(store: Store, stream: str) -> str:
    """Return the token of the transfer that was ordered last, once there is one."""

    async def orders() -> list[tuple[bytes, list[bytes]]]:
        return await store.connection.call("XRANGE", stream, "-", "+")

    await until(orders, what="the order of a transfer")
    fields = (await orders())[-1][1]
    return dict(zip(fields[::2], fields[1::2], strict=True))[b"t"].decode()


async def test_transfer_reported_as_failed_does_not_run_later(valkey_store: Store) -> None:
    stream, transfers = await on_node(valkey_store), Transfers(valkey_store)
    with pytest.raises(TransferFailed, match="did not answer"):
        await transfers.send_request(CID, UPLOAD, b"content", limit_seconds=0.1)
    token = await token_in(valkey_store, stream)
    assert await transfers.load_request(CID, token) is None
    names = valkey_store.known_keys(CID)
    assert await valkey_store.connection.call("EXISTS", names.transfer(token), names.stored_file(token)) == 0


async def test_unreadable_answer_is_a_failure_of_the_transfer(valkey_store: Store) -> None:
    stream, transfers = await on_node(valkey_store), Transfers(valkey_store)

    async def answer() -> None:
        token = await token_in(valkey_store, stream)
        await valkey_store.connection.call(
            "HSET", valkey_store.known_keys(CID).transfer(token), "answer", '{"files": "many"}'
        )

    async with asyncio.TaskGroup() as group:
        group.create_task(answer())
        with pytest.raises(TransferFailed, match="cannot be read"):
            await transfers.send_request(CID, UPLOAD, b"content", limit_seconds=10)
