"""Finds the nodes that can serve a workspace: compares the offers that their tool workers advertise with its needs.

Holds: a worker's offer is fixed when it starts. A worker without an offer is an older one and is assumed to serve
everything; a worker with an unreadable offer serves nothing.
Does not: reserve anything. Sizes are a node's limits for each workspace, not its free capacity.
Keys: the fields `offer` and `workspace_roots` of `deck:{k}:worker:<w>:about`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.contract import WorkspaceNeeds, WorkspaceSpec
from broker.coordination.membership import ClusterMember, list_members
from broker.runtime import UsageError, split_paths
from broker.store import Store

NODES_SHOWN = 8
MAX_TEXT_CHARS = 300
ANY_SANDBOX = "auto"


class NotServed(UsageError):
    """No running tool worker can serve a workspace. The message names the unmet needs and the nodes' offers."""

    code = "not_served"


class NodeOffer(BaseModel):
    """The offer of a tool worker for each workspace.

    Attributes:
        sandboxes: names of sandboxes.
        images: patterns of images for containers. The first one is the default image.
        labels: the operator's labels of the node.
        memory_bytes: memory limit for all programs of a workspace together; None for no limit.
        disk_bytes: disk limit of a workspace; None for no limit.
        cpus: CPU limit of a workspace; None if unknown, which satisfies any need.
    """

    model_config = ConfigDict(frozen=True)

    sandboxes: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    cpus: float | None = None

    def find_unmet_needs(self, workspace: WorkspaceSpec) -> list[str]:
        """Return the unmet needs of a workspace, as texts. Its directory is checked elsewhere."""
        needs = workspace.needs or WorkspaceNeeds()
        lacking = [f"the label {label}" for label in needs.labels if label not in self.labels]
        if workspace.sandbox != ANY_SANDBOX and workspace.sandbox not in self.sandboxes:
            lacking.append(f"the sandbox {workspace.sandbox}")
        elif workspace.image and not self._has_image(workspace.image):
            lacking.append(f"the image {workspace.image}")
        sizes = (
            ("of memory", needs.memory_bytes, self.memory_bytes),
            ("of disk", needs.disk_bytes, self.disk_bytes),
        )
        lacking += [f"{format_size(need)} {what}" for what, need, given in sizes if _exceeds(need, given)]
        if _exceeds(needs.cpus, self.cpus):
            lacking.append(f"{needs.cpus:g} CPUs")
        return lacking

    def __str__(self) -> str:
        parts = [
            "sandbox " + (" or ".join(self.sandboxes) or "none that works"),
            *(["images " + ", ".join(self.images)] if self.images else []),
            *(["labels " + ", ".join(self.labels)] if self.labels else []),
            *([f"{format_size(self.memory_bytes)} of memory"] if self.memory_bytes is not None else []),
            *([f"{format_size(self.disk_bytes)} of disk"] if self.disk_bytes is not None else []),
            *([f"{self.cpus:g} CPUs"] if self.cpus is not None else []),
        ]
        return "; ".join(parts)

    def _has_image(self, image: str) -> bool:
        return image in self.images[:1] or any(fnmatchcase(image, pattern) for pattern in self.images)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that can hold a workspace.

    Attributes:
        nodes: nodes that can serve it, sorted.
        lacking: the other nodes of its pool, with their unmet needs and offers.
        is_anybody_there: whether a tool worker of its pool runs.
    """

    nodes: tuple[str, ...]
    unmet_needs: Mapping[str, str]
    has_workers: bool

    def make_refusal(self) -> NotServed:
        """Return the error that explains why no node can serve the workspace."""
        shown = [f"{_truncate(node)} {why}" for node, why in sorted(self.unmet_needs.items())[:NODES_SHOWN]]
        more = len(self.unmet_needs) - len(shown)
        reported = ". ".join([*shown, *([f"{more} more nodes cannot serve it"] if more > 0 else [])])
        return NotServed(
            f"No running node can serve this workspace. {reported or 'No tool worker of its pool is running'}.",
            remedy="Change the needs, or start a tool worker that meets them.",
        )


def has_needs(workspace: WorkspaceSpec) -> bool:
    """Return whether some nodes of its pool may be unable to serve a workspace."""
    return workspace.sandbox != ANY_SANDBOX or workspace.needs is not None or workspace.path is not None


async def find_placement(store: Store, workspace: WorkspaceSpec) -> Placement:
    """Find the nodes that can serve a workspace."""
    nodes: set[str] = set()
    lacking: dict[str, str] = {}
    serving = [member for member in await list_members(store) if serves_pool(member, workspace.pool)]
    for member in serving:
        node = member.about.get("node", "")
        if not node:  # not one of our tool workers
            continue
        why = _find_reason(member, workspace)
        if why:
            lacking[node] = why
        else:
            nodes.add(node)
    # All workers of a node must serve it, because any of them may claim its actions.
    return Placement(tuple(sorted(nodes - lacking.keys())), lacking, bool(serving))


def serves_pool(member: ClusterMember, pool: str) -> bool:
    """Return whether a worker is alive and takes actions of a pool."""
    pools = member.about.get("pools", "").split(",")
    return member.role == "tool" and member.left_seconds > 0 and pool in pools


def accepts_directory(member: ClusterMember, path: str) -> bool:
    """Return whether a worker accepts the directory of a workspace."""
    roots = member.about.get("workspace_roots")
    return roots is None or any(PurePosixPath(path).is_relative_to(root) for root in split_paths(roots))


def format_size(size: int | None) -> str:
    """Format a size with its unit, such as `4 GiB`."""
    size = size or 0
    unit, name = next(((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if size >= unit), (1, "bytes"))
    return f"{round(size / unit, 2):,g} {name}" if size < 100_000 * unit else f"{size / unit:,.0f} {name}"


def _find_reason(member: ClusterMember, workspace: WorkspaceSpec) -> str:
    """Return why a worker cannot serve a workspace; empty if it can."""
    if workspace.path is not None and not accepts_directory(member, workspace.path):
        return f"does not take the directory {_truncate(workspace.path)}"
    advertised = member.about.get("offer")
    if advertised is None:
        return ""
    try:
        offer = NodeOffer.model_validate_json(advertised)
    except ValidationError:
        return "has an unreadable offer"
    lacking = offer.find_unmet_needs(workspace)
    return f"lacks {_truncate(' and '.join(lacking))} (it offers {_truncate(str(offer))})" if lacking else ""


def _exceeds(need: float | None, given: float | None) -> bool:
    return need is not None and given is not None and need > given


def _truncate(text: str) -> str:
    return ascii(text)[1:-1][:MAX_TEXT_CHARS]
