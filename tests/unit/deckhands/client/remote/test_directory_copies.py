"""Copies of directories that are sent to a server: the same again while one may have arrived, and else a new one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.contract.events import WorkspaceSpec
from broker.runtime.errors import UsageError
from deckhands.client.remote.remote_client import RemoteClient
from deckhands.client.tasks.spec import TaskSpec

NOT_TAKEN = ("422 Unprocessable", {"code": "directory_not_taken", "status": 422, "detail": "No tool worker takes it."})
UPLOADED = ("201 Created", {})
REFUSED = ("422 Unprocessable", {"code": "usage", "status": 422, "detail": "There is no such agent."})
BEGUN = ("201 Created", {"conversation_id": "c-1"})


@asynccontextmanager
async def server(directory: Path, *answers: tuple[str, object]) -> AsyncIterator[tuple[RemoteClient, list[str]]]:
    """A client of what gives one answer after another, and the requests that it gets, each by its first words."""
    asked, left = [], list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while left:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
                asked.append(head.partition(b" http/")[0].decode())
                status, content = left.pop(0)
                body = json.dumps(content).encode()
                kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(f"HTTP/1.1 {status}\r\n{kind}".encode() + body)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = RemoteClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", directory=directory)
    try:
        yield client, asked
    finally:
        await client.aclose()
        listening.close()
        await listening.wait_closed()


async def submit(client: RemoteClient, directory: Path) -> str:
    spec = TaskSpec(task="Look", workspace=WorkspaceSpec(path=str(directory)))
    return await client.submit(spec, idempotency_key="conversation:mine")


def uploads(asked: Sequence[str]) -> list[str]:
    return [request for request in asked if request.startswith("put /uploads/")]


async def test_current_files_are_sent_after_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before")
    async with server(tmp_path, NOT_TAKEN, UPLOADED, REFUSED, NOT_TAKEN, UPLOADED, BEGUN) as (client, asked):
        with pytest.raises(UsageError, match="no such agent"):
            await submit(client, tmp_path)
        (tmp_path / "a.txt").write_text("after")
        assert await submit(client, tmp_path) == "c-1"
    assert len(set(uploads(asked))) == 2


async def test_copy_that_may_have_started_a_conversation_is_resent(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before")
    failed = ("500 Oops", {"code": "internal", "status": 500, "detail": "It is unknown what has become of it."})
    async with server(tmp_path, NOT_TAKEN, UPLOADED, failed, UPLOADED, BEGUN) as (client, asked):
        with pytest.raises(Exception, match="It is unknown"):
            await submit(client, tmp_path)
        (tmp_path / "a.txt").write_text("after")
        assert await submit(client, tmp_path) == "c-1"
    assert (len(uploads(asked)), len(set(uploads(asked)))) == (2, 1)
