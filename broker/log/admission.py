"""Admission control: decides whether a conversation may start now, as the tenant and the memory permit.

Holds: `append` decides, in the same step that creates the conversation. An earlier check only avoids storing data for a
conversation that would be refused. A conversation that has started is never refused. A tenant's bound counts all
shards; conversations that start at the same time in different shards may exceed it by as many.
Keys: `deck:{k}:open:<tenant>`, `deck:{k}:paces`, see admission.lua.
"""

from __future__ import annotations

from typing import Any

from broker.contract import ConversationCreated
from broker.log.append_call import Duplicate
from broker.runtime import AdmissionRefused, UsageError
from broker.store import ShardKeys, Store


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
    """Check that a conversation may start, before anything is stored for it. Writes nothing.

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
        None if the conversation belongs to a step of another one: such a conversation is neither refused nor counted.
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
