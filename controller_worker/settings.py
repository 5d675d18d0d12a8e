"""What a controller worker reads of its environment; the only place in this package that does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from broker.limits.quotas import QuotaTable
from broker.limits.tenants import TenantTable, memory_bound
from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings, Count, Seconds
from broker.secrets.secrets import secret_key
from controller_worker.sdk.sessions import SandboxChoice


class ControllerVariables(BrokerSettings):
    """The variables that only controller workers read."""

    max_conversations: Annotated[Count, Field(description="conversations that a controller worker holds at once")] = (
        2_000
    )
    idle_seconds: Annotated[Seconds, Field(description="how long a conversation that only waits is kept in memory")] = (
        30.0
    )
    quotas: Annotated[
        str, Field(description="what providers let us call: the path of a TOML file, or the table itself")
    ] = ""
    tenants: Annotated[
        str, Field(description="weights and bounds of tenants: the path of a TOML file, or the table itself")
    ] = ""
    admit_memory: Annotated[
        str,
        Field(
            description="conversations begin while the store uses less: a share of its `maxmemory`, a size, or `none`; "
            "empty: what is in force, at first 80%"
        ),
    ] = ""
    sdk_sessions: Annotated[
        Count, Field(description="programs of the Claude Agent SDK that a controller worker holds at once, 200 MB each")
    ] = 8
    sdk_sandbox: Annotated[
        Literal["auto", "bwrap", "none"],
        Field(description="what those programs run in: `auto` (`bwrap` where it works), `bwrap` or `none`"),
    ] = "auto"
    hooks: Annotated[str, Field(description="a file that names what runs before and after events; empty: none")] = ""


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
        tenants: their weights and bounds, those of the quota table among them.
        admit_memory: see `memory_bound`; None: what is in force.
        sdk_sessions: how many programs of the Claude Agent SDK it holds at once.
        sdk_sandbox: what they run in.
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
    tenants: TenantTable
    admit_memory: float | None
    sdk_sessions: int
    sdk_sandbox: SandboxChoice
    hooks: str
    secret_key: Callable[[], bytes | None]


def controller_settings(env: Mapping[str, str] = os.environ) -> ControllerSettings:
    """Read the settings.

    Raises:
        UsageError: a value cannot be used.
    """
    variables = ControllerVariables.from_env(env)
    arm(variables)
    quotas = QuotaTable.of_setting(variables.quotas)
    tenants = TenantTable.of_setting(variables.tenants).beside(quotas.tenants)
    return ControllerSettings(
        store_url=variables.url,
        celery_url=variables.celery_url,
        shards=variables.shards,
        max_conversations=variables.max_conversations,
        idle_seconds=variables.idle_seconds,
        heartbeat_ttl_seconds=variables.heartbeat_ttl_seconds,
        model_env=dict(env),
        quotas=quotas.model_copy(update={"tenants": tenants}),
        tenants=tenants,
        admit_memory=memory_bound(variables.admit_memory) if variables.admit_memory else None,
        sdk_sessions=variables.sdk_sessions,
        sdk_sandbox=variables.sdk_sandbox,
        hooks=variables.hooks,
        secret_key=partial(secret_key, variables),
    )
