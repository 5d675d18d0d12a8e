"""The webhooks of a store and their deliveries.

Holds: a secret is shown once, when a webhook is created; the store has only its encrypted form. The deliveries of a
conversation to a webhook form a line, and one worker at a time has a line. See `broker/log/lua/webhooks.lua`.
Does not: keep more than `KEPT` finished deliveries of a webhook.
Keys: `deck:{k}:webhooks…`, `deck:{k}:webhook:<id>:…` in the shard of the webhook's id; `deck:{k}:hooked`, and the field
`hooked` of `deck:{k}:clock` in every shard.
"""

from __future__ import annotations

import base64
import contextlib
import secrets as randomness
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from broker.coordination import Quarantine
from broker.runtime import BrokerSettings, DeckhandsError, UsageError
from broker.secrets import Secrets, load_secret_key
from broker.store import Argument, ShardKeys, Store
from deckhands.operations.webhooks.webhook import Delivery, Webhook

MAX_WEBHOOKS = 1_000
MAX_OF_TENANT = 50
KEPT_DELIVERIES = 200
"""The number of finished deliveries kept per webhook."""
MAX_WAITING = 10_000
"""A webhook with more waiting deliveries is turned off."""
LEASE_MS = 60_000
"""How long a worker holds a line; the crash of a worker delays the line by this much."""
SECRET_BYTES = 32
ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"

WebhookCheck = Callable[[Webhook], None]


class UnknownWebhook(DeckhandsError):
    """The webhook or delivery does not exist, or is another tenant's."""

    code = "unknown_webhook"


@dataclass(frozen=True, slots=True)
class DeliveryLine:
    """The deliveries of a conversation to a webhook, while a worker holds them.

    Attributes:
        due: when the worker's lease ends.
    """

    webhook_id: str
    conversation_id: str
    due: str


class WebhookRepository:
    """The webhooks of a store."""

    def __init__(self, store: Store, secrets: Secrets) -> None:
        self._store = store
        self._secrets = secrets

    async def add(
        self,
        tenant: str,
        url: str,
        events: tuple[str, ...],
        conversation_id: str = "",
        *,
        form: Literal["deckhands", "a2a"] = "deckhands",
        token: str = "",
    ) -> tuple[Webhook, str]:
        """Add a webhook and return it with its secret, as `whsec_…`.

        Args:
            form: see `Webhook`.
            token: for A2A, sent back to the receiver; empty for none.

        Raises:
            UsageError: the tenant has too many webhooks.
        """
        there = await self.all()
        if len(there) >= MAX_WEBHOOKS:
            raise UsageError(f"The limit of {MAX_WEBHOOKS:,} webhooks is reached.", remedy="Remove one.")
        if sum(hook.tenant == tenant for hook in there) >= MAX_OF_TENANT:
            raise UsageError(f"The limit of {MAX_OF_TENANT} webhooks per tenant is reached.", remedy="Remove one.")
        load_secret_key(BrokerSettings.from_env(), is_made=True)
        webhook_id = "wh_" + "".join(randomness.choice(ALPHABET) for _ in range(16))
        secret = f"whsec_{base64.b64encode(randomness.token_bytes(SECRET_BYTES)).decode()}"
        sealed, sealed_token = (
            base64.b64encode(self._secrets.seal(_encryption_scope(webhook_id), text)).decode() if text else ""
            for text in (secret, token)
        )
        hook = Webhook(
            id=webhook_id,
            tenant=tenant,
            url=url,
            events=events,
            conversation_id=conversation_id,
            secret=sealed,
            form=form,
            token=sealed_token,
            created=await self._store.now(self._store.find_home(webhook_id)),
        )
        await self.mark_tenants([tenant])
        if await self._put(hook.id, b"", hook.model_dump_json().encode()) == "full":
            raise UsageError(f"The limit of {MAX_WEBHOOKS:,} webhooks is reached.", remedy="Remove one.")
        return hook, secret

    def now(self) -> datetime:
        """Return the time used to sign deliveries."""
        return self._store.clock.now()

    async def mark_tenants(self, tenants: list[str]) -> None:
        """Record in every shard which tenants have webhooks. Idempotent."""
        for names in await self._store.load_shards() if tenants else ():
            fields = [part for tenant in tenants for part in (tenant, "1")]
            await self._store.call_many(
                [("HSET", names.webhook_tenants, *fields), ("HSET", names.clock, "hooked", "1")]
            )

    async def all(self) -> list[Webhook]:
        """Return the readable webhooks, oldest first."""
        each = await self._store.call_many([("HGETALL", names.webhooks) for names in self._store.all_shards])
        found = []
        for text in (text for flat in each for text in flat[1::2]):
            with contextlib.suppress(ValueError):  # includes pydantic's errors
                found.append(Webhook.model_validate_json(text))
        return sorted(found, key=lambda hook: (hook.created, hook.id))

    async def webhook(self, webhook_id: str) -> Webhook:
        """Return one webhook.

        Raises:
            UnknownWebhook: there is no such webhook.
        """
        return (await self._load(webhook_id))[0]

    async def remove(self, webhook_id: str, *, check: WebhookCheck | None = None) -> None:
        """Remove a webhook and its deliveries.

        Args:
            check: raises unless the caller may remove the current version of the webhook; only that version is removed.

        Raises:
            UnknownWebhook: there is no such webhook.
        """
        while True:
            hook, text = await self._load(webhook_id)
            if check is not None:
                check(hook)
            if await self._put(webhook_id, text, b"") != "other":
                return

    async def set_enabled(
        self, webhook_id: str, *, is_enabled: bool, why_off: str = "", check: WebhookCheck | None = None
    ) -> Webhook:
        """Turn a webhook on or off; events that happen while it is off are not delivered. Idempotent.

        Args:
            check: raises unless the caller may change the current version of the webhook; only that version is changed.

        Raises:
            UnknownWebhook: there is no such webhook.
        """
        while True:
            hook, text = await self._load(webhook_id)
            if check is not None:
                check(hook)
            changed = hook.model_copy(update={"is_enabled": is_enabled, "why_off": why_off})
            if is_enabled and not hook.is_enabled:
                changed = changed.model_copy(
                    update={"created": await self._store.now(self._store.find_home(webhook_id))}
                )
            if await self._put(webhook_id, text, changed.model_dump_json().encode()) == "put":
                return changed

    def load_secret(self, hook: Webhook) -> str:
        """Return the secret of a webhook.

        Raises:
            SecretsLocked: this process has no key that decrypts it.
        """
        return self._secrets.unseal(_encryption_scope(hook.id), base64.b64decode(hook.secret))

    def load_token(self, hook: Webhook) -> str:
        """Return the token of an A2A webhook, or empty; raises the errors of `load_secret`."""
        return self._secrets.unseal(_encryption_scope(hook.id), base64.b64decode(hook.token)) if hook.token else ""

    async def plan(self, hook: Webhook, delivery: Delivery) -> str:
        """Add a delivery to its line: `planned`, `known`, `full`, or `missing`; see Lua. Idempotent."""
        place, text = delivery.event_id, delivery.model_dump_json()
        arguments = (hook.id, delivery.conversation_id, delivery.id, place, text, MAX_WAITING)
        (outcome,) = await self._call("deck_plan_delivery", *arguments)
        return str(outcome)

    async def has_work(self) -> bool:
        """Return whether there is a webhook, or news or a delivery left by a removed webhook."""
        commands = [
            command
            for names in self._store.all_shards
            for command in (
                ("HLEN", names.webhooks),
                ("ZCARD", f"{names.webhooks}:due"),
                ("ZCARD", names.webhook_news),
            )
        ]
        return any(await self._store.call_many(commands))

    async def due(self, limit: int) -> list[DeliveryLine]:
        """Claim due lines; they must be processed within `LEASE_MS`."""
        shards = self._store.all_shards
        waiting = await self._store.call_many([("ZCARD", f"{names.webhooks}:due") for names in shards])
        busy = [names for names, count in zip(shards, waiting, strict=True) if count]
        at = randomness.randbelow(len(busy)) if busy else 0  # so that no shard is always the last one
        found: list[DeliveryLine] = []
        for names in (*busy[at:], *busy[:at]):
            if len(found) >= limit:
                break
            found += await self._claim_due(names, limit - len(found))
        return found

    async def _claim_due(self, names: ShardKeys, limit: int) -> list[DeliveryLine]:
        _, *flat = await self._store.call_function("deck_send_due", (names.root,), limit, LEASE_MS)
        found = []
        for line, due in zip(flat[::2], flat[1::2], strict=True):
            try:
                webhook_id, _, conversation_id = _text(line).partition(" ")
            except UnicodeDecodeError:
                await self._store.call("ZREM", f"{names.webhooks}:due", line)
                continue
            found.append(DeliveryLine(webhook_id, conversation_id, _text(due)))
        return found

    async def take(self, line: DeliveryLine) -> tuple[DeliveryLine, Delivery] | None:
        """Return the first delivery of a line; None if it is empty or another worker has it."""
        arguments = (line.webhook_id, line.conversation_id, line.due, LEASE_MS)
        outcome, *rest = await self._call("deck_take_delivery", *arguments)
        if outcome != "taken":
            return None
        name, text, due = rest
        held = DeliveryLine(line.webhook_id, line.conversation_id, _text(due))
        try:
            return held, Delivery.model_validate_json(text)
        except ValueError:  # includes pydantic's errors
            unreadable = Delivery(
                id=_text(name),
                conversation_id=line.conversation_id,
                event_id=0,
                type="",
                body="",
                planned=await self._store.now(self._store.find_home(line.webhook_id)),
                state="failed",
                error="Its stored form cannot be read.",
            )
            following = await self.end_attempt(held, unreadable, None)
            return None if following is None else await self.take(following)

    async def end_attempt(
        self, line: DeliveryLine, delivery: Delivery, pause_seconds: float | None
    ) -> DeliveryLine | None:
        """Record the result of an attempt; None if another worker has the line now.

        Args:
            pause_seconds: the time until the next attempt; None if the delivery has ended.
        """
        pause: Argument = "" if pause_seconds is None else int(pause_seconds * 1_000)
        arguments = (line.webhook_id, line.conversation_id, delivery.id, line.due)
        text = delivery.model_dump_json()
        outcome, *rest = await self._call("deck_end_attempt", *arguments, text, pause, KEPT_DELIVERIES)
        return DeliveryLine(line.webhook_id, line.conversation_id, _text(rest[0])) if outcome == "ended" else None

    async def deliveries(self, webhook_id: str, *, limit: int) -> list[Delivery]:
        """Return the latest readable deliveries of a webhook, newest first."""
        home = self._store.find_home(webhook_id)
        order, sent = (home.webhook_deliveries(webhook_id, part) for part in ("order", "sent"))
        names = await self._store.call("ZREVRANGE", order, 0, limit - 1)
        if not names:
            return []
        texts = await self._store.call("HMGET", sent, *names)
        return [delivery for text in texts if (delivery := _parse_delivery(text)) is not None]

    async def redeliver(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Repeat a delivery under the same id, before later ones of its conversation.

        Raises:
            UnknownWebhook: the delivery no longer exists.
        """
        while True:
            sent = self._store.find_home(webhook_id).webhook_deliveries(webhook_id, "sent")
            text = await self._store.call("HGET", sent, delivery_id)
            if (found := _parse_delivery(text)) is None:
                raise UnknownWebhook(
                    "There is no such delivery.", remedy="The log of deliveries lists the latest ones."
                )
            again = found.model_copy(update={"state": "waiting", "attempts": 0, "next_attempt": None, "error": ""})
            arguments = (webhook_id, found.conversation_id, found.id, found.event_id, text, again.model_dump_json())
            (outcome,) = await self._call("deck_redeliver", *arguments)
            if outcome == "planned":
                return again

    async def rename_foreign_keys(self) -> None:
        """Rename keys of another type that occupy the places of the webhooks."""
        unreadable = Quarantine(self._store)
        places = [(shard.webhooks, "hash") for shard in self._store.all_shards]
        places += [(f"{shard.webhooks}:due", "zset") for shard in self._store.all_shards]
        places += [(shard.webhook_tenants, "hash") for shard in self._store.all_shards]
        places += [(shard.webhook_news, "zset") for shard in self._store.all_shards]
        places += [(shard.clock, "hash") for shard in self._store.all_shards]
        kinds = await self._store.call_many([("TYPE", key) for key, _ in places])
        for (key, kind), found in zip(places, kinds, strict=True):
            if _text(found) not in (kind, "none"):
                await unreadable.move_away(key, kind, ValueError(f"it was a {_text(found)}, not a {kind}"))

    async def _load(self, webhook_id: str) -> tuple[Webhook, bytes]:
        text = await self._store.call("HGET", self._store.find_home(webhook_id).webhooks, webhook_id)
        try:
            if text is not None:
                return Webhook.model_validate_json(text), text
        except ValueError:
            pass
        raise UnknownWebhook("There is no such webhook.", remedy="`deckhands webhook ls` lists them.")

    async def _put(self, webhook_id: str, known: bytes, text: bytes) -> str:
        (outcome,) = await self._call("deck_put_webhook", webhook_id, known, text, MAX_WEBHOOKS)
        return str(outcome)

    async def _call(self, function: str, webhook_id: str, *arguments: Argument) -> list[Any]:
        keys = (self._store.find_home(webhook_id).root,)
        return await self._store.call_function(function, keys, webhook_id, *arguments)


def _parse_delivery(text: bytes | None) -> Delivery | None:
    """Parse a stored delivery; None if there is none, or if it is unreadable."""
    try:
        return None if text is None else Delivery.model_validate_json(text)
    except ValueError:  # includes pydantic's errors
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _encryption_scope(webhook_id: str) -> str:
    return f"webhook-{webhook_id}"
