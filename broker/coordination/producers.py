"""Producers with their own inbox stream, each with a tenant that it is bound to.

A producer's user of the store may add to its own stream only, so the stream identifies the writer of an entry. The
operator registers the producers in this key, which a producer can neither read nor write. A bound producer always gets
the tenant in this key, whichever tenant an entry names.

Holds: a producer with an unreadable record is not served and is named in a log. A producer that is removed and added
again starts with an empty reply stream and with separate ids.
Keys: `deck:producers`; adds and removes `deck:inbox:<name>`, removes `deck:replies:<name>`.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.coordination.quarantine import Quarantine
from broker.runtime import StoreRefused, UsageError, to_millis
from broker.store import PRODUCERS, Store, inbox_key, replies_key

ANY_TENANT = "*"
GROUP = "ingresses"
MAX_PRODUCERS = 200
"""An ingress worker reads each stream by its own connection."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
RESERVED = frozenset(
    {"admin", "default", "operator", "controller", "tool", "ingress", "gateway", "jobs", "metrics", "producer"}
    | {"worker"}  # users that `serve-valkey` makes, or made
    | {"moved", "unreadable"}  # suffixes of keys beside the shared inbox
)
"""Names that no producer may have. `deploy/serve-valkey` has the same list."""
RIGHTS = "resetchannels -@all +@connection -@admin -@dangerous +xadd +xread +xrange +xrevrange +xlen"

_log = logging.getLogger(__name__)


class Producer(BaseModel):
    """A producer with its own stream.

    Attributes:
        tenant: the tenant of the conversations that its entries create; `*`: each entry names its own.
        created_ms: when it was added, in Unix milliseconds.
    """

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | Literal["*"]
    created_ms: int = 0

    @property
    def stream(self) -> str:
        """The key of its stream."""
        return inbox_key(self.name)

    @property
    def replies(self) -> str:
        """The key of its reply stream. All its answers go there."""
        return replies_key(self.name)

    @property
    def acl(self) -> str:
        """The minimal rights of its user, in the syntax of `ACL SETUSER` and of `user` in a configuration."""
        return f"%W~{self.stream} %R~{self.replies} {RIGHTS}"

    @property
    def unique_name(self) -> str:
        """A unique name of this producer. A removed producer with the same name had another one."""
        return f"{self.name}:{self.created_ms}"

    def bind_tenant(self, tenant: str) -> str:
        """Return the tenant of an entry of this producer.

        Args:
            tenant: the tenant that the entry names; empty if none.

        Raises:
            UsageError: the producer is bound to another tenant.
        """
        if self.tenant == ANY_TENANT:
            return tenant
        if tenant not in ("", self.tenant):
            raise UsageError(
                f"tenant: the producer {self.name} works for the tenant {self.tenant} only.", remedy="Leave it out."
            )
        return self.tenant


class Producers:
    """The producers of a store that have their own stream."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unreadable: set[bytes] = set()

    async def load_all(self) -> dict[str, Producer]:
        """Return the producers by name."""
        flat = await _read_hash(self._store, "HGETALL", PRODUCERS)
        found = {}
        for name, text in sorted(zip(flat[::2], flat[1::2], strict=True))[:MAX_PRODUCERS]:
            with suppress(ValidationError):
                producer = Producer.model_validate_json(text)
                if producer.name.encode() == name and producer.name not in RESERVED:
                    found[producer.name] = producer
                    continue
            if text not in self._unreadable and len(self._unreadable) < MAX_PRODUCERS:
                self._unreadable.add(text)
                _log.error("the record of the producer %s cannot be read, so its stream is not served", ascii(name))
        return found

    async def is_current(self, producer: Producer) -> bool:
        """Return whether a producer still exists, unchanged since it was read."""
        text = await _read_hash(self._store, "HGET", PRODUCERS, producer.name)
        with suppress(ValidationError):
            return text is not None and Producer.model_validate_json(text) == producer
        return False

    async def may_read(self, name: str, tenant: str) -> bool:
        """Return whether answers about a tenant's conversations may go to a reply stream."""
        text = await _read_hash(self._store, "HGET", PRODUCERS, name)
        with suppress(ValidationError):
            return text is None or Producer.model_validate_json(text).tenant in (ANY_TENANT, tenant)
        return False

    async def add(self, name: str, tenant: str) -> Producer:
        """Add a producer and create its stream. Empties a reply stream of that name first. Idempotent.

        Args:
            tenant: `*` if its entries may name any tenant.

        Raises:
            UsageError: the name or the tenant is invalid, the producer is bound to another tenant, or there are too
                many.
        """
        if name in RESERVED:
            raise UsageError(f"The producer name {name} is reserved.", remedy="Choose another one.")
        try:
            producer = Producer(name=name, tenant=tenant, created_ms=to_millis(self._store.clock.now()))
        except ValidationError as error:
            field = error.errors(include_url=False)[0]["loc"][0]
            raise UsageError(
                f"The {field} {ascii(name if field == 'name' else tenant)[:100]} cannot be used.",
                remedy="Use 1 to 64 letters, digits, '_', '.' or '-'.",
            ) from None
        if await self._store.call("HLEN", PRODUCERS) >= MAX_PRODUCERS:
            raise UsageError(f"There are {MAX_PRODUCERS} producers.", remedy="Remove one: deckhands inbox rm.")
        if not await self._store.call("HEXISTS", PRODUCERS, name):
            await self._store.call("DEL", producer.replies)  # the shared inbox or a removed producer has left it
        await self._store.call("HSETNX", PRODUCERS, name, producer.model_dump_json())
        kept = (await self.load_all()).get(name)
        if kept is None or kept.tenant != tenant:
            bound = "unreadable" if kept is None else f"bound to the tenant {kept.tenant}"
            raise UsageError(f"The producer {name} is {bound}.", remedy=f"Remove it first: deckhands inbox rm {name}.")
        if not await self._store.call("EXISTS", kept.stream):
            with suppress(StoreRefused):  # an ingress worker was faster
                await self._store.call("XGROUP", "CREATE", kept.stream, GROUP, "0", "MKSTREAM")
        return kept

    async def count_waiting(self, producer: Producer) -> int:
        """Return the number of a producer's entries that are not done."""
        names = [producer.stream, *await list_moved_streams(self._store, producer.stream)]
        return sum(await self._store.call_many([("XLEN", name) for name in names]))

    async def remove(self, name: str, *, discard: bool = False) -> None:
        """Remove a producer, its stream and its reply stream. Its user of the store stays.

        Args:
            discard: remove it even if entries wait; they are lost.

        Raises:
            UsageError: there is no such producer, or entries wait.
        """
        if not await self._store.call("HEXISTS", PRODUCERS, name):
            raise UsageError(
                f"There is no producer {ascii(name)[1:-1][:100]}.", remedy="`deckhands inbox ls` lists all."
            )
        streams = [inbox_key(name), *await list_moved_streams(self._store, inbox_key(name))]
        count = sum(await self._store.call_many([("XLEN", stream) for stream in streams]))
        if count and not discard:
            raise UsageError(
                f"{count:,} entries of {name} are not done.",
                remedy=f"Disable its user (ACL SETUSER {name} off) and wait for them, or lose them: --discard.",
            )
        await self._store.call_many(
            [
                ("HDEL", PRODUCERS, name),
                *(("DEL", key) for key in (make_moved_key(inbox_key(name)), replies_key(name), *streams)),
            ]
        )


def make_moved_key(stream: str) -> str:
    """Return the key that lists the streams moved away from a key because it had no free ids left."""
    return f"{stream}:moved"


def make_moved_prefix(stream: str) -> str:
    """Return the prefix of the names of streams that were moved away from a key. Its hash tag is the key."""
    return f"{{{stream}}}:moved:"


async def list_moved_streams(store: Store, stream: str) -> list[str]:
    """Return the streams that were moved away from a key and are still read, oldest first.

    A field that names another key is skipped.
    """
    flat = await _read_hash(store, "HGETALL", make_moved_key(stream))
    prefix = make_moved_prefix(stream).encode()
    found = [(parse_moved_ms(time), name) for name, time in zip(flat[::2], flat[1::2], strict=True)]
    return [name.decode() for _, name in sorted(found) if name.startswith(prefix) and name.isascii()]


async def _read_hash(store: Store, command: str, key: str, *arguments: str) -> Any:
    """Read a hash. A key of another type in its place is moved away first, if this user has the right."""
    try:
        return await store.call(command, key, *arguments)
    except StoreRefused as error:
        await Quarantine(store).move_away(key, "hash", error)
        return await store.call(command, key, *arguments)


def parse_moved_ms(value: bytes) -> int:
    """Return the time at which a stream was moved; 0 if it cannot be parsed."""
    return int(value) if value.isdigit() and len(value) < 20 else 0
