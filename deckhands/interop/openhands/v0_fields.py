"""Convert the fields of a V0 event to ours, whichever version of OpenHands wrote it (OpenHands 3.4).

Holds: fields with other names or places in older versions are found (`translated_ipython_code`, `exit_code`,
`is_confirmed`, …); a value that only OpenHands accepts is converted if its meaning is clear.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from deckhands.interop.openhands.model_responses import parse_amount, parse_content_text, to_object

Fields = Mapping[str, Any]

RENAMED_ARGS = {"is_confirmed": "confirmation_state", "images_urls": "image_urls", "openhands_version": "version"}
EDITOR_CALL = "print(file_editor(**"
MAX_EDITOR_CALL_CHARS = 1 << 20
OLD_METADATA = {"exit_code": "exit_code", "command_id": "pid"}
RISKS = (-1, 0, 1, 2)
TASK_STATES = {
    "todo": "todo",
    "pending": "todo",
    "in_progress": "in_progress",
    "in progress": "in_progress",
    "in-progress": "in_progress",
    "doing": "in_progress",
    "done": "done",
    "complete": "done",
    "completed": "done",
    "finished": "done",
}
"""States of a task as models write them; any other counts as `todo`."""


def convert_action(record: Fields) -> dict[str, Any]:
    """Return the own fields of an action."""
    args = {RENAMED_ARGS.get(key, key): value for key, value in to_object(record.get("args")).items()}
    args |= _editor_arguments(args.pop("translated_ipython_code", None))
    if record["action"] == "system" and args.get("tools") is not None:
        args["tools"] = _tool_names(args["tools"])
    if "task_list" in args:
        args["task_list"] = convert_tasks(args["task_list"])
    if args.get("security_risk") not in RISKS:
        args.pop("security_risk", None)
    if parse_amount(record.get("timeout")) is not None:
        args["timeout"] = record["timeout"]
    return {key: value for key, value in args.items() if value is not None}


def convert_observation(record: Fields) -> dict[str, Any]:
    """Return the own fields of an observation."""
    extras = dict(to_object(record.get("extras")))
    old = {name: _parse_number(extras.pop(key)) for key, name in OLD_METADATA.items() if key in extras}
    if record["observation"] == "run":
        given = {name: value for name, value in to_object(extras.get("metadata")).items() if value is not None}
        extras["metadata"] = given | {name: value for name, value in old.items() if value is not None}
    if "task_list" in extras:
        extras["task_list"] = convert_tasks(extras["task_list"])
    fields = {key: value for key, value in extras.items() if value is not None}
    return fields | {"content": parse_content_text(record.get("content"))}


def convert_tasks(items: Any) -> list[dict[str, str]]:
    """Return the items of a task list, whose fields may have any type. Items that are not objects are dropped."""
    found = enumerate((item for item in items if isinstance(item, dict)) if isinstance(items, list) else (), 1)
    return [
        {
            "id": _text(item.get("id")) or f"task-{number}",
            "title": _text(item.get("title")) or "Untitled task",
            "status": TASK_STATES.get(_text(item.get("status")).strip().lower(), "todo"),
            "notes": _text(item.get("notes")),
        }
        for number, item in found
    ]


def to_utc_text(text: Any) -> str | None:
    """Return a time of OpenHands with its zone, by default UTC; None for an invalid time."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    except (TypeError, ValueError, OverflowError):
        return None


def _editor_arguments(code: Any) -> Fields:
    """Return the arguments of the editor's call that older versions wrote as Python code."""
    if not isinstance(code, str) or len(code) > MAX_EDITOR_CALL_CHARS:
        return {}
    if not (code.startswith(EDITOR_CALL) and code.endswith("))")):
        return {}
    try:
        arguments = ast.literal_eval(code.removeprefix(EDITOR_CALL)[:-2])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return {key: value for key, value in to_object(arguments).items() if isinstance(key, str) and value is not None}


def _tool_names(tools: Any) -> list[str]:
    listed = tools if isinstance(tools, list) else []
    named = [to_object(tool.get("function")) or tool for tool in listed if isinstance(tool, dict)]
    return [tool["name"] for tool in named if isinstance(tool.get("name"), str)]


def _parse_number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else str(value)
