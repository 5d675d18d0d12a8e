"""Requests to a server, and copies of directories that are sent with them: repeated where nothing has become of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from broker.contract.events import WorkspaceSpec
from broker.coordination.transfers import TransferFailed
from broker.runtime.errors import UsageError
from deckhands.client.remote.remote_client import RemoteClient
from deckhands.client.remote.server_calls import ServerCalls, ServerUnavailable
from deckhands.client.tasks.spec import TaskSpec


def answer(status: str, content: object) -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


NOBODY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<h1>"
MISSING = NOBODY.replace(b"502 Bad Gateway", b"404 Not Found")
TIMED_OUT = NOBODY.replace(b"502 Bad Gateway", b"504 Gateway Timeout")
NOT_TAKEN = answer("422 Unprocessable", {"code": "directory_not_taken", "status": 422, "detail": "No one takes it."})
REFUSED = answer("422 Unprocessable", {"code": "usage", "status": 422, "detail": "There is no such agent."})
UPLOADED = answer("201 Created", {})
BEGUN = answer("201 Created", {"conversation_id": "c-1"})


@asynccontextmanager
async def server(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Return the address of a server that gives one answer after another, and the request heads that it gets."""
    heads, left = [], list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while left:
                heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
                length = heads[-1].partition(b"content-length: ")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                writer.write(left.pop(0))
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", heads
    finally:
        listening.close()
        await listening.wait_closed()


async def test_request_repeats_under_its_key_behind_an_empty_proxy() -> None:
    async with (
        server(NOBODY, TIMED_OUT, answer("202 Accepted", {"version": 3})) as (url, heads),
        aclosing(ServerCalls(url, "")) as calls,
    ):
        assert (await calls.ask("POST", "/conversations/c-1/pause")).json() == {"version": 3}
    keys = {line for head in heads for line in head.split(b"\r\n") if line.startswith(b"idempotency-key")}
    assert (len(heads), len(keys)) == (3, 1)


async def test_answers_of_the_server_itself_are_final() -> None:
    failed = {"code": "transfer_failed", "status": 502, "detail": "The node is gone."}
    async with server(answer("502 Bad Gateway", failed), MISSING) as (url, _), aclosing(ServerCalls(url, "")) as calls:
        with pytest.raises(TransferFailed, match="The node is gone"):
            await calls.ask("GET", "/conversations/c-1/patch")
        with pytest.raises(ServerUnavailable, match="no problem of Deckhands"):
            await calls.ask("GET", "/conversations/c-1")


async def submit(client: RemoteClient, directory: Path) -> str:
    spec = TaskSpec(task="Look", workspace=WorkspaceSpec(path=str(directory)))
    return await client.submit(spec, idempotency_key="conversation:mine")


def uploads(heads: Sequence[bytes]) -> list[bytes]:
    return [line for head in heads if (line := head.partition(b" http/")[0]).startswith(b"put /uploads/")]


async def test_current_files_are_sent_after_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before")
    async with (
        server(NOT_TAKEN, UPLOADED, REFUSED, NOT_TAKEN, UPLOADED, BEGUN) as (url, heads),
        aclosing(RemoteClient(url, directory=tmp_path)) as client,
    ):
        with pytest.raises(UsageError, match="no such agent"):
            await submit(client, tmp_path)
        (tmp_path / "a.txt").write_text("after")
        assert await submit(client, tmp_path) == "c-1"
    assert len(set(uploads(heads))) == 2


async def test_copy_that_may_have_started_a_conversation_is_resent(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before")
    failed = answer("500 Oops", {"code": "internal", "status": 500, "detail": "It is unknown what has become of it."})
    async with (
        server(NOT_TAKEN, UPLOADED, failed, UPLOADED, BEGUN) as (url, heads),
        aclosing(RemoteClient(url, directory=tmp_path)) as client,
    ):
        with pytest.raises(Exception, match="It is unknown"):
            await submit(client, tmp_path)
        (tmp_path / "a.txt").write_text("after")
        assert await submit(client, tmp_path) == "c-1"
    assert (len(uploads(heads)), len(set(uploads(heads)))) == (2, 1)
