"""Patches in the form of SWE-bench's own harness: `predictions.jsonl`, one line for each instance.

Source: `swebench.harness.utils.get_predictions_from_file` (swebench 5.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def to_prediction(row: Mapping[str, Any], patch: str) -> dict[str, str]:
    """Return the line of an attempt."""
    return {"instance_id": str(row["instance"]), "model_name_or_path": str(row["model"]), "model_patch": patch}
