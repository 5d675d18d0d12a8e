"""The followers of an ingress task, from its message: what Celery must send when the task has ended.

Holds: each callback without an id gets one that is derived from the task and the callback's position. So a task that
runs again, or a repeated second half, sends the same tasks. Followers reach only queues of applications and of ingress
workers, and no other key of Celery's broker, because producers may forge every signature and an ingress worker has more
rights there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from broker.runtime import UsageError, derive_task_id

FOLLOWERS = ("callbacks", "errbacks", "chain", "chord")
MAX_DEPTH = 16
NESTED_FIELDS = ("queue", "routing_key")
QUEUE_NAME = re.compile(r"(?!deckhands\.|celery-task|unacked)[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
"""In Redis a queue is a key: exclude keys of results and unacknowledged messages, and queues of our own workers."""

MAX_SECONDS = 10 * 365 * 24 * 3600.0
REQUIRED_ARGUMENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "group": {"tasks": (list, tuple)},
    "chain": {"tasks": (list, tuple)},
    "chord": {"header": (list, tuple, Mapping), "body": (Mapping,)},
    "xmap": {"task": (Mapping,), "it": (list, tuple)},
    "xstarmap": {"task": (Mapping,), "it": (list, tuple)},
    "chunks": {"task": (Mapping,), "it": (list, tuple), "n": (int,)},
}
"""The composite kinds of signatures, and the arguments that each needs."""
SENT_AS_TASK = frozenset({"celery.accumulate"})
"""Celery's own tasks that its canvas names without a kind: the one that ends a task replaced by a group."""

_Name = Annotated[StrictStr, Field(max_length=256)]
_Seconds = Annotated[float, Field(strict=True, ge=-MAX_SECONDS, le=MAX_SECONDS)]
_Signatures = list[dict[str, Any]] | dict[str, Any]


class _RetryPolicy(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_retries: StrictInt | None = None
    interval_start: _Seconds | None = None
    interval_step: _Seconds | None = None
    interval_max: _Seconds | None = None


class _SignatureOptions(BaseModel):
    """The options of a signature that an ingress worker can send. Options in `stamped_headers` may have any value."""

    model_config = ConfigDict(extra="allow")

    task_id: _Name | None = None
    root_id: _Name | None = None
    parent_id: _Name | None = None
    group_id: _Name | None = None
    group_index: StrictInt | None = None
    reply_to: _Name | None = None
    shadow: _Name | None = None
    route_name: _Name | None = None
    queue: Any = None
    routing_key: Any = None
    exchange: Any = None
    countdown: _Seconds | None = None
    eta: datetime | None = None
    expires: _Seconds | datetime | None = None
    time_limit: _Seconds | None = None
    soft_time_limit: _Seconds | None = None
    priority: Annotated[int, Field(strict=True, ge=0, le=255)] | None = None
    delivery_mode: Literal[1, 2, "transient", "persistent"] | None = None
    serializer: Literal["json"] | None = None
    compression: Literal["zlib", "gzip", "bzip2"] | None = None
    retry: StrictBool | None = None
    retry_policy: _RetryPolicy | None = None
    ignore_result: StrictBool | None = None
    add_to_parent: StrictBool | None = None
    retries: StrictInt | None = None
    max_retries: StrictInt | None = None
    interval: _Seconds | None = None
    replaced_task_nesting: StrictInt | None = None
    headers: dict[str, Any] | None = None
    stamped_headers: list[StrictStr] | None = None
    stamps: dict[str, Any] | None = None
    link: _Signatures | None = None
    link_error: _Signatures | None = None
    chain: list[dict[str, Any]] | None = None
    chord: dict[str, Any] | None = None


def parse_followers(task_id: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the followers of a task from its message, with an id for each callback.

    Raises:
        UsageError: a follower is invalid, or its queue is not one of an application.
    """
    return {name: add_ids(found.get(name), f"{task_id}/{name}") for name in FOLLOWERS}


def add_ids(value: Any, place: str, depth: int = 0) -> Any:
    """Return signatures with ids, at any depth of groups, chains, chords and callbacks of callbacks.

    Raises:
        UsageError: an item is not a signature. Celery itself would fail only after sending some of the others.
    """
    if depth > MAX_DEPTH:
        raise UsageError(f"The callbacks of the task are nested more than {MAX_DEPTH} levels deep.")
    if isinstance(value, list | tuple):
        return [add_ids(item, f"{place}/{n}", depth + 1) for n, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    _check(value)
    value = _expand_map(value)
    options = dict(value.get("options") or {})
    arguments = dict(value.get("kwargs") or {})
    kind = value.get("subtask_type")
    if kind in ("group", "chord", "chain"):
        for name in ("tasks", "header", "body"):
            if name in arguments:
                arguments[name] = add_ids(arguments[name], f"{place}/{name}", depth + 1)
    if kind not in ("chord", "chain"):
        options.setdefault("task_id", None)
        options["task_id"] = options["task_id"] or derive_task_id(place)
    for name in ("link", "link_error", "chain", "chord"):
        if name in options:
            options[name] = add_ids(options[name], f"{place}/{name}", depth + 1)
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
    if signature.get("subtask_type") is None and str(name).startswith("celery.") and name not in SENT_AS_TASK:
        raise UsageError(
            f"A callback of the task names Celery's own task {ascii(name)[:100]}.",
            remedy="Name a task of your application, or build a group, chain, chord or map by Celery's canvas.",
        )
    _check_parts(signature)
    _check_options(signature, signature.get("options") or {})


def _expand_map(signature: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a map of a task to the task that Celery would send for it, and chunks to a group of those.

    Celery cannot send such a signature after it was converted to JSON and back, and would give each chunk a new id each
    time.
    """
    kind, arguments = signature.get("subtask_type"), signature.get("kwargs") or {}
    if kind in ("xmap", "xstarmap"):
        return {**signature, "task": f"celery.{kind[1:]}", "args": [], "subtask_type": None, "immutable": True}
    if kind == "chunks":
        task, items, size = arguments["task"], arguments["it"], arguments["n"]
        parts = [
            {**signature, "subtask_type": "xstarmap", "kwargs": {"task": task, "it": items[start : start + size]}}
            for start in range(0, len(items), size)
        ]
        return {**signature, "task": "celery.group", "options": {}, "subtask_type": "group", "kwargs": {"tasks": parts}}
    return signature


def _check_parts(signature: Mapping[str, Any]) -> None:
    kind, arguments = signature.get("subtask_type"), signature.get("kwargs") or {}
    if kind is not None and (not isinstance(kind, str) or kind not in REQUIRED_ARGUMENTS):
        raise UsageError(
            f"A callback of the task has an unknown kind: {ascii(kind)[:100]}.",
            remedy=f"Its subtask_type is null or one of {', '.join(REQUIRED_ARGUMENTS)}.",
        )
    for name, form in REQUIRED_ARGUMENTS.get(kind or "", {}).items():
        if not isinstance(arguments.get(name), form) or (name == "n" and arguments[name] < 1):
            raise UsageError(
                f"A callback of the task cannot be used: the {kind} has no {name} of the right form.",
                remedy="Build it by Celery's canvas.",
            )
    if kind in ("xmap", "xstarmap", "chunks"):
        _check(arguments["task"])


def _check_options(signature: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check options that would make Celery fail when the callback is sent, after the agent has worked."""
    try:
        known = _SignatureOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UsageError(
            f"A callback of the task has an unusable option: {'.'.join(map(str, first['loc']))}: {first['msg']}.",
            remedy="Use the options of Celery's apply_async, with values of their types.",
        ) from None
    unknown = sorted(set(known.model_extra or ()) - set(known.stamped_headers or ()))
    if unknown:
        raise UsageError(
            f"A callback of the task has an unknown option: {ascii(unknown[0])[:100]}.",
            remedy="Use the options of Celery's apply_async.",
        )
    missing = sorted(set(known.stamped_headers or ()) - set(options))
    if missing:
        raise UsageError(f"A callback of the task has no value for its stamped header {ascii(missing[0])[:100]}.")
    if signature.get("subtask_type") == "group" and (options.get("link") or options.get("link_error")):
        raise UsageError(
            "A callback of the task is a group with link or link_error.", remedy="Link the tasks of the group instead."
        )
    for name in NESTED_FIELDS:
        place = options.get(name)
        if place is not None and not (isinstance(place, str) and QUEUE_NAME.fullmatch(place)):
            raise UsageError(
                f"A callback of the task cannot be sent to the {name} {ascii(place)[:100]}.",
                remedy="Name a queue of your application: letters, digits, _, . and -.",
            )
    if options.get("exchange"):
        raise UsageError("A callback of the task cannot be sent to an exchange.", remedy="Name a queue.")
