"""Deckhands' agents and datasets as a `verifiers` environment: `vf-eval deckhands-verifiers`.

A taskset is a dataset of `deckhands eval`. The harness runs each rollout as a conversation of a cluster, whose model
calls go to the endpoint of this rollout, with its secret. The reward is that of the dataset's check.

Holds: one rollout is one attempt of an evaluation with its own name. If its time is up, its conversation is cancelled.
Does not: use the runtime of `verifiers`; commands run in the cluster's workspaces. Tools of `verifiers` (MCP servers)
are refused, because workers would have to reach them.

This package has a name without dots, as `verifiers` finds its plug-ins by such names. It needs `verifiers` 0.4, and is
imported by nothing else.
"""

from __future__ import annotations

from deckhands_verifiers.harness import DeckhandsHarness, DeckhandsHarnessConfig
from deckhands_verifiers.taskset import DeckhandsData, DeckhandsTask, DeckhandsTaskset, DeckhandsTasksetConfig

__all__ = [
    "DeckhandsData",
    "DeckhandsHarness",
    "DeckhandsHarnessConfig",
    "DeckhandsTask",
    "DeckhandsTaskset",
    "DeckhandsTasksetConfig",
]
