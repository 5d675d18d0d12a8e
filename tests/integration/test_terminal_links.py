"""The link of a terminal between a server and a tool worker, over a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.coordination.terminals import (
    MOST_UNREAD,
    REQUEST_SECONDS,
    SILENCE_SECONDS,
    Kind,
    TerminalFailed,
    TerminalLink,
    Terminals,
)
from broker.coordination.transfers import seal
from broker.runtime.errors import CorruptEntry
from broker.store.store import Store
from tests.polling import unhurried, until
from tool_worker.worker.terminal_service import TerminalService
from tool_worker.workspace.workspaces import Workspaces

CID = "conversation"
LIMIT_SECONDS = 60.0


async def find_token(store: Store) -> str:
    """Wait for the request of a terminal, and return its token."""
    pattern = f"{(await store.locate(CID)).shard.root}:terminal:{CID}:*"
    found: list[bytes] = []

    async def is_there() -> bool:
        found[:] = await store.call("KEYS", pattern)
        return bool(found)

    await until(is_there, limit=LIMIT_SECONDS, what="a request")
    return found[0].decode().rpartition(":")[2]


@asynccontextmanager
async def linked(store: Store, *, pause_seconds: float = 0.0) -> AsyncIterator[tuple[TerminalLink, TerminalLink]]:
    """The server's and the worker's side of an open terminal, which the worker took some time to open."""
    terminals = Terminals(store)
    await store.call("HSET", (await store.locate(CID)).meta, "node", "n1")
    asking = asyncio.create_task(terminals.request(CID, columns=80, rows=24))
    accepted = await terminals.accept(CID, await find_token(store))
    assert accepted is not None
    worker = accepted[1]
    await pause(pause_seconds)
    await worker.send("opened")
    server = await asking
    try:
        yield server, worker
    finally:
        await server.aclose()
        await worker.aclose()


async def pause(seconds: float) -> None:
    """Do nothing for a time that the protocol allows."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    await until(lambda: loop.time() >= end, limit=LIMIT_SECONDS, what="the end of a pause")


async def exchange(link: TerminalLink, kind: Kind, number: int, others: int) -> None:
    """Send so many messages, and then as many again while all of the other side are received."""

    async def send() -> None:
        for each in range(number):
            await link.send(kind, b"%d" % each)

    async def receive() -> None:
        for each in range(2 * others):
            assert (await link.receive()).content == b"%d" % (each % others)

    await send()
    async with asyncio.timeout(unhurried(LIMIT_SECONDS)):
        await asyncio.gather(send(), receive())


async def test_full_windows_on_both_sides_pass(valkey_store: Store) -> None:
    async with linked(valkey_store) as (server, worker):
        keys, output = MOST_UNREAD, MOST_UNREAD - 1  # the worker has sent one already
        await asyncio.gather(exchange(server, "keys", keys, output), exchange(worker, "output", output, keys))


async def test_side_that_opens_or_reads_slowly_is_not_gone(valkey_store: Store) -> None:
    async with linked(valkey_store, pause_seconds=SILENCE_SECONDS + 1.5) as (server, worker):
        await worker.send("output", b"on")
        await pause(SILENCE_SECONDS + 1.5)  # neither side takes a message: the server's reader is slow, say
        assert not server.is_over
        assert not worker.is_over
        assert (await server.receive()).content == b"on"
        await server.send("keys", b"go")
        assert (await worker.receive()).content == b"go"


async def test_worker_that_never_opens_is_named(valkey_store: Store) -> None:
    terminals = Terminals(valkey_store)
    await valkey_store.call("HSET", (await valkey_store.locate(CID)).meta, "node", "n1")
    started = asyncio.get_running_loop().time()
    with pytest.raises(TerminalFailed, match="did not start in time on the node n1"):
        await terminals.request(CID, columns=80, rows=24)
    assert asyncio.get_running_loop().time() - started >= REQUEST_SECONDS - 0.1


async def test_hostile_side_that_waits_for_no_room_ends_the_link(valkey_store: Store) -> None:
    terminals = Terminals(valkey_store)
    names = await valkey_store.locate(CID)
    await valkey_store.call("HSET", names.meta, "node", "n1")
    asking = asyncio.create_task(terminals.request(CID, columns=80, rows=24))
    token = await find_token(valkey_store)
    accepted = await terminals.accept(CID, token)
    assert accepted is not None
    asked, worker = accepted
    await worker.send("opened")
    server = await asking
    try:
        for number in range(2, 2 * MOST_UNREAD + 4):
            sealed = seal(bytes.fromhex(asked.public), b"ox", f"{CID} {token} output {number}")
            await valkey_store.call("XADD", names.terminal_output(token), f"{number}-0", "m", sealed, "r", 0)
        await until(lambda: server.is_over, limit=LIMIT_SECONDS, what="the end of the link")
        for _ in range(2 * MOST_UNREAD + 1):
            await server.receive()
        with pytest.raises(CorruptEntry, match="more messages than allowed"):
            await asyncio.gather(*(server.receive() for _ in range(4)))
    finally:
        await server.aclose()
        await worker.aclose()


async def test_close_is_noticed_before_earlier_messages_are_taken(valkey_store: Store) -> None:
    async with linked(valkey_store) as (server, worker):
        await server.send("keys", b"x")
        await server.send("close")
        await until(lambda: worker.is_over, limit=LIMIT_SECONDS, what="the end of the link")
        assert [(await worker.receive()).kind for _ in range(2)] == ["keys", "close"]


async def test_worker_with_too_many_terminals_opens_no_further_one(valkey_store: Store, tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path, sandbox="none")
    terminals = Terminals(valkey_store)
    service = TerminalService(terminals, tmp_path, workspaces, limit=0)
    await valkey_store.call("HSET", (await valkey_store.locate(CID)).meta, "node", "n1")
    asking = asyncio.create_task(terminals.request(CID, columns=80, rows=24))
    try:
        service.start(CID, await find_token(valkey_store))
        with pytest.raises(TerminalFailed, match="serves 0 terminals already"):
            await asking
    finally:
        await service.aclose()
        await workspaces.aclose()
