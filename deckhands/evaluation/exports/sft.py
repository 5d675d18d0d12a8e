"""Attempts as examples for fine-tuning: one line of messages each, in the form of OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deckhands.evaluation.exports.dialogue import Dialogue, DialogueTurn

ABOUT = ("instance", "model", "attempt", "outcome", "conversation_id", "cost_usd", "iterations", "tags")
REWARDS = ("reward", "metrics", "step_rewards")


def to_sft(dialogue: Dialogue, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the example of an attempt.

    Trainers require a result for every call: a call without a result in the log, such as the last, gets an empty one.
    """
    messages: list[dict[str, Any]] = []
    waiting: dict[str, str] = {}
    for turn in dialogue.turns:
        if turn.role == "tool":
            if turn.call_id not in waiting:
                continue
            del waiting[turn.call_id]
        else:
            messages += _add_empty_results(waiting)
            waiting = {call.id: call.name for call in turn.calls}
        messages.append(_message(turn))
    messages += _add_empty_results(waiting)
    about = {name: row[name] for name in ABOUT if name in row} | {
        name: row[name] for name in REWARDS if row.get(name) not in (None, {}, [])
    }
    return {"messages": messages, "metadata": about | {"agent": dialogue.agent, "tools": list(dialogue.tools)}}


def _add_empty_results(waiting: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call_id, "name": name, "content": ""} for call_id, name in waiting.items()]


def _message(turn: DialogueTurn) -> dict[str, Any]:
    if turn.role == "tool":
        return {"role": "tool", "tool_call_id": turn.call_id, "name": turn.name, "content": turn.content}
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.images:
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in turn.images]
        message["content"] = [{"type": "text", "text": turn.content}, *pictures]
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in turn.calls
        ]
    return message
