"""The secrets of conversations: kept encrypted, given to one command at a time, hidden wherever they come up.

Holds:
    - The store never sees a value: each is encrypted (AES-256-GCM) for its conversation with a key that only workers
      and clients have.
    - A value that was replaced or removed is no longer given to commands, but is still hidden.
    - A delegate has the secrets of the conversation that it works for, as they are at each moment, besides its own.
    - Nobody writes to a conversation whose secrets it cannot hide: without the key that is an error.
Does not: keep a program from revealing, in another form, a secret that it was given; see `masking`.
Keys: `deck:{k}:c:<id>:secrets` (hash: name → current value), `deck:{k}:c:<id>:masked` (set: every value there was),
`deck:{k}:c:<id>:secrets_of` (string: the conversation whose secrets it has too).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from broker.runtime import BrokerSettings, DeckhandsError, UsageError
from broker.secrets.masking import MINIMUM_CHARS, Masker
from broker.store import Store

KEY_FILE = "secret.key"
KEY_BYTES = 32
NONCE_BYTES = 12
MAX_VALUE_CHARS = 32_768
FRESH_SECONDS = 1.0
"""How long a value that was added elsewhere may be unknown here. A process that gives a command a value knows it."""
CLAIM_FRESH_SECONDS = 2.0
"""How long a command gets the values that its claim brought: its workspace is opened meanwhile."""
REMEMBERED_CONVERSATIONS = 4_000

MAX_LENDERS = 16
"""How far up a delegate's secrets are looked for; delegates go less deep."""

ONE_KEY = "Give all workers and clients the same DECKHANDS_SECRET_KEY or DECKHANDS_SECRET_KEY_FILE."

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class SecretsLocked(DeckhandsError):
    """There are secrets, and no key here that opens them."""

    code = "secrets_locked"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the store keeps for one conversation, encrypted: current values by name, and every value there was.

    Attributes:
        lender_id: the conversation whose secrets it has too, or empty.
    """

    conversation_id: str
    current: dict[str, bytes]
    masked: frozenset[bytes]
    lender_id: str

    @classmethod
    def of(cls, conversation_id: str, flat: Sequence[bytes], masked: Sequence[bytes], lender: bytes | None) -> _Kept:
        """Read the store's replies."""
        current = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        return cls(conversation_id, current, frozenset(masked), lender.decode() if lender else "")


@dataclass(slots=True)
class _Known:
    """What is known of a conversation: its encrypted values when they were last looked up, and what hides them.

    Attributes:
        looked_up: the monotonic time when the store's reply came.
        encrypted: each with the conversation that it belongs to.
        is_borrowing: it has the secrets of another conversation too.
        connects: of the store's connection: a store can lose values only between two connections.
    """

    looked_up: float
    encrypted: frozenset[tuple[str, bytes]] = frozenset()
    masker: Masker = field(default_factory=Masker)
    is_borrowing: bool = False
    connects: int = 0


class KnownValues(NamedTuple):
    """Proof for the store that a writer knows every value of a conversation.

    Attributes:
        number: how many values it knows.
        sample: one of them, encrypted; empty without any. No other life of the same conversation id has it.
    """

    number: int
    sample: bytes = b""


class ClaimedSecrets(NamedTuple):
    """The secrets of a conversation as the claim of one of its commands brought them.

    Attributes:
        kept: see `_Kept.of`; empty: there are none.
        read_at: the monotonic time when the reply came; replies come in the order of the reads.
        connects: of the store's connection then.
    """

    kept: Sequence[Any]
    read_at: float
    connects: int


class Secrets:
    """The secrets of a store's conversations.

    Args:
        key: returns the key, 32 bytes, or None as long as there is none; asked when it is first needed.
        own: what is hidden in every conversation, because the process that asks holds it itself.
        remembered: how many conversations' secrets are kept in memory; not fewer than this process works on at once.
    """

    def __init__(
        self,
        store: Store,
        key: Callable[[], bytes | None],
        own: Iterable[str] = (),
        *,
        remembered: int = REMEMBERED_CONVERSATIONS,
    ) -> None:
        self._store = store
        self._find_key = key
        self._own = tuple(own)
        self._own_masker = Masker(self._own)
        self._remembered = remembered
        self._key: bytes | None = None
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def put(self, conversation_id: str, name: str, value: str) -> None:
        """Add a secret, or replace it. Idempotent.

        Args:
            name: the variable in which commands find it.
            value: 8 to 32,768 characters.

        Raises:
            UsageError: the name or the value cannot be used.
            SecretsLocked: there is no key here.
        """
        check_secret(name, value)
        names = self._store.keys(conversation_id)
        encrypted = self._encrypt(conversation_id, value)
        # To be hidden before it can be given to anybody.
        commands = [("SADD", names.masked, encrypted), ("HSET", names.secrets, name, encrypted)]
        await self._store.call_many(commands)
        self._known.pop(conversation_id, None)

    def sealed(self, conversation_id: str, text: str) -> bytes:
        """Return a text encrypted for what is kept beside a conversation; `opened` reads it.

        Raises:
            SecretsLocked: there is no key here.
        """
        return self._encrypt(conversation_id, text)

    def opened(self, conversation_id: str, encrypted: bytes) -> str:
        """Return what `sealed` was given.

        Raises:
            SecretsLocked: no key here opens it.
        """
        return self._decrypt(conversation_id, encrypted)

    async def remove(self, conversation_id: str, name: str) -> None:
        """Stop giving a secret to commands; it stays hidden. Idempotent."""
        key = self._store.keys(conversation_id).secrets
        await self._store.call("HDEL", key, name)

    async def lend(self, lender_id: str, conversation_id: str) -> None:
        """Give a conversation all secrets of another one, present and future. Idempotent."""
        key = self._store.keys(conversation_id).secrets_of
        await self._store.call("SET", key, lender_id)
        self._known.pop(conversation_id, None)

    async def names(self, conversation_id: str) -> list[str]:
        """Return the names of the secrets, sorted."""
        key = self._store.keys(conversation_id).secrets
        flat = await self._store.call("HGETALL", key)
        return sorted(flat[i].decode() for i in range(0, len(flat), 2))

    async def wanted_by(
        self, conversation_id: str, command: str, *, claimed: ClaimedSecrets | None = None
    ) -> dict[str, str]:
        """Return the secrets that a command names, by name.

        Args:
            claimed: what the claim of the command has brought; None or an old one: look them up.

        Raises:
            SecretsLocked: there are some, and no key here opens them.
        """
        connects = self._store.connection.connects
        if claimed is not None:
            age = self._store.clock.monotonic() - claimed.read_at
            claimed = claimed if age < CLAIM_FRESH_SECONDS and claimed.connects == connects else None
        kept = await self._kept(conversation_id, claimed)
        self._learn(conversation_id, kept, claimed.read_at if claimed is not None else None)
        words = set(re.findall(r"\w+", command, re.ASCII))
        return {
            name: self._decrypt(each.conversation_id, value)
            for each in reversed(kept)  # its own secrets take the place of their namesakes
            for name, value in each.current.items()
            if name in words
        }

    async def masker(self, conversation_id: str) -> Masker:
        """Return what hides the conversation's secrets, as they were a second ago at the earliest.

        Raises:
            SecretsLocked: there are some, and no key here opens them.
        """
        known = self._known.get(conversation_id)
        if known is None or self._store.clock.monotonic() - known.looked_up >= FRESH_SECONDS:
            known = await self._look_up(conversation_id)
        return known.masker

    async def checked_masker(self, conversation_id: str) -> tuple[Masker, KnownValues | None]:
        """Return what hides the secrets that are known here, and the proof of them, without looking them up.

        It is for an append that gives the store the proof, and is refused if there are others; then `look_up`.

        Returns:
            None as the proof: the store cannot check it, so they were looked up a second ago at the earliest.
        """
        known = self._known.get(conversation_id)
        if known is None:
            return self._own_masker, KnownValues(0)
        self._known.move_to_end(conversation_id)
        if known.is_borrowing or known.connects != self._store.connection.connects:
            return await self.masker(conversation_id), None
        _, sample = next(iter(known.encrypted), ("", b""))
        return known.masker, KnownValues(len(known.encrypted), sample)

    def may_be_forgotten(self, conversation_id: str) -> bool:
        """Return whether the secrets of a conversation may have been looked up and had to make room since."""
        return conversation_id not in self._known and len(self._known) >= self._remembered

    def is_known(self, conversation_id: str) -> bool:
        """Return whether the secrets of a conversation have been looked up and not forgotten since."""
        return conversation_id in self._known

    async def look_up(self, conversation_id: str) -> None:
        """Look up the secrets of a conversation now.

        Raises:
            SecretsLocked: there are some, and no key here opens them.
        """
        await self._look_up(conversation_id)

    async def _look_up(self, conversation_id: str) -> _Known:
        return self._learn(conversation_id, await self._kept(conversation_id))

    async def _kept(self, conversation_id: str, claimed: ClaimedSecrets | None = None) -> list[_Kept]:
        """Return what is kept for a conversation, then for those whose secrets it has too.

        Args:
            claimed: what is kept for the first one, if that is known.
        """
        found: list[_Kept] = []
        if claimed is not None:
            flat, masked, lender = claimed.kept or ((), (), None)
            found.append(_Kept.of(conversation_id, flat, masked, lender))
            conversation_id = found[0].lender_id
        while conversation_id and len(found) < MAX_LENDERS:
            names = self._store.keys(conversation_id)
            commands = [("HGETALL", names.secrets), ("SMEMBERS", names.masked), ("GET", names.secrets_of)]
            found.append(_Kept.of(conversation_id, *await self._store.call_many(commands)))
            conversation_id = found[-1].lender_id
        return found

    def _learn(self, conversation_id: str, kept: list[_Kept], read_at: float | None = None) -> _Known:
        """Remember what was read at a time, by default now, unless something newer is known."""
        read_at = self._store.clock.monotonic() if read_at is None else read_at
        newer = self._known.get(conversation_id)
        if newer is not None and newer.looked_up > read_at:
            return newer
        known = self._known.pop(conversation_id, None) or _Known(0.0, masker=self._own_masker)
        encrypted = frozenset((each.conversation_id, value) for each in kept for value in each.masked)
        if encrypted != known.encrypted:
            known.masker = Masker(
                [*self._own, *sorted({self._decrypt(owner_id, value) for owner_id, value in encrypted})]
            )
            known.encrypted = encrypted
        known.looked_up, known.connects = read_at, self._store.connection.connects
        known.is_borrowing = bool(kept[0].lender_id)
        self._known[conversation_id] = known
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
        return known

    def _encrypt(self, conversation_id: str, value: str) -> bytes:
        return encrypt(self._required_key(), value.encode(), conversation_id)

    def _decrypt(self, conversation_id: str, encrypted: bytes) -> str:
        try:
            return decrypt(self._required_key(), encrypted, conversation_id).decode()
        except ValueError as error:
            raise SecretsLocked(
                f"The secrets of {conversation_id} were encrypted with another key.", remedy=ONE_KEY
            ) from error

    def _required_key(self) -> bytes:
        self._key = self._key or self._find_key()
        if self._key is None:
            raise SecretsLocked("There are secrets, and no key for them.", remedy=ONE_KEY)
        return self._key


def encrypt(key: bytes, content: bytes, about: str) -> bytes:
    """Return content encrypted by AES-256-GCM; `about` is what it belongs to."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, content, about.encode())


def decrypt(key: bytes, encrypted: bytes, about: str) -> bytes:
    """Return what was encrypted.

    Raises:
        ValueError: with another key, or for something else, or it was changed since.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(encrypted[:NONCE_BYTES], encrypted[NONCE_BYTES:], about.encode())
    except InvalidTag as error:
        raise ValueError("it was encrypted otherwise") from error


def key_name(key: bytes) -> str:
    """Return what tells a key from others and says nothing of it."""
    return hashlib.sha256(b"deckhands key name" + key).hexdigest()[:16]


def check_secret(name: str, value: str) -> None:
    """Refuse a name that no variable can have, and a value that cannot be hidden.

    Raises:
        UsageError: see above; its text does not contain the value.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"A secret cannot be called {name!r}.", remedy="Use letters, digits and _, not a digit first.")
    if not MINIMUM_CHARS <= len(value) <= MAX_VALUE_CHARS or "\0" in value:
        raise UsageError(
            f"The value of the secret {name} has {len(value)} characters.",
            remedy=f"Use {MINIMUM_CHARS} to {MAX_VALUE_CHARS}: a shorter one would be found in everything.",
        )


def secret_key(settings: BrokerSettings, *, is_made: bool = False) -> bytes | None:
    """Return the key that the settings name: itself, its file, or else the file `secret.key` in our home.

    Args:
        is_made: whether the file in our home is made if it is not there; otherwise that is None.

    Raises:
        UsageError: there is none where the settings say, or it is not a key.
    """
    if settings.secret_key:
        return parsed_key(settings.secret_key)
    if settings.secret_key_file:
        key = key_in(Path(settings.secret_key_file), is_made=False)
        if key is None:
            raise UsageError(f"There is no file {settings.secret_key_file} with the key of the secrets.")
        return key
    return key_in(settings.home / KEY_FILE, is_made=is_made)


def parsed_key(text: str) -> bytes:
    """Read a key as it is written in the environment and in key files: 32 bytes in base64.

    Raises:
        UsageError: it is something else.
    """
    try:
        key = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            "The key of the secrets is not 32 bytes in base64.", remedy="Make one with `openssl rand -base64 32`."
        )
    return key


def key_in(path: Path, *, is_made: bool) -> bytes | None:
    """Read the key of a file that only its owner can read.

    Args:
        is_made: whether the file is made with a new key if it is not there; otherwise that is None.

    Raises:
        UsageError: it cannot be read, or is not a key.
    """
    try:
        if is_made and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            draft.touch(mode=0o600, exist_ok=True)
            draft.write_text(base64.b64encode(os.urandom(KEY_BYTES)).decode() + "\n")
            try:
                os.link(draft, path)  # the first one decides
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return parsed_key(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"The key of the secrets cannot be read from {path}: {error.strerror}.") from error
