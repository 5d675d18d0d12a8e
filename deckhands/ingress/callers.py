"""Callers: the Celery tasks and producers that wait for the end of a conversation.

A caller is stored together with the conversation, in the step that creates it, until the caller has its answer.

Holds: an outcome is decided once, so a repeated answer has the same bytes; a delivered answer is not repeated. The
callbacks of a task may contain secrets, and are encrypted like the secrets of the conversation.
Keys: `deck:{k}:c:<id>:caller`, `deck:{k}:awaited`, and `awaited` and `noticed` in the conversation's meta hash.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from broker.coordination import PARSE_ERRORS, Quarantine, find_conversation_keys
from broker.runtime import BrokerSettings, draw_jitter, new_key, to_millis
from broker.secrets import Secrets, SecretsLocked, load_secret_key
from broker.store import Argument, ShardKeys, Store, decode_fields

CELERY, STREAM = "celery", "stream"
MIN_CHECK_SECONDS = 0.2
FIRST_CHECK_SECONDS = 5.0
MAX_CHECK_SECONDS = 60.0
LOCK_SECONDS = 30.0
"""Longer than Celery's lock on the end of a chord, which a dead worker leaves behind."""
CALLER_TTL = timedelta(days=7)
SEALED = b"sealed:"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one conversation.

    Attributes:
        kind: `celery` or `stream`.
        name: the task's id, or the name of the reply stream.
        request_id: the producer's own id of the entry; empty for a task.
        kept: the fields that Celery needs when the task completes, such as callbacks; empty for a stream.
        is_headless: no user can answer the agent's questions.
        is_revoked: the task was revoked.
        outcome: the decided answer, as JSON; empty until it is decided.
        is_answered: the answer was delivered.
        broker: the Celery broker of the task, see `BrokerSettings.broker_name`; None if any ingress worker may answer.
        started_ms: when the agent started, in Unix milliseconds; 0 if the conversation ended before that; None if not
            yet.
        looks: the number of checks by ingress workers without a delivered answer.
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
        """The value of `awaited` in the conversation's meta hash."""
        return self.kind if self.kind == CELERY else f"{self.kind}:{self.name}"


class Callers:
    """The callers of a store's conversations.

    Args:
        secrets: encrypts `Caller.kept`.
    """

    def __init__(self, store: Store, secrets: Secrets) -> None:
        self._store = store
        self._secrets = secrets

    async def add(self, caller: Caller) -> None:
        """Store the caller of a conversation that may have none. The first caller of a conversation stays.

        `start_conversation` stores the caller of a new conversation in the step that creates it.
        """
        key = (await self._store.locate(caller.conversation_id)).caller
        await self._store.call_many([("HSETNX", key, *field) for field in self.to_fields(caller).items()])

    def to_fields(self, caller: Caller) -> dict[str, Argument]:
        """Return the fields of a caller's hash, its secrets encrypted."""
        kept = json.dumps(caller.kept or {}).encode()
        if b'"secrets"' in kept:
            load_secret_key(BrokerSettings.from_env(), is_made=True)
            kept = SEALED + self._secrets.seal(caller.conversation_id, kept.decode())
        fields: dict[str, Argument] = {"kind": caller.kind, "name": caller.name, "request_id": caller.request_id}
        fields |= {"kept": kept, "headless": int(caller.is_headless)}
        return fields if caller.broker is None else fields | {"broker": caller.broker}

    async def forget(self, conversation_id: str) -> None:
        """Delete the caller of a conversation that is not created, unless another worker has created it."""
        await self._call_function("deck_forget_caller", conversation_id)

    async def of(self, conversation_id: str) -> Caller | None:
        """Return the caller of a conversation; None if it never had one.

        Raises:
            ValueError, SecretsLocked: the stored caller cannot be read.
        """
        return self.parse(
            conversation_id, await self._store.call("HGETALL", (await self._store.locate(conversation_id)).caller)
        )

    def parse(self, conversation_id: str, flat: Sequence[bytes]) -> Caller | None:
        """Parse the fields of a caller's hash; raises the errors of `of`."""
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        kept = raw.pop(b"kept", b"{}")
        found = decode_fields([part for item in raw.items() for part in item])
        if "kind" not in found:
            return None
        if kept.startswith(SEALED):
            kept = self._secrets.unseal(conversation_id, kept.removeprefix(SEALED)).encode()
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

    async def reset_notice(self, conversation_id: str) -> tuple[Argument, ...]:
        """Return the command that lets the next append send a notice again. Send it before reading the log."""
        return ("HDEL", (await self._store.locate(conversation_id)).meta, "noticed")

    async def decide(self, conversation_id: str, outcome: Mapping[str, Any] | str) -> str:
        """Store the answer, or its JSON, unless one was decided before, and return the stored one as JSON."""
        key = (await self._store.locate(conversation_id)).caller
        text = outcome if isinstance(outcome, str) else json.dumps(outcome)
        _, decided = await self._store.call_many([("HSETNX", key, "outcome", text), ("HGET", key, "outcome")])
        stored: str = decided.decode()
        return stored

    async def note_start(self, conversation_id: str, started_ms: int) -> bool:
        """Store when the agent started; return whether it was unknown before."""
        key = (await self._store.locate(conversation_id)).caller
        return bool(await self._store.call("HSETNX", key, "started", started_ms))

    async def revoke(self, conversation_id: str) -> None:
        """Mark the task as revoked. Idempotent."""
        await self._store.call("HSET", (await self._store.locate(conversation_id)).caller, "revoked", 1)

    async def take_answer(self, caller: Caller, answer: str, started_ms: int) -> tuple[str, bool] | None:
        """Decide the answer unless it is decided, and acquire the right to deliver it for `LOCK_SECONDS`.

        Also schedules another check of the conversation, which tries again if this worker does not deliver it.

        Args:
            started_ms: see `Caller`.

        Returns:
            The decided answer, and whether the start was unknown before. None if the caller has its answer, or another
            worker delivers it.
        """
        lock_ms, checks = int(LOCK_SECONDS * 1000), min(caller.looks + 1, 10)
        arguments = (answer, new_key(), lock_ms, self._next_check_ms(caller), checks, started_ms)
        reply = await self._call_function("deck_take_answer", caller.conversation_id, *arguments)
        return (reply[1].decode(), bool(reply[2])) if reply[0] == "taken" else None

    async def give_back_answer(self, caller: Caller) -> None:
        """Give up the right to deliver an answer that could not be delivered; the next check tries again."""
        await self._store.call("DEL", f"{(await self._store.locate(caller.conversation_id)).caller}:lock")

    async def note_repeat(self, conversation_id: str) -> None:
        """Note that the message of the task has arrived again, for `mark_answered`."""
        await self._store.call("HSET", (await self._store.locate(conversation_id)).caller, "again", 1)

    async def mark_answered(self, conversation_id: str) -> bool:
        """Mark the caller as answered; the conversation may continue without it. Idempotent.

        Returns whether the message of the task has arrived again, because the delivered answer may then be lost.

        The caller's keys expire after `CALLER_TTL`, because nothing else removes those of a conversation that was never
        created.
        """
        ttl_ms = int(CALLER_TTL.total_seconds() * 1000)
        return bool((await self._call_function("deck_mark_answered", conversation_id, ttl_ms))[1])

    async def schedule_check(self, caller: Caller) -> None:
        """Schedule another check of the conversation: soon at first, then less and less often."""
        names = await self._store.locate(caller.conversation_id)
        await self._store.call_many(
            [
                ("ZADD", names.shard.awaited, self._next_check_ms(caller), caller.conversation_id),
                ("HSET", names.caller, "looks", min(caller.looks + 1, 10)),
            ]
        )

    async def leave_to_others(self, caller: Caller, *, is_news: bool) -> None:
        """Leave a conversation to the ingress workers of another broker; one of them, if any, checks it soon.

        The delay is random; otherwise the same worker could find it first every time.

        Args:
            is_news: whether it has just made progress; otherwise it is checked less and less often.
        """
        names = await self._store.locate(caller.conversation_id)
        looks = 0 if is_news else min(caller.looks + 1, 10)
        pause = MIN_CHECK_SECONDS + draw_jitter() * min(2.0**looks, MAX_CHECK_SECONDS)
        due = to_millis(self._store.clock.now()) + int(pause * 1000)
        await self._store.call_many(
            [("ZADD", names.shard.awaited, "XX", due, caller.conversation_id), ("HSET", names.caller, "looks", looks)]
        )

    async def overdue(self, names: ShardKeys, *, limit: int) -> list[str]:
        """Return conversations that are due for a check, and postpone each, so that other workers skip them."""
        now = to_millis(self._store.clock.now())
        found = await self._store.call("ZRANGEBYSCORE", names.awaited, "-inf", now, "LIMIT", 0, limit)
        due = now + int(FIRST_CHECK_SECONDS * 1000)
        if found:
            await self._store.call_many([("ZADD", names.awaited, "XX", due, cid) for cid in found])
        return [named for cid in found if (named := await self._conversation_in(names, cid))]

    async def waiting(self, names: ShardKeys, *, limit: int) -> tuple[list[Caller], int]:
        """Return the unanswered callers of a shard, and how many more were not read."""
        members = await self._store.call("ZRANGE", names.awaited, 0, limit - 1)
        ids = [named for member in members if (named := await self._conversation_in(names, member))]
        found = await asyncio.gather(*map(self._find_readable, ids))
        waiting = [caller for caller in found if caller is not None and not (caller.outcome or caller.is_answered)]
        return waiting, max(0, await self._store.call("ZCARD", names.awaited) - len(members))

    async def _find_readable(self, conversation_id: str) -> Caller | None:
        try:
            return await self.of(conversation_id)
        except (ValueError, SecretsLocked):
            return None

    async def _conversation_in(self, names: ShardKeys, member: bytes) -> str:
        """Return the conversation id in a member of the set; a member without one is quarantined."""
        try:
            return (await find_conversation_keys(self._store, names, member)).conversation_id
        except PARSE_ERRORS as error:
            await Quarantine(self._store).remove(names, names.awaited, member, error)
            return ""

    def _next_check_ms(self, caller: Caller) -> int:
        pause = min(FIRST_CHECK_SECONDS * 2**caller.looks, MAX_CHECK_SECONDS)
        return to_millis(self._store.clock.now()) + int(pause * 1000)

    async def _call_function(self, name: str, conversation_id: str, *arguments: Argument) -> list[Any]:
        names = await self._store.locate(conversation_id)
        return await self._store.call_function(name, (names.root, names.shard.root), conversation_id, *arguments)
