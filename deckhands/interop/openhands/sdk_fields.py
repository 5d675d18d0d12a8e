"""Convert the fields of events and of the state of OpenHands' SDK (V1) to ours (OpenHands 13)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deckhands.interop.openhands.model_responses import TOKENS, parse_amount, parse_count, to_object, to_text
from deckhands.interop.openhands.v0_fields import convert_tasks

Fields = dict[str, Any]

EDIT_FIELDS = ("command", "path", "file_text", "old_str", "new_str", "insert_line")


def convert_action(fields: Fields, action: Fields) -> tuple[str, Fields]:
    """Return the kind of an action and its own fields."""
    match action.get("kind"):
        case "TerminalAction" | "ExecuteBashAction":
            names = ("command", "is_input", "timeout")
            return "action.run", {name: action[name] for name in names if action.get(name) is not None}
        case "FileEditorAction" if action["command"] == "view":
            seen = {"view_range": action["view_range"]} if action.get("view_range") else {}
            return "action.read", {"path": action["path"], "impl_source": "oh_aci", **seen}
        case "FileEditorAction":
            return "action.edit", {name: action[name] for name in EDIT_FIELDS if action.get(name) is not None}
        case "TaskTrackerAction":
            return "action.task_tracking", {
                "command": action["command"],
                "task_list": convert_sdk_tasks(action.get("task_list")),
            }
        case "ThinkAction":
            return "action.think", {"thought": action["thought"]}
        case "FinishAction":
            return "action.finish", {"final_thought": action["message"]}
    arguments = json.loads(fields["tool_call"]["arguments"] or "{}")
    return "action.call_tool", {"name": fields["tool_name"], "arguments": arguments}


def convert_sdk_tasks(items: Any) -> list[dict[str, str]]:
    """Return the items of a task list; those of the SDK have no ids."""
    return [item | {"id": f"task-{number}"} for number, item in enumerate(convert_tasks(items), 1)]


def join_texts(parts: Any) -> str:
    """Return the texts of a message's parts."""
    texts = (part for part in parts if part.get("type", "text") == "text" and part.get("text"))
    return "\n".join(part["text"] for part in texts)


def read_costs(state: Fields) -> dict[str, Fields]:
    """Return the cost of each reply, by its id. The SDK's costs name no reply, but are in the same order."""
    found: dict[str, Fields] = {}
    for metrics in _metrics(state):
        usages, costs = (list(map(to_object, _list(metrics.get(name)))) for name in ("token_usages", "costs"))
        latencies = {
            one["response_id"]: parse_amount(one.get("latency")) or 0.0
            for one in map(to_object, _list(metrics.get("response_latencies")))
            if isinstance(one.get("response_id"), str)
        }
        for position, usage in enumerate(usages):
            name = usage.get("response_id")
            if isinstance(name, str):
                found[name] = {
                    "model": to_text(usage.get("model")) or to_text(metrics.get("model_name")),
                    "usage": {token: parse_count(usage.get(token)) for token in TOKENS},
                    "latency_seconds": latencies.get(name, 0.0),
                    "cost_usd": parse_amount(costs[position].get("cost")) if len(costs) == len(usages) else None,
                }
    return found


def read_totals(state: Fields) -> Fields:
    """Return the total cost of all calls, including those without an event."""
    totals = {"cost": 0.0, **dict.fromkeys(TOKENS, 0)}
    for metrics in _metrics(state):
        totals["cost"] += parse_amount(metrics.get("accumulated_cost")) or 0.0
        usage = to_object(metrics.get("accumulated_token_usage"))
        for name in TOKENS:
            totals[name] += parse_count(usage.get(name))
    return {"accumulated_cost": totals.pop("cost"), "accumulated_token_usage": totals}


def _metrics(state: Fields) -> list[Mapping[str, Any]]:
    by_usage = to_object(to_object(state.get("stats")).get("usage_to_metrics"))
    return [metrics for metrics in by_usage.values() if isinstance(metrics, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
