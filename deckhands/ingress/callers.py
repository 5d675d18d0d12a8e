"""Who waits for the end of a conversation: kept beside it before it begins, until they have their answer.

Holds: an outcome is decided once, so an answer that is repeated has the same bytes; what has arrived is not repeated.
What may hold secrets, the callbacks of a task, is encrypted like the secrets of the conversation.
Keys: `deck:{k}:c:<id>:caller`, `deck:{k}:awaited`, and `awaited` and `noticed` in the conversation's meta hash.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from broker.coordination import CANNOT_BE_READ, Unreadable, conversation_of
from broker.runtime import BrokerSettings, jitter, to_millis
from broker.secrets import Secrets, SecretsLocked, secret_key
from broker.store import Argument, ShardKeys, Store, texts_by_name

CELERY, STREAM = "celery", "stream"
SHORTEST_LOOK_SECONDS = 0.2
FIRST_LOOK_SECONDS = 5.0
LONGEST_LOOK_SECONDS = 60.0
LOCK_SECONDS = 30.0
"""Longer than Celery's claim on the end of a chord, which a door that dies leaves behind."""
FORGOTTEN_AFTER = timedelta(days=7)
SEALED = b"sealed:"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for one conversation.

    Attributes:
        kind: `celery` or `stream`.
        name: the task's id, or the name of the reply stream.
        request_id: the producer's own id of the entry; empty for a task.
        kept: what Celery is to do with the outcome; empty for a stream.
        is_headless: nobody can be asked.
        is_revoked: the task was revoked.
        outcome: their answer, as JSON; empty as long as it is not decided.
        is_answered: they have their answer.
        broker: which Celery broker the task came through, see `BrokerSettings.broker_name`; None: any may answer.
        started_ms: when the agent started, in Unix milliseconds; 0: its end has come before; None: not yet.
        looks: how often a door has looked and found no answer, or could not give it.
    """

    conversation_id: str
    kind: str
    name: str
    request_id: str = ""
    kept: Mapping[str, Any] | None = None
    is_headless: bool = True
    is_revoked: bool = False
    outcome: str = ""
    is_answered: bool = False
    looks: int = 0
    broker: str | None = None
    started_ms: int | None = None

    @property
    def awaited(self) -> str:
        """What the conversation's meta hash says of them."""
        return self.kind if self.kind == CELERY else f"{self.kind}:{self.name}"


class Callers:
    """The callers of a store's conversations.

    Args:
        secrets: encrypts what is kept.
    """

    def __init__(self, store: Store, secrets: Secrets) -> None:
        self._store = store
        self._secrets = secrets

    async def keep(self, caller: Caller) -> bool:
        """Remember a caller, whose conversation need not have begun; the first one of a conversation counts.

        Returns whether this is the first one.

        To be called before it begins, and once more after that: another door that had the same request may have refused
        it in between, and have forgotten the caller.
        """
        kept = json.dumps(caller.kept or {}).encode()
        if b'"secrets"' in kept:
            secret_key(BrokerSettings.from_env(), is_made=True)
            kept = SEALED + self._secrets.sealed(caller.conversation_id, kept.decode())
        fields: dict[str, Argument] = {"kind": caller.kind, "name": caller.name, "request_id": caller.request_id}
        fields |= {"kept": kept, "headless": int(caller.is_headless)}
        if caller.broker is not None:
            fields["broker"] = caller.broker
        key = self._store.keys(caller.conversation_id).caller
        is_new, *_ = await self._store.call_many([("HSETNX", key, name, value) for name, value in fields.items()])
        return bool(is_new)

    async def forget(self, conversation_id: str) -> None:
        """Forget the caller of a conversation that does not begin; one that another door has begun keeps it."""
        names = self._store.keys(conversation_id)
        await self._store.function("deck_forget_caller", (names.root, names.shard.root), conversation_id)

    async def of(self, conversation_id: str) -> Caller | None:
        """Return who waits for a conversation; None: nobody ever did.

        Raises:
            ValueError, SecretsLocked: what is kept cannot be read.
        """
        key = self._store.keys(conversation_id).caller
        flat = await self._store.call("HGETALL", key)
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        kept = raw.pop(b"kept", b"{}")
        found = texts_by_name([part for item in raw.items() for part in item])
        if "kind" not in found:
            return None
        if kept.startswith(SEALED):
            kept = self._secrets.opened(conversation_id, kept.removeprefix(SEALED)).encode()
        return Caller(
            conversation_id=conversation_id,
            kind=found["kind"],
            name=found.get("name", ""),
            request_id=found.get("request_id", ""),
            kept=json.loads(kept),
            is_headless=found.get("headless", "1") == "1",
            is_revoked="revoked" in found,
            outcome=found.get("outcome", ""),
            is_answered="answered" in found,
            looks=int(found.get("looks", "0")),
            broker=found.get("broker"),
            started_ms=int(found["started"]) if "started" in found else None,
        )

    async def decide(self, conversation_id: str, outcome: Mapping[str, Any]) -> str:
        """Decide the answer, and return it as JSON: this, or what was decided before."""
        key = self._store.keys(conversation_id).caller
        _, decided = await self._store.call_many(
            [("HSETNX", key, "outcome", json.dumps(outcome)), ("HGET", key, "outcome")]
        )
        text: str = decided.decode()
        return text

    async def note_start(self, conversation_id: str, started_ms: int) -> bool:
        """Remember when the agent started; return whether this is the first note of it."""
        key = self._store.keys(conversation_id).caller
        return bool(await self._store.call("HSETNX", key, "started", started_ms))

    async def revoke(self, conversation_id: str) -> None:
        """Remember that the task was revoked. Idempotent."""
        await self._store.call("HSET", self._store.keys(conversation_id).caller, "revoked", 1)

    async def lock(self, conversation_id: str, holder: str) -> bool:
        """Become the one who answers, for a while; say whether nobody else is."""
        key = f"{self._store.keys(conversation_id).caller}:lock"
        _, found = await self._store.call_many(
            [("SET", key, holder, "NX", "PX", int(LOCK_SECONDS * 1000)), ("GET", key)]
        )
        return bool(found == holder.encode())

    async def answered(self, conversation_id: str) -> None:
        """Remember that they have their answer; the conversation may continue without them. Idempotent.

        Where none has begun, nothing else would ever remove what is kept of them: it goes after `FORGOTTEN_AFTER`.
        """
        names = self._store.keys(conversation_id)
        commands: list[tuple[Argument, ...]] = [
            ("HDEL", names.meta, "awaited", "noticed"),
            ("ZREM", names.shard.awaited, conversation_id),
        ]
        is_there, has_begun = await self._store.call_many([("HEXISTS", names.caller, "kind"), ("EXISTS", names.meta)])
        if is_there:  # else the conversation was deleted, and what is written now would stay for ever
            commands = [("HSET", names.caller, "answered", 1), *commands, ("DEL", f"{names.caller}:lock")]
        if is_there and not has_begun:
            commands.append(("PEXPIRE", names.caller, int(FORGOTTEN_AFTER.total_seconds() * 1000)))
        await self._store.call_many(commands)

    async def look_later(self, caller: Caller) -> None:
        """Have the conversation looked at again: soon at first, then less and less often."""
        names = self._store.keys(caller.conversation_id)
        pause = min(FIRST_LOOK_SECONDS * 2**caller.looks, LONGEST_LOOK_SECONDS)
        due = to_millis(self._store.clock.now()) + int(pause * 1000)
        await self._store.call_many(
            [
                ("ZADD", names.shard.awaited, due, caller.conversation_id),
                ("HSET", names.caller, "looks", min(caller.looks + 1, 10)),
            ]
        )

    async def pass_on(self, caller: Caller, *, is_news: bool) -> None:
        """Leave a conversation to the doors of another broker: some of them look at it soon, if there are any.

        The time is random, or the same door could find it first again and again.

        Args:
            is_news: it has just got on; otherwise it is looked at less and less often.
        """
        names, looks = self._store.keys(caller.conversation_id), 0 if is_news else min(caller.looks + 1, 10)
        pause = SHORTEST_LOOK_SECONDS + jitter() * min(2.0**looks, LONGEST_LOOK_SECONDS)
        due = to_millis(self._store.clock.now()) + int(pause * 1000)
        await self._store.call_many(
            [("ZADD", names.shard.awaited, "XX", due, caller.conversation_id), ("HSET", names.caller, "looks", looks)]
        )

    async def overdue(self, names: ShardKeys, *, limit: int) -> list[str]:
        """Return conversations that are to be looked at, and put each off, so that other doors look at others."""
        now = to_millis(self._store.clock.now())
        found = await self._store.call("ZRANGEBYSCORE", names.awaited, "-inf", now, "LIMIT", 0, limit)
        due = now + int(FIRST_LOOK_SECONDS * 1000)
        if found:
            await self._store.call_many([("ZADD", names.awaited, "XX", due, cid) for cid in found])
        return [named for cid in found if (named := await self._named(names, cid))]

    async def waiting(self, names: ShardKeys, *, limit: int) -> tuple[list[Caller], int]:
        """Return those of a shard who have no answer yet, and how many more were not looked at."""
        members = await self._store.call("ZRANGE", names.awaited, 0, limit - 1)
        ids = [named for member in members if (named := await self._named(names, member))]
        found = await asyncio.gather(*map(self._readable, ids))
        waiting = [caller for caller in found if caller is not None and not (caller.outcome or caller.is_answered)]
        return waiting, max(0, await self._store.call("ZCARD", names.awaited) - len(members))

    async def _readable(self, conversation_id: str) -> Caller | None:
        try:
            return await self.of(conversation_id)
        except (ValueError, SecretsLocked):
            return None

    async def _named(self, names: ShardKeys, member: bytes) -> str:
        """Return the conversation that a member of the set names; one that names none is put aside."""
        try:
            return conversation_of(self._store, names, member).conversation_id
        except CANNOT_BE_READ as error:
            await Unreadable(self._store).remove(names, names.awaited, member, error)
            return ""

    async def hear(self, conversation_id: str) -> None:
        """Let the next append leave a notice again; to be called before the log is read."""
        await self._store.call("HDEL", self._store.keys(conversation_id).meta, "noticed")
