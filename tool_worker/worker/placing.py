"""Sends actions for new workspaces to nodes that can serve them, before anything of them is claimed.

Holds: an action that came by the stream of a pool, for a workspace that is on no node and needs what this worker does
not offer, is handed on to a node that offers it. Where none does, it waits; if none comes, it is answered with what is
missing, and the workspace stays without a node.
Does not: look at actions that came by the stream of this node, or at workspaces without needs: neither costs anything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from zlib import crc32

from broker.coordination import ActionDelivery, NodeOffer, NotServed, find_placement, has_needs
from broker.store import Store
from tool_worker.sandbox import DockerSandbox, sandboxes
from tool_worker.settings import ToolSettings

WAIT_SECONDS = 30.0
POLL_SECONDS = 1.0
MAX_WAITING = 256
"""How many actions wait for a node at once; all others are answered at once where there is none."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Claim the action: it is for this node, or is forwarded by the claim."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No node that runs serves it."""

    refusal: NotServed


class Placing:
    """Decides about the deliveries of one tool worker.

    Args:
        offer: what this worker offers; None: everything.
        roots: below which conversations may name their directory.
    """

    def __init__(self, store: Store, offer: NodeOffer | None, roots: Sequence[Path] = ()) -> None:
        self._store = store
        self._offer = offer
        self._roots = roots

    def is_for_another(self, delivery: ActionDelivery) -> bool:
        """Say whether this worker lacks what a new workspace needs; asks nobody."""
        is_of_pool = ":act:pool:" in delivery.place and not delivery.is_anywhere
        if self._offer is None or not is_of_pool or not has_needs(delivery.workspace):
            return False
        return bool(self._offer.lacking(delivery.workspace)) or not self._takes(delivery.workspace.path)

    async def place(self, delivery: ActionDelivery) -> Serve | Wait:
        """Find the node for an action that is for another: after this, the claim forwards it there.

        Idempotent: a workspace that has a node keeps it.
        """
        names = self._store.keys(delivery.conversation_id)
        last_id, node = await self._store.call("HMGET", names.meta, "last_id", "node")
        if last_id is None or node is not None:
            return Serve()
        found = await find_placement(self._store, delivery.workspace)
        if not found.nodes:
            return Wait(found.refusal())
        chosen = found.nodes[crc32(delivery.conversation_id.encode()) % len(found.nodes)]
        # A function of the store: the conversation may have been deleted meanwhile, and must leave no key.
        await self._store.function("deck_bind_node", (names.root,), chosen)
        return Serve()

    async def find(self, delivery: ActionDelivery, *, wait_seconds: float) -> NotServed | None:
        """Do what `place` does, and wait for a node while there is none; return why there is none in the end."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_seconds
        while isinstance(placed := await self.place(delivery), Wait):
            if self._offer is not None and not self._offer.lacking(delivery.workspace):
                return None  # only the directory is not taken: the workspace says why when it is opened
            if loop.time() >= ends:
                return placed.refusal
            await asyncio.sleep(POLL_SECONDS)
        return None

    def _takes(self, path: str | None) -> bool:
        return path is None or any(PurePosixPath(path).is_relative_to(root) for root in self._roots)


def offer_of(settings: ToolSettings) -> NodeOffer:
    """Find out what this worker offers; blocks for as long as it takes to try the sandboxes."""
    known = sandboxes(settings.node_dir / ".sandbox", settings.containers)
    working = [
        name
        for name, sandbox in known.items()
        if (sandbox.capabilities.confines_programs or settings.variables.sandbox == name)
        and sandbox.reason_unavailable() is None
    ]
    return NodeOffer(
        sandboxes=tuple(working),
        images=settings.containers.images if DockerSandbox.name in working else (),
        labels=settings.labels,
        memory_bytes=settings.limits.memory_bytes,
        disk_bytes=settings.workspace_limits.bytes,
        cpus=settings.containers.cpus or float(len(os.sched_getaffinity(0))),
    )
