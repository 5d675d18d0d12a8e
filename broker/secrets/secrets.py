"""The secrets of conversations: stored encrypted, given to one command at a time, masked everywhere else.

Holds:
    - The store never sees a plain value. Each is encrypted (AES-256-GCM) for its conversation with a key that only
      workers and clients have.
    - A replaced or removed value is no longer given to commands, but is still masked.
    - A delegate has its parent's current secrets in addition to its own.
    - No process writes to a conversation whose secrets it cannot mask: a missing key is an error.
    - Of a secret that is looked up when it is used, the store has the reference. A value is masked in all processes
      before a command gets it.
Does not: keep a program from revealing a secret in another form; see `masking`.
Keys: `deck:{k}:c:<id>:secrets` (hash: name → current value, or NUL and a `SecretReference` in JSON),
`deck:{k}:c:<id>:masked` (set: all current and former values and references), `deck:{k}:c:<id>:secrets_of` (string: the
conversation whose secrets it shares).
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
from broker.secrets.masking import MIN_SECRET_CHARS, Masker
from broker.secrets.references import SecretLookup, SecretReference, SecretUnavailable
from broker.store import Store

KEY_FILE = "secret.key"
KEY_BYTES = 32
NONCE_BYTES = 12
MAX_VALUE_CHARS = 32_768
FRESH_SECONDS = 1.0
"""The longest time that a value added by another process may be unknown here. A process that gives a value to a command
knows it."""
CLAIM_FRESH_SECONDS = 2.0
"""How long the secrets read by a claim may be used; meanwhile the workspace is opened."""
CACHED_CONVERSATIONS = 4_000

REFERENCE_MARK = "\0"
"""Starts a reference where a value may stand; no value contains it."""
MAX_HIDDEN_VALUES = 1_000

MAX_LENDERS = 16
"""The longest chain of parents to search for secrets; delegates are nested less deeply."""

ONE_KEY = "Give all workers and clients the same DECKHANDS_SECRET_KEY or DECKHANDS_SECRET_KEY_FILE."

ENDPOINT_URL, ENDPOINT_KEY = "MODEL_ENDPOINT_URL", "MODEL_ENDPOINT_KEY"
"""The secrets that are the address and the key of a conversation's own endpoint. No command gets them."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class SecretsLocked(DeckhandsError):
    """There are secrets, but no key that decrypts them."""

    code = "secrets_locked"


@dataclass(frozen=True, slots=True)
class _StoredSecrets:
    """The stored secrets of one conversation, encrypted: current values by name, and all former ones.

    Attributes:
        lender_id: the conversation whose secrets it shares, or empty.
    """

    conversation_id: str
    current: dict[str, bytes]
    masked: frozenset[bytes]
    lender_id: str

    @classmethod
    def parse(
        cls, conversation_id: str, flat: Sequence[bytes], masked: Sequence[bytes], lender: bytes | None
    ) -> _StoredSecrets:
        """Parse the store's replies."""
        current = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        return cls(conversation_id, current, frozenset(masked), lender.decode() if lender else "")


@dataclass(slots=True)
class _CachedSecrets:
    """The cached secrets of a conversation: its encrypted values at the last lookup, and their masker.

    Attributes:
        looked_up: the monotonic time of the store's reply.
        encrypted: each value with the conversation that it belongs to.
        values: the values themselves.
        is_borrowing: it shares the secrets of another conversation.
        connects: the store's connection count at that lookup. The store can lose values only between two connections.
    """

    looked_up: float
    encrypted: frozenset[tuple[str, bytes]] = frozenset()
    values: frozenset[str] = field(default=frozenset(), repr=False)
    masker: Masker = field(default_factory=Masker)
    is_borrowing: bool = False
    connects: int = 0


class OwnEndpoint(NamedTuple):
    """The endpoint of one conversation's model calls, and its key, which may be empty."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class SecretsProof(NamedTuple):
    """Proof for the store that a writer knows every value of a conversation.

    Attributes:
        number: how many values it knows.
        sample: one of them, encrypted; empty if there are none. A recreated conversation of the same id never has it.
    """

    number: int
    sample: bytes = b""


class ClaimedSecrets(NamedTuple):
    """The secrets of a conversation, as read by the claim of one of its commands.

    Attributes:
        kept: see `_StoredSecrets.parse`; empty if there are none.
        read_at: the monotonic time of the reply; replies arrive in the order of the reads.
        connects: the connection count of the store then.
    """

    replies: Sequence[Any]
    read_at: float
    connects: int


class Secrets:
    """The secrets of a store's conversations.

    Args:
        key: returns the key, 32 bytes, or None while there is none; called on first use.
        own: this process's own secrets, masked in every conversation.
        sources: looks up the secrets that a command uses by reference; None where no command runs.
        max_hidden: how many values may be masked; beyond it, no further values are looked up, because each costs time.
        remembered: the size of the cache; at least the number of conversations that this process works on at once.
    """

    def __init__(
        self,
        store: Store,
        key: Callable[[], bytes | None],
        own: Iterable[str] = (),
        *,
        sources: SecretLookup | None = None,
        max_hidden: int = MAX_HIDDEN_VALUES,
        remembered: int = CACHED_CONVERSATIONS,
    ) -> None:
        self._store = store
        self._sources = sources
        self._max_hidden = max_hidden
        self._find_key = key
        self._own = tuple(own)
        self._own_masker = Masker(self._own)
        self._remembered = remembered
        self._key: bytes | None = None
        self._cache: OrderedDict[str, _CachedSecrets] = OrderedDict()

    async def put(self, conversation_id: str, name: str, value: str | SecretReference) -> None:
        """Add or replace a secret. Idempotent.

        Args:
            name: the environment variable of commands.
            value: 8 to 32,768 characters, or where to look it up.

        Raises:
            UsageError: the name or the value is invalid.
            SecretsLocked: there is no key.
        """
        check_secret(name, value)
        names = await self._store.locate(conversation_id)
        text = value if isinstance(value, str) else REFERENCE_MARK + value.model_dump_json()
        encrypted = self._encrypt(conversation_id, text)
        # Masked before any command can read it. A reference is put there, too: the claim of a command reads the secrets
        # of conversations where something is masked.
        commands = [("SADD", names.masked, encrypted), ("HSET", names.secrets, name, encrypted)]
        await self._store.call_many(commands)
        self._cache.pop(conversation_id, None)

    def seal(self, conversation_id: str, text: str) -> bytes:
        """Encrypt a text that is stored beside a conversation; `unseal` decrypts it.

        Raises:
            SecretsLocked: there is no key.
        """
        return self._encrypt(conversation_id, text)

    def unseal(self, conversation_id: str, encrypted: bytes) -> str:
        """Decrypt a text encrypted by `seal`.

        Raises:
            SecretsLocked: no key here decrypts it.
        """
        return self._decrypt(conversation_id, encrypted)

    async def remove(self, conversation_id: str, name: str) -> None:
        """Stop giving a secret to commands; it stays masked. Idempotent."""
        key = (await self._store.locate(conversation_id)).secrets
        await self._store.call("HDEL", key, name)

    async def lend(self, lender_id: str, conversation_id: str) -> None:
        """Share all present and future secrets of a conversation with another one. Idempotent."""
        key = (await self._store.locate(conversation_id)).secrets_of
        await self._store.call("SET", key, lender_id)
        self._cache.pop(conversation_id, None)

    async def list_names(self, conversation_id: str) -> list[str]:
        """Return the names of the secrets, sorted."""
        key = (await self._store.locate(conversation_id)).secrets
        flat = await self._store.call("HGETALL", key)
        return sorted(flat[i].decode() for i in range(0, len(flat), 2))

    async def find_named(
        self, conversation_id: str, command: str, *, claimed: ClaimedSecrets | None = None
    ) -> dict[str, str]:
        """Return the secrets that a command names, by name.

        Args:
            claimed: the secrets read by the claim of the command. If None or outdated, they are looked up.

        Raises:
            SecretsLocked: there are some, but no key here decrypts them.
            SecretUnavailable: one is a reference, and its value cannot be looked up.
        """
        connects = self._store.connection.connects
        if claimed is not None:
            age = self._store.clock.monotonic() - claimed.read_at
            claimed = claimed if age < CLAIM_FRESH_SECONDS and claimed.connects == connects else None
        kept = await self._load_stored(conversation_id, claimed)
        self._remember(conversation_id, kept, claimed.read_at if claimed is not None else None)
        words = set(re.findall(r"\w+", command, re.ASCII)) - {ENDPOINT_URL, ENDPOINT_KEY}
        named = {
            name: (each.conversation_id, self._decrypt(each.conversation_id, value))
            for each in reversed(kept)  # the conversation's own secrets override shared ones
            for name, value in each.current.items()
            if name in words
        }
        found = {name: text for name, (_, text) in named.items()}
        for name, (owner_id, text) in named.items():
            if text.startswith(REFERENCE_MARK):
                reference = SecretReference.model_validate_json(text.removeprefix(REFERENCE_MARK))
                found[name] = await self._look_up_value(owner_id, name, reference)
                await self._hide(conversation_id, owner_id, name, found[name])
        return found

    async def find_endpoint(self, conversation_id: str) -> OwnEndpoint | None:
        """Return the endpoint that a conversation, or the one whose secrets it shares, has for its model calls.

        It is always looked up.

        Raises:
            SecretsLocked: there are secrets, but no key here decrypts them.
        """
        for each in await self._load_stored(conversation_id):
            if ENDPOINT_URL in each.current:
                url, key = (
                    self._decrypt(each.conversation_id, each.current[name]) if name in each.current else ""
                    for name in (ENDPOINT_URL, ENDPOINT_KEY)
                )
                return OwnEndpoint(url, key)
        return None

    async def _look_up_value(self, owner_id: str, name: str, reference: SecretReference) -> str:
        """Return the current value of a secret that a conversation has by reference."""
        if self._sources is None:
            raise SecretUnavailable(f"The secret {name} is looked up by tool workers only.")
        tenant = await self._store.call("HGET", (await self._store.locate(owner_id)).meta, "tenant")
        try:
            value = await self._sources.look_up(reference, tenant=(tenant or b"").decode(errors="backslashreplace"))
            check_secret(name, value)
        except UsageError as error:
            remedy = f"{error.remedy} Change it in the source {reference.source}."
            raise SecretUnavailable(error.message, remedy=remedy) from None
        except SecretUnavailable as error:
            raise SecretUnavailable(
                f"The secret {name} cannot be looked up, so nothing was run: {error.message}", remedy=error.remedy
            ) from error
        return value

    async def _hide(self, conversation_id: str, owner_id: str, name: str, value: str) -> None:
        """Mask a value, before a command gets it, in its conversation and in all conversations that share it."""
        known = self._cache.get(conversation_id) or await self._look_up(conversation_id)
        if value in known.values:
            return
        if len(known.encrypted) >= self._max_hidden:
            raise SecretUnavailable(
                f"The secret {name} has a new value, and {self._max_hidden:,} values are hidden in this conversation.",
                remedy="Continue in a new conversation, or let the source return the same value for longer.",
            )
        await self._store.call("SADD", (await self._store.locate(owner_id)).masked, self._encrypt(owner_id, value))
        await self._look_up(conversation_id)

    async def load_masker(self, conversation_id: str) -> Masker:
        """Return a masker of the conversation's secrets, at most one second old.

        Raises:
            SecretsLocked: there are some, but no key here decrypts them.
        """
        known = self._cache.get(conversation_id)
        if known is None or self._store.clock.monotonic() - known.looked_up >= FRESH_SECONDS:
            known = await self._look_up(conversation_id)
        return known.masker

    async def get_cached_masker(self, conversation_id: str) -> tuple[Masker, SecretsProof | None]:
        """Return a masker of the cached secrets and the proof of them, without a lookup.

        An append passes the proof to the store, which refuses it if there are other secrets. Then call `look_up`.

        Returns:
            The proof is None if the store cannot check it; the secrets were then looked up at most one second ago.
        """
        known = self._cache.get(conversation_id)
        if known is None:
            return self._own_masker, SecretsProof(0)
        self._cache.move_to_end(conversation_id)
        if known.is_borrowing or known.connects != self._store.connection.connects:
            return await self.load_masker(conversation_id), None
        _, sample = next(iter(known.encrypted), ("", b""))
        return known.masker, SecretsProof(len(known.encrypted), sample)

    def may_be_evicted(self, conversation_id: str) -> bool:
        """Return whether the secrets of a conversation may have been evicted from the cache."""
        return conversation_id not in self._cache and len(self._cache) >= self._remembered

    def is_cached(self, conversation_id: str) -> bool:
        """Return whether the secrets of a conversation are cached."""
        return conversation_id in self._cache

    async def look_up(self, conversation_id: str) -> None:
        """Look up the secrets of a conversation now.

        Raises:
            SecretsLocked: there are some, but no key here decrypts them.
        """
        await self._look_up(conversation_id)

    async def _look_up(self, conversation_id: str) -> _CachedSecrets:
        return self._remember(conversation_id, await self._load_stored(conversation_id))

    async def _load_stored(self, conversation_id: str, claimed: ClaimedSecrets | None = None) -> list[_StoredSecrets]:
        """Return the stored secrets of a conversation, then of those whose secrets it shares.

        Args:
            claimed: the secrets of the first one, if already read.
        """
        found: list[_StoredSecrets] = []
        if claimed is not None:
            flat, masked, lender = claimed.replies or ((), (), None)
            found.append(_StoredSecrets.parse(conversation_id, flat, masked, lender))
            conversation_id = found[0].lender_id
        while conversation_id and len(found) < MAX_LENDERS:
            names = await self._store.locate(conversation_id)
            commands = [("HGETALL", names.secrets), ("SMEMBERS", names.masked), ("GET", names.secrets_of)]
            found.append(_StoredSecrets.parse(conversation_id, *await self._store.call_many(commands)))
            conversation_id = found[-1].lender_id
        return found

    def _remember(
        self, conversation_id: str, kept: list[_StoredSecrets], read_at: float | None = None
    ) -> _CachedSecrets:
        """Cache secrets read at a time (default: now), unless newer ones are cached."""
        read_at = self._store.clock.monotonic() if read_at is None else read_at
        newer = self._cache.get(conversation_id)
        if newer is not None and newer.looked_up > read_at:
            return newer
        known = self._cache.pop(conversation_id, None) or _CachedSecrets(0.0, masker=self._own_masker)
        encrypted = frozenset((each.conversation_id, value) for each in kept for value in each.masked)
        if encrypted != known.encrypted:
            known.values = frozenset(self._decrypt(owner_id, value) for owner_id, value in encrypted)
            known.masker = Masker([*self._own, *sorted(known.values)])
            known.encrypted = encrypted
        known.looked_up = read_at
        known.connects = self._store.connection.connects
        known.is_borrowing = bool(kept[0].lender_id)
        self._cache[conversation_id] = known
        while len(self._cache) > self._remembered:
            self._cache.popitem(last=False)
        return known

    def _encrypt(self, conversation_id: str, value: str) -> bytes:
        return encrypt(self._require_key(), value.encode(), conversation_id)

    def _decrypt(self, conversation_id: str, encrypted: bytes) -> str:
        try:
            return decrypt(self._require_key(), encrypted, conversation_id).decode()
        except ValueError as error:
            raise SecretsLocked(
                f"The secrets of {conversation_id} were encrypted with another key.", remedy=ONE_KEY
            ) from error

    def _require_key(self) -> bytes:
        self._key = self._key or self._find_key()
        if self._key is None:
            raise SecretsLocked("There are secrets, and no key for them.", remedy=ONE_KEY)
        return self._key


def encrypt(key: bytes, content: bytes, about: str) -> bytes:
    """Encrypt content with AES-256-GCM, bound to the context `about`."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, content, about.encode())


def decrypt(key: bytes, encrypted: bytes, about: str) -> bytes:
    """Decrypt content.

    Raises:
        ValueError: another key or context was used, or the content was changed.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(encrypted[:NONCE_BYTES], encrypted[NONCE_BYTES:], about.encode())
    except InvalidTag as error:
        raise ValueError("it was encrypted otherwise") from error


def key_fingerprint(key: bytes) -> str:
    """Return an identifier of a key that reveals nothing about it."""
    return hashlib.sha256(b"deckhands key name" + key).hexdigest()[:16]


def check_secret(name: str, value: str | SecretReference) -> None:
    """Check that a name is valid for a variable and that a value can be masked.

    Raises:
        UsageError: one is invalid; the text does not contain the value.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name of a secret.", remedy="Use letters, digits and _, not a digit first."
        )
    if isinstance(value, SecretReference):
        if name in (ENDPOINT_URL, ENDPOINT_KEY):
            raise UsageError(f"The secret {name} has no source.", remedy="Give its value.")
        return
    if not MIN_SECRET_CHARS <= len(value) <= MAX_VALUE_CHARS or "\0" in value:
        raise UsageError(
            f"The value of the secret {name} has {len(value)} characters.",
            remedy=f"Use {MIN_SECRET_CHARS} to {MAX_VALUE_CHARS}: a shorter one would match everywhere.",
        )

    if name == ENDPOINT_URL and not re.match(r"https?://[^/]", value):
        raise UsageError(f"The secret {name} is not an address.", remedy="Write one such as http://HOST:PORT/v1.")
    if name == ENDPOINT_KEY and any(char <= " " or char >= "\x7f" for char in value):
        raise UsageError(f"The secret {name} has characters that no header may have.", remedy="Use visible ASCII.")


def load_secret_key(settings: BrokerSettings, *, is_made: bool = False) -> bytes | None:
    """Return the key in the settings: the key itself, its file, or else the file `secret.key` in our home.

    Args:
        is_made: whether to create the missing file in our home; otherwise None is returned for it.

    Raises:
        UsageError: the configured file is missing, or the key is invalid.
    """
    if settings.secret_key:
        return parse_key(settings.secret_key)
    if settings.secret_key_file:
        key = load_key_file(Path(settings.secret_key_file), is_made=False)
        if key is None:
            raise UsageError(f"The key file {settings.secret_key_file} of the secrets does not exist.")
        return key
    return load_key_file(settings.home / KEY_FILE, is_made=is_made)


def parse_key(text: str) -> bytes:
    """Parse a key from the environment or a key file: 32 bytes in base64.

    Raises:
        UsageError: it has another form.
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


def load_key_file(path: Path, *, is_made: bool) -> bytes | None:
    """Read the key from a file that only its owner can read.

    Args:
        is_made: whether to create a missing file with a new key; otherwise None is returned.

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
                os.link(draft, path)  # the first writer wins
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return parse_key(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"The key of the secrets cannot be read from {path}: {error.strerror}.") from error
