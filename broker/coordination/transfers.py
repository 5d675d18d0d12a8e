"""Transfers: files of a workspace copied in and out, by a tool worker of the workspace's node.

The request is stored in a key; an order in the node's action stream names it; the answer is written beside it. The
files travel as a tar file, compressed with zstd, in a stored file. A long transfer has parts, each with its own
request. Meanwhile the node keeps the received or packed data beside the workspace.

The bytes are encrypted for one receiver, so that the store cannot read them. Each receiver makes a key pair for one
message and publishes its public half. The sender makes another pair, and both derive a key by X25519. The key encrypts
one message by AES-256-GCM.

A stored file, also one that waits for its workspace, is stored in pieces.

Holds: running a request twice has the same result as once. A request that was not started in time is never run. An
answer that is not fetched expires after ten minutes. The store holds one part of a file at a time. An upload appears in
the workspace only when all of it has arrived. File contents are readable neither in the store nor in its append-only
file: each side publishes a public key in the request, and the other side encrypts the files for it. A file exists whole
or not at all. The content of a kept file is checked against its name. Pieces are small enough not to delay other
conversations. A file in transit expires after its time to live. The initial files of a conversation are encrypted with
the key of the secrets. Workers and clients have it, the store does not.
Does not: record transfers in the log; authenticate the sender, or prove that a public key is the receiver's. A process
that may write to the store could replace it.
Keys: `deck:{k}:c:<id>:transfer:<token>`, stored files, and the node's action stream, `deck:{k}:c:<id>:parcel:<name>`, a
hash of pieces. The name is the content's SHA-256, or a token's. The field `size` is the size of the content; `sealed`
names the key. A file without `sealed` was stored unencrypted by an older version.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.contract import GitSource, UploadedSource
from broker.runtime import BrokerSettings, CorruptEntry, DeckhandsError, UsageError, new_key
from broker.secrets import ONE_KEY, SecretsLocked, decrypt, encrypt, key_fingerprint, load_secret_key
from broker.store import Argument, Store

PIECE_BYTES = 256 * 2**10
MAX_STORED_FILE_BYTES = 64 * 2**20


def check_size(size_bytes: int, what: str, limit_bytes: int = MAX_STORED_FILE_BYTES) -> None:
    """Check that content is not too large for the store.

    Raises:
        UsageError: it has more than 64 MiB.
    """
    if size_bytes > limit_bytes:
        raise UsageError(
            f"{what} has {size_bytes:,} bytes; the limit is {limit_bytes:,}.",
            remedy="Transfer fewer files at once, or use a directory or a repository that the tool worker can reach.",
        )


def make_content_name(content: bytes) -> str:
    """Return the name of a file with this content."""
    return hashlib.sha256(content).hexdigest()


class StoredFiles:
    """The files that a store holds for conversations.

    Args:
        key: returns the key that encrypts files; called when it is first needed. None for the key in the environment.
            Without one, a key is created in our home when the first file is encrypted.
    """

    def __init__(self, store: Store, key: Callable[[], bytes | None] | None = None) -> None:
        self._store = store
        self._find_key = key
        self._key: bytes | None = None

    async def keep(self, conversation_id: str, content: bytes) -> str:
        """Encrypt a file and store it as long as the log exists; the log may be created later. Idempotent.

        Returns:
            Its name.

        Raises:
            UsageError: it is too large.
            SecretsLocked: this process has no key.
        """
        check_size(len(content), "The file")
        name = make_content_name(content)
        key = (await self._store.locate(conversation_id)).stored_file(name)
        size, sealed = await self._store.call("HMGET", key, "size", "sealed")
        if size is not None and sealed is None:  # an older version has stored it, and may be reading it
            await self._store.call("PERSIST", key)
            return name
        key_bytes = self._load_key(is_made=True)
        for n in range(-(-len(content) // PIECE_BYTES)):
            piece = encrypt(key_bytes, content[n * PIECE_BYTES : (n + 1) * PIECE_BYTES], _describe_piece(name, n))
            # Each piece has its own field, so that a repeated write adds no second copy.
            await self._store.call("HSET", key, n, piece)
        # Last, so that no reader takes a part for the whole. `PERSIST` removes the expiry of an unclaimed file.
        last = ("HSET", key, "size", len(content), "sealed", key_fingerprint(key_bytes))
        await self._store.call_many([last, ("PERSIST", key)])
        return name

    async def put(
        self,
        conversation_id: str,
        name: str,
        content: bytes,
        *,
        ttl_seconds: float | None = None,
        limit_bytes: int = MAX_STORED_FILE_BYTES,
    ) -> None:
        """Store a file under a name, unencrypted. Idempotent.

        Raises:
            UsageError: it is too large.
        """
        check_size(len(content), "The file", limit_bytes)
        key = (await self._store.locate(conversation_id)).stored_file(name)
        expiry = [] if ttl_seconds is None else [("PEXPIRE", key, int(ttl_seconds * 1000))]
        for at in range(0, len(content), PIECE_BYTES):
            piece = ("HSET", key, at // PIECE_BYTES, content[at : at + PIECE_BYTES])
            await self._store.call_many([piece, *expiry])
        last: list[tuple[Argument, ...]] = [*expiry] or [("PERSIST", key)]
        await self._store.call_many([("HSET", key, "size", len(content)), *last])

    async def put_chunks(self, conversation_id: str, name: str, source: Path, *, ttl_seconds: float) -> None:
        """Encrypt a file in pieces as the initial content of a conversation. It expires unless claimed. Idempotent.

        An existing file stays unchanged, because it may have been claimed.

        Args:
            name: the name of its content.

        Raises:
            UsageError: it is too large.
            OSError: it cannot be read.
            SecretsLocked: this process has no key.
        """
        size_bytes = (await asyncio.to_thread(source.stat)).st_size
        check_size(size_bytes, "The file")
        keys = ((await self._store.locate(conversation_id)).stored_file(name),)
        ttl_ms = int(ttl_seconds * 1000)
        key = self._load_key(is_made=True)
        with source.open("rb") as file:
            for n in range(-(-size_bytes // PIECE_BYTES)):
                piece = encrypt(key, await asyncio.to_thread(file.read, PIECE_BYTES), _describe_piece(name, n))
                if await self._store.call_function("deck_lay_by", keys, ttl_ms, n, piece) == ["there"]:
                    return
        await self._store.call_function("deck_lay_by", keys, ttl_ms, "sealed", key_fingerprint(key))
        await self._store.call_function("deck_lay_by", keys, ttl_ms, "size", size_bytes)

    async def refresh(self, conversation_id: str, name: str, *, ttl_seconds: float) -> bool:
        """Extend the time to live of an unclaimed file; a claimed file never expires.

        Returns False if it does not exist.
        """
        key = (await self._store.locate(conversation_id)).stored_file(name)
        commands = [("PEXPIRE", key, int(ttl_seconds * 1000), "XX"), ("HEXISTS", key, "size")]
        _, is_whole = await self._store.call_many(commands)
        return bool(is_whole)

    async def claim(self, conversation_id: str, name: str) -> bool:
        """Keep an unclaimed file as long as the log exists. Returns False if it does not exist. Idempotent."""
        key = (await self._store.locate(conversation_id)).stored_file(name)
        return bool(await self._store.call_function("deck_claim_file", (key,)) == ["claimed"])

    async def fetch(self, conversation_id: str, name: str) -> bytes:
        """Return the content of a stored file.

        Raises:
            CorruptEntry: it does not exist, or its content has changed.
            SecretsLocked: it is encrypted, and no key of this process decrypts it.
        """
        size, sealed, pieces = await self._load_pieces(conversation_id, name)
        if sealed is not None:
            pieces = await asyncio.to_thread(self._decrypt_piece, name, sealed, pieces)
        content = b"".join(pieces)
        if len(content) != size:
            raise CorruptEntry("The file in the store is not whole.", remedy="Upload it again.")
        if len(name) == hashlib.sha256().digest_size * 2 and make_content_name(content) != name:
            raise CorruptEntry("The file in the store is damaged.", remedy="Upload it again.")
        return content

    async def copy_to(self, source_id: str, target_id: str, source: GitSource | UploadedSource | None) -> None:
        """Copy an initial file of this conversation to another one, without decrypting it. Idempotent.

        Raises:
            CorruptEntry: it does not exist, or a part is missing.
        """
        # Each owner of a parent copies it to the delegate again. The size is written last.
        if not isinstance(source, UploadedSource) or await self.claim(target_id, source.parcel):
            return
        size, sealed, pieces = await self._load_pieces(source_id, source.parcel)
        if not all(pieces):
            raise CorruptEntry("The file in the store is not whole.", remedy="Upload it again.")
        key = (await self._store.locate(target_id)).stored_file(source.parcel)
        for n, piece in enumerate(pieces):
            await self._store.call("HSET", key, n, piece)
        of_seal: tuple[Argument, ...] = () if sealed is None else ("sealed", sealed)
        await self._store.call_many([("HSET", key, "size", size, *of_seal), ("PERSIST", key)])

    async def remove(self, conversation_id: str, name: str) -> None:
        """Remove a file. Idempotent."""
        key = (await self._store.locate(conversation_id)).stored_file(name)
        await self._store.call("DEL", key)

    async def _load_pieces(self, conversation_id: str, name: str) -> tuple[int, bytes | None, list[bytes]]:
        """Return the size of a file, the name of its encryption key, and its pieces as stored.

        Raises:
            CorruptEntry: it does not exist.
        """
        key = (await self._store.locate(conversation_id)).stored_file(name)
        size, sealed = await self._store.call("HMGET", key, "size", "sealed")
        if size is None:
            raise CorruptEntry("The file is not in the store.", remedy="Upload it again.")
        count = -(-int(size) // PIECE_BYTES)
        return int(size), sealed, [await self._store.call("HGET", key, n) or b"" for n in range(count)]

    def _decrypt_piece(self, name: str, sealed: bytes, pieces: list[bytes]) -> list[bytes]:
        key = self._load_key()
        if key_fingerprint(key).encode() != sealed:
            raise SecretsLocked("The file was sealed with another key.", remedy=ONE_KEY)
        try:
            return [decrypt(key, piece, _describe_piece(name, n)) for n, piece in enumerate(pieces)]
        except ValueError as error:
            raise CorruptEntry("The file in the store is damaged.", remedy="Upload it again.") from error

    def _load_key(self, *, is_made: bool = False) -> bytes:
        if self._key is None and self._find_key is None:
            self._key = load_secret_key(BrokerSettings.from_env(), is_made=is_made)
        elif self._key is None and self._find_key is not None:
            self._key = self._find_key()
        if self._key is None:
            raise SecretsLocked("This process has no key to encrypt and decrypt files.", remedy=ONE_KEY)
        return self._key


def _describe_piece(name: str, piece: int) -> str:
    """Return the description that is authenticated with an encrypted piece, so that pieces cannot be exchanged."""
    return f"file {name} {piece}"


PUBLIC_BYTES = 32
SEALED_BYTES = PUBLIC_BYTES + 16
"""Bytes that encryption adds to a message."""


class Receiver:
    """The receiver of one message. The sender needs `public`."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, sealed: bytes, about: str) -> bytes:
        """Decrypt a sealed message.

        Args:
            about: the sender's description of the message, which is authenticated.

        Raises:
            CorruptEntry: it was sealed for another receiver, or is another message.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        theirs = sealed[:PUBLIC_BYTES]
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
            key = _derive_key(shared, theirs, self.public, about)
            return AESGCM(key).decrypt(bytes(12), memoryview(sealed)[PUBLIC_BYTES:], None)
        except (InvalidTag, ValueError) as error:
            raise CorruptEntry("The files in the store cannot be opened here.", remedy="Copy them again.") from error


def seal(public: bytes, content: bytes, about: str) -> bytes:
    """Encrypt content so that only the receiver with this public key can decrypt it.

    Raises:
        CorruptEntry: the public key is invalid.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    mine = X25519PrivateKey.generate()
    theirs = mine.public_key().public_bytes_raw()
    try:
        shared = mine.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise CorruptEntry("The other side of a transfer has no valid public key.") from error
    return theirs + AESGCM(_derive_key(shared, theirs, public, about)).encrypt(bytes(12), content, None)


def _derive_key(shared: bytes, sender: bytes, receiver: bytes, about: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=b"deckhands transfer" + sender + receiver + about.encode()).derive(shared)


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
            `checkpoint` saves the workspace in its node's checkpoint storage, and `checkpoints` lists the saved ones.
            `list` lists a directory. A long transfer has its parts copied one by one: `upload_part` before `upload`, or
            `download_part` after `download`, and then `end`.
        path: relative to the workspace.
        at: for `download` and `list`: the files of the last checkpoint at or before this event; None: as they are now.
        is_inside: for an upload: copy into the directory `path`, and create it if it does not exist.
        transfer: common name of all requests of one long transfer; empty for a transfer in one request.
        part: number of the part, from 0.
        size_bytes, digest: of an upload in parts: size and SHA-256 of the packed data.
    """

    model_config = ConfigDict(frozen=True)

    what: Literal[
        "download", "upload", "diff", "checkpoint", "checkpoints", "upload_part", "download_part", "end", "list"
    ]
    path: str = "."
    at: Annotated[int, Field(ge=1, lt=10**12)] | None = None
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
        transfer, packed_bytes, digest: only of a download that is fetched in parts: its name, and the size and SHA-256
            of the packed data.
        without_bits: some entries whose set-user-id, set-group-id or sticky bit was not copied.
        left_out: names of changed files that were left out of the patch because of its size.
        left_out_count: number of such files; `left_out` names only the first ones.
        entries: entries of a listed directory, by name; the first 5,000.
        events: the events whose checkpoints are kept, in order; of files of a checkpoint, its event alone.
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
    events: tuple[int, ...] = ()


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
        if request.at is not None and not answer.events:
            raise TransferFailed(
                f"The tool worker of the node {node.decode()} cannot read checkpoints.", remedy="Upgrade it."
            )
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
            raise TransferFailed("The files of the upload did not arrive.", remedy="Start the upload again.") from error
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
