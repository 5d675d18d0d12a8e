"""What a tool worker reads of its environment; the only place in this package that does."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.failpoints import arm
from broker.settings import BrokerSettings


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Settings of one tool worker.

    Attributes:
        store_url: the log's store.
        celery_url: Celery's broker.
        node: this machine's id; workspaces are bound to it.
        node_dir: where workspaces, host sockets and journals live.
        pools: what this worker can do.
        sandbox: `auto`, `bwrap` or `none`; a conversation may ask for less only if this is `none`.
        concurrency: actions run at once.
        workspace_ttl_seconds: how long a workspace's processes outlive the last use.
    """

    store_url: str
    celery_url: str
    shards: int
    node: str
    node_dir: Path
    pools: tuple[str, ...]
    sandbox: str
    concurrency: int
    workspace_ttl_seconds: float


def tool_settings(env: Mapping[str, str] = os.environ) -> ToolSettings:
    """Read the settings.

    Raises:
        UsageError: a value cannot be used.
    """
    broker = BrokerSettings.from_env(env)
    arm(broker)
    return ToolSettings(
        store_url=broker.url,
        celery_url=broker.celery_url,
        shards=broker.shards,
        node=broker.node or socket.gethostname(),
        node_dir=Path(broker.node_dir) if broker.node_dir else broker.home / "node",
        pools=tuple(pool.strip() for pool in broker.pools.split(",") if pool.strip()),
        sandbox=broker.sandbox,
        concurrency=broker.concurrency,
        workspace_ttl_seconds=broker.workspace_ttl_seconds,
    )
