"""What the proxy of a workspace has refused while an action ran, for the model to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract.events import Observation


def refused_in(result: Mapping[str, Any]) -> list[object]:
    """Return what the workspace's proxy refused meanwhile."""
    refused = result.get("refused")
    return refused if isinstance(refused, list) else []


def with_refusals(observation: Observation, refused: list[object]) -> Observation:
    """Add what was refused: most programs do not say why they were."""
    if not refused:
        return observation
    listed = "".join(f"\n- {text}" for text in refused)
    return observation.model_copy(
        update={"content": f"{observation.content}\n[The proxy of this workspace refused:{listed}]"}
    )
