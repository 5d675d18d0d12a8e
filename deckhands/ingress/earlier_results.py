"""A task that follows others: their results are appended to its text.

In a chain or as the body of a chord, Celery passes the results of the previous tasks as the first argument.

Holds: the combined task can be submitted. Results that are too long for it are cut, all in the same proportion, and if
there are very many, the last ones are left out; the text says so. An empty workspace gets a file with all of them.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.runtime import UsageError
from deckhands.client import MAX_TASK_CHARS

SHOWN_FIELDS = ("conversation_id", "title", "state", "message", "outputs")
HEADING = "Results of the tasks before this one, as JSON:"
FILE = "earlier-results.jsonl"
ARCHIVE = "earlier-results.tar"
LEAST_CHARS = 200
SPARE_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class FollowingTask:
    """The request of a task that follows others.

    Attributes:
        fields: of the request.
        archive: a tar file for its workspace, with the results in `FILE`, one per line; None if the task text contains
            all results, or its workspace has another initial content.
    """

    fields: dict[str, Any]
    archive: bytes | None = None


def follow(previous: Sequence[Any], options: Mapping[str, Any]) -> FollowingTask:
    """Return the request: the options, and a task with the results of previous tasks appended.

    Args:
        previous: positional arguments: the results of previous tasks, then the task unless it is an option.

    Raises:
        UsageError: there is no task, or too many arguments.
    """
    earlier = list(previous)
    fields = dict(options)
    if "task" not in fields:
        if not earlier:
            raise UsageError("The request cannot be used: task: it is missing.", remedy="Pass the task as a text.")
        fields["task"] = earlier.pop()
    if len(earlier) > 1:
        raise UsageError(
            f"The request cannot be used: it has {len(earlier)} arguments before its task.",
            remedy="Pass the task alone; everything else has a name.",
        )
    if not earlier or not isinstance(fields["task"], str):
        return FollowingTask(fields)
    results = earlier[0] if isinstance(earlier[0], list) else [earlier[0]]
    has_file = _starts_empty(fields.get("workspace"))
    fields["task"], is_whole = _join(fields["task"], results, has_file=has_file)
    return FollowingTask(fields, _pack(results) if has_file and not is_whole else None)


def _starts_empty(workspace: Any) -> bool:
    """Return whether the workspace of a request starts as an empty directory."""
    if isinstance(workspace, Mapping):
        return workspace.get("path") is None and workspace.get("source") is None
    return workspace is None


def _join(task: str, results: Sequence[Any], *, has_file: bool) -> tuple[str, bool]:
    """Return the task with the results appended, and whether all of them are included in full."""
    room = MAX_TASK_CHARS - len(task) - len(HEADING) - SPARE_CHARS
    each = max(room // max(len(results), 1) - 1, LEAST_CHARS)
    whole = [json.dumps(_short(found), ensure_ascii=False) for found in results]
    kept = whole[: max(room // (each + 1), 0)]
    lines = [line if len(line) <= each else line[: each - 3] + "..." for line in kept]
    is_whole = lines == whole
    if len(lines) < len(whole):
        lines.append(f"[{len(whole) - len(lines):,} of {len(whole):,} results are left out here: they do not fit.]")
    if has_file and not is_whole:
        lines.append(f"[The file {FILE} in the workspace has all {len(whole):,} results whole, one a line.]")
    return f"{task}\n\n{HEADING}\n" + "\n".join(lines), is_whole


def _pack(results: Sequence[Any]) -> bytes:
    """Return the tar file. The same results give the same bytes; their hash names the file."""
    content = "".join(json.dumps(found, ensure_ascii=False) + "\n" for found in results).encode(errors="replace")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(FILE)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _short(found: Any) -> Any:
    is_summary = isinstance(found, dict) and found.get("summary") is True
    return {name: found.get(name) for name in SHOWN_FIELDS} if is_summary else found
