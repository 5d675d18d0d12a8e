"""What Celery is to do when a task of the door has ended, as its message says.

Holds: each callback that has no id gets one that belongs to the task and the callback's place, so that a task that is
carried out again, or a second half that is repeated, sends the same tasks. What follows reaches queues of applications
and of the doors, and no other key of Celery's broker: the door has more rights there than producers, who may forge
every signature.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from broker.runtime.errors import UsageError
from broker.runtime.ids import id_at

FOLLOWERS = ("callbacks", "errbacks", "chain", "chord")
MAX_DEPTH = 16
PLACES = ("queue", "routing_key")
QUEUE_NAME = re.compile(r"(?!deckhands\.|celery-task|unacked)[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
"""Over Redis a queue is a key: not one that keeps results or what is under way, nor a queue of our own workers."""


def followers(task_id: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows a task: what its message says, with an id for each callback.

    Raises:
        UsageError: it cannot be used, or would reach what is no queue of an application.
    """
    return {name: with_ids(found.get(name), f"{task_id}/{name}") for name in FOLLOWERS}


def with_ids(value: Any, place: str, depth: int = 0) -> Any:
    """Return signatures with ids, at any depth of groups, chains, chords and callbacks of callbacks.

    Raises:
        UsageError: one is not a signature, which Celery would find out in the middle of the others.
    """
    if depth > MAX_DEPTH:
        raise UsageError(f"The callbacks of the task are nested more than {MAX_DEPTH} levels deep.")
    if isinstance(value, list | tuple):
        return [with_ids(item, f"{place}/{n}", depth + 1) for n, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    _check(value)
    options = dict(value.get("options") or {})
    arguments = dict(value.get("kwargs") or {})
    kind = value.get("subtask_type")
    if kind in ("group", "chord", "chain"):
        for name in ("tasks", "header", "body"):
            if name in arguments:
                arguments[name] = with_ids(arguments[name], f"{place}/{name}", depth + 1)
    if kind not in ("chord", "chain"):
        options.setdefault("task_id", None)
        options["task_id"] = options["task_id"] or id_at(place)
    for name in ("link", "link_error"):
        if name in options:
            options[name] = with_ids(options[name], f"{place}/{name}", depth + 1)
    return {**value, "options": options, "kwargs": arguments}


def _check(signature: Mapping[str, Any]) -> None:
    name, arguments = signature.get("task"), signature.get("args")
    is_fit = isinstance(name, str) and bool(name) and (arguments is None or isinstance(arguments, list | tuple))
    parts = (signature.get("kwargs"), signature.get("options"))
    if not is_fit or not all(part is None or isinstance(part, Mapping) for part in parts):
        raise UsageError(
            "A callback of the task is not a Celery signature.",
            remedy="Each has a task (its name), args (a list), kwargs and options (objects).",
        )
    options = signature.get("options") or {}
    for name in PLACES:
        place = options.get(name)
        if place is not None and not (isinstance(place, str) and QUEUE_NAME.fullmatch(place)):
            raise UsageError(
                f"A callback of the task cannot be sent to the {name} {ascii(place)[:100]}.",
                remedy="Name a queue of your application: letters, digits, _, . and -.",
            )
    if options.get("exchange"):
        raise UsageError("A callback of the task cannot be sent to an exchange.", remedy="Name a queue.")
