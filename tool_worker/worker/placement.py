"""Forwards actions for new workspaces to nodes that can serve them, before the action is claimed.

Holds: an action is forwarded if it came from a pool's stream, its workspace has no node, and this worker does not meet
the workspace's needs. If no node meets them, the action waits; if none appears, it is answered with the missing needs,
and the workspace stays without a node.
Does not: check actions from this node's stream, or workspaces without needs; neither costs anything.
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
from tool_worker.sandbox import make_sandboxes
from tool_worker.settings import ToolSettings

WAIT_SECONDS = 30.0
POLL_SECONDS = 1.0
MAX_WAITING = 256
"""How many actions may wait for a node at once; any further one is answered immediately if no node serves it."""


@dataclass(frozen=True, slots=True)
class ClaimNow:
    """Claim the action, because this node serves it or the claim forwards it."""


@dataclass(frozen=True, slots=True)
class WaitForNode:
    """No live node serves the action."""

    refusal: NotServed


class NodePlacement:
    """Decides which node serves the deliveries of one tool worker.

    Args:
        offer: What this worker offers; None for everything.
        roots: Directories below which conversations may name their workspace.
    """

    def __init__(self, store: Store, offer: NodeOffer | None, roots: Sequence[Path] = ()) -> None:
        self._store = store
        self._offer = offer
        self._roots = roots

    def needs_other_node(self, delivery: ActionDelivery) -> bool:
        """Return whether a new workspace needs something that this worker lacks. Makes no store call."""
        is_of_pool = ":act:pool:" in delivery.location and not delivery.is_anywhere
        if self._offer is None or not is_of_pool or not has_needs(delivery.workspace):
            return False
        path = delivery.workspace.path
        may_be_here = path is None or any(PurePosixPath(path).is_relative_to(root) for root in self._roots)
        return bool(self._offer.find_unmet_needs(delivery.workspace)) or not may_be_here

    async def bind_node(self, delivery: ActionDelivery) -> ClaimNow | WaitForNode:
        """Bind a new workspace to a node that serves it; the following claim forwards the action there.

        Idempotent: a workspace that has a node keeps it.
        """
        names = await self._store.locate(delivery.conversation_id)
        last_id, node = await self._store.call("HMGET", names.meta, "last_id", "node")
        if last_id is None or node is not None:
            return ClaimNow()
        found = await find_placement(self._store, delivery.workspace)
        if not found.nodes:
            return WaitForNode(found.make_refusal())
        chosen = found.nodes[crc32(delivery.conversation_id.encode()) % len(found.nodes)]
        # A store function: the conversation may have been deleted meanwhile, and then no key may be created.
        await self._store.call_function("deck_bind_node", (names.root,), chosen)
        return ClaimNow()

    async def wait_for_node(self, delivery: ActionDelivery, *, wait_seconds: float) -> NotServed | None:
        """Call `place` until a node serves the action; return the refusal if none does within `wait_seconds`."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_seconds
        while isinstance(placed := await self.bind_node(delivery), WaitForNode):
            if self._offer is not None and not self._offer.find_unmet_needs(delivery.workspace):
                return None  # only the directory is refused: opening the workspace reports the reason
            if loop.time() >= ends:
                return placed.refusal
            await asyncio.sleep(POLL_SECONDS)
        return None


def build_node_offer(settings: ToolSettings) -> NodeOffer:
    """Return what this worker offers. Blocks while it tries the sandboxes."""
    known = make_sandboxes(settings.node_dir / ".sandbox", settings.containers)
    working = [
        name
        for name, sandbox in known.items()
        if (sandbox.capabilities.confines_programs or settings.variables.sandbox == name)
        and sandbox.reason_unavailable() is None
    ]
    return NodeOffer(
        sandboxes=tuple(working),
        images=settings.containers.images if any(known[name].capabilities.runs_images for name in working) else (),
        labels=settings.labels,
        memory_bytes=settings.limits.memory_bytes,
        disk_bytes=settings.workspace_limits.bytes,
        cpus=settings.containers.cpus or float(len(os.sched_getaffinity(0))),
    )
