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
from broker.runtime.errors import UsageError
from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings, Count, Seconds
from broker.secrets.secrets import secret_key


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
    any_model: Annotated[
        bool,
        Field(
            description="set by `run`, `demo` and evaluations for their private workers: conversations may name any "
            "model and any script; refused where others could reach the store"
        ),
    ] = False
    hooks: Annotated[str, Field(description="a file that names what runs before and after events; empty: none")] = ""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of one controller worker.

    Attributes:
        variables: as the environment has them.
        model_env: the environment that model settings (`LLM_*`) are read from.
        quotas: of models, for the whole cluster.
        tenants: their weights and bounds, those of the quota table among them.
        admit_memory: see `memory_bound`; None: what is in force.
        secret_key: returns what opens the secrets of conversations.
    """

    variables: ControllerVariables
    model_env: Mapping[str, str]
    quotas: QuotaTable
    tenants: TenantTable
    admit_memory: float | None
    secret_key: Callable[[], bytes | None]


def controller_settings(env: Mapping[str, str] = os.environ) -> ControllerSettings:
    """Read the settings.

    Raises:
        UsageError: a value cannot be used.
    """
    variables = ControllerVariables.from_env(env)
    arm(variables)
    if variables.any_model and not variables.url.startswith("unix://"):
        raise UsageError(
            "DECKHANDS_ANY_MODEL is set, and the store at DECKHANDS_URL is not private to this machine.",
            remedy="Unset it, and offer models by LLM_MODEL and LLM_CONFIG; docs/models.md says how.",
        )
    quotas = QuotaTable.of_setting(variables.quotas)
    tenants = TenantTable.of_setting(variables.tenants).beside(quotas.tenants)
    return ControllerSettings(
        variables=variables,
        model_env=dict(env),
        quotas=quotas.model_copy(update={"tenants": tenants}),
        tenants=tenants,
        admit_memory=memory_bound(variables.admit_memory) if variables.admit_memory else None,
        secret_key=partial(secret_key, variables),
    )
