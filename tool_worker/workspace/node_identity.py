"""Ties a node's name to one directory.

A conversation's actions go to its node by name. Two directories under one name would give a conversation two
workspaces, each with half of the work.

Holds: a directory keeps the identity that its first worker gave it. A worker does not start while its node's name is
served from another directory.
Does not: notice workers of one name that start at the same moment; the next worker that starts does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from broker.coordination import HEARTBEAT_SECONDS, ClusterMember, list_members
from broker.runtime import HEARTBEAT_TTL_SECONDS, UsageError, new_key
from broker.store import Store

FOLDER = ".node"
PATIENCE_SECONDS = 3 * HEARTBEAT_TTL_SECONDS
"""A killed worker stays visible for a moment, and its successor may have a new disk."""


def read_or_create_identity(node_dir: Path) -> str:
    """Return the identity of a node's directory, creating it if missing; "" if it cannot be written."""
    kept = node_dir / FOLDER / "identity"
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = kept.with_name(new_key())
        mine.write_text(mine.name)
        with contextlib.suppress(FileExistsError):
            os.link(mine, kept)  # atomic: a whole file, or another worker's
        mine.unlink()
        return kept.read_text()
    except OSError:
        return ""  # later uses of the directory report the error


async def check_served_only_here(store: Store, node: str, identity: str) -> None:
    """Check that no other worker serves this node from another directory; wait for one that may be dead.

    Raises:
        UsageError: Another worker does.
    """
    waited = 0.0
    while other := find_worker_elsewhere(await list_members(store), node, identity):
        if waited >= PATIENCE_SECONDS:
            raise UsageError(
                f"The node {node!r} is served from another directory, by {other.worker_id}.",
                remedy="Give this worker another DECKHANDS_NODE, or the same DECKHANDS_NODE_DIR.",
            )
        await asyncio.sleep(HEARTBEAT_SECONDS)
        waited += HEARTBEAT_SECONDS


def find_worker_elsewhere(found: Sequence[ClusterMember], node: str, identity: str) -> ClusterMember | None:
    """Return a live worker that serves the node from a directory with another identity; None if there is none."""
    for member in found:
        theirs = member.about.get("directory", "")
        is_double = member.about.get("node") == node and theirs and identity and theirs != identity
        if member.role == "tool" and is_double and member.left_seconds > 0:
            return member
    return None
