"""What a controller worker reads of its environment; the only place in this package that does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from broker.limits.quotas import QuotaTable
from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings
from broker.secrets.secrets import no_key, secret_key


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of one controller worker.

    Attributes:
        store_url: the log's store.
        celery_url: Celery's broker.
        max_conversations: how many it holds at once, waiting ones included.
        idle_seconds: how long a conversation that only waits is kept in memory.
        heartbeat_ttl_seconds: see `BrokerSettings`.
        model_env: the environment that model settings (`LLM_*`) are read from.
        quotas: of models, for the whole cluster.
        hooks: the file that names the hooks; empty for none.
        secret_key: returns what opens the secrets of conversations.
    """

    store_url: str
    celery_url: str
    shards: int
    max_conversations: int
    idle_seconds: float
    heartbeat_ttl_seconds: float
    model_env: Mapping[str, str]
    quotas: QuotaTable
    hooks: str
    secret_key: Callable[[], bytes | None] = no_key


def controller_settings(env: Mapping[str, str] = os.environ) -> ControllerSettings:
    """Read the settings.

    Raises:
        UsageError: a value cannot be used.
    """
    broker = BrokerSettings.from_env(env)
    arm(broker)
    return ControllerSettings(
        store_url=broker.url,
        celery_url=broker.celery_url,
        shards=broker.shards,
        max_conversations=broker.max_conversations,
        idle_seconds=broker.idle_seconds,
        heartbeat_ttl_seconds=broker.heartbeat_ttl_seconds,
        model_env=dict(env),
        quotas=QuotaTable.of_setting(broker.quotas),
        hooks=broker.hooks,
        secret_key=partial(secret_key, broker),
    )
