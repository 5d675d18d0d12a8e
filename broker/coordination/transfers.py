"""Transfers: files of a workspace copied in and out, by a tool worker of the workspace's node.

The request is stored in a key; an order in the node's action stream names it; the answer is written beside it. The
files travel as a tar file, compressed with zstd, in a stored file. A long transfer has parts, each with its own
request. Meanwhile the node keeps the received or packed data beside the workspace.

Holds: running a request twice has the same result as once. A request that was not started in time is never run. An
answer that is not fetched expires after ten minutes. The store holds one part of a file at a time. An upload appears in
the workspace only when all of it has arrived. File contents are readable neither in the store nor in its append-only
file: each side publishes a public key in the request, and the other side encrypts the files for it.
Does not: record transfers in the log.
Keys: `deck:{k}:c:<id>:transfer:<token>`, stored files, and the node's action stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.coordination.sealing import SEALED_BYTES, Receiver, seal
from broker.coordination.stored_files import MAX_STORED_FILE_BYTES, StoredFiles, check_size
from broker.runtime import DeckhandsError, UsageError, new_key
from broker.store import Store

TTL_SECONDS = 600.0
ANSWER_LIMIT_SECONDS = 120.0
LONG_ANSWER_LIMIT_SECONDS = 900.0
"""For requests at which the node packs or unpacks everything."""
PART_BYTES = 16 * 2**20
MAX_COPY_BYTES = 4 * 2**30
"""For all files of one transfer, and again for the packed data."""
MAX_COPY_FILES = 200_000
CONTENT_LIMIT_SECONDS = 30.0
"""How long a node waits for the encrypted upload; longer than its sender's poll interval."""
MAX_PARTS = MAX_COPY_BYTES // PART_BYTES
MAX_SEALED_BYTES = MAX_STORED_FILE_BYTES + SEALED_BYTES
_POLL_SECONDS = 0.05


class TransferRequest(BaseModel):
    """A request to transfer files.

    Attributes:
        what: `download` and `upload` copy a file or directory. `diff` returns a patch of all changes since the start.
            `checkpoint` saves the workspace in its node's checkpoint storage. `list` lists a directory. A long transfer
            has its parts copied one by one: `upload_part` before `upload`, or `download_part` after `download`, and
            then `end`.
        path: relative to the workspace.
        is_inside: of an upload: copy into the directory `path`, and create it if it does not exist.
        transfer: common name of all requests of one long transfer; empty for a transfer in one request.
        part: number of the part, from 0.
        size_bytes, digest: of an upload in parts: size and SHA-256 of the packed data.
    """

    model_config = ConfigDict(frozen=True)

    what: Literal["download", "upload", "diff", "checkpoint", "upload_part", "download_part", "end", "list"]
    path: str = "."
    is_inside: bool = False
    transfer: Annotated[str, Field(max_length=64)] = ""
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)] = 0
    size_bytes: Annotated[int, Field(ge=0, le=MAX_COPY_BYTES)] = 0
    digest: Annotated[str, Field(max_length=64)] = ""


class FileEntry(BaseModel):
    """An entry of a directory of a workspace.

    Attributes:
        name: bytes that are not text are escaped.
        kind: `file`, `directory` or `link`.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str
    size_bytes: int = 0


class TransferAnswer(BaseModel):
    """The outcome of a request.

    Attributes:
        files: number of transferred entries of every kind.
        error: why the transfer failed, or empty.
        code: the class of the error.
        transfer, packed_bytes, digest: of a download that waits in parts: its name, and size and SHA-256 of the packed
            data.
        without_bits: some of the entries whose set-user-id, set-group-id or sticky bit was not copied.
        left_out: of a patch that would be too large: names of changed files that are not in it.
        left_out_count: number of such files; `left_out` names only the first ones.
        entries: entries of a listed directory, by name; the first 5,000.
    """

    model_config = ConfigDict(frozen=True)

    files: int = 0
    size_bytes: int = 0
    error: str = ""
    remedy: str = ""
    code: str = ""
    transfer: str = ""
    packed_bytes: int = 0
    digest: str = ""
    without_bits: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0
    entries: tuple[FileEntry, ...] = ()


class TransferFailed(DeckhandsError):
    """A transfer failed; the message says why."""

    code = "transfer_failed"


class NoWorkspace(UsageError):
    """The conversation has no workspace yet."""

    code = "no_workspace"

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"The conversation {conversation_id} has no workspace yet.",
            remedy="It gets one with its first action; try again then.",
        )


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a transfer."""

    answer: TransferAnswer
    content: bytes


class Transfers:
    """The transfers of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stored_files = StoredFiles(store)
        self._receivers: dict[str, Receiver] = {}

    async def send_request(
        self,
        conversation_id: str,
        request: TransferRequest,
        content: bytes = b"",
        *,
        limit_seconds: float = ANSWER_LIMIT_SECONDS,
    ) -> TransferResult:
        """Request a transfer and wait for its end.

        Args:
            content: content of an upload.
            limit_seconds: time limit for the answer. If no node has started within two minutes, the wait ends earlier.

        Raises:
            NoWorkspace: the conversation has no workspace yet.
            UsageError: the content is too large.
            TransferFailed: the tool worker failed, or exceeded the limit.
        """
        names = await self._store.locate(conversation_id)
        node = await self._store.call("HGET", names.meta, "node")
        if node is None:
            raise NoWorkspace(conversation_id)
        token = new_key()
        key = names.transfer(token)
        check_size(len(content), "The file")
        receiver = Receiver()
        sealed_for = None
        await self._write(key, "reply_key", receiver.public)
        await self._write(key, "request", request.model_dump_json())
        stream = names.shard.actions(f"node:{node.decode()}")
        order = ("c", conversation_id, "a", 0, "x", "transfer", "t", token)
        await self._store.call("XADD", stream, "*", *order)
        try:
            async with asyncio.timeout(min(limit_seconds, ANSWER_LIMIT_SECONDS)) as limit:
                latest = asyncio.get_running_loop().time() + limit_seconds
                while True:
                    answered, begun = await self._store.call("HMGET", key, "answer", "begun")
                    if answered:
                        break
                    if begun:
                        limit.reschedule(latest)
                    if content and begun and begun != sealed_for:  # another worker may have taken it over
                        sealed = await asyncio.to_thread(seal, begun, content, f"{conversation_id} {token}")
                        await self._stored_files.put(
                            conversation_id, token, sealed, ttl_seconds=TTL_SECONDS, limit_bytes=MAX_SEALED_BYTES
                        )
                        await self._write(key, "sealed_for", begun)
                        sealed_for = begun
                    # polls, because transfers are rare and started by hand: not worth a blocking connection
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            # A transfer that is reported as failed must not run when the node comes back.
            await self._store.call("DEL", key, names.stored_file(token))
            raise TransferFailed(
                f"The node {node.decode()}, which has the workspace, did not answer for {limit_seconds:g} seconds.",
                remedy="Start a tool worker there.",
            ) from error
        try:
            answer = TransferAnswer.model_validate_json(answered)
        except ValueError as error:
            raise TransferFailed(
                f"The answer from the node {node.decode()} cannot be read.",
                remedy="Make sure that its tool worker runs this version.",
            ) from error
        if answer.error:
            failure = TransferFailed(answer.error, remedy=answer.remedy)
            failure.code = answer.code
            raise failure
        brought = b""
        if request.what in ("download", "diff", "download_part") and not answer.packed_bytes:
            sealed = await self._stored_files.fetch(conversation_id, f"{token}-back")
            await self._stored_files.remove(conversation_id, f"{token}-back")
            brought = await asyncio.to_thread(receiver.open, sealed, f"{conversation_id} {token} back")
        return TransferResult(answer, brought)

    async def load_request(self, conversation_id: str, token: str) -> TransferRequest | None:
        """Return the request, as the tool worker; None if it was answered, or if the client no longer waits."""
        key = (await self._store.locate(conversation_id)).transfer(token)
        asked, answer = await self._store.call("HMGET", key, "request", "answer")
        if asked is None or answer is not None:
            return None
        try:
            return TransferRequest.model_validate_json(asked)
        except ValueError:
            return None  # not written by our code

    async def mark_started(self, conversation_id: str, token: str) -> None:
        """Record that a request runs, as the tool worker, because the answer may take a while. Idempotent."""
        receiver = self._receivers.setdefault(token, Receiver())
        await self._write((await self._store.locate(conversation_id)).transfer(token), "begun", receiver.public)

    async def load_content(self, conversation_id: str, token: str) -> bytes:
        """Wait for the encrypted content of an upload and return it, as the tool worker that started the request.

        Raises:
            TransferFailed: its sender has gone.
            CorruptEntry: see `StoredFiles.fetch`.
        """
        key, receiver = (await self._store.locate(conversation_id)).transfer(token), self._receivers[token]
        try:
            async with asyncio.timeout(CONTENT_LIMIT_SECONDS):
                while True:
                    if await self._store.call("HGET", key, "sealed_for") == receiver.public:
                        break
                    await asyncio.sleep(_POLL_SECONDS)  # polls, as the sender does
        except TimeoutError as error:
            raise TransferFailed("The files of the upload did not arrive.", remedy="Send them again.") from error
        sealed = await self._stored_files.fetch(conversation_id, token)
        return await asyncio.to_thread(receiver.open, sealed, f"{conversation_id} {token}")

    async def answer(self, conversation_id: str, token: str, answer: TransferAnswer, content: bytes | None) -> None:
        """Answer a request, as the tool worker. Idempotent.

        Args:
            content: content of a download; None if there is none.
        """
        key = (await self._store.locate(conversation_id)).transfer(token)
        reply_key = await self._store.call("HGET", key, "reply_key")
        if content is not None and reply_key is not None:  # otherwise the client no longer waits
            sealed = await asyncio.to_thread(seal, reply_key, content, f"{conversation_id} {token} back")
            await self._stored_files.put(
                conversation_id, f"{token}-back", sealed, ttl_seconds=TTL_SECONDS, limit_bytes=MAX_SEALED_BYTES
            )
        await self._stored_files.remove(conversation_id, token)
        await self._write(key, "answer", answer.model_dump_json())
        self._receivers.pop(token, None)

    async def _write(self, key: str, field: str, text: str | bytes) -> None:
        commands = [("HSET", key, field, text), ("PEXPIRE", key, int(TTL_SECONDS * 1000))]
        await self._store.call_many(commands)
