"""One call of the function `append` as values: the writer, the events, the side effects, and the outcome.

An append that creates a conversation passes admission control, which checks the bounds of its tenant and of the memory.

Holds: the names of the arguments are defined here and at the head of `append` in `append.lua`, and nowhere else.
`append` decides, in the same step that creates the conversation. An earlier check only avoids storing data for a
conversation that would be refused. A conversation that has started is never refused. A tenant's bound counts all
shards; conversations that start at the same time in different shards may exceed it by as many.
Does not: define an outcome for a lost reply. `event_log` repeats the call until it has one.
Keys: `deck:{k}:open:<tenant>`, `deck:{k}:paces`, see admission.lua.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Literal, NamedTuple

import msgpack

from broker.contract import ConversationCreated, MessagePolicy, Ownership, StartWindow
from broker.runtime import (
    AdmissionRefused,
    ConversationBusy,
    DataLocked,
    ShardsRaised,
    StoreError,
    UnknownConversation,
    UsageError,
)
from broker.secrets import SecretsProof
from broker.store import Argument, ShardKeys, Store

Condition = Literal["", "message:", "message:enqueue", "message:reject", "message:interrupt", "expire"]
"""The condition of a producer's append. `message:<policy>`: the policy accepts a message now; without one, the
conversation's policy applies. `expire`: the conversation is scheduled."""

SEED_BYTES = 16
"""Of the randomness from which the capabilities of actions are made, see results.lua."""

STARTS_WORK: Condition = "message:enqueue"
"""The condition of an append that starts work and is never refused."""

NamedArguments = dict[str, Any]
"""Named arguments. Values that the function compares with texts of the store are texts."""


def make_message_condition(policy: MessagePolicy | None) -> Condition:
    """Return the condition for appending a user's message.

    Args:
        policy: how the message is handled while the agent works; None for the conversation's own policy.
    """
    conditions: dict[MessagePolicy | None, Condition] = {
        None: "message:",
        "enqueue": "message:enqueue",
        "reject": "message:reject",
        "interrupt": "message:interrupt",
    }
    return conditions[policy]


class Creator(NamedTuple):
    """The producer that creates a conversation.

    Attributes:
        key: idempotency key.
        pool: pool of tool workers for its first action.
        awaited: the caller to notify of its end: `celery` or `stream:<name>`; empty for none.
        caller: the fields of this caller, stored in the same step unless it has one; None: they are stored already.
        elsewhere: number of open conversations of its tenant in other shards; None if another conversation's step
            creates it: it is then neither refused nor counted.
        shards: the number of shards that this process knows.
        start: when it may start; None for at once.
    """

    key: str
    pool: str
    awaited: str = ""
    elsewhere: int | None = 0
    start: StartWindow | None = None
    caller: Mapping[str, Argument] | None = None
    shards: int = 1

    def to_arguments(self) -> NamedArguments:
        """Return the arguments that describe this writer."""
        named: NamedArguments = {"by": "create", "key": self.key, "pool": self.pool}
        named |= {"awaited": self.awaited} if self.awaited else {}
        named |= {"shards": self.shards} if self.shards > 1 else {}
        if self.caller:
            named["caller"] = [
                part if isinstance(part, bytes) else str(part) for item in self.caller.items() for part in item
            ]
        named |= {"inner": True} if self.elsewhere is None else {"elsewhere": self.elsewhere}
        if self.start is not None:
            times = {"delay_ms": self.start.delay_seconds, "limit_ms": self.start.limit_seconds}
            named["start"] = {name: math.ceil(time * 1000) for name, time in times.items() if time is not None}
        return named


class ProducerWriter(NamedTuple):
    """A producer: a user, a client or another conversation.

    Attributes:
        key: idempotency key.
        condition: condition for the append.
        quiet: send no notification.
        seen_id: required id of the last event; None for any.
        capability: the capability of the action whose end it reports; or empty.
        cause: id and checksum of an action that the log must have; None for none.
    """

    key: str
    condition: Condition = ""
    is_quiet: bool = False
    seen_id: int | None = None
    capability: str = ""
    cause: tuple[int, str] | None = None

    def to_arguments(self) -> NamedArguments:
        """Return the arguments that describe this writer."""
        named: NamedArguments = {"by": "producer", "key": self.key, "condition": self.condition, "quiet": self.is_quiet}
        named |= {"capability": self.capability} if self.capability else {}
        named |= {"action": str(self.cause[0]), "checksum": self.cause[1]} if self.cause is not None else {}
        return named if self.seen_id is None else named | {"seen": str(self.seen_id)}


class ToolWriter(NamedTuple):
    """A tool worker that has run an action.

    Attributes:
        place: the action's entry to acknowledge, `<stream>|<entry>`; or empty.
        checksum: checksum of the action; empty to accept any event with its id.
        fingerprint: the action's fingerprint, as workspace hosts know it; or empty.
        has_used: whether the action has read or changed the workspace.
    """

    worker_id: str
    action_id: int
    place: str
    checksum: str
    fingerprint: str = ""
    has_used: bool = True

    def to_arguments(self) -> NamedArguments:
        """Return the arguments that describe this writer."""
        named: NamedArguments = {
            "by": "tool",
            "worker": self.worker_id,
            "action": str(self.action_id),
            "checksum": self.checksum,
        }
        named |= {"fingerprint": self.fingerprint} if self.fingerprint else {}
        named |= {} if self.has_used else {"uses": False}
        return named | ({"place": self.place} if self.place else {})


class Owner(NamedTuple):
    """The owner of a conversation.

    Attributes:
        seen_id: the last event that its decision is based on.
        checksum: checksum of that event; empty to accept any event with that id.
        key: identifies this call; a repetition has the same key.
    """

    ownership: Ownership
    seen_id: int
    checksum: str
    key: str

    def to_arguments(self) -> NamedArguments:
        """Return the arguments that describe this writer."""
        worker, token = self.ownership.worker_id, self.ownership.token
        decided = {"seen": str(self.seen_id), "checksum": self.checksum, "key": self.key}
        return {"by": "owner", "worker": worker, "token": token} | decided


Writer = Creator | ProducerWriter | ToolWriter | Owner


class NewEntry(NamedTuple):
    """One event to write.

    Attributes:
        data: its bytes.
        dispatch: `1` for a runnable action that goes to its action stream, `pool:<name>` for one that goes to the
            stream of that pool; empty for an event that is not dispatched.
        answers: id of the action that this observation settles; None if it settles none.
    """

    data: bytes
    dispatch: str = ""
    answers: int | None = None

    def to_arguments(self) -> NamedArguments:
        """Return the arguments that describe this event, without its bytes."""
        named: NamedArguments = {"dispatch": self.dispatch} if self.dispatch else {}
        return named | ({} if self.answers is None else {"answers": str(self.answers)})


def make_append_arguments(
    conversation_id: str,
    writer: Writer,
    entries: Sequence[NewEntry],
    cancels: Sequence[int] = (),
    fields: Mapping[str, str | int | float] | None = None,
    *,
    secrets: SecretsProof | None = None,
) -> list[Argument]:
    """Return the arguments of the function: the id, the named arguments, and the bytes of each event.

    Args:
        cancels: ids of running actions to stop; 0 stops all programs of the workspace.
        fields: fields of the conversation in the index.
        secrets: the secret values known to the writer. The append is refused if the conversation has others. None skips
            this check.
    """
    named = writer.to_arguments() | {"events": [entry.to_arguments() for entry in entries]}
    if any(entry.dispatch for entry in entries):
        named["seed"] = token_hex(SEED_BYTES)
    named |= {"cancels": [str(action) for action in cancels]} if cancels else {}
    named |= {"fields": [str(part) for field in fields.items() for part in field]} if fields else {}
    named |= {} if secrets is None else {"secrets": secrets.number, "sample": secrets.sample}
    return [conversation_id, msgpack.packb(named, use_bin_type=False), *(entry.data for entry in entries)]


@dataclass(frozen=True, slots=True)
class Appended:
    """The events were written, with the ids from `first_id` to `last_id`.

    Attributes:
        checksum: the checksum of the last event, see `codec.checksum_of`.
    """

    first_id: int
    last_id: int
    checksum: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Duplicate:
    """An earlier call with the same key wrote the events, with ids first to last."""

    first_id: int
    last_id: int
    checksum: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Fenced:
    """Refused: another worker owns the conversation."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Refused: the log has grown since the decision. Read the new events and decide again."""

    last_id: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Refused: the conversation is closed."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Refused: the log ends at `last_id` and does not contain the event that the writer refers to."""

    last_id: int


AppendOutcome = Appended | Duplicate | Fenced | Conflict | Closed | Lost


def parse_outcome(reply: Any, conversation_id: str, checksum: str = "") -> AppendOutcome | None:
    """Return the outcome in a reply of the function `append`; None if the conversation to create exists already.

    Args:
        checksum: checksum of the last event to write.

    Raises:
        UnknownConversation: there is no such conversation.
        ConversationBusy: it takes no message now.
        DataLocked: it is encrypted, and the events are not.
        StoreError: the reply is not one of the function's.
    """
    match reply:
        case ["missing"]:
            raise UnknownConversation(conversation_id)
        case ["busy"]:
            raise ConversationBusy(conversation_id)
        case ["exists"]:
            return None
        case ["raised"]:
            raise ShardsRaised
        case ["locked"]:
            raise DataLocked(
                f"The conversation {conversation_id} is encrypted, and this process has no master key.",
                remedy="Set DECKHANDS_MASTER_KEYS or DECKHANDS_MASTER_KEYS_FILE.",
            )
        case ["appended", first, last]:
            return Appended(first, last, checksum)
        case ["duplicate", first, last]:
            return Duplicate(first, last, checksum)
        case ["fenced"]:
            return Fenced()
        case ["conflict", last]:
            return Conflict(last)
        case ["closed"]:
            return Closed()
        case ["lost", last]:
            return Lost(last)
    raise StoreError(f"Unexpected reply of the function append: {reply!r}.")


async def has_appended(store: Store, conversation_id: str, key: str) -> bool:
    """Return whether the log holds the append that a producer made under a key."""
    once = (await store.locate(conversation_id)).once
    return bool(await store.retry(lambda: store.connection.call("HEXISTS", once, f"p:{key}")))


class PoolRefused(UsageError):
    """A tenant's conversations may not use a pool of tool workers."""

    code = "pool_refused"

    def __init__(self, pool: str, tenant: str, pools: str) -> None:
        whose = f"of the tenant {tenant}" if tenant else "without a tenant"
        super().__init__(
            f"Conversations {whose} may not use the pool {pool!r} of tool workers.",
            remedy=f"Use one of its pools: {', '.join(pools.split(','))}. DECKHANDS_TENANTS of the controller workers "
            "lists them.",
        )


def raise_refusal(reply: list[Any]) -> None:
    """Raise the refusal that a reply of the store's functions contains, if any.

    Raises:
        AdmissionRefused: the conversation may not start now.
        PoolRefused: its tenant may not use its pool of tool workers.
    """
    match reply:
        case ["pool", pool, tenant, pools]:
            raise PoolRefused(_text(pool), _text(tenant), _text(pools))
        case ["refused", reason, tenant, used, limit, retry_ms]:
            raise AdmissionRefused(_text(reason), _text(tenant), used, limit, retry_ms / 1000)


async def check_admission(store: Store, conversation_id: str, tenant: str) -> None:
    """Check that a conversation may start, before data is stored for it. Writes nothing.

    Raises:
        AdmissionRefused: it may not start now. Never raised for a conversation that has started.
    """
    shard = (await store.locate(conversation_id)).shard
    elsewhere = await _count_open_in_others(store, shard, tenant)
    raise_refusal(await store.call_function("deck_admit", (shard.root,), conversation_id, tenant, elsewhere))


async def find_creation(store: Store, conversation_id: str, key: str) -> Duplicate | None:
    """Return the ids of the events that created a conversation under this key; None if none did."""
    once = (await store.locate(conversation_id)).once
    found = await store.call("HGET", once, f"create:{key}")
    if found is None:
        return None
    first, _, last = found.decode().partition(":")
    return Duplicate(int(first), int(last))


async def count_open_elsewhere(store: Store, created: ConversationCreated) -> int | None:
    """Return how many conversations of its tenant are open in the other shards.

    Returns:
        None if another conversation's step creates this one: it is then neither refused nor counted.
    """
    if created.parent is not None:
        return None
    tenant = created.tenancy.tenant if created.tenancy is not None else ""
    return await _count_open_in_others(store, (await store.locate(created.conversation_id)).shard, tenant)


async def _count_open_in_others(store: Store, shard: ShardKeys, tenant: str) -> int:
    if store.shards == 1:
        return 0
    rules = ("HMGET", shard.tenants, tenant, "*")
    named, others = await store.call(*rules)
    share = "*" if named is None and others is not None else tenant
    commands = [("ZCARD", other.open_conversations(share)) for other in await store.load_shards() if other != shard]
    return sum(await store.call_many(commands))


def _text(part: Any) -> str:
    return part.decode(errors="backslashreplace") if isinstance(part, bytes) else str(part)
