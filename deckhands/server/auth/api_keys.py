"""API keys: their scopes, tenant and rate limit, and the check of a presented token.

Holds: the store has only the hash of a secret, which is shown once; a revoked or expired key is refused at the next
request; hashes are compared in constant time.
Keys: `deck:{0}:keys`, `deck:{0}:keys:used`, `deck:{0}:keys:rate:<id>:<minute>`.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from broker.runtime import DeckhandsError, UsageError, from_millis, to_millis
from broker.store import Argument, Store

EVERY_TENANT = "*"
MAX_KEYS = 10_000
MAX_LIFE = timedelta(days=3_660)
TOKEN = re.compile(r"dh_([a-z2-7]{12})_([A-Za-z0-9_-]{43})")
KEY_ID = re.compile(r"[a-z2-7]{12}")
ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
DEFAULT_REQUESTS_PER_MINUTE = 600
DEFAULT_BODY_BYTES = 2**20
DEFAULT_STREAMS = 500
RATE_TTL_SECONDS = 120
MAX_ADMITTED = 1_000
"""The number of valid tokens whose keys are kept parsed; each request compares them with those of the store."""


class Scope(StrEnum):
    """A permission of a key. No scope implies another."""

    READ = "read"
    WRITE = "write"
    OPERATE = "operate"
    ADMIN = "admin"


class AccessDenied(DeckhandsError):
    """The request is not allowed."""

    code = "unauthorized"

    def __init__(self, code: str, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class TooManyRequests(DeckhandsError):
    """The key has used up its requests of this minute."""

    code = "rate_limited"
    retryable = True

    def __init__(self, limit: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"This key may make {limit:,} requests a minute.", remedy=f"Try again in {retry_after_seconds:.0f} s."
        )
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class ApiKey(BaseModel):
    """A key as stored.

    Attributes:
        id: its public part.
        name: a label for humans.
        digest: the SHA-256 of its secret.
        tenant: the tenant whose conversations it may see; `*` for all tenants.
        requests_per_minute: its rate limit.
        body_bytes: the maximum length of a request body; files are limited by transfers instead.
        streams: how many streams and long-polling requests it may have open at one server.
        expires: when it expires; None for never.
        revoked: when it was revoked; None if it was not.
    """

    model_config = ConfigDict(frozen=True)

    id: str = Field(pattern=rf"^{KEY_ID.pattern}$")
    name: str = Field(min_length=1, max_length=100)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(pattern=r"^(\*|[A-Za-z0-9_.-]{1,64})$")
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    requests_per_minute: int = Field(default=DEFAULT_REQUESTS_PER_MINUTE, ge=1, le=1_000_000)
    body_bytes: int = Field(default=DEFAULT_BODY_BYTES, ge=1_024, le=64 * 2**20)
    streams: int = Field(default=DEFAULT_STREAMS, ge=1, le=100_000)

    def state(self, now: datetime) -> str:
        """Return `good`, `expired` or `revoked`."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "good"


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as a listing shows it; `used` is None if it has never been used."""

    key: ApiKey
    used: datetime | None


class ApiKeys:
    """The API keys of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = store.all_shards[0].api_keys
        self._admitted: dict[bytes, tuple[bytes | None, ApiKey]] = {}

    async def add(
        self,
        name: str,
        *,
        tenant: str,
        scopes: Iterable[Scope],
        life: timedelta | None = None,
        requests_per_minute: int = DEFAULT_REQUESTS_PER_MINUTE,
        body_bytes: int = DEFAULT_BODY_BYTES,
        streams: int = DEFAULT_STREAMS,
    ) -> tuple[ApiKey, str]:
        """Create a key, and return it with its token, which cannot be shown again.

        Args:
            tenant: `*` for all tenants.
            life: how long it is valid; None until it is revoked.

        Raises:
            UsageError: an argument is invalid, or there are too many keys.
        """
        if life is not None and not timedelta(0) < life <= MAX_LIFE:
            raise UsageError("A key is valid for up to ten years.", remedy="Use a duration such as 90d.")
        if await self._store.call("HLEN", self._root) >= MAX_KEYS:
            raise UsageError(f"There are {MAX_KEYS:,} keys.", remedy="Remove those that were revoked.")
        now = self._store.clock.now()
        secret = secrets.token_urlsafe(32)
        try:
            key = ApiKey(
                id="".join(secrets.choice(ALPHABET) for _ in range(12)),
                name=name,
                digest=sha256(secret.encode()).hexdigest(),
                tenant=tenant,
                scopes=frozenset(scopes),
                created=now,
                expires=None if life is None else now + life,
                requests_per_minute=requests_per_minute,
                body_bytes=body_bytes,
                streams=streams,
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UsageError(f"The {first['loc'][0]} of the key cannot be used: {first['msg']}.") from None
        await self._store.call("HSET", self._root, key.id, key.model_dump_json())
        return key, f"dh_{key.id}_{secret}"

    async def all(self) -> list[ListedKey]:
        """Return the readable keys, oldest first."""
        flat, used = await self._store.call_many([("HGETALL", self._root), ("HGETALL", f"{self._root}:used")])
        times = dict(zip(used[::2], used[1::2], strict=True))
        found = []
        for key_id, text in zip(flat[::2], flat[1::2], strict=True):
            key = _parse_key(text)
            at = times.get(key_id, b"")
            if key is not None:
                found.append(ListedKey(key, from_millis(int(at)) if at.isdigit() else None))
        return sorted(found, key=lambda listed: (listed.key.created, listed.key.id))

    async def has_any(self) -> bool:
        """Return whether there is a key, valid or not."""
        count = await self._store.call("HLEN", self._root)
        return bool(count)

    async def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key. Idempotent; the key stays in the listing.

        Raises:
            UsageError: there is no such key.
        """
        key = await self._find(key_id)
        if key.revoked is None:
            key = key.model_copy(update={"revoked": self._store.clock.now()})
            await self._store.call("HSET", self._root, key.id, key.model_dump_json())
        return key

    async def remove(self, key_id: str) -> None:
        """Delete a key, which is refused from now on.

        Raises:
            UsageError: there is no such key.
        """
        await self._find(key_id)
        await self._store.call_many([("HDEL", self._root, key_id), ("HDEL", f"{self._root}:used", key_id)])

    async def admit(self, token: str) -> ApiKey:
        """Return the key of a token as `check` does, and count a request as `count` does.

        A token that was valid before is checked and counted in one round trip. Other tokens are checked before they are
        counted, because the id of a key is not secret.
        """
        found = TOKEN.fullmatch(token)
        seen = sha256(token.encode()).digest()
        if found is None or seen not in self._admitted:
            key = await self.check(token)
            await self.count(key)
            return key
        now = self._store.clock.now()
        key_id, secret = found.groups()
        text, number, *_ = await self._store.call_many(
            [("HGET", self._root, key_id), *self._count_commands(key_id, now)]
        )
        known_text, key = self._admitted[seen]
        if text != known_text:
            del self._admitted[seen]
            key = self._authenticate(text, secret)
        key = self._require_valid(key)
        _require_within(key, number, now)
        return key

    async def check(self, token: str) -> ApiKey:
        """Return the key of a token.

        Raises:
            Refused: the token belongs to no key, or to an expired or revoked one.
        """
        parts = TOKEN.fullmatch(token)
        key_id, secret = parts.groups() if parts else ("a" * 12, "")
        text = await self._store.call("HGET", self._root, key_id)
        key = self._require_valid(self._authenticate(text, secret))
        while len(self._admitted) >= MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        self._admitted[sha256(token.encode()).digest()] = (text, key)
        return key

    def _authenticate(self, text: bytes | None, secret: str) -> ApiKey:
        """Return the key that was stored as `text` if the secret is its own."""
        key = _parse_key(text)
        digest = key.digest if key is not None else "0" * 64
        if not hmac.compare_digest(sha256(secret.encode()).hexdigest(), digest) or key is None:
            raise AccessDenied("unauthorized", "The API key is not known.", remedy="`deckhands key add` makes one.")
        return key

    async def check_id(self, key_id: str) -> ApiKey:
        """Return a key that was checked before, if it is still valid. Raises the errors of `check`."""
        text = await self._store.call("HGET", self._root, key_id)
        if (key := _parse_key(text)) is None:
            raise AccessDenied("unauthorized", "The API key no longer exists.")
        return self._require_valid(key)

    async def count(self, key: ApiKey) -> None:
        """Count a request.

        Raises:
            TooManyRequests: the key has used up its requests of this minute.
        """
        now = self._store.clock.now()
        number, *_ = await self._store.call_many(self._count_commands(key.id, now))
        _require_within(key, number, now)

    def _count_commands(self, key_id: str, now: datetime) -> list[tuple[Argument, ...]]:
        """Return the commands that count a request; the first reply is the number of requests in this minute."""
        rate = f"{self._root}:rate:{key_id}:{now.timestamp() // 60:.0f}"
        return [
            ("INCR", rate),
            ("EXPIRE", rate, RATE_TTL_SECONDS),
            ("HSET", f"{self._root}:used", key_id, to_millis(now)),
        ]

    def _require_valid(self, key: ApiKey) -> ApiKey:
        if (state := key.state(self._store.clock.now())) != "good":
            what = "was revoked" if state == "revoked" else "has expired"
            raise AccessDenied(f"key_{state}", f"The API key {key.id} {what}.", remedy="Ask for another one.")
        return key

    async def _find(self, key_id: str) -> ApiKey:
        text = await self._store.call("HGET", self._root, key_id)
        if (key := _parse_key(text)) is None:
            raise UsageError(
                f"There is no API key {ascii(key_id)[1:-1][:50]}.", remedy="`deckhands key ls` lists all keys."
            )
        return key


def _require_within(key: ApiKey, number: int, now: datetime) -> None:
    """Check the number of a key's requests in this minute.

    Raises:
        TooManyRequests: the key has used them up.
    """
    if number > key.requests_per_minute:
        raise TooManyRequests(key.requests_per_minute, max(1.0, 60 - now.timestamp() % 60))


def _parse_key(text: bytes | None) -> ApiKey | None:
    """Parse a stored key; None if there is none or it cannot be read. An unreadable key grants nothing."""
    if text is None:
        return None
    try:
        return ApiKey.model_validate_json(text)
    except ValidationError:
        return None
