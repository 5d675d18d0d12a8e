"""Files and pictures of a new conversation, sent to a server by a client with a key.

Threat: a client with the scope `write` may forge the archive, its name, its format and the pictures, within its tenant.
No one else can. Promises: a file matches its SHA-256, has a bounded size, at most 16 per tenant are pending, and only a
request of the same tenant under the same Idempotency-Key can use it. The tool worker checks its content, as for any
client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from broker.contract.actions import MessageAction
from broker.contract.workspace_sources import UploadedSource
from broker.coordination.transfers import MAX_STORED_FILE_BYTES, PIECE_BYTES, StoredFiles
from broker.runtime.errors import CorruptEntry
from deckhands.client.tasks.inputs import to_conversation_id
from deckhands.server.auth.uploads import KEPT_SECONDS, MAX_WAITING
from tests.served_stores import environment_with
from tests.server_parts import Served, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTENT = b"not even an archive" * (PIECE_BYTES // 8)  # more than one piece
NAME = sha256(CONTENT).hexdigest()
PICTURE = "data:image/png;base64,iVBORw0KGgo="


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("uploads")
    async with served(folder / "log", environment_with(folder), body_seconds=1.0) as found:
        await found.token()
        yield found


def under(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


def task(name: str = NAME, **more: Any) -> dict[str, Any]:
    source = {"kind": "upload", "name": "a.tar", "format": "tar", "parcel": name}
    return {"task": "do it", "workspace": {"source": source}, **more}


def id_under(tenant: str, key: str) -> str:
    """Return the id of a tenant's conversation under a key."""
    return to_conversation_id(None, sha256(f"{tenant}\n{key}".encode()).hexdigest())


async def code_of(asked: Any) -> tuple[int, str]:
    answer: httpx2.Response = await asked
    return answer.status_code, answer.json().get("code", "")


async def upload(client: httpx2.AsyncClient, key: str, content: bytes = CONTENT) -> None:
    put = await client.put(f"/uploads/{sha256(content).hexdigest()}", content=content, headers=under(key))
    assert put.status_code == 201


async def life_of(server: Served, conversation_id: str, name: str = NAME) -> int:
    """How long a file has to live, in seconds; -1: as long as the log, -2: it is not there."""
    key = server.client.store.known_keys(conversation_id).stored_file(name)
    return int(await server.client.store.connection.call("TTL", key))


async def test_a_conversation_begins_with_what_was_uploaded_under_its_key(server: Served) -> None:
    async with server.as_(await server.token()) as client:
        for _ in range(2):  # as by a client that had no answer
            put = await client.put(f"/uploads/{NAME}", content=CONTENT, headers=under("begins"))
            kept = {"parcel": NAME, "size_bytes": len(CONTENT), "kept_seconds": KEPT_SECONDS}
            assert (put.status_code, put.json()) == (201, kept)
        begun = await client.post("/conversations", json=task(images=[PICTURE]), headers=under("begins"))
        again = await client.post("/conversations", json=task(images=[PICTURE]), headers=under("begins"))
        assert (begun.status_code, again.json()) == (201, begun.json())
        cid = begun.json()["conversation_id"]
        assert await StoredFiles(server.client.store).fetch(cid, NAME) == CONTENT
        assert await life_of(server, cid) == -1
        late = await client.put(f"/uploads/{NAME}", content=CONTENT, headers=under("begins"))
        assert (late.status_code, await life_of(server, cid)) == (201, -1)
        first = next(event for event in await server.client.events(cid) if isinstance(event, MessageAction))
        assert first.image_urls == (PICTURE,)
        ran = await client.post("/runs/wait?timeout_seconds=0.01", json={"task": "do it", "images": [PICTURE]})
        assert ran.status_code == 202


async def test_upload_of_another_key_or_tenant_is_refused(server: Served) -> None:
    async with server.as_(await server.token()) as client, server.as_(await server.token("other")) as other:
        await upload(client, "mine")
        for asking, headers in ((other, under("mine")), (client, under("another")), (client, {})):
            for path in ("/conversations", "/runs/wait?timeout_seconds=0.01"):
                refused = await code_of(asking.post(path, json=task(), headers=headers))
                assert refused == (422, "unknown_upload")
        assert (await other.get("/conversations")).json()["conversations"] == []
        begun = await client.post("/conversations", json=task(), headers=under("mine"))
        assert begun.status_code == 201


async def test_a_file_whose_conversation_is_refused_expires_and_counts(server: Served) -> None:
    async with server.as_(await server.token("refused")) as client:
        for n in range(MAX_WAITING):
            await upload(client, str(n))
            begun = await client.post("/conversations", json=task(images=["http://a b"]), headers=under(str(n)))
            assert begun.status_code == 422
            assert 0 < await life_of(server, id_under("refused", str(n))) <= KEPT_SECONDS
        full = client.put(f"/uploads/{NAME}", content=CONTENT, headers=under("one more"))
        assert await code_of(full) == (429, "too_many_uploads")


async def test_partial_upload_belongs_to_no_one_and_expires(server: Served) -> None:
    cid = id_under("parts", "a")
    key = server.client.store.known_keys(cid).stored_file(NAME)
    await server.client.store.connection.call("HSET", key, 0, CONTENT[:PIECE_BYTES])  # its server died behind this
    async with server.as_(await server.token("parts")) as client:
        begun = client.post("/conversations", json=task(), headers=under("a"))
        assert await code_of(begun) == (422, "unknown_upload")
        await upload(client, "a")
        assert 0 < await life_of(server, cid) <= KEPT_SECONDS
        assert (await client.post("/conversations", json=task(), headers=under("a"))).status_code == 201
        assert await life_of(server, cid) == -1


async def test_uploaded_file_referenced_elsewhere_stays(server: Served, tmp_path: Path) -> None:
    files = StoredFiles(server.client.store)
    (tmp_path / "a.tar").write_bytes(CONTENT)
    for cid in ("kept-otherwise", "lent-otherwise"):
        await files.put_chunks(cid, NAME, tmp_path / "a.tar", ttl_seconds=60)
    await files.keep("kept-otherwise", CONTENT)
    source = UploadedSource(name="a.tar", format="tar", parcel=NAME)
    await files.copy_to("kept-otherwise", "lent-otherwise", source)
    await files.copy_to("kept-otherwise", "lent-to-one-without", source)
    await files.put_chunks("kept-otherwise", NAME, tmp_path / "a.tar", ttl_seconds=60)  # by a request that came late
    kept = ("kept-otherwise", "lent-otherwise", "lent-to-one-without")
    assert [await life_of(server, cid) for cid in kept] == [-1, -1, -1]
    assert await files.fetch("lent-to-one-without", NAME) == CONTENT


async def test_upload_with_a_wrong_hash_is_not_kept(server: Served) -> None:
    async with server.as_(await server.token("forger")) as client:
        put, key = client.put, under("forged")
        assert await code_of(put(f"/uploads/{NAME}", content=b"x", headers=key)) == (422, "wrong_content")
        empty = sha256(b"").hexdigest()
        assert await code_of(put(f"/uploads/{empty}", content=b"", headers=key)) == (422, "wrong_content")
        assert await code_of(put(f"/uploads/{NAME}", content=CONTENT)) == (422, "invalid_request")
        assert await code_of(put("/uploads/a", content=b"x", headers=key)) == (422, "invalid_request")
        assert await code_of(client.post("/conversations", json=task(), headers=key)) == (422, "unknown_upload")
        reader = await server.token("forger", scopes=["read"])
        headers = key | {"Authorization": f"Bearer {reader}"}
        assert await code_of(put(f"/uploads/{NAME}", content=CONTENT, headers=headers)) == (403, "forbidden")


async def test_an_upload_is_bounded_and_has_to_come(server: Served) -> None:
    token = await server.token("large")
    head = f"PUT /uploads/{NAME} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nIdempotency-Key: a\r\n"

    async def answer_to(rest: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"{head}{rest}".encode())
        line = (await asyncio.wait_for(reader.readline(), 30)).decode()
        writer.close()
        return line.split()[1]

    assert await answer_to(f"Content-Length: {MAX_STORED_FILE_BYTES + 1}\r\n\r\n") == "413"
    assert await answer_to("Content-Length: 100\r\n\r\nx") == "408"

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_STORED_FILE_BYTES // 2**20 + 1):
            yield bytes(2**20)

    async with server.as_(token) as client:
        chunked = await client.put(f"/uploads/{NAME}", content=endless(), headers=under("a"))
        assert chunked.status_code == 413


async def test_a_tenant_has_a_bounded_number_waiting(server: Served) -> None:
    small = sha256(b"small").hexdigest()
    async with server.as_(await server.token("many")) as client, server.as_(await server.token("few")) as few:
        for n in range(MAX_WAITING):
            await upload(client, str(n), b"small")
        over = client.put(f"/uploads/{small}", content=b"small", headers=under("over"))
        assert await code_of(over) == (429, "too_many_uploads")
        await upload(few, "0", b"small")
        begun = await client.post("/conversations", json=task(small), headers=under("0"))
        assert begun.status_code == 201
        await upload(client, "0", b"small")  # and it does not count as waiting
        await upload(client, "other", b"small")  # nor does what was refused


async def test_a_file_that_has_expired_does_not_count_as_waiting(server: Served) -> None:
    store = server.client.store
    key = f"{store.all_shards[0].api_keys}:uploads:{sha256(b'late').hexdigest()}"
    async with server.as_(await server.token("late")) as client:
        for n in range(MAX_WAITING):
            waiting, ended = f"{id_under('late', str(n))}:{NAME}", store.clock.now().timestamp() - 1
            await store.connection.call("ZADD", key, ended, waiting)
        await upload(client, "another", b"small")
        assert await store.connection.call("ZCARD", key) == 1


async def test_refusal_removes_nothing_counted_before(server: Served) -> None:
    """Another upload of the tenant is being refused at this moment, and is counted still."""
    small, store = sha256(b"small").hexdigest(), server.client.store
    key = f"{store.all_shards[0].api_keys}:uploads:{sha256(b'racing').hexdigest()}"
    until, own = store.clock.now().timestamp() + 60, f"{id_under('racing', 'own')}:{small}"
    for member in (own, *map(str, range(MAX_WAITING))):
        await store.connection.call("ZADD", key, until, member)
    async with server.as_(await server.token("racing")) as client:
        put = client.put(f"/uploads/{small}", content=b"small", headers=under("own"))
        assert await code_of(put) == (429, "too_many_uploads")
    assert await store.connection.call("ZSCORE", key, own) is not None


async def test_a_file_that_was_overwritten_in_the_store_is_nobodys(server: Served) -> None:
    files, store = StoredFiles(server.client.store), server.client.store
    await files.keep("overwritten", CONTENT)
    key = store.known_keys("overwritten").stored_file(NAME)
    await store.connection.call("HSET", key, 0, b"X" * PIECE_BYTES)
    with pytest.raises(CorruptEntry, match="damaged"):
        await files.fetch("overwritten", NAME)


async def test_task_pictures_are_checked_like_message_pictures(server: Served, tmp_path: Path) -> None:
    inside = tmp_path / "secret.png"
    inside.write_bytes(b"\x89PNG\r\n\x1a\n")
    async with server.as_(await server.token("painter")) as client:
        for wrong, code in (
            ([str(inside)], "invalid_request"),
            ([inside.as_uri()], "invalid_request"),
            (["https://a"] * 21, "invalid_request"),
            (["https://a b"], "usage"),
            (["https://" + "a" * 2_000], "usage"),
        ):
            asked = client.post("/conversations", json={"task": "do it", "images": wrong})
            assert await code_of(asked) == (422, code), wrong
        assert (await client.get("/conversations")).json()["conversations"] == []
