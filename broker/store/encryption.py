"""Encryption of conversations at rest: each tenant has a data key, encrypted by a master key that the store never has.

    master keys     DECKHANDS_MASTER_KEYS or its file: of every process that reads or writes conversations
    data keys       one for each tenant, random; the store has them encrypted by a master key
    cipher          AES-256-GCM with a key derived from a data key, for one conversation

Holds:
    - Encryption is on where a process has master keys. A conversation keeps the key that it was created with, named by
      the field `data_key` of its index; the function `append` refuses an event that is not encrypted with it.
    - Each encryption has a random nonce of 96 bits under a key of one conversation, so the limit of 2^32 encryptions
      with one key is out of reach. The kind of a text (event, snapshot, …) is authenticated with it, so texts cannot be
      exchanged.
    - A deleted data key is unknown to every process within `FRESH_SECONDS`: each caches a bounded number of keys, and
      asks the store for the number of deletions before it uses one.
    - A new master key requires only the data keys to be encrypted again. A data key that was deleted meanwhile stays
      deleted.
    - A record is authenticated with its id and its tenant. A program with write access to the store can delete a data
      key, but cannot exchange it for that of another tenant or for a known one.
Does not: hide ids, times, sizes, states, tenants, labels and counts, which the functions and listings need; stop a
program with write access to the store from removing events. Neither does it remove a decrypted event from the memory of
a process that has read it.
Keys: `deck:{0}:data_keys` (hash): `key:<id>` → an encrypted data key (JSON), `tenant:<name>` → the id of its key,
`revision` → number of deletions. See data_keys.lua.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from broker.runtime import BrokerSettings, CorruptEntry, DataForgotten, DataLocked, StoreMisconfigured, UsageError

if TYPE_CHECKING:
    from broker.store.store import Store

KEY_BYTES = 32
NONCE_BYTES = 12
KEY_ID_BYTES = 8
"""Bytes of the id of a data key, which are the first of everything that it encrypts."""
FRESH_SECONDS = 0.5
"""How long a process relies on what it last read of deleted keys."""
CACHED_KEYS = 4_096
CACHED_CIPHERS = 8_192
MAX_MASTER_KEYS = 16
SHOWN_FAILURES = 5
CHECKED_RECORDS = 8
"""How many data keys of a master key are tried: a single record may be forged."""
SETTINGS = "DECKHANDS_MASTER_KEYS or DECKHANDS_MASTER_KEYS_FILE"
FORM = "Write ID:KEY, with a key of `openssl rand -base64 32`; further ones behind a comma or in a new line."

_log = logging.getLogger(__name__)
_CipherOrNone = TypeVar("_CipherOrNone", bound="Cipher | None")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_ID = re.compile(r"[A-Za-z0-9_.-]{1,32}")


class MasterKeys:
    """The master keys of this process, by their ids. The first one encrypts new data keys; all of them decrypt.

    Args:
        text: `ID:KEY`, separated by commas or line breaks.
        path: a file with such a text. It is read again if it has changed, when a data key is encrypted or an id is
            unknown.

    Raises:
        UsageError: the text or the file cannot be used. The message contains no key.
    """

    def __init__(self, text: str = "", path: Path | None = None) -> None:
        self._path = path
        self._changed_ns = 0
        self._keys = self._read() if path is not None else _parse_master_keys(text, "DECKHANDS_MASTER_KEYS")

    @classmethod
    def load(cls, settings: BrokerSettings) -> MasterKeys:
        """Return the master keys in the settings; empty if they name none."""
        if settings.master_keys:
            return cls(settings.master_keys)
        return cls(path=Path(settings.master_keys_file)) if settings.master_keys_file else NO_MASTER_KEYS

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def ids(self) -> list[str]:
        """The ids. The key with the first one encrypts new data keys."""
        return list(self._keys)

    def wrap(self, key_id: str, tenant: str, data_key: bytes) -> str:
        """Encrypt a data key; return the record for the store."""
        if self._has_changed():
            self._read_again()
        master_id, master = next(iter(self._keys.items()))
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + _make_aead(master).encrypt(nonce, data_key, _describe_data_key(key_id, tenant))
        return json.dumps({"master": master_id, "tenant": tenant, "key": base64.b64encode(sealed).decode()})

    def unwrap(self, key_id: str, record: bytes) -> tuple[str, bytes]:
        """Return the tenant and the data key of a record.

        Raises:
            DataLocked: this process lacks its master key, has another key under that id, or the record belongs to
                another data key.
            CorruptEntry: the record is damaged.
        """
        from cryptography.exceptions import InvalidTag

        try:
            found = DataKeyRecord.parse(key_id, record)
        except (ValueError, LookupError, TypeError) as error:
            raise CorruptEntry(f"The data key {key_id} in the store is damaged.") from error
        master = self.find(found.master_id)
        if master is None:
            raise DataLocked(
                f"The data key {key_id} was encrypted with the master key {found.master_id!r}, which is not in "
                f"{SETTINGS}.",
                remedy="Add it; `deckhands encryption rotate` changes to the first one.",
            )
        try:
            return found.tenant, _unseal(found, master)
        except (InvalidTag, ValueError) as error:
            raise DataLocked(
                f"The data key {key_id} does not match the master key {found.master_id!r} of this process.",
                remedy=f"Give every process the same {SETTINGS}: another key may have the id there.",
            ) from error

    def matches(self, record: DataKeyRecord) -> bool:
        """Return whether this process has the record's master key, by id and content."""
        from cryptography.exceptions import InvalidTag

        master = self.find(record.master_id)
        try:
            return master is not None and bool(_unseal(record, master))
        except (InvalidTag, ValueError):
            return False

    def find(self, master_id: str) -> bytes | None:
        """Return a master key; None if it is unknown, also after the file was read again."""
        if master_id not in self._keys and self._path is not None:
            self._read_again()
        return self._keys.get(master_id)

    def _read_again(self) -> None:
        """Read the file again; keep the known keys if it is invalid, because it may be only half written."""
        try:
            self._keys = self._read()
        except UsageError as error:
            self._changed_ns = 0
            _log.warning("the master keys stay as they were: %s %s", error, error.remedy)

    def _has_changed(self) -> bool:
        try:
            return self._path is not None and self._path.stat().st_mtime_ns != self._changed_ns
        except OSError:  # it is being replaced, or is gone: what was read is still right
            return False

    def _read(self) -> dict[str, bytes]:
        assert self._path is not None
        try:
            self._changed_ns = self._path.stat().st_mtime_ns
            text = self._path.read_text()
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"The file {self._path} of the master keys cannot be read: {error}.",
                remedy="Correct DECKHANDS_MASTER_KEYS_FILE.",
            ) from error
        found = _parse_master_keys(text, f"The file {self._path}")
        if not found:
            raise UsageError(f"The file {self._path} of the master keys has none.", remedy=FORM)
        return found


def _parse_master_keys(text: str, place: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for part in re.split(r"[,\n]", text):
        if not part.strip():
            continue
        master_id, _, written = part.strip().partition(":")
        try:
            key = base64.b64decode(written, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not _ID.fullmatch(master_id) or len(key) != KEY_BYTES:
            raise UsageError(f"{place} has an entry that is not an id and 32 bytes in base64.", remedy=FORM)
        if master_id in found or len(found) >= MAX_MASTER_KEYS:
            raise UsageError(f"{place} has the id {master_id} twice, or more than {MAX_MASTER_KEYS}.", remedy=FORM)
        found[master_id] = key
    return found


NO_MASTER_KEYS = MasterKeys()


@dataclass(frozen=True, slots=True)
class DataKeyRecord:
    """The data key of a tenant, as the store has it.

    Attributes:
        tenant: its tenant; empty for conversations without one.
        sealed: the encrypted key.
    """

    key_id: str
    tenant: str
    master_id: str
    sealed: bytes = field(repr=False)

    @classmethod
    def parse(cls, key_id: str, record: bytes) -> DataKeyRecord:
        """Parse a record of the store; raises ValueError, LookupError or TypeError if it is not one."""
        found = json.loads(record)
        return cls(key_id, str(found["tenant"]), str(found["master"]), base64.b64decode(found["key"], validate=True))


class Cipher:
    """Encrypts the stored data of one conversation.

    Args:
        key_id: the data key's id.
        scope: the purpose of the cipher; each purpose has its own key.
    """

    __slots__ = ("_aead", "_key", "key_id")

    def __init__(self, key_id: str, data_key: bytes, scope: str) -> None:
        self.key_id = key_id.encode()
        self._key = hmac.digest(data_key, f"deckhands {scope}".encode(), "sha256")
        self._aead = _make_aead(self._key)

    def encrypt(self, content: bytes, about: str) -> bytes:
        """Encrypt content, bound to its description `about`. The result starts with the id of the key."""
        nonce = os.urandom(NONCE_BYTES)
        sealed: bytes = self._aead.encrypt(nonce, content, about.encode())
        return self.key_id + nonce + sealed

    def decrypt(self, sealed: bytes, about: str) -> bytes:
        """Decrypt content.

        Raises:
            CorruptEntry: it was changed, or encrypted with another description or key.
        """
        from cryptography.exceptions import InvalidTag

        start = KEY_ID_BYTES + NONCE_BYTES
        try:
            if sealed[:KEY_ID_BYTES] == self.key_id:
                found: bytes = self._aead.decrypt(sealed[KEY_ID_BYTES:start], sealed[start:], about.encode())
                return found
        except (InvalidTag, ValueError):
            pass
        raise CorruptEntry(
            f"The encrypted value of {about} was changed in the store, or copied there from another one."
        )

    def digest(self, content: bytes) -> str:
        """Return a name of content that reveals nothing about it without the key: 64 hexadecimal digits."""
        return hmac.digest(self._key, content, "sha256").hex()


@dataclass(frozen=True, slots=True)
class ChangedCipher:
    """The conversation's cipher, which is not the one that was used; None if it is not encrypted."""

    cipher: Cipher | None


class Encryption:
    """The data keys of a store and the ciphers of its conversations."""

    def __init__(self, store: Store, masters: MasterKeys, *, is_required: bool = False) -> None:
        self._store = store
        self._masters = masters
        self._is_required = is_required
        self._name = store.all_shards[0].data_keys
        self._keys: OrderedDict[str, bytes] = OrderedDict()
        self._ciphers: OrderedDict[str, Cipher | None] = OrderedDict()
        self._loaded: OrderedDict[tuple[str, bytes], Cipher] = OrderedDict()
        self._missing: set[str] = set()
        self._revision: bytes | None = None
        self._checked: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether this process encrypts new conversations."""
        return bool(self._masters)

    async def create_cipher(self, conversation_id: str, tenant: str) -> Cipher | None:
        """Return the cipher for a new conversation; None if encryption is off. Creates the tenant's key if needed.

        A conversation that already exists under the id may have another one: call `remember` after the creation.

        Raises:
            DataLocked: the store encrypts new conversations, and this process has no master key.
        """
        if not self.is_on:
            if self._is_required:
                raise DataLocked(
                    "The store encrypts new conversations, and this process has no master key.",
                    remedy=f"Set {SETTINGS}, as for the workers.",
                )
            return None
        await self._refresh()
        proposed = secrets.token_urlsafe(6)
        record = self._masters.wrap(proposed, tenant, os.urandom(KEY_BYTES))
        reply = await self._store.call_function("deck_data_key", (self._name,), tenant, proposed, record)
        if reply[0] == "taken":  # another tenant's key has the proposed id
            return await self.create_cipher(conversation_id, tenant)
        key_id = reply[1].decode(errors="backslashreplace")
        owner, data_key = self._unwrap(key_id, reply[2])
        if owner != tenant:
            raise CorruptEntry(f"The store names the data key {key_id} of another tenant for {tenant!r}.")
        return Cipher(key_id, data_key, conversation_id)

    async def find_cipher(self, conversation_id: str) -> Cipher | None:
        """Return the cipher of an existing conversation; None if it is not encrypted.

        Also None if this process has no master key; the store then refuses its writes to an encrypted conversation.

        Raises:
            DataLocked: its key was deleted, or is under another master key.
        """
        if not self.is_on:
            return None
        await self._refresh()
        if conversation_id in self._ciphers:
            return self.remember(conversation_id, self._ciphers[conversation_id])
        meta = (await self._store.locate(conversation_id)).meta
        last_id, key_id = await self._store.call("HMGET", meta, "last_id", "data_key")
        if last_id is None:  # there is no such conversation yet
            return None
        if key_id is None:
            return self.remember(conversation_id, None)
        return self.remember(conversation_id, await self.load_cipher(conversation_id, key_id))

    async def find_cipher_of(self, conversation_id: str, key_id: bytes | None) -> Cipher | None:
        """Return the cipher of a conversation for one of its entries.

        The index decides, whatever the entry claims: a plain entry does not belong in an encrypted conversation.

        Args:
            key_id: the key that the entry names; None: it is not encrypted.

        Raises:
            DataLocked: it is encrypted, and this process has no key for it.
        """
        if key_id is not None and not self.is_on:
            return await self.load_cipher(conversation_id, key_id)  # raises, and says what is missing
        cipher = await self.find_cipher(conversation_id)
        if key_id == (None if cipher is None else cipher.key_id):
            return cipher
        self.forget_cipher(conversation_id)  # another conversation may have the id now
        cipher = await self.find_cipher(conversation_id)
        if cipher is None and key_id is not None:  # its index is gone, or the entry does not belong here
            return await self.load_cipher(conversation_id, key_id)
        return cipher

    async def find_changed_cipher(self, conversation_id: str, used: Cipher | None) -> ChangedCipher | None:
        """Return the cipher of an existing conversation if it differs from `used`; else None.

        Asks the store and ignores the cache, because another conversation may have the id now.

        Raises:
            DataLocked: this process lacks the master key of the data key, or the data key was deleted.
        """
        meta = (await self._store.locate(conversation_id)).meta
        last_id, key_id = await self._store.call("HMGET", meta, "last_id", "data_key")
        if last_id is None or key_id == (None if used is None else used.key_id):
            return None
        self.forget_cipher(conversation_id)
        return ChangedCipher(None if key_id is None else await self.load_cipher(conversation_id, key_id))

    async def load_cipher(self, conversation_id: str, sealed: bytes) -> Cipher:
        """Return the cipher for encrypted data of a conversation, by the key id at the start of the data.

        Raises:
            DataLocked: this process lacks the master key of the data key, or the data key was deleted.
        """
        if not self.is_on:
            raise DataLocked(
                f"{conversation_id} is encrypted, and this process has no master key.",
                remedy=f"Set {SETTINGS}.",
            )
        await self._refresh()
        key_id = sealed[:KEY_ID_BYTES]
        known = self._ciphers.get(conversation_id)
        if known is not None and known.key_id == key_id:
            return known
        # Not under the id of the conversation: what names the key may be forged, or belong to an earlier conversation.
        loaded = self._loaded.get((conversation_id, key_id))
        if loaded is None:
            name = key_id.decode(errors="backslashreplace")
            loaded = Cipher(name, await self._load_key(name), conversation_id)
        return _keep(self._loaded, (conversation_id, key_id), loaded, CACHED_CIPHERS)

    async def find_tenant_cipher(self, conversation_id: str, scope: str) -> Cipher | None:
        """Return the cipher that all conversations of the tenant share for one purpose; see `find_cipher`."""
        cipher = await self.find_cipher(conversation_id)
        return None if cipher is None else await self.load_tenant_cipher(cipher.key_id, scope)

    async def load_tenant_cipher(self, sealed: bytes, scope: str) -> Cipher:
        """Return the cipher of a tenant for one purpose, by the key id at the start of the data; see `load_cipher`."""
        return await self.load_cipher(f"all {scope}", sealed)

    def forget_cipher(self, conversation_id: str) -> None:
        """Forget the cached cipher, because another conversation may have the id now."""
        self._ciphers.pop(conversation_id, None)

    async def decrypt_fields(self, conversation_ids: Sequence[str], rows: Sequence[dict[bytes, bytes]]) -> None:
        """Decrypt `ENCRYPTED_FIELDS` of index rows in place; a field that cannot be decrypted becomes empty."""
        for conversation_id, row in zip(conversation_ids, rows, strict=True):
            if b"data_key" not in row:
                continue
            for name in ENCRYPTED_FIELDS & row.keys():
                row[name] = await self._decrypt_field(conversation_id, name, row[name])

    async def _decrypt_field(self, conversation_id: str, name: bytes, value: bytes) -> bytes:
        if not value:
            return value
        try:
            sealed = base64.b64decode(value)
            cipher = await self.load_cipher(conversation_id, sealed)
            return cipher.decrypt(sealed, f"the field {name.decode()}")
        except (DataLocked, CorruptEntry, ValueError):
            return b""

    async def list_keys(self) -> list[DataKeyRecord]:
        """Return the data keys in the store, sorted by tenant. Unreadable records are left out."""
        found = []
        for name, value in (await self._load_all()).items():
            if name.startswith(b"key:"):
                try:
                    found.append(DataKeyRecord.parse(name.removeprefix(b"key:").decode(), value))
                except (ValueError, LookupError, TypeError):
                    continue
        return sorted(found, key=lambda record: (record.tenant, record.key_id))

    async def check_masters(self) -> None:
        """Check each master key of this process by decrypting one of its data keys.

        Raises:
            StoreMisconfigured: another process has another key under the same id.
        """
        shown: dict[str, list[DataKeyRecord]] = {}
        for record in await self.list_keys():
            shown.setdefault(record.master_id, []).append(record)
        for master_id, records in shown.items():
            if self._masters.find(master_id) is None:
                continue
            if not any(self._masters.matches(record) for record in records[:CHECKED_RECORDS]):
                raise StoreMisconfigured(
                    f"The master key {master_id!r} of this process is not the one that the store's data keys were "
                    "encrypted with.",
                    remedy=f"Give every process the same {SETTINGS}: each id names one key.",
                )

    async def rotate(self) -> int:
        """Encrypt every data key with the first master key; return how many were changed. Repeat it after a failure.

        Raises:
            DataLocked: some data keys are damaged, or their master key is unknown here. All others were changed.
        """
        if not self.is_on:
            raise DataLocked("This process has no master key.", remedy=f"Set {SETTINGS}.")
        changed = 0
        failed: dict[str, str] = {}
        for name, record in (await self._load_all()).items():
            if not name.startswith(b"key:"):
                continue
            key_id = name.removeprefix(b"key:").decode(errors="backslashreplace")
            try:
                tenant, data_key = self._masters.unwrap(key_id, record)
            except (DataLocked, CorruptEntry) as error:
                failed[key_id] = error.message
                continue
            if DataKeyRecord.parse(key_id, record).master_id != self._masters.ids[0]:
                wrapped = self._masters.wrap(key_id, tenant, data_key)
                reply = await self._store.call_function("deck_rewrap_key", (self._name,), key_id, record, wrapped)
                changed += reply[0] == "changed"
        if failed:
            shown = list(failed.values())[:SHOWN_FAILURES]
            more = f" And {len(failed) - len(shown)} more." if len(failed) > len(shown) else ""
            raise DataLocked(
                f"{changed} data keys were changed, and {len(failed)} could not be: {' '.join(shown)}{more}",
                remedy=f"Add the missing master keys to {SETTINGS}, and repeat it.",
            )
        return changed

    async def delete_key(self, tenant: str) -> bool:
        """Delete a tenant's data key: all data encrypted with it becomes unreadable. Return whether there was one.

        Idempotent. Needs no master key. A new conversation of the tenant gets a new key.
        """
        reply = await self._store.call_function("deck_delete_key", (self._name,), tenant)
        return bool(reply[0] == "deleted")

    async def _load_all(self) -> dict[bytes, bytes]:
        flat: list[Any] = await self._store.call("HGETALL", self._name)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def _refresh(self) -> None:
        now = self._store.clock.monotonic()
        if self._checked is not None and now - self._checked < FRESH_SECONDS:
            return
        revision = await self._store.call("HGET", self._name, "revision")
        if revision != self._revision:
            self._keys.clear()
            self._ciphers.clear()
            self._loaded.clear()
        self._missing.clear()
        self._revision = revision
        self._checked = now

    async def _load_key(self, key_id: str) -> bytes:
        if key_id in self._keys:
            self._keys.move_to_end(key_id)
            return self._keys[key_id]
        is_missing = key_id in self._missing
        record = None if is_missing else await self._store.call("HGET", self._name, f"key:{key_id}")
        if record is None:
            self._missing.add(key_id)  # until the next refresh: a listing may have thousands of rows with this key
            raise DataForgotten(
                f"The data key {ascii(key_id)[1:-1]} was deleted: data encrypted with it can no longer be read.",
                remedy="Only a backup of the store from before, and its master key, can bring it back.",
            )
        return self._unwrap(key_id, record)[1]

    def _unwrap(self, key_id: str, record: bytes) -> tuple[str, bytes]:
        tenant, self._keys[key_id] = self._masters.unwrap(key_id, record)
        while len(self._keys) > CACHED_KEYS:
            self._keys.popitem(last=False)
        return tenant, self._keys[key_id]

    def remember(self, conversation_id: str, cipher: _CipherOrNone) -> _CipherOrNone:
        """Remember the cipher of a conversation that exists, None for a plain one; return it."""
        return _keep(self._ciphers, conversation_id, cipher, CACHED_CIPHERS)


ENCRYPTED_FIELDS = frozenset((b"title", b"last_error"))
"""The fields of the index that contain text of events."""


def encrypt_fields(cipher: Cipher, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields for the index, with `ENCRYPTED_FIELDS` encrypted. An empty one stays empty."""
    return {
        name: base64.b64encode(cipher.encrypt(str(value).encode(), f"the field {name}")).decode()
        if value and name.encode() in ENCRYPTED_FIELDS
        else value
        for name, value in fields.items()
    }


def _keep(cache: OrderedDict[_Key, Any], key: _Key, value: _Value, most: int) -> _Value:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > most:
        cache.popitem(last=False)
    return value


def _make_aead(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _unseal(record: DataKeyRecord, master: bytes) -> bytes:
    """Decrypt the data key of a record; raises InvalidTag or ValueError if another master key encrypted it."""
    nonce, sealed = record.sealed[:NONCE_BYTES], record.sealed[NONCE_BYTES:]
    found: bytes = _make_aead(master).decrypt(nonce, sealed, _describe_data_key(record.key_id, record.tenant))
    return found


def _describe_data_key(key_id: str, tenant: str) -> bytes:
    return f"data key {key_id} {tenant}".encode()
