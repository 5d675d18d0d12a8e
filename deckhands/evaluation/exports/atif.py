"""Attempts in ATIF, the Agent Trajectory Interchange Format of Harbor.

Source: version 1.6 of its specification (harbor/models/trajectories). A step of the agent is one reply of the model,
with the answers to its calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deckhands.evaluation.exports.dialogue import Dialogue, DialogueTurn, format_time

VERSION = "ATIF-v1.6"
Fields = dict[str, Any]


def to_atif(dialogue: Dialogue, row: Mapping[str, Any]) -> Fields:
    """Return the trajectory of an attempt, with its row under `extra`."""
    steps: list[Fields] = []
    owners: dict[str, Fields] = {}
    """Steps by the calls that are not answered yet."""
    for turn in dialogue.turns:
        if turn.role == "tool":
            step = owners.pop(turn.call_id, None)
            if step is not None:
                results = step.setdefault("observation", {"results": []})["results"]
                results.append({"source_call_id": turn.call_id, "content": turn.content})
            continue
        step = _step(len(steps) + 1, turn)
        owners |= {call.id: step for call in turn.calls}
        steps.append(step)
    own = [step for step in steps if step["source"] == "agent"]
    for step, reward in zip(own, row.get("step_rewards") or (), strict=False):
        step.setdefault("extra", {})["reward"] = reward
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "schema_version": VERSION,
        "session_id": dialogue.conversation_id,
        "agent": {
            "name": dialogue.agent or "unknown",
            "version": dialogue.version or "unknown",
            "model_name": dialogue.model or str(row["model"]),
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(found["prompt_tokens"] for found in metrics),
            "total_completion_tokens": sum(found["completion_tokens"] for found in metrics),
            "total_cached_tokens": sum(found["cached_tokens"] for found in metrics),
            "total_cost_usd": row["cost_usd"],
            "total_steps": len(steps),
        },
        "extra": {name: value for name, value in row.items() if name != "patch"},
    }


def _step(number: int, turn: DialogueTurn) -> Fields:
    step: Fields = {
        "step_id": number,
        "source": "agent" if turn.role == "assistant" else turn.role,
        "message": turn.content,
    }
    if (at := format_time(turn.at)) is not None:
        step["timestamp"] = at
    if turn.images:
        step["extra"] = {"images": len(turn.images)}
    if turn.calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": call.arguments} for call in turn.calls
        ]
    if turn.thinking:
        step["reasoning_content"] = turn.thinking
    if (reply := turn.reply) is not None:
        step["model_name"] = reply.model
        step["metrics"] = {
            "prompt_tokens": reply.usage.prompt_tokens,
            "completion_tokens": reply.usage.completion_tokens,
            "cached_tokens": reply.usage.cache_read_tokens,
        } | ({} if reply.cost_usd is None else {"cost_usd": reply.cost_usd})
    return step
