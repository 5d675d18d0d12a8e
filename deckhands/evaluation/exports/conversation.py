"""Exports one conversation in the formats of evaluations. Without a score, its outcome is `unscored`.

It also writes patches in the form of SWE-bench's own harness: `predictions.jsonl`, one line for each instance.

Source: `swebench.harness.utils.get_predictions_from_file` (swebench 5.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from broker.contract import Event
from deckhands.client import summarize
from deckhands.evaluation.exports.atif import to_atif
from deckhands.evaluation.exports.dialogue import to_dialogue
from deckhands.evaluation.exports.inspect_log import UNSCORED, to_inspect_log
from deckhands.evaluation.exports.sft import to_sft


def export_conversation(conversation_id: str, events: Sequence[Event], form: str) -> str:
    """Return a conversation as the text of a file: JSON, for `sft` on one line.

    Args:
        events: whole, from the first one on.
        form: `atif`, `inspect` or `sft`.
    """
    summary = summarize(events)
    dialogue = to_dialogue(conversation_id, events)
    model = dialogue.model or summary.model or "unknown"
    row: dict[str, Any] = {
        "instance": conversation_id,
        "attempt": 1,
        "model": model,
        "outcome": UNSCORED,
        "cause": summary.error_code,
        "state": summary.state,
        "conversation_id": conversation_id,
        "cost_usd": summary.cost_usd,
        "iterations": summary.iterations,
        "seconds": summary.duration_seconds,
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
    }
    match form:
        case "atif":
            return json.dumps(to_atif(dialogue, row), ensure_ascii=False, indent=2) + "\n"
        case "sft":
            return json.dumps(to_sft(dialogue, row), ensure_ascii=False) + "\n"
        case _:
            log = to_inspect_log(conversation_id, summary.title or "conversation", model, [(row, dialogue)])
            return json.dumps(log, ensure_ascii=False, indent=2) + "\n"


def to_prediction(row: Mapping[str, Any], patch: str) -> dict[str, str]:
    """Return the line of an attempt."""
    return {"instance_id": str(row["instance"]), "model_name_or_path": str(row["model"]), "model_patch": patch}
