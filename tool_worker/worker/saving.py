"""How a tool worker saves workspaces, by its settings."""

from __future__ import annotations

from broker.log.event_log import EventLog
from tool_worker.settings import ToolSettings
from tool_worker.workspace.checkpoints.checkpoint_store import BASES, Checkpoints
from tool_worker.workspace.checkpoints.checkpointing import Checkpointing
from tool_worker.workspace.opening.workspace_opener import WorkspaceOpener


def checkpointing_of(log: EventLog, settings: ToolSettings, opener: WorkspaceOpener) -> Checkpointing:
    """Return what saves and restores the workspaces of a node."""
    place, every = settings.variables.checkpoints, settings.variables.checkpoint_every
    if not place:
        return Checkpointing(log, settings.node_dir, None, every=every, opener=opener)
    saved = Checkpoints(place, log.store.clock, limits=settings.workspace_limits)
    bases = Checkpoints(place, log.store.clock, folder=BASES)
    return Checkpointing(log, settings.node_dir, saved, every=every, bases=bases, opener=opener)
