"""The settings of a controller worker; the only module of this package that reads its environment."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field

from broker.limits import QuotaTable, TenantTable, parse_memory_bound
from broker.runtime import BrokerSettings, Count, Seconds, StoreUnavailable, UsageError, arm
from broker.secrets import load_secret_key

STORE_SECONDS = 30.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class ControllerVariables(BrokerSettings):
    """The variables that only controller workers read."""

    max_conversations: Annotated[Count, Field(description="conversations that a controller worker holds at once")] = (
        2_000
    )
    idle_seconds: Annotated[Seconds, Field(description="how long a conversation that only waits is kept in memory")] = (
        30.0
    )
    quotas: Annotated[
        str, Field(description="quotas of model providers: the path of a TOML file, or the table itself")
    ] = ""
    tenants: Annotated[
        str, Field(description="weights and bounds of tenants: the path of a TOML file, or the table itself")
    ] = ""
    admit_memory: Annotated[
        str,
        Field(
            description="conversations start while the store uses less: a share of its `maxmemory`, a size, or `none`; "
            "empty: the current bound, at first 80%"
        ),
    ] = ""
    sdk_sessions: Annotated[
        Count, Field(description="programs of the Claude Agent SDK that a controller worker holds at once, 200 MB each")
    ] = 8
    sdk_sandbox: Annotated[
        Literal["auto", "bwrap", "none"],
        Field(description="sandbox of those programs: `auto` (`bwrap` where it works), `bwrap` or `none`"),
    ] = "auto"
    any_model: Annotated[
        str,
        Field(
            description="set by `run`, `demo` and evaluations for their private workers to the socket of their store: "
            "conversations may name any model and any script; refused with any other store"
        ),
    ] = ""
    priced_models: Annotated[
        str,
        Field(
            description="set by evaluations for their private workers: names of models, separated by commas, whose "
            "unknown prices the workers report"
        ),
    ] = ""
    hooks: Annotated[str, Field(description="file of hooks, which run before and after events; empty: none")] = ""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of one controller worker.

    Attributes:
        variables: values of the environment variables.
        model_env: the environment with the model settings (`LLM_*`).
        quotas: quotas of models, for the whole cluster.
        tenants: weights and bounds, including those of the quota table.
        admit_memory: see `parse_memory_bound`; None for the current one.
        secret_key: returns the key that decrypts the secrets of conversations.
    """

    variables: ControllerVariables
    model_env: Mapping[str, str]
    quotas: QuotaTable
    tenants: TenantTable
    admit_memory: float | None
    secret_key: Callable[[], bytes | None]


def load_controller_settings(env: Mapping[str, str] = os.environ) -> ControllerSettings:
    """Read the settings.

    Raises:
        UsageError: a value cannot be used.
    """
    variables = ControllerVariables.from_env(env)
    arm(variables)
    if variables.any_model:
        _check_private(variables)
    quotas = QuotaTable.load_setting(variables.quotas)
    tenants = TenantTable.load_setting(variables.tenants).merge(quotas.tenants)
    return ControllerSettings(
        variables=variables,
        model_env=dict(env),
        quotas=quotas.model_copy(update={"tenants": tenants}),
        tenants=tenants,
        admit_memory=parse_memory_bound(variables.admit_memory) if variables.admit_memory else None,
        secret_key=partial(load_secret_key, variables),
    )


def read_model_variables(env: Mapping[str, str] = os.environ) -> tuple[Mapping[str, str], bool]:
    """Return the variables with the settings of models, and whether conversations may name any model."""
    return dict(env), bool(env.get("DECKHANDS_ANY_MODEL", ""))


def _check_private(variables: ControllerVariables) -> None:
    """Check that the program that started this worker also started the store; only then may it offer every model.

    Raises:
        UsageError: another or an unknown program started the store.
        StoreUnavailable: no process listens at the store's address.
    """
    path = unquote(urlsplit(variables.url).path)
    is_named = variables.url.startswith("unix://") and variables.any_model == path
    if not is_named or not _is_related(_find_peer_pid(path)):
        raise UsageError(
            "DECKHANDS_ANY_MODEL is set, and the store at DECKHANDS_URL is not one that `run`, `demo` or an evaluation "
            "has started for this worker.",
            remedy="Unset it, and offer models by LLM_MODEL and LLM_CONFIG; docs/models.md says how.",
        )


def _find_peer_pid(path: str) -> int:
    """Return the id of the process that listens on a socket, if it belongs to this user; otherwise 0.

    Raises:
        StoreUnavailable: no process listens, even after the time that the restart of a private store takes.
    """
    attempts = int(STORE_SECONDS / POLL_SECONDS)
    for attempt in range(attempts):
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(path)
            except OSError as error:
                if attempt == attempts - 1:
                    raise StoreUnavailable(f"Cannot connect to the store at {path}: {error.strerror}.") from error
                Event().wait(POLL_SECONDS)
                continue
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, user, _ = struct.unpack("3i", peer)
            return int(pid) if user == os.getuid() else 0
    return 0


def _is_related(pid: int) -> bool:
    """Return whether a process, or its parent, is an ancestor of this one."""
    ancestors = set[int]()
    parent = os.getpid()
    while parent > 0:
        ancestors.add(parent := _find_parent_pid(parent))
    return pid > 0 and (pid in ancestors or _find_parent_pid(pid) in ancestors - {0})


def _find_parent_pid(pid: int) -> int:
    """Return the id of a process' parent; 0 if it is unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
