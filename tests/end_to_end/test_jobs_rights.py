"""A worker of jobs and a beat have the rights that they need in both servers, and no more."""

from __future__ import annotations

import base64
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from celery import Celery

from broker.contract.fencing import Ownership
from broker.contract.specs import Tenancy
from broker.health import BEAT_LOCK, HEALTHY, LAPSED, check
from broker.limits.ledger import Ledger, list_accounts
from deckhands.client.client import Client
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from deckhands.operations.webhooks.repository import WebhookRepository
from tests.archive_parts import begin_ended
from tests.polling import until
from tests.served_stores import LIMIT_SECONDS, refusals, serving_both, worker
from tests.webhook_parts import begin_worked, receiving


def test_health_check_reads_the_beats_lock() -> None:
    assert f"{BEAT_KEYS}:lock" == BEAT_LOCK


@pytest.mark.parametrize("masters", ["", f"one:{base64.b64encode(bytes(32)).decode()}"])
async def test_jobs_and_beat_work_with_their_rights(
    tmp_path: Path, programs, monkeypatch: pytest.MonkeyPatch, masters: str
) -> None:
    monkeypatch.setenv("DECKHANDS_MASTER_KEYS", masters)
    place, rules = tmp_path / "archive", tmp_path / "retention.toml"
    rules.write_text('[[rule]]\nage = "0s"\n')
    async with AsyncExitStack() as stack:
        log, queue, usual = await stack.enter_async_context(serving_both(tmp_path, programs))
        environment = {**usual, "DECKHANDS_MASTER_KEYS": masters}
        assert (await check("beat", queue.role("beat"))).exit_status == LAPSED
        await stack.enter_async_context(worker("deckhands.operations.jobs.beat", environment, queue=queue))
        archiving = {"DECKHANDS_ARCHIVE": str(place), "DECKHANDS_RETENTION": str(rules), "DECKHANDS_URL": log.jobs}
        await stack.enter_async_context(worker("deckhands.operations.jobs", environment | archiving, queue=queue))
        client = await stack.enter_async_context(await Client.connect(log.operator))
        await begin_ended(client, "one-of-us", labels={"team": "ci"}, tenancy=Tenancy(tenant="acme"))
        ledger, accounts = Ledger(client.store), list_accounts("one-of-us", tenant="acme")
        owner = Ownership("one-of-us", "w", "1")
        await ledger.settle(owner, accounts, total_usd=0.5)
        await ledger.reserve(owner, accounts, worst_usd=0.25, total_usd=0.5, is_batched=True)
        await client.store.connection.call("SET", client.store.known_keys("nobody").blob("0" * 64), "left")
        with Celery(broker=queue.queue, set_as_current=False) as app:
            for name in ("orphans", "retire"):
                app.send_task(f"deckhands.jobs.{name}", queue="deckhands.jobs", ignore_result=True)

            async def is_archived() -> bool:
                return not await client.recent() and bool([*place.rglob("one-of-us.zip")])

            await until(is_archived, limit=LIMIT_SECONDS, what="a conversation in the archive")

        assert await ledger.list_conversation_ids("tenant:acme") == []
        assert (await ledger.load_account("tenant:acme")).spent_usd == 0.5

        async def beats() -> bool:
            return (await check("beat", queue.role("beat"))).exit_status == HEALTHY

        await until(beats, limit=LIMIT_SECONDS, what="a beat")
        assert await refusals(log) == []


async def test_jobs_turn_off_a_webhook_whose_receiver_is_gone(
    tmp_path: Path, programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = base64.urlsafe_b64encode(bytes(32)).decode()
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", key)
    monkeypatch.setenv("DECKHANDS_WEBHOOK_PRIVATE", "127.0.0.1")
    async with AsyncExitStack() as stack:
        log, queue, usual = await stack.enter_async_context(serving_both(tmp_path, programs))
        environment = {
            **usual,
            "DECKHANDS_SECRET_KEY": key,
            "DECKHANDS_WEBHOOK_PRIVATE": "127.0.0.1",
            "DECKHANDS_URL": log.jobs,
        }
        await stack.enter_async_context(worker("deckhands.operations.jobs", environment))
        receiver = await stack.enter_async_context(receiving())
        receiver.answer = lambda _: 410
        client = await stack.enter_async_context(await Client.connect(log.gateway))
        webhooks = WebhookRepository(client.store, client.secrets)
        hook, _ = await webhooks.add("acme", receiver.url, ("conversation.settled",))
        await begin_worked(client, "one-of-us", tenancy=Tenancy(tenant="acme"))
        with Celery(broker=queue.queue, set_as_current=False) as app:

            async def is_off() -> bool:
                app.send_task("deckhands.jobs.webhooks", queue="deckhands.jobs", ignore_result=True)
                return not (await webhooks.webhook(hook.id)).is_enabled

            await until(is_off, limit=LIMIT_SECONDS, what="a webhook that is turned off")
        assert await refusals(log) == []
