"""Copies that are too long for one piece: they travel in parts, arrive whole or not at all, and need little memory."""

from __future__ import annotations

import asyncio
import os
import random
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.coordination import transfers
from broker.coordination.transfers import PART_BYTES, TransferFailed, TransferRequest, Transfers
from broker.log.event_log import EventLog
from broker.runtime.errors import UsageError
from broker.store.embedded import EmbeddedValkey
from broker.store.store import Store, open_store
from deckhands.client.transfers.files import WorkspaceFiles
from tests.polling import until
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.worker.transfer_service import TransferService
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.checkpoints.checkpointing import Checkpointing
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.named_directories import NamedDirectories

CID = "copying"
LONG_BYTES = 70 * 2**20
LIMIT_SECONDS = 120.0


class Node:
    """A node that serves the transfers of one conversation.

    Attributes:
        served: the requests, in order.
    """

    def __init__(self, store: Store, root: Path) -> None:
        self.files = WorkspaceFiles(store)
        self.workspace = HostFolder(root, CID).workspace
        self.workspace.mkdir(parents=True)
        self.served: list[str] = []
        self._store = store
        self._root = root
        checkpointing = Checkpointing(EventLog(store), root, None, every=100)
        bindings = Bindings(root, NamedDirectories())
        self.service = TransferService(Transfers(store), root, checkpointing, _no_sandbox, bindings)

    async def serve(self) -> None:
        stream, call = self._store.known_keys(CID).shard.actions("node:one"), self._store.connection.call
        while True:
            await until(lambda: call("XLEN", stream), limit=LIMIT_SECONDS, what="request")
            for entry, fields in await call("XRANGE", stream, "-", "+"):
                token = fields[-1].decode()
                request = await Transfers(self._store).load_request(CID, token)
                self.served.append(request.what if request else "?")
                await self.service.transfer(CID, token)
                await call("XDEL", stream, entry)

    def left(self) -> list[str]:
        return [path.name for path in (self._root / CID).iterdir() if path.name.startswith(".")]

    async def stored(self) -> int:
        return len(await self._store.connection.call("KEYS", "*parcel*"))


async def _no_sandbox() -> Sandbox:
    raise AssertionError("no sandbox is needed")


@asynccontextmanager
async def node_of(store: Store, root: Path) -> AsyncIterator[Node]:
    await EventLog(store).create(ConversationCreated(conversation_id=CID))
    await store.connection.call("HSET", store.known_keys(CID).meta, "node", "one")
    node = Node(store, root)
    serving = asyncio.create_task(node.serve())
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            yield node
    finally:
        serving.cancel()


def noise(path: Path, size: int = LONG_BYTES) -> bytes:
    content = random.Random(7).randbytes(size)
    path.write_bytes(content)
    return content


async def test_a_long_file_is_copied_in_and_out(valkey_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "model.bin"
    content = noise(source)
    seen: list[tuple[int, int | None]] = []
    async with node_of(valkey_store, tmp_path / "root") as node:
        files, size = await node.files.upload(CID, source, "data/", on_progress=lambda *step: seen.append(step))
        assert (files, size) == (1, LONG_BYTES)
        assert (node.workspace / "data" / "model.bin").read_bytes() == content
        assert node.served == ["upload_part"] * 5 + ["upload", "end"]
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] > LONG_BYTES
        seen.clear()
        node.served.clear()
        back = tmp_path / "back.bin"
        copied = await node.files.download(CID, "data/model.bin", back, on_progress=lambda *step: seen.append(step))
        assert copied == (1, LONG_BYTES, [])
        assert back.read_bytes() == content
        assert node.served == ["download"] + ["download_part"] * 5 + ["end"]
        assert seen[-1][0] == seen[-1][1]
        assert node.left() == []
        assert await node.stored() == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["back.bin", "model.bin", "root"]


@pytest.mark.soak
async def test_a_long_copy_needs_the_memory_of_a_few_parts(valkey_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "model.bin"
    noise(source, 8 * PART_BYTES)
    async with node_of(valkey_store, tmp_path / "root") as node:
        tracemalloc.start()
        try:
            await node.files.upload(CID, source, "model.bin")
            await node.files.download(CID, "model.bin", tmp_path / "back.bin")
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 6 * PART_BYTES


async def test_a_copy_that_breaks_off_leaves_nothing(valkey_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "model.bin"
    noise(source)
    async with node_of(valkey_store, tmp_path / "root") as node:
        begun = asyncio.Event()
        copying = asyncio.create_task(node.files.upload(CID, source, "x", on_progress=lambda *_: begun.set()))
        await begun.wait()
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert list(node.workspace.iterdir()) == []
        assert node.left() == []
        noise(node.workspace / "y")
        begun.clear()
        copying = asyncio.create_task(node.files.download(CID, "y", tmp_path / "y", on_progress=lambda *_: begun.set()))
        await begun.wait()
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert node.left() == []

    def is_clean() -> bool:
        return sorted(path.name for path in tmp_path.iterdir()) == ["model.bin", "root"]

    await until(is_clean, what="end of the thread that unpacked")


async def test_an_upload_that_is_not_what_was_sent_is_refused(valkey_store: Store, tmp_path: Path) -> None:
    async with node_of(valkey_store, tmp_path / "root") as node:
        ask = Transfers(valkey_store).send_request
        await ask(CID, TransferRequest(what="upload_part", transfer="t", part=0), b"part")
        for size, digest in ((4, "0" * 64), (5, "0" * 64)):
            whole = TransferRequest(what="upload", path="x", transfer="t", size_bytes=size, digest=digest)
            with pytest.raises(TransferFailed, match="differs from the sent data"):
                await ask(CID, whole)
        with pytest.raises(TransferFailed, match="no longer on this node"):
            await ask(CID, TransferRequest(what="upload", path="x", transfer="../../x", size_bytes=4, digest="0"))
        with pytest.raises(TransferFailed, match="no longer on this node"):
            await ask(CID, TransferRequest(what="download_part", transfer="other", part=3))
        long = TransferRequest(what="upload_part", transfer="u", part=0)
        with pytest.raises(TransferFailed, match="more than"):
            await ask(CID, long, b"x" * (PART_BYTES + 1))
        for number in range(3):
            await ask(CID, TransferRequest(what="upload_part", transfer=f"v{number}", part=0), b"part")
        with pytest.raises(TransferFailed, match="4 transfers of this workspace are not finished"):
            await ask(CID, TransferRequest(what="upload_part", transfer="w", part=0), b"part")
        assert list(node.workspace.iterdir()) == []
        for path in (tmp_path / "root" / CID).glob(".transfer-*"):
            os.utime(path, (0, 0))
        await ask(CID, TransferRequest(what="upload_part", transfer="w", part=0), b"part")  # the old ones are removed
        assert len(node.left()) == 1


async def test_too_large_copy_is_refused_before_it_is_sent(valkey_store: Store, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(transfers.MAX_COPY_BYTES + 1)
    async with node_of(valkey_store, tmp_path / "root") as node:
        with pytest.raises(UsageError, match="more than 4,294,967,296 bytes"):
            await node.files.upload(CID, tmp_path / "sparse", "x")
        (tmp_path / "sparse").rename(node.workspace / "sparse")
        with pytest.raises(TransferFailed, match="more than 4,294,967,296 bytes"):
            await node.files.download(CID, "sparse", tmp_path / "x")
        assert node.served == ["download"]
        assert node.left() == []


async def test_bits_that_are_not_copied_are_named(valkey_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "shared").mkdir(parents=True)
    (source / "tool").write_text("x")
    (source / "tool").chmod(0o4755)
    (source / "shared").chmod(0o1777)
    async with node_of(valkey_store, tmp_path / "root") as node:
        named: list[str] = []
        await node.files.upload(CID, source, "in", on_without_bits=named.extend)
        assert sorted(named) == ["source/shared", "source/tool"]
        assert not (node.workspace / "in" / "tool").stat().st_mode & 0o7000
        (node.workspace / "in" / "tool").chmod(0o2755)
        (node.workspace / "in" / "shared").chmod(0o1777)
        named.clear()
        await node.files.download(CID, "in", tmp_path / "out", on_without_bits=named.extend)
        assert sorted(named) == ["in/shared", "in/tool"]
        assert not (tmp_path / "out" / "tool").stat().st_mode & 0o7000


@pytest.mark.parametrize("size", [2**20, LONG_BYTES], ids=["at once", "in parts"])
async def test_copied_files_are_readable_nowhere_in_the_store(tmp_path: Path, size: int) -> None:
    source, back = tmp_path / "secret.txt", tmp_path / "back.txt"
    canary = noise(source, size)[size // 2 :][:24]  # nothing of it is compressed
    valkey = EmbeddedValkey(tmp_path / "valkey", append_fsync="always")
    await valkey.start()
    store = await open_store(valkey.url)
    try:
        async with node_of(store, tmp_path / "root") as node:
            await node.files.upload(CID, source, "data/")
            assert (node.workspace / "data" / "secret.txt").read_bytes() == source.read_bytes()
            await node.files.download(CID, "data/secret.txt", back)
            assert back.read_bytes() == source.read_bytes()
    finally:
        await store.aclose()
        await valkey.stop()
    kept = [path.read_bytes() for path in (tmp_path / "valkey").rglob("*") if path.is_file()]
    assert any(b"transfer" in content for content in kept)
    assert not any(canary in content for content in kept)
