"""A task that follows others: what they returned, as text behind the task.

In a chain or as the body of a chord, Celery passes the results of the tasks before as the first argument.

Holds: the whole is a task that can be submitted; results that are too long are cut, each by the same measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from broker.runtime.errors import UsageError
from deckhands.tasks.tasks import MAX_TASK_CHARS

SHOWN_FIELDS = ("conversation_id", "title", "state", "message", "outputs")
HEADING = "Results of the tasks before this one, as JSON:"
LEAST_CHARS = 200
SPARE_CHARS = 1_000


def fields_of(previous: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request: its options, and a task that says what the arguments before it were.

    Args:
        previous: arguments by position: what earlier tasks returned, then the task unless it is an option.

    Raises:
        UsageError: there is no task, or too many arguments.
    """
    earlier, fields = list(previous), dict(options)
    if "task" not in fields:
        if not earlier:
            raise UsageError("The request cannot be used: task: it is missing.", remedy="Pass the task as a text.")
        fields["task"] = earlier.pop()
    if len(earlier) > 1:
        raise UsageError(
            f"The request cannot be used: it has {len(earlier)} arguments before its task.",
            remedy="Pass the task alone; everything else has a name.",
        )
    if earlier and isinstance(fields["task"], str):
        fields["task"] = _joined(fields["task"], earlier[0])
    return fields


def _joined(task: str, result: Any) -> str:
    results = result if isinstance(result, list) else [result]
    room = MAX_TASK_CHARS - len(task) - len(HEADING) - SPARE_CHARS
    each = max(room // max(len(results), 1), LEAST_CHARS)
    lines = [_cut(json.dumps(_short(found), ensure_ascii=False), each) for found in results]
    return f"{task}\n\n{HEADING}\n" + "\n".join(lines)


def _short(found: Any) -> Any:
    is_summary = isinstance(found, dict) and found.get("summary") is True
    return {name: found.get(name) for name in SHOWN_FIELDS} if is_summary else found


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
